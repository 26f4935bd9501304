"""The bodies of commands that are more than a call. `tapernorm.cli` imports this when one of them runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import typer

from tapernorm import from_pretrained
from tapernorm.output import INTERRUPTED, NUMERICAL, console, print_json
from tapernorm.run_config import RunConfig
from tapernorm.sites import context_length


def inspect_text(
    model: str, text: str, tokens: int, out: Path | None, column: str, split: str | None, as_json: bool
) -> None:
    """`inspect --text`: survey, page, table or JSON."""
    from tapernorm import survey_page as page
    from tapernorm.page import page_path

    path = page_path(page.page_name(model), out) if out or not as_json else None
    seen = page.look(model, text, tokens, column, split)
    if path is not None:
        page.write_page(seen, path)
    if as_json:
        return print_json({**page.to_dict(seen), "page": str(path) if path else None})
    console().print(page.scale_table(seen))
    print("\n".join(["", *page.sentences(seen), page.advice(seen), "", "page:", f"  {path}", "try next:"]))
    print(f"  {page.command(seen)}")
    return None


def remove_norms(options: dict[str, Any]) -> None:
    """`remove`, from the options of the command line."""
    from tapernorm import removal
    from tapernorm.removal_report import removal_table, verdict

    overwrite, as_json, minutes = (options.pop(name) for name in ("overwrite", "as_json", "minutes"))
    if minutes is not None and not 0 < minutes < float("inf"):
        raise ValueError(f"--minutes {minutes:g} must be above 0")
    options["out"] = options["out"] or removal.default_out(options["model"], overwrite)
    options |= {"keep": tuple(options["keep"] or ()), "csv": options["csv"] and str(options["csv"])}
    asked = removal.RemovalConfig(**options)
    record = removal.execute(asked, overwrite=overwrite)
    if minutes is not None and not record["failed"]:
        from tapernorm.go_on import train_the_rest

        record = train_the_rest(asked, record, minutes)
    if as_json:
        print_json(removal.summary(record))
    else:
        console().print(removal_table(record))
        print(f"\ngenerate text:\n  {record['generate_command']}\n")
        console().print(" ".join(verdict(record)), markup=False, highlight=False)
    for sentence in record["failed"]:
        print(f"tapernorm: {sentence}", file=sys.stderr)
    if record["failed"]:
        raise typer.Exit(NUMERICAL)


def train(config: RunConfig, overwrite: bool, resume: bool, as_json: bool) -> None:
    """`taper` and `pretrain`."""
    from tapernorm.report import summary_table
    from tapernorm.runs import execute

    record = execute(config, overwrite=overwrite, resume=resume)
    losses, fold, baseline = record.get("losses", {}), record.get("fold"), record["baseline_arm"]
    loss_of = {arm: found.get("loss") for arm, found in losses.items()}
    if as_json:
        summary = {
            "out": record["settings"]["out"],
            "loss_before": loss_of.get("original" if config.kind == "taper" else baseline),
            "loss_after": loss_of.get(baseline if config.arm == "baseline" else config.arm),
            "loss_normed": loss_of.get(baseline),
            **{key: record.get(key) for key in ("fold", "verify", "bench", "report")},
        }
        print_json(summary)
    else:
        console().print(summary_table(record))
        if "generate_command" in record:
            print(f"\ngenerate text:\n  {record['generate_command']}")
    if fold is not None and not record["verify"]["passed"]:
        raise typer.Exit(NUMERICAL)


def fold_model(
    model: str, out: str, stream: bool | None, compare: bool, overwrite: bool, as_json: bool, fuse: bool = False
) -> None:
    """`fold`: in memory and compared with the unfolded model, or from disk to disk."""
    from tapernorm import card, fold_, save_pretrained, shards

    streamed = shards.is_sharded(model) if stream is None else stream
    if compare and not streamed:
        raise ValueError(
            "--compare is for a fold from disk to disk (--stream); in memory the models are compared always"
        )
    if fuse and streamed:
        raise ValueError(
            "--fuse is for a fold in memory: pass --no-stream with it, or fuse what the stream wrote "
            "(tapernorm.from_pretrained, tapernorm.fuse.fuse_, tapernorm.save_pretrained)"
        )
    if streamed:
        report: Any = shards.fold_folder(model, out, overwrite=overwrite, compare=compare)
    else:
        loaded, tokenizer = from_pretrained(model)
        report = fold_(loaded, fuse=fuse)
        save_pretrained(loaded, out, tokenizer=tokenizer, overwrite=overwrite)
        card.write_card(out, {"fold": report.to_dict()})
    if as_json:
        return print_json({"out": out, "fold": report.to_dict()})
    print(f"{len(report.folded)} norms folded, {len(report.kept)} kept")
    if fuse:
        print(f"{sum(map(len, report.fused))} linear maps fused into {len(report.fused)}")
        for name, reason in report.unfused.items():
            print(f"  {name} not: {reason}")
    if streamed:
        print(f"{report.shards} files, {report.bytes_written / 1e9:.2f} GB, {report.seconds:.0f} s", end="")
        print(f" ({report.resumed} of them were there already)" if report.resumed else "")
        print(f"{report.rows_checked} rows read again, largest error {report.row_error:.1e} of the row")
    if report.max_abs_logit_error is None:
        print("not compared with the unfolded model: --compare loads both, one after the other")
    else:
        error, relative = report.max_abs_logit_error, report.relative_error
        print(f"largest logit error {error:.2e} ({relative:.1e} of the largest logit)")
    print(f"norm-free model: {out}")
    return None


def compare(
    a: str, b: str, data: str | None, column: str, split: str | None, block: int, blocks: int, as_json: bool
) -> None:
    """`verify`."""
    from tapernorm.verify import verify

    first, _ = from_pretrained(a)
    second, tokenizer = from_pretrained(b)
    read = blocks_of(second, tokenizer, data, column, split, min(block, context_length(second)), blocks)
    result = verify(first, second, read.ids)
    if as_json:
        print_json(result.to_dict())
    else:
        print(f"largest logit error  {result.max_abs_logit_error:.3e}")
        print(f"relative error       {result.relative_error:.3e}  (bound {result.bound:.1e})")
        print(f"greedy tokens equal  {100 * result.greedy_match:.1f} %")
        print(f"cache agrees         {'yes' if result.cached_match else 'no'}")
        print(f"loss                 {result.loss_a:.6f}  {result.loss_b:.6f}")
        print("passed" if result.passed else "FAILED: the models are not the same function")
    if not result.passed:
        raise typer.Exit(NUMERICAL)


def measure_loss(
    model: str, data: str, column: str, split: str | None, block: int | None, tokens: int, as_json: bool
) -> None:
    """`eval`."""
    from tapernorm.progress import bar
    from tapernorm.verify import evaluate

    loaded, tokenizer = from_pretrained(model)
    context = context_length(loaded)
    length = block or min(512, context)
    if length > context:
        raise ValueError(f"block={length} is longer than the model's context of {context} tokens")
    blocks = blocks_of(loaded, tokenizer, data, column, split, length, max(1, tokens // length))
    with bar("loss", len(blocks) // 8 + 1) as advance:
        losses = evaluate(loaded, blocks.ids, progress=advance, labels=blocks.labels)
    if as_json:
        return print_json(losses.to_dict())
    for name, value in losses.to_dict().items():
        print(f"{name:11s} {value:.4f}" if isinstance(value, float) else f"{name:11s} {value}")
    return None


def write_text(
    model: str,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    compile: bool | None,
    as_json: bool = False,
) -> None:
    """`generate`: text on stdout as it comes, or all of it in one JSON object."""
    from transformers import TextStreamer

    from tapernorm.generate import decode, encode

    loaded, tokenizer = from_pretrained(model)
    if tokenizer is None:
        raise ValueError(f"{model} has no tokenizer beside it; put its tokenizer's files into the folder")
    torch.manual_seed(seed)
    ids, mask = encode(tokenizer, [prompt])
    context = context_length(loaded)
    if ids.shape[1] >= context:
        raise ValueError(f"the prompt has {ids.shape[1]} tokens, and the model's context is {context}")
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p}
    streamer = None if as_json else TextStreamer(tokenizer, skip_special_tokens=True)
    try:
        made = decode(
            loaded,
            ids,
            streamer=streamer,
            compile="auto" if compile is None else compile,
            attention_mask=mask,
            max_new_tokens=min(max_new_tokens, context - ids.shape[1]),
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            **sampling,
        )
    except KeyboardInterrupt:
        if streamer is not None:
            streamer.end()  # what was decoded and not printed yet, and the end of the line
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        new = made.sequences[0, ids.shape[1] :].tolist()
        told = {"model": model, "prompt": prompt, "text": tokenizer.decode(new, skip_special_tokens=True)}
        speed = {"tokens_per_second": made.tokens_per_second, "compiled": made.compiled}
        print_json(told | {"new_tokens": len(new), "tokens": new} | speed)


def blocks_of(
    model: Any, tokenizer: Any, source: str | None, column: str, split: str | None, length: int, count: int
) -> Any:
    """Validation blocks of a text, or random ids, of `length` tokens."""
    from tapernorm.data import load_text
    from tapernorm.packing import Blocks, pack_labelled

    if source is None:
        ids = torch.randint(model.config.vocab_size, (count, length), generator=torch.Generator().manual_seed(0))
        return Blocks(ids, ids)
    if tokenizer is None:
        raise ValueError("the model has no tokenizer beside it, so it cannot read a text")
    text = load_text(source, column, split, tokenizer=tokenizer)
    return pack_labelled(text.validation, tokenizer, length, limit=count)
