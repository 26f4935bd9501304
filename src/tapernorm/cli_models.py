"""The commands about a model that is there: `verify`, `eval` and `generate`. `tapernorm.cli` registers them."""

from __future__ import annotations

from typing import Annotated

import typer

from tapernorm import options as o


def verify(
    a: Annotated[str, typer.Argument(help="The reference model.")],
    b: Annotated[str, typer.Argument(help="The model to judge.")],
    data: Annotated[str | None, typer.Option("--data", help="Text to compare on. Default: random tokens.")] = None,
    text_column: o.Column = "text",
    split: o.Split = None,
    block: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 128,
    blocks: Annotated[int, typer.Option(help="Sequences to compare.")] = 16,
    as_json: o.Json = False,
    config: o.Config = None,
) -> None:
    """Compare two models: logits, greedy tokens, cached against uncached, loss. Exit code 3 if they differ."""
    from tapernorm.commands import compare

    compare(a, b, data, text_column, split, block, blocks, as_json)


def evaluate(
    model: o.Model,
    data: o.Data,
    text_column: o.Column = "text",
    split: o.Split = None,
    block: o.Block = None,
    eval_tokens: o.EvalTokens = 65_536,
    as_json: o.Json = False,
    config: o.Config = None,
) -> None:
    """The loss of a model on the validation part of a text: mean, median and tail."""
    from tapernorm.commands import measure_loss

    measure_loss(model, data, text_column, split, block, eval_tokens, as_json)


def generate(
    model: o.Model,
    prompt: Annotated[str, typer.Option(help="The text to go on from.")],
    max_new_tokens: Annotated[int, typer.Option(help="How many tokens to make.")] = 100,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this share.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws, where --temperature is not 0.")] = 0,
    compile: o.CompileStep = None,
    as_json: o.Json = False,
    config: o.Config = None,
) -> None:
    """Write text with a model, as it comes: the tokens of transformers' generate, sooner. See docs/generating.md."""
    from tapernorm.commands import write_text

    write_text(model, prompt, max_new_tokens, temperature, top_p, seed, compile, as_json)
