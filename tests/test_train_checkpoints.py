"""transformers' Trainer: a run that is stopped and goes on, the best model, and what a checkpoint is."""

import json
import shutil

import pytest
import transformers

from tapernorm import TaperTrainer, get_controller, hub, schedule
from tapernorm.modules import taper_norms
from tapernorm.train import last_checkpoint
from trainers import CONFIG, STEPS, make, same


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
