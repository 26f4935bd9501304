"""A run: text and a model go in; a norm-free model, its proof and a report come out, all in one folder.

RUN/run.json          what was asked for, on what, and everything that was measured
RUN/<arm>/            one folder for each trained arm: log.jsonl, checkpoints, and `final`
RUN/model/            the norm-free model
RUN/text/             what the model wrote, where it was to write its own text
RUN/<arm>/teacher/    what a teacher said of the text, while the arm is trained
RUN/report.html       for people
RUN/tensorboard/<arm> the rows of log.jsonl as events, where that was asked for
"""

from __future__ import annotations

import copy
import dataclasses
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

from torch import nn

from tapernorm import bench, board, card, forecast, held, hub, lora, packing
from tapernorm.arm import arm_trainer, log_every
from tapernorm.convert import get_controller, taper_
from tapernorm.distill import Teacher
from tapernorm.fold import fold_
from tapernorm.guard import GuardStop
from tapernorm.material import Material, continuations, device, prepare
from tapernorm.prefix import attach_prefix, prefix_of
from tapernorm.progress import bar
from tapernorm.rates import rate_factors
from tapernorm.record import Run
from tapernorm.report import write_report
from tapernorm.run_config import RunConfig
from tapernorm.runlog import RunLog
from tapernorm.train import last_checkpoint
from tapernorm.verify import evaluate, verify

_ROUNDS = 15  # of the decoding benchmark


def execute(config: RunConfig, overwrite: bool = False, resume: bool = False) -> dict[str, Any]:
    """Do the run. Returns the record that is in run.json.

    Raises:
        ValueError: bad input; nothing was written then.
        FoldError: the trained model cannot be folded; what was trained is in the run's folder.
        MassiveTokenError: see `TaperController.step`.
        ImportError: `tensorboard` or `lora` was asked for, and its package is not there; nothing was written then.
        GuardStop: the run did not recover (the last sound model is in `RUN/<arm>/sound`), or the guard slowed the
            taper so far that its end was not reached.
    """
    run = Run.open(config, overwrite, resume)
    if config.tensorboard:
        board.require()
    if config.lora:
        lora.require()
    if resume and run.record.get("status") == "done":
        return run.record
    if config.teacher not in ("original", "baseline"):
        hub.skeleton(config.teacher)  # a typo is told before the work
    material = prepare(config, resume)
    if config.kind == "taper":
        baseline = material.facts["baseline_arm"]
        forecast.announce(config, material, baseline, lambda: _trainable(config, material, material.build()))
    run.begin("tapernorm.runs.execute", **material.facts)
    material.gathered.save(run.folder)
    try:
        _work(run, material)
    except BaseException as error:
        run.update(status="stopped")
        if not isinstance(error, KeyboardInterrupt):
            run.event(-1, type(error).__name__, str(error))
        raise
    return run.record


def _work(run: Run[RunConfig], material: Material) -> None:
    config, baseline = run.config, run.record["baseline_arm"]
    losses = run.record.setdefault("losses", {})

    def measure(name: str, model: nn.Module) -> None:
        if name not in losses:
            with bar(f"loss of {name}", len(material.validation) // 8 + 1) as advance:
                blocks = material.validation if name == config.arm else material.stock(material.validation)
                losses[name] = evaluate(model, blocks.ids, progress=advance, labels=blocks.labels).to_dict()
            run.update(losses=losses)

    if config.kind == "taper":
        measure("original", material.build().to(device()))
    if config.arm == "baseline" or config.baseline:
        measure(baseline, _train_arm(run, material, baseline, None))
    if config.arm != "baseline":
        model = _train_arm(run, material, config.arm, config)
        measure(config.arm, model)
        _finish(run, material, model)
    run.update(status="done", report=str(write_report(run.folder)))  # who waits for the end finds the page


def _train_arm(run: Run[RunConfig], material: Material, name: str, taper: RunConfig | None) -> Any:
    """Train one arm, or go on with it, or load it where it is done."""
    config, folder = run.config, run.folder / name
    final = folder / "final"
    if final.is_dir():
        return hub.from_pretrained(final)[0].to(device())
    model = material.build()
    gone = held.gone(model, material.train.ids[:4]) if config.kind == "taper" else {}
    controller = taper_(model, dataclasses.replace(taper.taper, prefix=material.prefix)) if taper is not None else None
    trained = _trainable(config, material, model)
    teacher = _teacher(run, material, folder / "teacher") if controller is not None and config.taught else None
    train, validation, tokenizer = material.train, material.validation, material.tokenizer
    if controller is None:
        train, validation, tokenizer = material.stock(train), material.stock(validation), material.stock_tokenizer
    elif config.disturb:
        train = packing.disturbed(train, config.disturb, config.seed)
    rows = train.rows()
    if controller is not None:
        controller.hold(model, gone)
    rates = None if config.lora else rate_factors(gone)  # an adapter's maps start from nothing
    trainer = arm_trainer(config, trained, controller, rows, folder, tokenizer, teacher=teacher, rates=rates)
    every = log_every(config)
    with bar(name, config.steps) as advance:
        events = run.folder / "tensorboard" / name if config.tensorboard else None
        log = RunLog(folder, validation, material.sites, controller, every, advance, events, teacher)
        trainer.add_callback(log)
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
    model = lora.merge_lora(trained) if config.lora else model
    hub.save_pretrained(model, final, tokenizer=tokenizer, overwrite=True)
    for path in (*folder.glob("checkpoint-*"), folder / "teacher"):
        shutil.rmtree(path, ignore_errors=path.name == "teacher")  # there may be none
    return model.eval()


def _trainable(config: RunConfig, material: Material, model: Any) -> Any:
    """The model, or, with LoRA, what is trained of it: of one with its norms the gains as well, as of a tapered one."""
    if not config.lora:
        return model
    gains = () if get_controller(model) else (s.name for s in material.sites if s.role in ("internal", "final"))
    return lora.add_lora(model, config.lora, gains, config.seed)


def _teacher(run: Run[RunConfig], material: Material, folder: Path) -> Teacher:
    """The model that `teacher` names, with the prefix that the student has."""
    config = run.config
    places = {"original": None, "baseline": run.folder / run.record["baseline_arm"] / "final"}
    place = places.get(config.teacher, config.teacher)
    model = (material.build() if place is None else hub.from_pretrained(place)[0]).to(device())
    if material.prefix and material.prefix != prefix_of(model):
        attach_prefix(model, material.prefix)
    centred = any(site.probed is not None and site.probed.kind == "layer" for site in material.sites)
    teacher = Teacher(model, config.distill, match=config.match, centred=centred)
    teacher.keep(folder, *material.train.shape)
    return teacher


def _finish(run: Run[RunConfig], material: Material, unfolded: Any) -> None:
    """Fold, save, load again, verify, measure."""
    folder = run.folder / "model"
    folded = copy.deepcopy(unfolded)
    few = material.validation[:2]
    example = {"input_ids": few.ids.to(device()), "labels": few.labels.to(device())}
    report = fold_(folded, example=example)
    hub.save_pretrained(folded, folder, tokenizer=material.tokenizer, overwrite=True)
    run.update(fold=report.to_dict(), norm_free_model=str(folder))
    loaded, _ = hub.from_pretrained(folder, device=device())  # what was written is what is judged
    run.update(verify=verify(unfolded, loaded, material.validation.ids[:16]).to_dict())
    with bar("decoding speed", 2 * (_ROUNDS + 1)) as advance:
        models = bench.variants(unfolded)
        rows = []
        for batch in (1, 4):
            rows += bench.bench(models, batch=batch, rounds=_ROUNDS, name=run.record["model"]["name"], progress=advance)
    samples = continuations(loaded, material.tokenizer, material.validation.ids, count=3, new_tokens=48)
    run.update(bench={"rows": rows}, samples=[{"prompt": prompt, "text": text} for prompt, text in samples])
    prompt = samples[0][0]
    run.update(generate_command=f"tapernorm generate {shlex.quote(str(folder))} --prompt {shlex.quote(prompt)}")
    card.write_card(folder, run.record)
