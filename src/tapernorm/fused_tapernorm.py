"""Linear maps that are one product, and forwards in fewer calls: what the modules of a fused model are made of.

    FusedPart       stands where a linear map stood, and hands out its slice of the product with the one map
    fuse_linears    puts them in the place of linear maps that read one tensor (`fused_linears` in config.json)
    shorten         gives a gated MLP or an attention the forward that does with fewer calls (`short_forwards`)

Which modules these are is found by `tapernorm.fuse` and `tapernorm.shorten`. A copy of this file lies in a model folder
beside that of `modeling_tapernorm.py`, which imports it; it imports nothing but torch and transformers.
"""

import functools
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class FusedPart(nn.Module):
    """One of several linear maps that read the same tensor: a slice of the product with `owner.<whole>`, an nn.Linear.

    The first multiplies, and leaves the slices with what it read (one tuple, for threads); another takes its own if it
    is given that very tensor, or multiplies anew: order decides on speed alone. The last drops them."""

    owner = whole = sizes = index = left = last = cast(Any, None)

    def __init__(self, owner, whole, sizes, index, left):
        super().__init__()  # the owner is not registered: it would be a module of its own child
        self.__dict__.update(owner=owner, whole=whole, sizes=sizes, index=index, left=left, last=len(sizes) - 1)

    def forward(self, input):
        index, left, held = self.index, self.left, self.left.held
        if index and held is not None and held[0] is input:
            if index == self.last:
                left.held = None
            return held[1][index]
        made = product(self.owner._modules[self.whole], input)  # looked up: it may be wrapped by now
        parts = torch.split_with_sizes(made, self.sizes, -1)  # a third of the cost of `made.split`
        left.held = None if index == self.last else (input, parts)
        return parts[index]

    def __call__(self, input):
        return super().__call__(input) if hooks_of(self) else self.forward(input)

    def _rows(self, name):
        tensor = getattr(self.owner._modules[self.whole], name)
        return None if tensor is None else tensor.split(self.sizes)[self.index]

    weight, bias = property(lambda self: self._rows("weight")), property(lambda self: self._rows("bias"))
    in_features, out_features = property(lambda self: self.weight.shape[1]), property(lambda self: len(self.weight))


def hooks_of(module):
    """Those that a call runs; something false where there are none."""
    return module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks


def product(linear, input):
    """linear(input); where nobody could tell, without the calls, which are half of what a small product costs."""
    own = vars(linear)
    if hooks_of(linear) or type(linear) is not nn.Linear or "forward" in own:
        return linear(input)
    return nn.functional.linear(input, own["_parameters"]["weight"], own["_parameters"]["bias"])


class Left:
    held: Any = None  # by the first of some `FusedPart`s for the others, never for copies of them: (input, slices)

    def __getstate__(self):
        return {}


def fuse_linears(owner, whole, parts):
    """Make one linear map, with weights yet to come, of several. Raises ValueError where they are none of one width."""
    linears = [owner._modules.get(part) for part in parts]
    if all(isinstance(linear, FusedPart) for linear in linears):  # the body, which is built first, has done it
        return owner.get_submodule(whole)
    widths = {linear.in_features if type(linear) is nn.Linear else None for linear in linears}
    if None in widths or len(widths) != 1 or hasattr(owner, whole):
        raise ValueError(f"{', '.join(parts)} of a {type(owner).__name__} are no linear maps to be fused as {whole}")
    like, sizes, left = linears[0].weight, [linear.out_features for linear in linears], Left()
    options = {"bias": any(linear.bias is not None for linear in linears), "dtype": like.dtype, "device": like.device}
    made = nn.utils.skip_init(nn.Linear, *widths, sum(sizes), **options).train(owner.training)
    for index, part in enumerate(parts):
        setattr(owner, part, FusedPart(owner, whole, sizes, index, left).train(owner.training))
    setattr(owner, whole, made)
    return made


# Forwards in fewer calls. A small model that decodes waits for Python; these start the operations of the stock forward
# that count, and no others. Whether a module computes this is seen in its forward (`tapernorm.shorten`), never guessed
# from names. A call that is in any way unlike those that were seen takes the stock forward.


def shorten(module, how):
    """Give a module the forward that `how["kind"]` names. Raises ValueError where it lacks the modules for it."""
    modules = module._modules
    parts = {name for name, part in modules.items() if type(part) is FusedPart and part.whole == how.get("whole")}
    if not parts or how.get("kind") not in SHORT or not {how.get("out"), how.get("act", how.get("out"))} <= {*modules}:
        raise ValueError(f"a {type(module).__name__} has no forward such as the config's short_forwards says: {how}")
    module.short = how | {"saved": how, "parts": sorted(parts, key=lambda name: modules[name].index)}
    if "known" in how:
        half = modules[module.short["parts"][0]].sizes[0] // how["heads"] // 2
        module.short |= {"known": frozenset(how["known"]), "halves": (half, half)}
    module.forward = functools.partial(SHORT[how["kind"]], module)


def _as_seen(module):
    """No training, nothing hooked or put in another's place; and no compiler, which needs none of this."""
    if module.training or torch.compiler.is_compiling():
        return False
    for name in module.short["parts"]:
        part = module._modules[name]
        if type(part) is not FusedPart or hooks_of(part):
            return False
    return True


def short_mlp(module, *args, **kwargs):
    """out(act(a) · b), [a | b] = whole(x) or [b | a]"""
    how, modules = module.short, module._modules
    out, act, acted = modules[how["out"]], modules[how["act"]], how["acted"]
    plain = len(args) == 1 and not kwargs and type(out) is nn.Linear and _as_seen(module)
    if not plain or args[0].dtype != vars(out)["_parameters"]["weight"].dtype:  # T5 casts between the two
        return type(module).forward(module, *args, **kwargs)
    made = product(modules[how["whole"]], args[0])
    parts = torch.split_with_sizes(made, modules[how["parts"][0]].sizes, -1)
    act = act if hooks_of(act) else act.forward
    return product(out, act(parts[acted]) * parts[1 - acted])


def _is_sdpa(config):
    name = object.__getattribute__(config, "__dict__").get("_attn_implementation_internal")  # the property takes 4 µs
    return name == "sdpa" and ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def short_attention(module, *args, **kwargs):
    """out(attention(turn(q), turn(k), v)), [q | k | v] = whole(x): q and k, side by side, are turned together.

    turn([l | r]) = [l | r] · cos + [−r | l] · sin. [batch, heads, tokens, width of a head]"""
    how, modules, get = module.short, module._modules, cast(Any, kwargs.get)
    x = args[0] if args else get(how["input"])
    rotary, mask, cache = get(how["rotary"]), get(how["mask"]), get(how["cache"])
    odd = not isinstance(x, torch.Tensor) or not isinstance(rotary, tuple) or not kwargs.keys() <= how["known"]
    if odd or len(args) > 1 or type(cache) not in CACHES or not _as_seen(module) or not _is_sdpa(module.config):
        return type(module).forward(module, *args, **kwargs)
    (batch, length, _), heads, keys = x.shape, how["heads"], how["keys"]
    made = product(modules[how["whole"]], x).view(batch, length, heads + 2 * keys, -1).transpose(1, 2)
    both, value = torch.split_with_sizes(made, (heads + keys, keys), 1)
    cos, sin = rotary if len(rotary[0]) == 1 else (t.unsqueeze(1) for t in rotary)  # [batch or 1, tokens, width]
    left, right = torch.split_with_sizes(both, how["halves"], -1)
    both = both * cos + torch.cat((-right, left), -1) * sin
    query, key = torch.split_with_sizes(both, (heads, keys), 1)
    if cache is not None:
        key, value = cache.update(key, value, getattr(module, how["index"]), kwargs=kwargs)
    if length == 1 and mask is None:  # what the function would do
        grouped = heads != keys
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, scale=how["scaling"], enable_gqa=grouped)
    else:
        mixed = sdpa_attention_forward(module, query, key, value, mask, scaling=how["scaling"])[0]
    return product(modules[how["out"]], mixed.reshape(batch, length, -1)), None


SHORT: Any = {"mlp": short_mlp, "attention": short_attention}
# A cache of somebody's own may read what else a call holds.
CACHES = (transformers.DynamicCache, transformers.StaticCache, type(None))
