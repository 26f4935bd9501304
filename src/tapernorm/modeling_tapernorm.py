"""transformers models whose norms were removed and folded into the neighbouring weights: one file for every family.

`TaperNorm<Stock>` (`TaperNormLlamaConfig`, `TaperNormLlamaForCausalLM`) is a subclass of transformers' class
`<Stock>`, made when it is first asked for by the `__getattr__` of this module. Its config says how it differs:

    removed_norms   modules that are `nn.Identity` here; a star stands for a layer's index
    added_biases    linear maps that have a bias here and none in the stock class
    untied          tied weights of the stock class that are tensors of their own here
    tapered         settings of a removal that is not finished, or None; such a model is not built by this file
    constant_prefix token ids of the constant prefix, whose keys and values stand before those of every text
    prefix_shapes   attention modules that hold them, with (heads, tokens, width of a key, width of a value)
    fused_linears   module -> {linear map: those of the stock class that it stands for}; they read one tensor
    short_forwards  module -> what its forward computes, of those that do so in fewer calls here

This file and `fused_tapernorm.py`, which it imports, need nothing but torch and transformers, so that their copies in a
model folder work alone. The import is relative, since transformers copies what is imported so and nothing else:

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

A stock class must never read such a folder, since it would put fresh norms where there are none. The Auto classes
stop at the model type `tapernorm_<base>`; `LlamaForCausalLM.from_pretrained(folder)` stops because config.json has
a sentence where the stock config wants a number (the norms' epsilon), and the number under `guarded`.
"""

import functools
import json
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .fused_tapernorm import fuse_linears, shorten

PREFIX = "TaperNorm"
TYPE_PREFIX = "tapernorm_"
GUARD = "its norms were taken out: use an Auto class with trust_remote_code=True, or tapernorm.from_pretrained"
# The mixins stand before a stock class, which a type checker must be told and Python must not.
_ConfigBase: Any = PreTrainedConfig if TYPE_CHECKING else object
_ModelBase: Any = PreTrainedModel if TYPE_CHECKING else object
FIELDS = ("removed_norms", "added_biases", "untied", "tapered", "constant_prefix", "prefix_shapes")
FIELDS += ("fused_linears", "short_forwards")
ATTENTION = "prefix_"  # before sdpa and eager: the name of an attention function that knows the prefix


def name_pattern(name):
    """For full module names: `model.layers.*.input_layernorm`, a star for an index."""
    return re.compile(re.escape(name).replace(r"\*", r"\d+") + r"\Z")


def starred(name):
    """`model.layers.3.mlp` -> `model.layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|\Z)", ".*", name)


def is_in_norm(model, name):
    """Whether a parameter belongs to a norm."""
    return "norm" in type(model.get_submodule(name.rpartition(".")[0])).__name__.lower()


class ConfigMixin(_ConfigBase):
    """What a norm-free config adds to the stock one, and how it is written so that the stock one refuses it."""

    removed_norms = added_biases = untied = ()
    tapered = None
    constant_prefix = ()  # not `prefix`: pipelines take that for a text
    prefix_shapes: Any = {}  # noqa: RUF012 - a class's default, replaced and never changed
    fused_linears: Any = {}  # noqa: RUF012
    short_forwards: Any = {}  # noqa: RUF012

    def to_json_string(self, use_diff=True):
        values = json.loads(super().to_json_string(use_diff))
        values["guarded"] = {self.guard_field: values.get(self.guard_field, getattr(self, self.guard_field))}
        values[self.guard_field] = GUARD
        return json.dumps(values, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        config_dict = {k: v for k, v in {**config_dict, **config_dict.get("guarded", {})}.items() if k != "guarded"}
        if not __name__.startswith("transformers_modules."):  # the installed package, not a folder's copy
            register_models(cls)
        return super().from_dict(config_dict, **kwargs)


class ModelMixin(_ModelBase):
    """Builds the stock model, then takes out and puts in what the config says."""

    def __init__(self, config, *args, **kwargs):
        if config.tapered is not None:
            raise ValueError(
                f"{config.name_or_path or 'this checkpoint'}: the norms of this model are not removed yet, only "
                "tapered; load it with `tapernorm.from_pretrained(folder)` (pip install tapernorm), then train on "
                "or fold it"
            )
        ties = type(self)._tied_weights_keys or {}  # on the instance before post_init, which ties by it
        self._tied_weights_keys = {k: v for k, v in ties.items() if k not in config.untied} or None
        super().__init__(config, *args, **kwargs)
        self._apply_layout(config)

    @classmethod
    def from_pretrained(cls, *args, output_loading_info=False, **kwargs):
        """As the stock method; but what it would only warn of is an error: norms that grow back where the folder has
        none, and, for the class that was saved, any weight too few or too many.

        Raises:
            ValueError: config.json and the weights beside it are not of one model.
        """
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        whole = cls.__name__ in (model.config.architectures or ())
        missing = sorted(name for name in info["missing_keys"] if whole or is_in_norm(model, name))
        odd = sorted(info["unexpected_keys"]) if whole else []
        if missing:
            raise ValueError(
                f"{model.name_or_path}: {len(missing)} weights of {cls.__name__} are missing from it, such as "
                f"{missing[0]}; config.json and the weights beside it are not of one model"
            )
        if odd:
            raise ValueError(
                f"{model.name_or_path}: config.json knows no place for {len(odd)} of the weights beside it, such as "
                f"{odd[0]}: the two are not of one model"
            )
        return (model, info) if output_loading_info else model

    def _upload_modified_files(self, working_dir, repo_id, *args, **kwargs):
        """What `push_to_hub` calls last: a card that transformers made up gives way to that of the model's folder."""
        own, made = (Path(place) / "README.md" for place in (self.name_or_path, working_dir))
        if own.is_file() and made.is_file() and "automatically generated" in made.read_text(encoding="utf-8"):
            shutil.copyfile(own, made)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    def _apply_layout(self, config):
        gone = self._find_all(config, config.removed_norms)
        if config.removed_norms and not gone:
            raise ValueError(f"{type(self).__name__}: none of its modules is in the config's removed_norms")
        for name in gone:
            kind = type(self.get_submodule(name)).__name__
            if "norm" not in kind.lower() and kind != "Identity":  # the body, which is built first, has taken it out
                raise ValueError(f"{name}, which the config's removed_norms names, is no norm but a {kind}")
            self.set_submodule(name, nn.Identity())
        for name in self._find_all(config, config.added_biases):
            linear = self.get_submodule(name)
            if not hasattr(linear, "bias") or not isinstance(getattr(linear, "weight", 0), nn.Parameter):
                raise ValueError(f"{name}, which the config's added_biases names, takes no bias")
            linear.bias = nn.Parameter(linear.weight.new_zeros(linear.weight.shape[0]))
        for pattern, groups in dict(config.fused_linears).items():
            for name in self._find_all(config, [pattern]):
                for whole, parts in groups.items():
                    fuse_linears(self.get_submodule(name), whole, parts)
                    gone += [f"{name}.{part}" for part in parts]
        for pattern, how in dict(config.short_forwards).items():
            for name in self._find_all(config, [pattern]):
                shorten(self.get_submodule(name), how)
        if getattr(self, "_tp_plan", None):  # a tensor-parallel rule for a module that is gone stops the loading
            self._tp_plan = {k: v for k, v in self._tp_plan.items() if k not in set(map(starred, gone))}
        for pattern, shape in dict(config.prefix_shapes).items():
            for name in self._find_all(config, [pattern]):
                hold_prefix(self.get_submodule(name), *shape)
        if config.constant_prefix:
            guard_attention(self)
            self.set_attn_implementation(config._attn_implementation)

    def set_attn_implementation(self, attn_implementation, *args, **kwargs):
        """As the stock method; with a constant prefix, sdpa and eager attention that knows it, and no other."""
        if self.config.constant_prefix:
            attn_implementation = knows_prefix(attn_implementation)
        super().set_attn_implementation(attn_implementation, *args, **kwargs)

    def _find_all(self, config, patterns):
        """Full names here for the names in the config, which are those of the class that was saved: a body alone,
        or another head, differs by the base model's prefix and may lack some."""
        names, prefix, found = list(dict(self.named_modules())), self.base_model_prefix + ".", []
        for wanted in patterns:
            spellings = (wanted, wanted.removeprefix(prefix), prefix + wanted)
            matches = [[n for n in names if name_pattern(spelling).match(n)] for spelling in spellings]
            here = next(filter(None, matches), [])
            if not here and type(self).__name__ in (config.architectures or ()):
                raise ValueError(f"{type(self).__name__} has no module {wanted!r}, which its config names")
            found += here
        return found


# The constant prefix. Its keys and values are buffers of the attention modules, put before those that the cache
# returns; cache, position ids and attention mask of a caller never hold it, so `generate` needs to know nothing.


def hold_prefix(attention, heads, tokens, key_width, value_width):
    """Give an attention module its buffers. [1, heads, tokens, width]"""
    like = next(attention.parameters())
    attention.register_buffer("prefix_key", like.new_zeros(1, heads, tokens, key_width, dtype=like.dtype))
    attention.register_buffer("prefix_value", like.new_zeros(1, heads, tokens, value_width, dtype=like.dtype))


def knows_prefix(attn_implementation):
    """The name of the attention function with the prefix. Raises ValueError where there is none."""
    name = "sdpa" if attn_implementation is None else str(attn_implementation).removeprefix(ATTENTION)
    if name not in ATTENTIONS:
        raise ValueError(f"{attn_implementation} attention cannot hold a constant prefix: use sdpa or eager")
    return ATTENTION + name


def guard_attention(model):
    """Route `set_attn_implementation` of a model and its parts by `knows_prefix`: plain sdpa would leave the prefix
    out without a word. On the instances, since their classes are transformers' own."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and not isinstance(part, ModelMixin):
            part.set_attn_implementation = functools.partial(_set_attention, part)


def _set_attention(model, attn_implementation, *args, **kwargs):
    type(model).set_attn_implementation(model, knows_prefix(attn_implementation), *args, **kwargs)


def _own_eager(module, *args, **kwargs):
    """The eager function of the file that the attention class comes from."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)


def _with_prefix(attention):
    def forward(module, query, key, value, attention_mask, **kwargs):
        batch, length = key.shape[0], key.shape[2]
        own = module.prefix_key.to(key.dtype), module.prefix_value.to(value.dtype)
        pairs = zip(own, (key, value), strict=True)
        key, value = (torch.cat([p.expand(batch, -1, -1, -1), x], dim=2) for p, x in pairs)
        if attention_mask is not None and attention_mask.shape[-1] == length:  # a four-dimensional mask of the caller
            seen = True if attention_mask.dtype == torch.bool else 0.0
            attention_mask = nn.functional.pad(attention_mask, (own[0].shape[2], 0), value=seen)
        return attention(module, query, key, value, attention_mask, **kwargs)

    return forward


def _mask_with_prefix(make_mask):
    """The prefix is seen by every query, in sliding-window layers too: a sink that slides out is no sink."""

    def mask(batch_size, q_length, config: Any = None, device="cpu", allow_is_causal_skip=True, **kwargs):
        # No mask means torch's `is_causal`, which aligns the corner wrongly when there are more keys than queries.
        alone = allow_is_causal_skip and isinstance(q_length, int) and q_length == 1
        kwargs |= {"batch_size": batch_size, "q_length": q_length, "config": config, "device": device}
        made = make_mask(allow_is_causal_skip=alone, **kwargs)
        if made is None:
            return None
        seen = made.new_full((made.shape[0], 1, q_length, len(config.constant_prefix)), made.dtype == torch.bool)
        return torch.cat([seen, made], dim=-1)

    return mask


ATTENTIONS = {"sdpa": (sdpa_attention_forward, sdpa_mask), "eager": (_own_eager, eager_mask)}
for _name, (_attention, _mask) in ATTENTIONS.items():
    AttentionInterface.register(ATTENTION + _name, _with_prefix(_attention))
    AttentionMaskInterface.register(ATTENTION + _name, _mask_with_prefix(_mask))


def heads(base_type):
    """`{auto class: stock class}`, by name, of one family: transformers' own tables, no model code is imported."""
    found: dict[str, str] = {}
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None) if name.startswith("AutoModel") else None
        stock = mapping._model_mapping.get(base_type) if mapping is not None else None
        if isinstance(stock, str):
            found[name] = stock
    return found


def share_conversions(old, new):
    """Checkpoint conversions (stacked experts, renamed weights) are keyed on model type or class name."""
    if (mapping := get_checkpoint_conversion_mapping(old)) is not None:
        register_checkpoint_conversion_mapping(new, mapping, overwrite=True)


def guard_field_of(stock):
    """The field that holds the sentence: the epsilon, or else a whole number, or else any number.

    Never one that the checks of `PreTrainedConfig` itself read, such as vocab_size: AutoTokenizer and Trainer parse
    config.json with that bare class."""
    skipped = {*PreTrainedConfig.__dataclass_fields__, "vocab_size"}
    own = [field for field in stock.__dataclass_fields__ if field not in skipped]
    kinds = {field: stock.__dataclass_fields__[field].type for field in own}
    epsilons = [field for field in own if re.search(r"(eps|epsilon)\Z", field)]
    whole = [field for field in own if kinds[field] in (int, "int")]
    numbers = [field for field in own if set(get_args(kinds[field]) or (kinds[field],)) <= {int, float, type(None)}]
    return next(iter(epsilons + whole + numbers))


def make_config(name, stock):
    base_type, new_type = stock.model_type, TYPE_PREFIX + stock.model_type
    for table, mapping in vars(modeling_auto).items():  # read by pipelines, Trainer's label smoothing, evaluators
        if re.match(r"MODEL_.*MAPPING_NAMES\Z", table) and isinstance(mapping.get(base_type), str):
            mapping[new_type] = PREFIX + mapping[base_type]
    share_conversions(base_type, new_type)
    own = {"model_type": new_type, "base_model_type": base_type, "guard_field": guard_field_of(stock)}
    own |= {"__module__": __name__, "__doc__": stock.__doc__, "stock_class": stock}
    return type(name, (ConfigMixin, stock), own)


def make_model(name, stock):
    share_conversions(stock.__name__, name)
    config_class = get_class(PREFIX + stock.config_class.__name__)
    own = {"__module__": __name__, "__doc__": stock.__doc__, "stock_class": stock, "config_class": config_class}
    # Both are guessed from the source of the class's module, and this one holds no attention and no experts.
    own["_can_set_attn_implementation_cached_value"] = stock._can_set_attn_implementation()
    own["_can_set_experts_implementation_cached_value"] = stock._can_set_experts_implementation()
    made = type(name, (ModelMixin, stock), own)
    body: Any = heads(config_class.base_model_type).get("AutoModel", stock.__name__)
    if body == stock.__name__:  # generic heads build their body by AutoModel.from_config, which passes no flag
        modeling_auto.AutoModel.register(config_class, made, exist_ok=True)
    else:
        get_class(PREFIX + body)
    return made


def get_class(name):
    """The class `TaperNorm<Stock>`, made if need be. Raises AttributeError when transformers has no such class."""
    if name not in globals():
        stock = getattr(transformers, name.removeprefix(PREFIX), None) if name.startswith(PREFIX) else None
        if not (isinstance(stock, type) and issubclass(stock, (PreTrainedConfig, PreTrainedModel))):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = (make_config if issubclass(stock, PreTrainedConfig) else make_model)(name, stock)
    return globals()[name]


__getattr__ = get_class  # transformers and pickle ask for the classes by name


def config_class_of(base_type):
    """The norm-free config class of a model type of transformers. Raises KeyError for an unknown one."""
    return get_class(PREFIX + CONFIG_MAPPING[base_type].__name__)


def auto_map(config_class):
    """The entry of config.json that leads the Auto classes to a folder's copy of this file."""
    names = {"AutoConfig": config_class.__name__}
    names |= {auto: PREFIX + stock for auto, stock in heads(config_class.base_model_type).items()}
    return {auto: f"{__name__.rsplit('.', 1)[-1]}.{name}" for auto, name in names.items()}


def register_models(config_class):
    """Let the Auto classes build a family without a flag, and let its save_pretrained copy the code."""
    config_class.register_for_auto_class()
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    for auto_name, stock in heads(config_class.base_model_type).items():
        # A table may name a class of another family, which has a config of its own.
        if getattr(getattr(transformers, stock, None), "config_class", None) is config_class.stock_class:
            model_class = get_class(PREFIX + stock)
            getattr(modeling_auto, auto_name).register(config_class, model_class, exist_ok=True)
            model_class.register_for_auto_class(auto_name)
