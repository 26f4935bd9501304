"""What goes into folders: tiny models, whole, tapered and without norms, and a tokenizer; and a process without
tapernorm."""

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn

import tapernorm as tn
import tiny_models
from tapernorm.modules import taper_norms
from tapernorm.sites import find_sites

FAMILIES = ("llama", "gpt2")
IDS = torch.arange(3, 21).reshape(2, 9)
SIZE = {"vocab_size": 300, "hidden_size": 32, "num_attention_heads": 4}
SIZES = {
    "llama": {
        **SIZE, "intermediate_size": 32, "num_key_value_heads": 2, "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    "gpt2": SIZE,
}  # fmt: skip
# The first lines of a fresh process that cannot import tapernorm.
BLOCKED = """
import sys, json
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "tapernorm":
            raise ImportError("tapernorm is not installed here")
sys.meta_path.insert(0, Blocked())
"""


def tiny(family, seed=0):
    """A tiny model whose every parameter, norm gains and biases included, is random; the bytes are its tokens."""
    return tiny_models.tiny(family, seed, **SIZES[family]).eval()


def folded_by_hand(family, seed=0, final=True):
    """Norms gone, biases where there were none, head untied: the shape of what folding leaves."""
    model = tiny(family, seed)
    for name, module in list(model.named_modules()):
        if type(module).__name__ in ("LlamaRMSNorm", "LayerNorm") and (final or name.count(".") > 1):
            model.set_submodule(name, nn.Identity())
        elif name.endswith(("q_proj", "up_proj")):
            module.bias = nn.Parameter(torch.randn(module.out_features) * 0.1)
    if final:
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach() * torch.rand(32))
        model.config.tie_word_embeddings = False
        if family == "gpt2":
            head.bias = nn.Parameter(torch.randn(300) * 0.1)
    return model


def taper_row(row, model, example, **settings):
    """Every norm of a row of families.py that can go."""
    sites = find_sites(model, example)
    keep = tuple(site.name for site in sites if site.role == "final" and not site.removable)
    config = tn.TaperConfig(arm="all", keep=keep, post=row.post, anchor_weight=0, **settings)
    tn.taper_(model, config, example=example)


@torch.no_grad()
def to_gate(model, gate=0.0):
    """Gains, biases and c of their own at every site, and that gate."""
    generator = torch.Generator().manual_seed(7)
    for module in taper_norms(model).values():
        fixed = module.fixed_norm
        fixed.c.copy_(0.5 * torch.rand(1, generator=generator) + 0.3)
        fixed.weight.copy_(torch.rand(fixed.weight.shape, generator=generator) + 0.5)
        if fixed.bias is not None:
            fixed.bias.copy_(0.3 * torch.randn(fixed.bias.shape, generator=generator))
        module.set_gate(gate)
    return model


def byte_tokenizer():
    alphabet = ["<s>", "</s>", "<pad>", *sorted(ByteLevel.alphabet())]
    backend = Tokenizer(BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS).logits


def names_of_norms(model):
    return [name for name, module in model.named_modules() if type(module).__name__.endswith("Norm")]
