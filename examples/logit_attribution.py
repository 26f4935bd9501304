"""Direct logit attribution: what each layer wrote into the residual, read out by the head's row for one token.

    python examples/logit_attribution.py ORIGINAL NORM_FREE [PROMPT]

Without a final norm the shares add up to the logit exactly. With one they do not: it divides their sum by its size.
"""

import sys

import torch

import tapernorm as tn


@torch.no_grad()
def shares(model, ids):
    """({where: its share of the logit}, the logit of the likeliest next token, the token)"""
    body, head = model.base_model, model.get_output_embeddings()
    layers = body.h if hasattr(body, "h") else body.layers
    written, handles = {}, []

    def keep(name, first_only):
        def hook(module, args, kwargs, out):
            stream = out[0] if isinstance(out, tuple) else out
            if first_only:  # what goes into the first layer: the embeddings
                stream = args[0] if args else kwargs["hidden_states"]
            written[name] = stream[0, -1]

        return hook

    for number, layer in enumerate(layers):
        for name, module in {"attention": getattr(layer, "self_attn", None) or layer.attn, "MLP": layer.mlp}.items():
            handles.append(module.register_forward_hook(keep(f"layer {number} {name}", False), with_kwargs=True))
    handles.append(layers[0].register_forward_hook(keep("embeddings", True), with_kwargs=True))
    logits = model(input_ids=ids, use_cache=False).logits[0, -1]
    for handle in handles:
        handle.remove()
    token = int(logits.argmax())
    found = {name: float(stream @ head.weight[token]) for name, stream in written.items()}
    if head.bias is not None:
        found["head's bias"] = float(head.bias[token])
    return found, float(logits[token]), token


def main(original, norm_free, prompt="Once upon a time"):
    for title, source in (("original", original), ("norm-free", norm_free)):
        model, tokenizer = tn.from_pretrained(source, dtype="float64")
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"] if tokenizer else torch.arange(1, 9)[None]
        found, logit, token = shares(model, ids)
        print(f"{title}: token {tokenizer.decode([token])!r}" if tokenizer else f"{title}: token {token}")
        for name, share in sorted(found.items(), key=lambda item: -abs(item[1]))[:6]:
            print(f"  {share:+10.4f}  {name}")
        total = sum(found.values())
        print(f"  {total:+10.4f}  sum of {len(found)} shares")
        print(f"  {logit:+10.4f}  logit (difference {total - logit:+.1e})")


if __name__ == "__main__":
    main(*sys.argv[1:])
