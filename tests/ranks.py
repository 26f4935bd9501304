"""What every process of a training on several runs; started by torchrun or accelerate, not by pytest.

    python -m torch.distributed.run --nproc_per_node 2 tests/ranks.py KIND[,KIND...] OUT

KIND: plain (one process), linear (a linear fixed branch, in DDP where there are several), ddp, static (static_graph),
fsdp (fully_shard on every layer; leaves a sharded checkpoint of step 5), resume (fsdp, from that checkpoint), trainer
(TaperTrainer, by whatever launched it), zero1 and zero2 (DeepSpeed).
Rank 0 writes OUT/<kind>.pt.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import llama
import tapernorm as tn

STEPS, GLOBAL_BATCH = 9, 12
CONFIG = tn.TaperConfig(
    arm="all",
    warmup_steps=3,
    taper_steps=4,
    ema_decay=0.8,
    uniformity_weight=0.01,
    allow_massive=True,
    guard_margin=5.0,
)


def build() -> Any:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    return llama.tiny()


def rows(step: int) -> torch.Tensor:
    return torch.randint(3, 64, (GLOBAL_BATCH, 8), generator=torch.Generator().manual_seed(step))


def loop(kind: str, out: Path) -> dict[str, Any]:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    made = build().train()
    fixed: Any = "linear" if kind == "linear" else "diagonal"
    controller = tn.taper_(made, dataclasses.replace(CONFIG, fixed=fixed))
    model: Any = made
    if kind in ("ddp", "static", "linear") and world > 1:
        model = torch.nn.parallel.DistributedDataParallel(made, static_graph=kind == "static")
    elif kind in ("fsdp", "resume"):
        for layer in made.model.layers:
            fully_shard(layer)
        fully_shard(made)
    optimizer: Any = torch.optim.AdamW(made.parameters(), lr=1e-3, weight_decay=0.0)
    backward = Tensor.backward
    if kind in ("zero1", "zero2"):
        model, optimizer, backward = deepspeed_engine(made, int(kind[-1]), GLOBAL_BATCH // world)
        controller.attach_optimizer(model.optimizer)
    else:
        controller.attach_optimizer(optimizer)
    if kind == "resume":
        model_state, optimizer_state = get_state_dict(made, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "taper": controller.state_dict()}
        dcp.load(state, checkpoint_id=str(out / "sharded"))
        set_state_dict(made, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        controller.load_state_dict(state["taper"])
    losses, shown = [], []
    for step in range(controller.step_count, STEPS):
        mine = rows(step).chunk(world)[rank]
        loss = model(input_ids=mine, labels=mine).loss
        backward(loss + controller.auxiliary_loss())
        optimizer.step()
        optimizer.zero_grad()
        controller.step(loss=loss)
        both = loss.detach().clone()
        if world > 1:
            dist.all_reduce(both)
        losses.append(float(both) / world)
        shown.append((controller.gate, *controller.scales.values(), controller.scale_target or 0.0))
        if kind == "fsdp" and step == 4:
            model_state, optimizer_state = get_state_dict(made, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state, "taper": controller.state_dict()}
            dcp.save(state, checkpoint_id=str(out / "sharded"))
    refused = ""
    if kind in ("fsdp", "resume"):
        try:
            tn.fold_(made)
        except (tn.FoldError, ValueError) as error:
            refused = str(error)
    if kind in ("fsdp", "resume"):  # as in examples/multi_node.md; the first rank gets them
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(made, options=options)
    else:
        weights = made.state_dict()
    everyone: list[Any] = [None] * world
    if world > 1:
        dist.all_gather_object(everyone, shown)
    else:
        everyone = [shown]
    state = controller.state_dict()
    return {"losses": losses, "shown": everyone, "weights": weights, "refused": refused, "taper": state}


def deepspeed_engine(model: Any, stage: int, batch: int) -> tuple[Any, Any, Any]:
    """(what is called, what is stepped, what goes backwards), as in examples/multi_node.md."""
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    # engine.step() sets gradients to zero, too
    return engine, SimpleNamespace(step=engine.step, zero_grad=lambda: None), engine.backward


def trainer(out: Path) -> dict[str, Any]:
    """TaperTrainer, launched by accelerate: DDP or FSDP2, as its configuration says."""
    made = build()
    controller = tn.taper_(made, CONFIG)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    fsdp = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    arguments = transformers.TrainingArguments(
        output_dir=str(out / f"trainer-{world}-{fsdp}"), max_steps=STEPS, use_cpu=True, report_to=[], disable_tqdm=True,
        per_device_train_batch_size=GLOBAL_BATCH // world, learning_rate=1e-3, weight_decay=0.0, logging_steps=1,
        save_strategy="steps", save_steps=5, lr_scheduler_type="constant", dataloader_pin_memory=False,
        ddp_find_unused_parameters=False, max_grad_norm=0.0, seed=0,
    )  # fmt: skip
    data: Any = [{"input_ids": row, "labels": row} for step in range(STEPS) for row in rows(step)]
    run = tn.TaperTrainer(model=made, args=arguments, train_dataset=data)
    run.train()
    losses = [row["loss"] for row in run.state.log_history if "loss" in row]
    state = run.accelerator.get_state_dict(run.model_wrapped)
    return {"losses": losses, "weights": state, "taper": controller.state_dict()}


def main() -> None:
    kinds, out = sys.argv[1].split(","), Path(sys.argv[2])
    if "RANK" in os.environ and kinds != ["trainer"]:  # which begins for itself
        dist.init_process_group("gloo")
    for kind in kinds:
        found = trainer(out) if kind == "trainer" else loop(kind, out)
        if int(os.environ.get("RANK", "0")) == 0:
            torch.save(found, out / f"{kind}.pt")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then abort a process that the interpreter takes down around them


if __name__ == "__main__":
    main()
