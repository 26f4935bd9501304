"""transformers' Trainer: the same weights as the plain loop, the same anchor however it accumulates, resume."""

import dataclasses
import json
import shutil

import pytest
import torch
import transformers
from transformers import Trainer, TrainerCallback, TrainingArguments

from tapernorm import (
    GuardStop,
    TaperCallback,
    TaperConfig,
    TaperMixin,
    TaperTrainer,
    get_controller,
    hub,
    schedule,
    taper_,
)
from tapernorm.modules import taper_norms
from tapernorm.train import last_checkpoint

torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()

CONFIG = TaperConfig(arm="all", warmup_steps=3, taper_steps=4, ema_decay=0.8)
STEPS = 9


def tiny(family="llama", seed=0):
    """A one-block model whose every parameter is random. GPT-2 keeps its dropout."""
    ends = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    if family == "gpt2":
        config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=64, **ends)
    else:
        config = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            max_position_embeddings=64, **ends
        )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3)
            if parameter.ndim == 1 and name.endswith("weight"):
                parameter += 1
    return model


def blocks(count=64, length=8, seed=0):
    rows = torch.randint(3, 64, (count, length), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder, **settings):
    settings = {
        "max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "lr_scheduler_type": "linear",
        "weight_decay": 0.1, "max_grad_norm": 1.0, "save_strategy": "no", "logging_strategy": "no",
    } | settings  # fmt: skip
    return TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, dataloader_pin_memory=False, **settings
    )


class Watch(TrainerCallback):
    """What the controller showed after each optimizer step."""

    def __init__(self, controller):
        self.controller, self.rows = controller, []

    def on_step_end(self, args, state, control, **kwargs):
        c = self.controller
        self.rows.append((state.global_step, c.step_count, c.gate, c.phase, c.scale_target, c.scales))


def make(folder, family="llama", config=CONFIG, kind=TaperTrainer, seed=0, data=None, **settings):
    """(trainer, controller, watch) on a fresh model."""
    model = tiny(family, seed)
    controller = taper_(model, config)
    trainer = kind(
        model=model, args=arguments(folder, **settings), train_dataset=data or blocks(), eval_dataset=blocks(8, seed=5)
    )
    watch = Watch(controller)
    trainer.add_callback(watch)
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    return trainer, controller, watch


def same(a, b):
    assert a.keys() == b.keys()
    for key, value in a.items():
        equal = torch.equal(value, b[key]) if isinstance(value, torch.Tensor) else value == b[key]
        assert equal, key


class Recording(TaperTrainer):
    """Keeps the micro-batches of every step."""

    def get_batch_samples(self, *args):
        samples, items = super().get_batch_samples(*args)
        self.__dict__.setdefault("seen", []).append([dict(s) for s in samples])
        return samples, items


@pytest.mark.parametrize("accumulate", (1, 2))
def test_the_trainer_and_the_plain_loop_agree(tmp_path, accumulate):
    trainer, controller, _ = make(tmp_path, kind=Recording, gradient_accumulation_steps=accumulate)
    trainer.train()
    assert controller.phase == "done"

    model = tiny()
    mine = taper_(model, CONFIG)
    decayed = trainer.get_decay_parameter_names(model)
    groups = [
        {"params": [p for n, p in model.named_parameters() if n in decayed], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if n not in decayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    mine.attach_optimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    model.train()
    for batches in trainer.seen:
        assert len(batches) == accumulate
        for batch in batches:
            loss = model(input_ids=batch["input_ids"], labels=batch["labels"]).loss + mine.auxiliary_loss()
            (loss / accumulate).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        mine.step()
    for (name, theirs), ours in zip(trainer.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=name)
    assert mine.scale_target == pytest.approx(controller.scale_target, rel=1e-5)
    unanchored = make(tmp_path, config=TaperConfig(arm="all", warmup_steps=3, taper_steps=4, anchor_weight=0.0))[0]
    unanchored.train()
    far = max(
        float((a - b).detach().abs().max())
        for a, b in zip(unanchored.model.parameters(), model.parameters(), strict=True)
    )
    assert far > 1e-3  # the anchor made a difference


def test_the_controller_follows_the_schedule(tmp_path):
    trainer, controller, watch = make(tmp_path, gradient_accumulation_steps=2)
    trainer.train()
    assert [row[0] for row in watch.rows] == [row[1] for row in watch.rows] == list(range(1, STEPS + 1))
    assert [row[2] for row in watch.rows] == pytest.approx([schedule.gate(k, CONFIG) for k in range(1, STEPS + 1)])
    assert [row[3] for row in watch.rows] == ["warmup"] * 2 + ["taper"] * 4 + ["done"] * 3
    assert trainer.controller is controller is get_controller(trainer.model)
    state = trainer.optimizer.state
    assert all(m.fixed_norm.weight in state for m in taper_norms(trainer.model).values())


def anchor_gradient(folder, batch, accumulate, rows, **overrides):
    """What the anchor adds to the first step's gradient after the target was frozen, over 8 rows."""
    gradients = []

    class Catch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            gradients.append([p.grad.clone() for p in model.parameters()])

    found = []
    for weight in (0.0, 0.5):
        gradients.clear()
        config = TaperConfig(arm="all", warmup_steps=1, taper_steps=4, anchor_weight=weight)
        trainer, *_ = make(
            folder, config=config, data=rows, max_steps=2, per_device_train_batch_size=batch, max_grad_norm=0.0,
            gradient_accumulation_steps=accumulate, learning_rate=0.0,
        )  # fmt: skip
        for name, value in overrides.items():
            setattr(trainer, name, value)
        trainer.add_callback(Catch())
        trainer.train()
        found.append(gradients[1])
    return [b - a for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("overrides", ({}, {"model_accepts_loss_kwargs": False}, {"loss_is_scaled_for_ga": False}))
def test_the_anchor_is_the_same_for_one_batch_and_eight(tmp_path, overrides):
    """However the Trainer scales its own loss, and with rows of different lengths."""
    rows = blocks(8)
    for index, row in enumerate(rows):
        row["attention_mask"] = (torch.arange(8) < 8 - index // 2).long()
        row["labels"] = torch.where(row["attention_mask"] == 1, row["input_ids"], -100)
    whole = anchor_gradient(tmp_path, 8, 1, rows)
    largest = max(float(g.abs().max()) for g in whole)
    assert largest > 1e-3
    model = tiny()
    controller = taper_(model, TaperConfig(arm="all", warmup_steps=1, taper_steps=4, anchor_weight=0.5))
    model.train()
    for step in range(2):
        model(**{k: torch.stack([row[k] for row in rows]) for k in ("input_ids", "attention_mask")})
        loss = controller.auxiliary_loss()
        if step == 0:
            controller.step()
    direct = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
    for ours, wanted in zip(whole, direct, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=2e-4 * largest)
    parts = anchor_gradient(tmp_path, 1, 8, rows, **overrides)
    for ours, wanted in zip(parts, whole, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=2e-4 * largest)


def test_evaluation_never_contains_the_anchor(tmp_path):
    trainer, controller, _ = make(tmp_path, eval_strategy="steps", eval_steps=1)
    trainer.train()
    evaluated = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    assert len(evaluated) == STEPS
    trainer.model.eval()
    with torch.no_grad():
        rows = torch.stack([row["input_ids"] for row in blocks(8, seed=5)])
        plain = float(trainer.model(input_ids=rows, labels=rows).loss)
    assert trainer.evaluate()["eval_loss"] == evaluated[-1] == pytest.approx(plain, rel=1e-6)
    quiet, other, _ = make(tmp_path)
    quiet.train()
    same(controller.state_dict(), other.state_dict())  # and evaluating disturbs nothing
    same(trainer.model.state_dict(), quiet.model.state_dict())


def test_gains_take_no_weight_decay(tmp_path):
    for family in ("llama", "gpt2"):
        trainer, *_ = make(tmp_path, family)
        trainer.create_optimizer()
        decay = {id(p): g["weight_decay"] for g in trainer.optimizer.param_groups for p in g["params"]}
        for module in taper_norms(trainer.model).values():
            assert {decay[id(p)] for p in module.parameters()} == {0.0}
        assert 0.1 in decay.values()


def test_a_model_that_is_not_tapered_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not tapered"):
        TaperTrainer(model=tiny(), args=arguments(tmp_path), train_dataset=blocks())


def test_the_mixin_goes_in_front_of_a_trainer_of_ones_own(tmp_path):
    class Doubled(Trainer):
        def compute_loss(self, *args, **kwargs):
            loss, outputs = super().compute_loss(*args, **(kwargs | {"return_outputs": True}))
            return (2 * loss, outputs) if kwargs.get("return_outputs") else 2 * loss

    class Mine(TaperMixin, Doubled):
        pass

    trainer, controller, _ = make(tmp_path, kind=Mine)
    trainer.train()
    assert controller.phase == "done" and controller.scale_target is not None


# The callback alone


def test_the_callback_alone(tmp_path):
    config = TaperConfig(warmup_steps=3, taper_steps=4)
    found = []
    for kind in (Trainer, TaperTrainer):
        trainer, controller, watch = make(tmp_path, config=config, kind=kind)
        if kind is Trainer:
            trainer.add_callback(TaperCallback(controller))
        trainer.train()
        assert controller.gate == 0.0
        found.append((watch.rows, trainer.model.state_dict()))
    same(found[0][1], found[1][1])
    assert found[0][0] == found[1][0]


def test_the_callback_alone_does_not_drop_an_anchor_in_silence(tmp_path):
    trainer, controller, _ = make(tmp_path, kind=Trainer)
    trainer.add_callback(TaperCallback(controller))
    with pytest.raises(RuntimeError, match="auxiliary_loss"):
        trainer.train()


@pytest.mark.parametrize("stop", (2, 5))
def test_the_callback_alone_never_begins_again_in_silence(tmp_path, stop):
    config = TaperConfig(warmup_steps=3, taper_steps=4)

    def run(folder, seed=0, **settings):
        trainer, controller, watch = make(folder, config=config, kind=Trainer, seed=seed, **settings)
        trainer.add_callback(TaperCallback(controller))
        return trainer, controller, watch

    whole, _, rows = run(tmp_path, save_strategy="steps", save_steps=stop)
    whole.train()
    checkpoint = tmp_path / f"checkpoint-{stop}"
    trainer, controller, watch = run(tmp_path / "resumed", seed=99)
    with pytest.raises(ValueError, match=r"read_taper_state\(checkpoint\)"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    controller.load_state_dict(hub.read_taper_state(checkpoint))
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert watch.rows == rows.rows[stop:]
    same(trainer.model.state_dict(), whole.model.state_dict())


def test_a_step_that_the_scaler_skipped():
    calls = []

    class Optimizer:
        step_was_skipped = False

    class Controller:
        guard = None

        def step(self, skipped, loss):
            assert loss is None
            calls.append(skipped)

    callback, optimizer = TaperCallback(Controller()), Optimizer()
    callback.on_optimizer_step(None, None, None, optimizer=optimizer)
    optimizer.step_was_skipped = True
    callback.on_optimizer_step(None, None, None, optimizer=optimizer)
    assert calls == [False, True]


# Checkpoints


@pytest.fixture(scope="module", params=("llama", "gpt2"))
def finished(request, tmp_path_factory):
    """A run that was never stopped, with a checkpoint of every step. (family, folder, trainer, watch)"""
    folder = tmp_path_factory.mktemp(request.param)
    trainer, _, watch = make(folder, request.param, save_strategy="steps", save_steps=1)
    trainer.train()
    return request.param, folder, trainer, watch


@pytest.mark.parametrize("stop", (1, 2, 3, 5, 8))
def test_resume_in_a_fresh_model(finished, stop, tmp_path):
    family, folder, whole, rows = finished
    trainer, controller, watch = make(tmp_path, family, seed=99)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{stop}"))
    assert watch.rows == rows.rows[stop:]
    same(trainer.model.state_dict(), whole.model.state_dict())
    same(controller.state_dict(), whole.controller.state_dict())


@pytest.mark.parametrize("stop", (2, 5))
def test_resume_in_the_same_process(finished, stop, tmp_path):
    """The model has gone on past the checkpoint, and goes back to it."""
    family, folder, whole, rows = finished
    trainer, controller, watch = make(tmp_path, family)
    trainer.train()
    watch.rows.clear()
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{stop}"))
    assert watch.rows == rows.rows[stop:]
    same(trainer.model.state_dict(), whole.model.state_dict())
    same(controller.state_dict(), whole.controller.state_dict())


@pytest.mark.parametrize("stop", (2, 5, 9))
def test_a_checkpoint_is_never_a_stock_model(finished, stop, tmp_path):
    family, folder, *_ = finished
    checkpoint = folder / f"checkpoint-{stop}"
    stock = {"llama": transformers.LlamaForCausalLM, "gpt2": transformers.GPT2LMHeadModel}[family]
    with pytest.raises(Exception, match=r"norms|tapernorm"):
        stock.from_pretrained(checkpoint)
    with pytest.raises(ValueError, match=r"only\s+tapered"):
        transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    model, _ = hub.from_pretrained(checkpoint)
    controller = get_controller(model)
    assert (controller.step_count, controller.gate) == (stop, pytest.approx(schedule.gate(stop, CONFIG)))
    assert not list(checkpoint.glob("*.bin"))
    assert json.loads((checkpoint / "training_args.json").read_text())["max_steps"] == STEPS


def test_best_model_brings_its_gate(tmp_path):
    class Rigged(TaperTrainer):
        """The evaluation loss is lowest after step 5, in the taper."""

        def evaluate(self, *args, **kwargs):
            metrics = {"eval_loss": abs(self.state.global_step - 5.0)}
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    settings = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    trainer, controller, watch = make(tmp_path, kind=Rigged, load_best_model_at_end=True, **settings)
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-5")
    _, steps, gate, phase, target, scales = watch.rows[4]
    assert (controller.step_count, controller.gate, controller.phase) == (steps, gate, phase)
    assert (controller.scale_target, controller.scales) == (target, scales)
    assert {m.path for m in taper_norms(trainer.model).values()} == {"mixed"}
    saved, _ = hub.from_pretrained(tmp_path / "checkpoint-5")
    same(trainer.model.state_dict(), saved.state_dict())


def test_last_checkpoint(tmp_path):
    assert last_checkpoint(tmp_path) is None
    for step in (2, 10, 9):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text('{"global_step": 1')  # cut short
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-9"
    (tmp_path / "checkpoint-9" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-99").write_text("a file")
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text("[]")
    assert last_checkpoint(tmp_path) is None


def test_the_trainer_writes_its_state_last(tmp_path):
    """What `last_checkpoint` relies on."""
    order = []

    class Ordered(TaperTrainer):
        def _save_optimizer_and_scheduler(self, output_dir):
            order.append((tmp_path / "checkpoint-9" / "trainer_state.json").exists())
            super()._save_optimizer_and_scheduler(output_dir)

        def _save_rng_state(self, output_dir):
            order.append((tmp_path / "checkpoint-9" / "trainer_state.json").exists())
            super()._save_rng_state(output_dir)

    trainer, *_ = make(tmp_path, kind=Ordered, save_strategy="steps", save_steps=9)
    trainer.train()
    assert order == [False, False]
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-9"
    shutil.rmtree(tmp_path / "checkpoint-9")


def test_only_one_process_writes(tmp_path):
    trainer, *_ = make(tmp_path / "none")
    trainer.args = type("Args", (), {"should_save": False, "output_dir": str(tmp_path / "none")})()
    trainer._save(str(tmp_path / "none" / "folder"))
    assert not (tmp_path / "none" / "folder").exists()


# A second train(), and the guard


def test_a_second_train_goes_on_and_says_so(tmp_path):
    trainer, controller, watch = make(tmp_path)
    trainer.train()
    assert controller.phase == "done"
    state = controller.state_dict()
    with pytest.warns(UserWarning, match=r"at step 9 in phase 'done' with gate 0; it does not begin again"):
        trainer.train()
    assert (controller.step_count, controller.gate, controller.phase) == (2 * STEPS, 0.0, "done")
    assert controller.scales == {k.removeprefix("c."): float(v) for k, v in state.items() if k.startswith("c.")}
    assert [row[1] for row in watch.rows] == list(range(1, 2 * STEPS + 1))


GUARDED = dataclasses.replace(
    CONFIG, warmup_steps=3, taper_steps=12, guard_margin=0.5, guard_patience=2, guard_rewinds=1, allow_massive=True
)


class Spoiled(TaperTrainer):
    """Makes the loss what `spoil` says, from a step on or below a gate."""

    spoil = staticmethod(lambda trainer, loss: loss)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if model.training:
            old = loss
            loss = self.spoil(self, loss)
            if loss is not old and self.controller.guard is not None:
                self._taper_callback.losses[-1] = loss.detach()
        return (loss, outputs) if return_outputs else loss


def test_the_guard_sees_the_loss_of_the_step(tmp_path):
    """The mean over micro-batches, without the controller's own losses."""
    seen = []
    for accumulate in (1, 4):
        trainer, controller, _ = make(
            tmp_path, config=dataclasses.replace(GUARDED, uniformity_weight=1.0), learning_rate=0.0,
            per_device_train_batch_size=8 // accumulate, gradient_accumulation_steps=accumulate,
        )  # fmt: skip
        judge = controller.guard.judge
        losses = []
        controller.guard.judge = lambda loss, clock, step, judge=judge, losses=losses: (
            losses.append(loss), judge(loss, clock, step))[1]  # fmt: skip
        trainer.train()
        seen.append(losses)
        plain, *_ = make(
            tmp_path, config=dataclasses.replace(GUARDED, guard_margin=None, anchor_weight=0.0), learning_rate=0.0,
            per_device_train_batch_size=8 // accumulate, gradient_accumulation_steps=accumulate, logging_steps=1,
            logging_strategy="steps",
        )  # fmt: skip
        plain.train()
        wanted = [row["loss"] for row in plain.state.log_history if "loss" in row]
        assert losses == pytest.approx(wanted, rel=1e-3)
    assert seen[0] == pytest.approx(seen[1], rel=1e-5)


def test_a_gradient_that_is_not_finite_never_reaches_the_weights(tmp_path):
    class Once(Spoiled):
        @staticmethod
        def spoil(trainer, loss):
            return loss * torch.nan if trainer.state.global_step == 6 else loss

    trainer, controller, watch = make(tmp_path, config=GUARDED, kind=Once)
    trainer.train()
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    assert controller.step_count == STEPS - 1  # the step that was dropped did not happen
    assert [event["kind"] for event in controller.events] == ["hold", "recovered"]
    assert watch.rows[5][2] == watch.rows[6][2]
    unguarded, *_ = make(tmp_path, config=dataclasses.replace(GUARDED, guard_margin=None), kind=Once)
    unguarded.train()
    assert not all(torch.isfinite(p).all() for p in unguarded.model.parameters())


def test_the_guard_stops_with_a_sound_checkpoint(tmp_path):
    class Below(Spoiled):
        @staticmethod
        def spoil(trainer, loss):
            return loss + 100 if trainer.controller.gate < 0.7 else loss

    trainer, controller, watch = make(
        tmp_path, config=GUARDED, kind=Below, max_steps=60, save_strategy="steps", save_steps=1, save_total_limit=2
    )
    with pytest.raises(GuardStop, match=r"after 1 rewinds.* The last sound model, at gate 0\.7.* is in .*sound"):
        trainer.train()
    assert [event["kind"] for event in controller.events] == ["hold", "rewind", "hold", "stop"]
    model, _ = hub.from_pretrained(tmp_path / "sound")
    saved = get_controller(model)
    assert saved.events == controller.events
    assert saved.guard.unsound == 0 and saved.gate >= 0.7 and saved.gate == controller.gate
    assert saved.step_count == max(row[1] for row in watch.rows if row[2] < 1 and row[0] < 16)
    same(model.state_dict(), trainer.model.state_dict())
    steps = sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*"))
    assert steps == [14, 15]  # none of an unsound step


def test_the_callback_alone_cannot_guard(tmp_path):
    trainer, controller, _ = make(tmp_path, config=dataclasses.replace(GUARDED, anchor_weight=0.0), kind=Trainer)
    trainer.add_callback(TaperCallback(controller))
    with pytest.raises(ValueError, match="use TaperTrainer or TaperMixin"):
        trainer.train()
