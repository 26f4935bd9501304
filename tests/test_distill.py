"""A teacher: its KL is one, of real tokens, the same however a step is cut; what is kept is what was computed."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
import torch
from torch.nn.functional import kl_div, log_softmax

import tapernorm as tn
import tiny_models
import trainers
from tapernorm import distill
from tapernorm.distill import Teacher, coarsen, divergence
from tapernorm.prefix import attach_prefix
from tapernorm.run_config import RunConfig
from test_cli import QUICK, Call, call, models, text  # noqa: F401  (fixtures)
from trainers import make, masked_blocks, step_gradients, tiny

CONFIG = tn.TaperConfig(arm="all", warmup_steps=1, taper_steps=4, anchor_weight=0.0)


def logits(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def deep(family: str = "llama", seed: int = 0) -> Any:
    """Of three blocks, so that two have a residual that is compared."""
    return tiny_models.tiny(family, seed, layers=3)


# The KL


@pytest.mark.parametrize("k", [1, 4, 20])
def test_of_one_and_the_same_it_is_0_and_pulls_nowhere(k: int) -> None:
    student = logits(3, 5, 20).requires_grad_()
    found = divergence(student, *coarsen(student.detach(), k))
    found.sum().backward()
    assert found.shape == (3, 5) and float(found.detach().abs().max()) < 1e-12
    assert student.grad is not None and float(student.grad.abs().max()) < 1e-12


@pytest.mark.parametrize("k", [20, 64])
def test_with_the_whole_vocabulary_it_is_torchs(k: int) -> None:
    teacher, student = logits(7, 20), logits(7, 20, seed=1).requires_grad_()
    found = divergence(student, *coarsen(teacher, k))
    theirs = kl_div(log_softmax(student, -1), log_softmax(teacher, -1), reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(found, theirs, rtol=1e-12, atol=1e-12)
    (ours,) = torch.autograd.grad(found.sum(), student, retain_graph=True)
    (wanted,) = torch.autograd.grad(theirs.sum(), student)
    torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-12)


def test_it_is_at_most_the_full_one_and_grows_with_k() -> None:
    teacher, student = logits(500, 40), logits(500, 40, seed=1)
    found = [divergence(student, *coarsen(teacher, k)) for k in (1, 3, 10, 39, 40)]
    assert float(found[0].min()) >= 0 and float((found[-1] - found[0]).max()) > 1
    for fewer, more in itertools.pairwise(found):
        assert float((fewer - more).max()) < 1e-12


def test_a_teacher_that_is_certain_gives_finite_gradients() -> None:
    teacher = torch.zeros(1, 50)
    teacher[0, 7] = 200.0
    for sure in (False, True):
        student = (teacher.clone() if sure else torch.zeros(1, 50)).requires_grad_()
        found = divergence(student, *coarsen(teacher, 4))
        found.sum().backward()
        assert student.grad is not None and bool(torch.isfinite(student.grad).all())
        assert float(found.detach()) == pytest.approx(0 if sure else math.log(50), abs=1e-5)


def test_the_distance_behind_blocks() -> None:
    """By the formula, 0 of one and the same, and blind to a mean where the norms are."""
    theirs = [logits(2, 3, 8, seed=seed) for seed in range(3)]
    ours = [h + 0.1 * logits(2, 3, 8, seed=9) for h in theirs]
    apart = [((a - b) ** 2).sum(-1) / (b**2).sum(-1) for a, b in zip(ours, theirs, strict=True)]
    wanted = sum((1 + d).log() for d in apart) / 3
    torch.testing.assert_close(distill.mismatch(ours, theirs), wanted, rtol=1e-12, atol=0)
    assert float(distill.mismatch(theirs, theirs).max()) == 0
    shifted = [h + 5 for h in theirs]
    assert float(distill.mismatch(shifted, theirs, centred=True).max()) < 1e-24
    assert float(distill.mismatch(shifted, theirs).min()) > 0.1


# In a Trainer


@pytest.mark.parametrize("overrides", ({}, {"model_accepts_loss_kwargs": False}, {"loss_is_scaled_for_ga": False}))
@pytest.mark.parametrize("match", [0.0, 2.0])
def test_it_is_the_mean_over_the_real_tokens_of_a_step(tmp_path, monkeypatch, overrides, match) -> None:
    """However the step is cut and the Trainer scales its own loss, and with rows of different lengths."""
    monkeypatch.setattr(trainers, "tiny", deep)
    rows = masked_blocks()
    original = deep(seed=5)
    teacher = Teacher(original, weight=0.7, k=16, match=match)
    student = deep()
    inputs = {key: torch.stack([row[key] for row in rows]) for key in ("input_ids", "attention_mask")}
    made = student(**inputs, output_hidden_states=True)
    with torch.no_grad():
        told = original(**inputs, output_hidden_states=True)
    real = inputs["attention_mask"] == 1
    loss = 0.7 * divergence(made.logits, *coarsen(told.logits, 16))[real].sum() / real.sum()
    between = list(zip(made.hidden_states, told.hidden_states, strict=True))[1:-1]
    assert len(between) == 2
    for ours, theirs in between:
        apart = (1 + (ours - theirs).pow(2).sum(-1) / theirs.pow(2).sum(-1)).log()
        loss = loss + match * apart[real].sum() / real.sum() / len(between)
    wanted = torch.autograd.grad(loss, list(student.parameters()))
    largest = max(float(g.abs().max()) for g in wanted)
    assert largest > 1e-3
    for batch, accumulate in ((8, 1), (1, 8)):
        given = overrides if batch == 1 else {}
        (without,) = step_gradients(tmp_path, CONFIG, rows, batch, accumulate, **given)
        (with_it,) = step_gradients(tmp_path, CONFIG, rows, batch, accumulate, teacher=teacher, **given)
        found = [b - a for a, b in zip(without, with_it, strict=True)]
        found = [g for g in found if g.abs().max() > 0]  # the fixed branch has none yet
        assert len(found) == len(wanted)
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.shape == theirs.shape
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3 * largest)  # the teacher's logs are float16
    assert teacher.mean() is not None and teacher.mean() is None


def test_evaluation_is_without_it_and_the_guard_does_not_see_it(tmp_path) -> None:
    trainer, controller, _ = make(tmp_path, config=tn.TaperConfig(warmup_steps=2, taper_steps=3, guard_margin=50.0))
    trainer.teacher = Teacher(tiny(seed=5), weight=1000.0)
    seen = []
    step = controller.step
    controller.step = lambda **given: (seen.append(float(given["loss"])), step(**given))[1]
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert max(seen) < before + 5, "the loss that the guard is told is the cross-entropy"
    assert trainer.evaluate()["eval_loss"] < before + 5


def test_it_pulls_a_student_towards_it(tmp_path) -> None:
    """At gate 0, what is left between the two is less with the teacher than without it."""
    left = {}
    for weight in (0.0, 30.0):
        original = tiny()
        trainer, controller, _ = make(tmp_path, config=CONFIG, max_steps=60, learning_rate=3e-3)
        trainer.teacher = Teacher(original, weight) if weight else None
        trainer.train()
        assert controller.phase == "done"
        ids = tiny_models.ids(16, 8, seed=9)
        with torch.no_grad():
            made, wanted = trainer.model.eval()(input_ids=ids).logits, original.eval()(input_ids=ids).logits
        left[weight] = float(divergence(made, *coarsen(wanted, 64)).mean())
    assert left[30.0] < 0.85 * left[0.0], left


# What is kept


def test_what_was_kept_is_what_was_computed(tmp_path, monkeypatch) -> None:
    ids = tiny_models.ids(6, 8)
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    plain, kept = Teacher(tiny(), k=8), Teacher(tiny(), k=8)
    assert kept.keep(tmp_path / "kept", rows=6, length=8)
    runs = []
    monkeypatch.setattr(kept, "_run", lambda i, m, run=kept._run: (runs.append(len(i)), run(i, m))[1])
    kept.targets(ids[:2])
    for batch, batch_mask in ((ids, None), (ids, mask)):
        wanted = plain.targets(batch, batch_mask)
        for _ in range(2):
            found = kept.targets(batch, batch_mask)
            assert torch.equal(found[0], wanted[0])
            torch.testing.assert_close(found[1], wanted[1], rtol=2e-3, atol=2e-3)
        assert found[1].exp().sum(-1).allclose(torch.ones(6, 8))
    assert runs == [2, 4, 1, 1], "the masked row is another one, and there was no room for it"
    again = Teacher(tiny(), k=8)
    assert again.keep(tmp_path / "kept", rows=6, length=8)
    monkeypatch.setattr(again, "_run", None)
    for one, other in zip(again.targets(ids), kept.targets(ids), strict=True):
        assert torch.equal(one, other)
    other = Teacher(tiny(seed=1), k=8)  # another model finds nothing of what this one said
    assert other.keep(tmp_path / "kept", rows=6, length=8)
    assert not torch.equal(other.targets(ids)[0], again.targets(ids)[0])
    for k, rows in ((7, 6), (7, 5)):  # of another shape: begun anew
        other = Teacher(tiny(), k=k)
        assert other.keep(tmp_path / "kept", rows, length=8) and not other.store.places
        assert other.targets(ids[:2])[0].shape == (2, 8, k) and len(other.store.places) == 2


def test_too_much_is_not_kept(tmp_path, monkeypatch) -> None:
    teacher = Teacher(tiny(), k=8)
    monkeypatch.setattr(distill, "_MOST", 6 * (8 * (8 * 4 + 9 * 2) + 16))
    assert not teacher.keep(tmp_path / "kept", rows=7, length=8) and not (tmp_path / "kept").exists()
    assert teacher.targets(tiny_models.ids(3, 8))[0].shape == (3, 8, 8)
    assert teacher.keep(tmp_path / "kept", rows=6, length=8)


def test_with_a_prefix_both_see_the_same_positions() -> None:
    """At gate 1 student and teacher are one function, the table of positions included."""
    for family in ("llama", "gpt2"):
        student, original = (tiny_models.tiny(family, dropout=False) for _ in range(2))
        tn.taper_(student, tn.TaperConfig(prefix=(3, 5)))
        ids = tiny_models.ids(2, 8)
        with torch.no_grad():
            made = student(input_ids=ids).logits
            bare = float(Teacher(original).loss(made, {"input_ids": ids}))
            attach_prefix(original, (3, 5))
            assert abs(float(Teacher(original).loss(made, {"input_ids": ids}))) < 1e-3 < bare


def test_it_matches_blocks(tmp_path, monkeypatch) -> None:
    """What a student is behind its blocks comes nearer with the weight than without it."""
    monkeypatch.setattr(trainers, "tiny", deep)
    left = {}
    for match in (0.0, 20.0):
        original = deep()
        trainer, controller, _ = make(tmp_path, config=CONFIG, max_steps=60, learning_rate=3e-3)
        trainer.teacher = Teacher(original, 0.0, match=match) if match else None
        trainer.train()
        assert controller.phase == "done"
        ids = tiny_models.ids(16, 8, seed=9)
        with torch.no_grad():
            both = [m.eval()(input_ids=ids, output_hidden_states=True).hidden_states for m in (trainer.model, original)]
        left[match] = float(distill.mismatch(both[0][1:-1], both[1][1:-1]).mean())
    assert left[20.0] < 0.6 * left[0.0], left


# The command


def test_taper_with_a_teacher(call: Call, models, text, tmp_path, monkeypatch) -> None:  # noqa: F811
    folders, keep = [], Teacher.keep

    def watched(self, folder, *size):
        folders.append(folder)
        return keep(self, folder, *size)

    monkeypatch.setattr(Teacher, "keep", watched)
    given = ("--data", text, "--prefix", "3", "--distill", 2, "--no-baseline", *QUICK)
    out = tmp_path / "run"
    code, said, err = call("taper", models / "llama", "--out", out, *given, "--json")
    assert code == 0 and json.loads(said)["verify"]["passed"], err
    assert "the original as a teacher, its KL with weight 2" in err
    assert folders == [out / "internal" / "teacher"] and not folders[0].exists()
    rows = [json.loads(row) for row in (out / "internal" / "log.jsonl").open()]
    assert rows[0]["divergence"] < 1e-5, "both have the prefix, and are one at first"
    assert rows[-1]["divergence"] > 1e-4


def test_taper_with_the_twin_that_keeps_its_norms(call: Call, models, text, tmp_path, monkeypatch) -> None:  # noqa: F811
    """--teacher baseline: what was trained with its norms teaches, behind every block too, and nothing is kept."""
    seen = []
    monkeypatch.setattr(Teacher, "targets", lambda self, *a, own=Teacher.targets: (seen.append(self), own(self, *a))[1])
    given = ("--data", text, "--prefix", "3", "--distill", 1, "--match", 2, "--teacher", "baseline", *QUICK)
    out = tmp_path / "run"
    code, said, err = call("taper", models / "llama", "--out", out, *given, "--json")
    assert code == 0 and json.loads(said)["verify"]["passed"], err
    assert "the model trained with its norms as a teacher, its KL with weight 1, its residuals with 2" in err
    teacher = seen[-1]
    assert teacher.match == 2 and teacher.store is None
    trained = tn.from_pretrained(out / json.loads((out / "run.json").read_text())["baseline_arm"] / "final")[
        0
    ].state_dict()
    assert all(
        torch.equal(value, trained[name]) for name, value in teacher.model.state_dict().items() if name in trained
    )


def test_what_is_refused(tmp_path) -> None:
    for value in (-1.0, float("nan"), "1"):
        with pytest.raises(ValueError, match=r"distill=.* must be a finite number, at least 0"):
            RunConfig(kind="taper", model="m", data="a.txt", out="x", distill=value)
    for taught in ({"distill": 1.0}, {"match": 1.0}):
        with pytest.raises(ValueError, match="pretrain has none: leave them out"):
            RunConfig(kind="pretrain", data="a.txt", out="x", **taught)
    for options, why in (({}, "give distill or match"), ({"distill": 1.0, "baseline": False}, "leave the baseline on")):
        with pytest.raises(ValueError, match=why):
            RunConfig(kind="taper", model="m", data="a.txt", out="x", teacher="baseline", **options)
    for options in ({"weight": 0.0}, {"weight": math.inf}, {"match": math.nan}, {"k": 0}):
        with pytest.raises(ValueError, match=r"weight=|k=0"):
            Teacher(tiny(), **options)
    with pytest.raises(ValueError, match=r"output has no hidden_states; call it with output_hidden_states=True"):
        Teacher(tiny(), match=1.0).loss(torch.zeros(1, 2, 64), {"input_ids": torch.zeros(1, 2, dtype=torch.long)})
    teacher = Teacher(tiny())
    with pytest.raises(ValueError, match="the batch has none"):
        teacher.loss(torch.zeros(1, 2, 64), {"inputs_embeds": torch.zeros(1, 2, 16)})
    with pytest.raises(ValueError, match="knows 64 tokens and the student 70"):
        teacher.loss(torch.zeros(1, 2, 70), {"input_ids": torch.zeros(1, 2, dtype=torch.long)})
    trainer, *_ = make(tmp_path)
    trainer.teacher, trainer._signature_columns = teacher, ["input_ids", "labels"]
    trainer.model.forward = lambda forward=trainer.model.forward, **given: {"loss": forward(**given).loss}
    with pytest.raises(ValueError, match="a teacher needs the logits"):
        trainer.train()
