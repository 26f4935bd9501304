"""A run: text and a model go in; a norm-free model, its proof and a report come out, all in one folder.

RUN/run.json          what was asked for, on what, and everything that was measured
RUN/<arm>/            one folder for each trained arm: log.jsonl, checkpoints, and `final`
RUN/model/            the norm-free model
RUN/report.html       for people
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import json
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_callback import PrinterCallback, ProgressCallback

import tapernorm
from tapernorm import bench, data, hub
from tapernorm.config import SIZES, RunConfig, read_prefix
from tapernorm.convert import choose, get_controller, taper_
from tapernorm.fold import fold_
from tapernorm.guard import GuardStop
from tapernorm.prefix import find_prefix, position_tables, refuse_prefix
from tapernorm.progress import bar
from tapernorm.report import write_report
from tapernorm.runlog import RunLog
from tapernorm.sites import NormSite, context_length, find_sites
from tapernorm.train import TaperTrainer, last_checkpoint
from tapernorm.verify import evaluate, greedy_tokens, verify

_ROUNDS = 15  # of the decoding benchmark
_UNFINISHED = ".run.json"  # what a kill may leave of a record that was being written


class Run:
    """The folder of a run and its record, written whole at every change."""

    def __init__(self, config: RunConfig, record: dict[str, Any]) -> None:
        self.config = config
        self.folder = Path(config.out)
        self.record = record
        self.started = time.time() - record.get("seconds", 0.0)

    @classmethod
    def open(cls, config: RunConfig, overwrite: bool, resume: bool) -> Run:
        """Check where the run is to go. Nothing is written before `begin`.

        Raises:
            ValueError: the folder is not empty and neither overwrite nor resume was asked for; resume of something
                that is no run, or of one with other settings.
        """
        folder = Path(config.out)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file; give --out the name of a folder")
        occupied = folder.is_dir() and any(path.name != _UNFINISHED for path in folder.iterdir())
        if occupied and not overwrite and not resume:
            raise ValueError(
                f"{folder} is not empty; pass --overwrite to replace it, --resume to continue it, or another --out"
            )
        record: dict[str, Any] = {}
        if occupied and (resume or overwrite):
            try:
                record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
            except (OSError, ValueError):
                raise ValueError(
                    f"{folder} is not empty and holds no run (no readable run.json); it is left alone"
                ) from None
        if resume and record:
            theirs, ours = record.get("settings", {}), config.to_dict()
            other = [k for k in ours if k != "out" and theirs.get(k) != ours[k]]
            if other:
                was = ", ".join(f"{k}={theirs.get(k)!r} (now {ours[k]!r})" for k in other)
                raise ValueError(f"{folder} was started with other settings: {was}; resume it with the same ones")
        return cls(config, record if resume else {})

    def begin(self, **facts: Any) -> None:
        """Make the folder and write what is known. Clears an old run that is to be overwritten."""
        if not self.record and self.folder.is_dir():
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        command = ["tapernorm", *sys.argv[1:]] if Path(sys.argv[0]).stem.startswith(("tapernorm", "__main__")) else []
        self.record.setdefault("started", datetime.datetime.now().astimezone().isoformat(timespec="seconds"))
        self.record.setdefault("command", shlex.join(command) or "tapernorm.runs.execute(...)")
        self.update(
            kind=self.config.kind,
            status="running",
            settings=self.config.to_dict(),
            versions={
                "tapernorm": tapernorm.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
            threads=torch.get_num_threads(),
            **facts,
        )

    def update(self, **facts: Any) -> None:
        """Add to the record and write it, so that a kill never leaves half of it."""
        self.record.update(facts)
        self.record["seconds"] = time.time() - self.started
        temporary = self.folder / _UNFINISHED
        temporary.write_text(json.dumps(self.record, indent=2, default=str) + "\n", encoding="utf-8")
        temporary.replace(self.folder / "run.json")

    def event(self, step: int, kind: str, text: str) -> None:
        """Something that the reader of the report should know. Told twice it is one, as where a run was resumed."""
        events, new = self.record.get("events", []), {"step": step, "kind": kind, "text": text}
        if new not in events:
            self.update(events=[*events, new])


@dataclasses.dataclass
class Material:
    """What both arms start from."""

    build: Callable[[], Any]  # a fresh copy of the starting model
    tokenizer: Any
    train: Tensor  # [N, block] ids
    validation: Tensor
    sites: list[NormSite]
    prefix: tuple[int, ...]  # of the tapered arm
    facts: dict[str, Any]


def execute(config: RunConfig, overwrite: bool = False, resume: bool = False) -> dict[str, Any]:
    """Do the run. Returns the record that is in run.json.

    Raises:
        ValueError: bad input; nothing was written then.
        FoldError: the trained model cannot be folded; what was trained is in the run's folder.
        MassiveTokenError: see `TaperController.step`.
        GuardStop: the run did not recover (the last sound model is in `RUN/<arm>/sound`), or the guard slowed the
            taper so far that its end was not reached.
    """
    run = Run.open(config, overwrite, resume)
    if resume and run.record.get("status") == "done":
        return run.record
    material = prepare(config)
    run.begin(**material.facts)
    try:
        _work(run, material)
    except BaseException as error:
        run.update(status="stopped")
        if not isinstance(error, KeyboardInterrupt):
            run.event(-1, type(error).__name__, str(error))
        raise
    return run.record


def prepare(config: RunConfig) -> Material:
    """Model, tokenizer, text: everything that can be refused before a folder is made.

    Raises:
        ValueError: as `tapernorm.hub.from_pretrained`, `tapernorm.data.load_text` and `tapernorm.taper_`; a block
            longer than the model's context; no tokenizer; a vocabulary that the model does not have.
    """
    text: data.TextData
    if config.kind == "taper":
        model, tokenizer = hub.from_pretrained(str(config.model))
        if get_controller(model) is not None:
            raise ValueError(f"{config.model} is tapered already; give the original model")
        if tokenizer is None:
            raise ValueError(f"{config.model} has no tokenizer beside it; put its tokenizer's files into the folder")
        text = data.load_text(config.data, config.text_column, config.split)
        name = str(config.model)

        def build() -> Any:
            return copy.deepcopy(model)  # which itself is never trained

    else:
        text = data.load_text(config.data, config.text_column, config.split)
        _check_block(config, SIZES[config.size][3])
        tokenizer = data.train_tokenizer(text.train, config.vocab_size or SIZES[config.size][2])
        name = f"llama-{config.size}"

        def build() -> Any:
            return pretrain_model(config.size, tokenizer, config.seed)

        model = build()
    if (
        config.bf16
        and not torch.cuda.is_available()
        and not torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    ):
        raise ValueError("bf16 asks for a GPU or a CPU with AVX-512; leave it out")
    context = context_length(model)
    _check_block(config, context)
    sites = find_sites(model)
    if config.arm != "baseline":
        choose(sites, config.taper)
    prefix = _prefix(config, model, tokenizer, text.train, sites)
    # Where positions are a learned table, a prefix shortens it.
    block = _check_block(config, context - len(prefix) if prefix and position_tables(model) else context)
    train = data.pack(text.train, tokenizer, block)
    validation = data.pack(text.validation, tokenizer, block, limit=max(1, config.eval_tokens // block))
    if int(train.max()) >= model.config.vocab_size:
        raise ValueError(
            f"the tokenizer makes ids up to {int(train.max())}, and the model knows {model.config.vocab_size}: "
            "they do not belong together"
        )
    parameters = sum(p.numel() for p in model.parameters())
    facts = {
        "model": {
            "name": name,
            "architecture": type(model).__name__,
            "parameters": parameters,
            "width": model.config.hidden_size,
            "layers": model.config.num_hidden_layers,
            "context": context,
        },
        "data": {
            "name": text.name,
            "train_tokens": train.numel(),
            "validation_tokens": validation.numel(),
            "block": block,
        },
        "device": bench.device_name(_device()),
        "prefix": list(prefix),
        "baseline_arm": _baseline_name(config, sites),
        "arm": config.arm,
        **({"taper": config.taper.to_dict()} if config.arm != "baseline" else {}),
    }
    return Material(build, tokenizer, train, validation, sites, prefix, facts)


def _prefix(
    config: RunConfig, model: Any, tokenizer: Any, texts: Iterable[str], sites: list[NormSite]
) -> tuple[int, ...]:
    """The constant prefix that was asked for, or the one that is needed; a fresh model needs none."""
    asked = read_prefix(config.prefix)
    if config.kind == "pretrain" or config.arm == "baseline":
        return ()
    if asked is not None:
        if asked:
            refuse_prefix(model, asked)
        return asked
    if config.allow_massive:
        return ()
    try:
        return find_prefix(model, tokenizer, texts, sites=sites)
    except ValueError as error:
        raise ValueError(f"{error} (or pass --prefix none to go without, or token ids)") from error


def pretrain_model(size: str, tokenizer: Any, seed: int) -> LlamaForCausalLM:
    """A Llama of one of the `SIZES` with random weights; the same seed gives the same weights."""
    width, layers, _, context = SIZES[size]
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=width * 8 // 3 // 16 * 16,
            num_hidden_layers=layers,
            num_attention_heads=max(4, width // 32),
            max_position_embeddings=context,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
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


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _work(run: Run, material: Material) -> None:
    config, baseline = run.config, run.record["baseline_arm"]
    losses = run.record.setdefault("losses", {})

    def measure(name: str, model: nn.Module) -> None:
        if name not in losses:
            with bar(f"loss of {name}", len(material.validation) // 8 + 1) as advance:
                losses[name] = evaluate(model, material.validation, progress=advance).to_dict()
            run.update(losses=losses)

    if config.kind == "taper":
        measure("original", material.build().to(_device()))
    if config.arm == "baseline" or config.baseline:
        measure(baseline, _train_arm(run, material, baseline, None))
    if config.arm != "baseline":
        model = _train_arm(run, material, config.arm, config)
        measure(config.arm, model)
        _finish(run, material, model)
    run.update(status="done")
    report = write_report(run.folder)
    run.update(report=str(report))


def _train_arm(run: Run, material: Material, name: str, taper: RunConfig | None) -> Any:
    """Train one arm, or go on with it, or load it where it is done."""
    config, folder = run.config, run.folder / name
    final = folder / "final"
    if final.is_dir():
        return hub.from_pretrained(final)[0].to(_device())
    model = material.build()
    controller = taper_(model, dataclasses.replace(taper.taper, prefix=material.prefix)) if taper is not None else None
    every = max(1, config.steps // 100)
    width = model.config.hidden_size
    rate = config.learning_rate or (5e-4 if config.kind == "taper" else 3e-3 * (64 / width) ** 0.5)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch,
        gradient_accumulation_steps=config.accumulate,
        learning_rate=rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.02},
        warmup_steps=max(1, config.steps // 20),
        # A norm makes the scale of what it feeds free, so decay costs nothing; without norms it pulls the function
        # itself down, which a short fine-tuning cannot make up for.
        weight_decay=0.1 if config.kind == "pretrain" else 0.0,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        logging_steps=every,
        logging_nan_inf_filter=False,  # a NaN is to be seen
        save_steps=max(1, config.steps // 10),
        save_total_limit=2,
        seed=config.seed,
        bf16=config.bf16,
        use_cpu=_device().type == "cpu",
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to=[],
    )
    dataset: Any = [{"input_ids": row, "labels": row} for row in material.train]
    kind = Trainer if controller is None else TaperTrainer
    trainer = kind(
        model=model,
        args=arguments,
        train_dataset=dataset,
        data_collator=default_data_collator,  # blocks are full: nothing to pad, and a tokenizer may have no pad token
        processing_class=material.tokenizer,
    )
    for unwanted in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(unwanted)
    with bar(name, config.steps) as advance:
        trainer.add_callback(RunLog(folder, material.validation, material.sites, controller, every, advance))
        checkpoint = last_checkpoint(folder)
        started = time.perf_counter()
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        finally:  # also where the guard gave up
            for event in controller.events if controller is not None else ():
                run.event(**event)
    spent = {**run.record.get("training_seconds", {}), name: time.perf_counter() - started}
    run.update(training_seconds=spent)  # of the last sitting, where a run was resumed
    if controller is not None and controller.dropped_batches:
        run.event(
            controller.config.warmup_steps,
            "statistics",
            f"{controller.dropped_batches} batches were not finite and were left out of the statistics",
        )
    if controller is not None and controller.gate > 0:
        raise GuardStop(
            f"{name}: the guard slowed the taper, and it ended at gate {controller.gate:.2f} instead of 0 after "
            f"{config.steps} steps; raise steps, or see the events in {run.folder / 'run.json'}"
        )
    hub.save_pretrained(model, final, tokenizer=material.tokenizer, overwrite=True)
    for path in folder.glob("checkpoint-*"):
        shutil.rmtree(path)
    return model.eval()


def _finish(run: Run, material: Material, unfolded: Any) -> None:
    """Fold, save, load again, verify, measure."""
    folder = run.folder / "model"
    folded = copy.deepcopy(unfolded)
    ids = material.validation[:2].to(_device())
    example = {"input_ids": ids, "labels": ids}
    report = fold_(folded, example=example)
    hub.save_pretrained(folded, folder, tokenizer=material.tokenizer, overwrite=True)
    run.update(fold=report.to_dict(), norm_free_model=str(folder))
    loaded, _ = hub.from_pretrained(folder, device=_device())  # what was written is what is judged
    run.update(verify=verify(unfolded, loaded, material.validation[:16]).to_dict())
    with bar("decoding speed", 2 * (_ROUNDS + 1)) as advance:
        models = bench.variants(unfolded)
        rows = []
        for batch in (1, 4):
            rows += bench.bench(models, batch=batch, rounds=_ROUNDS, name=run.record["model"]["name"], progress=advance)
    run.update(bench={"rows": rows}, samples=_samples(loaded, material))
    prompt = run.record["samples"][0]["prompt"]
    run.update(generate_command=f"tapernorm generate {shlex.quote(str(folder))} --prompt {shlex.quote(prompt)}")


def _samples(model: Any, material: Material, count: int = 3, new_tokens: int = 48) -> list[dict[str, str]]:
    tokenizer = material.tokenizer
    start = material.validation[:count, : min(12, material.validation.shape[1] // 2)]
    made = greedy_tokens(model, start, min(new_tokens, material.validation.shape[1] - start.shape[1]))
    return [
        {
            "prompt": tokenizer.decode(prompt, skip_special_tokens=True).strip(),
            "text": tokenizer.decode(text, skip_special_tokens=True),
        }
        for prompt, text in zip(start, made, strict=True)
    ]
