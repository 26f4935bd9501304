"""What the tests of the scale loss share: anchored models, the final norm's input, and its scale written down again."""

import torch

import tiny_models
from tapernorm import TaperConfig, taper_
from tiny_models import ids

FAMILIES = {"llama": ("rms", "model.norm"), "gpt2": ("layer", "transformer.ln_f")}
LAMBDA = 0.7


def tiny(family="llama", dtype=torch.float32, eps=1e-6):
    """Two blocks without dropout. eps: of its norms."""
    settings = {"layer_norm_epsilon" if family == "gpt2" else "rms_norm_eps": eps}
    return tiny_models.tiny(family, dtype=dtype, dropout=False, **settings)


def anchored(family="llama", dtype=torch.float32, **settings):
    settings = {"arm": "all", "warmup_steps": 1, "taper_steps": 4, "anchor_weight": LAMBDA} | settings
    model = tiny(family, dtype)
    return model, taper_(model, TaperConfig(**settings))


def past_warm_up(*args, **settings):
    """A model whose target was frozen on `ids(4, seed=50)`."""
    model, controller = anchored(*args, **settings)
    model(input_ids=ids(4, seed=50))
    assert float(controller.auxiliary_loss()) == 0.0
    controller.step()
    return model, controller


def residual(model, family, **inputs):
    """The final norm's input, with its graph, by a hook of the test's own and without the anchor's."""
    kept = []
    handle = model.get_submodule(FAMILIES[family][1]).register_forward_pre_hook(lambda m, a: kept.append(a[0]))
    training = model.training
    model.eval()
    model(**inputs)
    model.train(training)
    handle.remove()
    return kept[0]


def s_of(h, family, eps=1e-6):
    if FAMILIES[family][0] == "layer":
        return (h.var(-1, unbiased=False) + eps).sqrt()
    return (h.pow(2).mean(-1) + eps).sqrt()
