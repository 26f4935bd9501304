"""Training that is killed and goes on: what runs in the process that is killed. Imported there, not by pytest."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import tapernorm as tn

STEPS = 12
CONFIG = tn.TaperConfig(arm="all", warmup_steps=3, taper_steps=6, ema_decay=0.8, uniformity_weight=0.01)


_WRITES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def die_at(moment: int, folder: Path) -> None:
    """Kill this process at the `moment`-th time that it changes something in `folder`."""
    left = [moment]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event not in _WRITES or not str(args[0]).startswith(str(folder)):
            return
        if event == "open" and not set(str(args[1])) & set("wa+x"):
            return
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def run(name: str, folder: Path, moment: int | None) -> None:
    """One sitting of the loop `name`; `moment`: see `die_at`."""
    if moment is not None:
        die_at(moment, folder)
    {"plain": plain, "trainer": trainer}[name](folder)


def model() -> Any:
    """A GPT-2 with its dropout, so that the generator's state counts."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    ends = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(0)
    made = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=64, **ends))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return made


def rows(count: int) -> torch.Tensor:
    return torch.randint(3, 64, (count, 8), generator=torch.Generator().manual_seed(1))


def log(folder: Path, step: int, loss: float, controller: Any) -> None:
    row = {
        "step": step,
        "loss": loss,
        "gate": controller.gate,
        "c": controller.scales,
        "target": controller.scale_target,
    }
    with (folder / "log.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def finish(folder: Path, made: Any, controller: Any) -> None:
    state = {k: v for k, v in controller.state_dict().items() if isinstance(v, torch.Tensor)}
    torch.save({"model": made.state_dict(), "controller": state}, folder / "end.partial")
    (folder / "end.partial").rename(folder / "end.pt")


def plain(folder: Path) -> None:
    """The plain loop with `tn.save_checkpoint` after every step."""
    made = model().train()
    controller = tn.taper_(made, CONFIG)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    controller.attach_optimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    torch.manual_seed(7)
    found = tn.load_checkpoint(folder, made, optimizer, scheduler=scheduler)
    step, position = (found.step, found.extra["position"]) if found is not None else (0, 0)
    data = rows(256)
    while step < STEPS:
        total = 0.0
        for _ in range(2):
            batch = data[position : position + 4]
            position += 4
            loss = (made(input_ids=batch, labels=batch).loss + controller.auxiliary_loss()) / 2
            loss.backward()
            total += loss.item()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        controller.step()
        step += 1
        log(folder, step, total, controller)
        tn.save_checkpoint(folder, step, made, optimizer, scheduler=scheduler, extra={"position": position})
    finish(folder, made, controller)


class _Log(transformers.TrainerCallback):
    def __init__(self, folder: Path, controller: Any) -> None:
        self.folder, self.controller = folder, controller

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            log(self.folder, state.global_step, float(logs["loss"]), self.controller)


def trainer(folder: Path) -> None:
    """`TaperTrainer` with a checkpoint after every step."""
    from tapernorm.train import TaperTrainer, last_checkpoint

    made = model()
    controller = tn.taper_(made, CONFIG)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=1e-2, save_strategy="steps", save_steps=1, save_total_limit=2, logging_strategy="steps",
        logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    data: Any = [{"input_ids": row, "labels": row} for row in rows(64)]
    run = TaperTrainer(model=made, args=arguments, train_dataset=data)
    run.remove_callback(transformers.trainer_callback.PrinterCallback)
    run.add_callback(_Log(folder, controller))
    checkpoint = last_checkpoint(folder)
    run.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    finish(folder, made, controller)
