"""What a run starts from: a model, a tokenizer, text in blocks. Everything that can be refused is refused here."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tapernorm import data, hub, packing, sources
from tapernorm.bench import device_name
from tapernorm.bos import leave_out
from tapernorm.convert import choose, get_controller
from tapernorm.packing import Blocks
from tapernorm.precision import refuse_bfloat16
from tapernorm.prefix import find_prefix, own_bos, refuse_prefix, room
from tapernorm.run_config import SIZES, RunConfig, read_prefix
from tapernorm.sites import NormSite, context_length, find_sites
from tapernorm.verify import greedy_tokens


@dataclasses.dataclass
class Material:
    """What both arms start from."""

    build: Callable[[], Any]  # a fresh copy of the starting model
    tokenizer: Any
    train: Blocks
    validation: Blocks
    sites: list[NormSite]
    prefix: tuple[int, ...]  # of the tapered arm
    bos: int | None  # what the tokenizer began texts with, where the prefix has taken that over
    stock_tokenizer: Any  # as it came
    gathered: sources.Gathered
    facts: dict[str, Any]

    def stock(self, blocks: Blocks) -> Blocks:
        """The blocks as they are for the model with its norms, which has no prefix: behind its own first token."""
        return blocks if self.bos is None else blocks.begun(self.bos)


def prepare(config: RunConfig, resume: bool = False) -> Material:
    """Model, tokenizer, text: everything that can be refused before a folder is made.

    resume: what the model wrote for this run before is taken again.

    Raises:
        ValueError: as `tapernorm.hub.from_pretrained`, `tapernorm.data.load_text` and `tapernorm.taper_`; a block
            longer than the model's context; no tokenizer; a vocabulary that the model does not have.
    """
    if config.kind == "taper":
        model, tokenizer = load_original(str(config.model))
        gathered = sources.gather(config, model, tokenizer, device(), resume)
        text = gathered.text
        name = str(config.model)

        def build() -> Any:
            return copy.deepcopy(model)  # which itself is never trained

    else:
        gathered = sources.gather(config)
        text = gathered.text
        _check_block(config, SIZES[config.size][3])
        tokenizer = data.train_tokenizer(text.train, config.vocab_size or SIZES[config.size][2])
        name = f"llama-{config.size}"

        def build() -> Any:
            return pretrain_model(config.size, tokenizer, config.seed)

        model = build()
    if config.bf16:
        refuse_bfloat16(device())
    context = context_length(model)
    _check_block(config, context)
    sites = find_sites(model)
    if config.arm != "baseline":
        choose(sites, config.taper)
    asked = () if config.kind == "pretrain" or config.arm == "baseline" else read_prefix(config.prefix)
    prefix = choose_prefix(asked, model, tokenizer, text.train, sites, look=not config.allow_massive)
    bos, stock_tokenizer = own_bos(tokenizer) if prefix else None, tokenizer
    # a block of the model that keeps its norms has its first token too
    block = _check_block(config, min(room(model, prefix), context - (bos is not None)))
    if bos is not None:
        stock_tokenizer = copy.deepcopy(tokenizer)
        leave_out(tokenizer)
    train = packing.pack_labelled(text.train, tokenizer, block)
    validation = packing.pack_labelled(text.validation, tokenizer, block, limit=max(1, config.eval_tokens // block))
    refuse_foreign_ids(train.ids, model)
    facts = {
        "model": model_facts(model, name, context),
        "data": {
            **gathered.facts,
            "train_tokens": train.tokens,
            "validation_tokens": validation.tokens,
            "block": block,
            **({"answer_tokens": train.counted} if train.counted < train.tokens else {}),
        },
        "device": device_name(device()),
        "prefix": list(prefix),
        "baseline_arm": _baseline_name(config, sites),
        "arm": config.arm,
        **({"taper": config.taper.to_dict()} if config.arm != "baseline" else {}),
    }
    return Material(build, tokenizer, train, validation, sites, prefix, bos, stock_tokenizer, gathered, facts)


def choose_prefix(
    asked: tuple[int, ...] | None,
    model: Any,
    tokenizer: Any,
    texts: Iterable[str],
    sites: list[NormSite],
    look: bool = True,
) -> tuple[int, ...]:
    """The constant prefix that was asked for, or, where that is None, the one that is needed if it is looked for."""
    if asked:
        refuse_prefix(model, asked)
    if asked is not None or not look:
        return asked or ()
    return find_prefix(model, tokenizer, texts, sites=sites)


def pretrain_model(size: str, tokenizer: Any, seed: int) -> LlamaForCausalLM:
    """A Llama of one of the `SIZES` with random weights; the same seed gives the same weights."""
    width, layers, _, context = SIZES[size]
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return random_llama(width, layers, len(tokenizer), context, seed, **ids)


def random_llama(
    width: int, layers: int, vocabulary: int, context: int, seed: int = 0, **more: Any
) -> LlamaForCausalLM:
    """A Llama with tied embeddings and random weights, in the proportions of the `SIZES`. more: of its config."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=width * 8 // 3 // 16 * 16,
            num_hidden_layers=layers,
            num_attention_heads=max(4, width // 32),
            max_position_embeddings=context,
            tie_word_embeddings=True,
            **more,
        )
    )


def _check_block(config: RunConfig, context: int) -> int:
    block = config.block or min(512, context)
    if block > context:
        raise ValueError(f"block={block} is longer than the model's context of {context} tokens")
    return block


def _baseline_name(config: RunConfig, sites: list[NormSite]) -> str:
    if config.kind == "taper":
        return "normed"
    return next((site.kind for site in sites if site.removable), "normed")


def device() -> torch.device:
    """Where runs happen."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_original(source: str) -> tuple[Any, Any]:
    """(model, tokenizer) of a model that has its norms.

    Raises:
        ValueError: as `tapernorm.hub.from_pretrained`; it is tapered already; it has no tokenizer.
    """
    model, tokenizer = hub.from_pretrained(source)
    if get_controller(model) is not None:
        raise ValueError(f"{source} is tapered already; give the original model, or fold it (tapernorm fold)")
    if tokenizer is None:
        raise ValueError(f"{source} has no tokenizer beside it; put its tokenizer's files into the folder")
    return model, tokenizer


def refuse_foreign_ids(ids: Tensor, model: Any) -> None:
    """Raises ValueError for token ids that the model has no embedding for."""
    if int(ids.max()) >= model.config.vocab_size:
        raise ValueError(
            f"the tokenizer makes ids up to {int(ids.max())}, and the model knows {model.config.vocab_size}: "
            "they do not belong together"
        )


def model_facts(model: Any, name: str, context: int) -> dict[str, Any]:
    """What the report says of a model."""
    return {
        "name": name,
        "architecture": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "width": getattr(model.config, "hidden_size", None),
        "layers": getattr(model.config, "num_hidden_layers", None),
        "context": context,
    }


def continuations(model: Any, tokenizer: Any, ids: Tensor, count: int, new_tokens: int) -> list[tuple[str, str]]:
    """(prompt, greedy text) from the beginnings of the first blocks. ids: [N, T]"""
    start = ids[:count, : min(12, ids.shape[1] // 2)]
    made = greedy_tokens(model, start, min(new_tokens, ids.shape[1] - start.shape[1]))
    prompts, texts = ([tokenizer.decode(row, skip_special_tokens=True) for row in rows] for rows in (start, made))
    return [(prompt.strip(), text) for prompt, text in zip(prompts, texts, strict=True)]
