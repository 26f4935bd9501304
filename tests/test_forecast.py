"""What a taper says before it begins, and how it measures; the defaults of a pretrained model, end to end."""

from __future__ import annotations

import json

import pytest
import torch

import tiny_models
from tapernorm import forecast
from test_cli import QUICK, Call, call, models, text  # noqa: F401  (fixtures)


def test_measuring_leaves_the_weights_and_the_random_numbers_alone() -> None:
    model = tiny_models.tiny("gpt2")  # with dropout
    before = {name: p.clone() for name, p in model.state_dict().items()}
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    few, many = (forecast.seconds_per_step(model, 2, 8, accumulate) for accumulate in (1, 50))
    assert torch.equal(torch.rand(2), wanted)
    assert 0 < few < many
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert forecast.seconds_per_target(model, 2, 8) > 0


@pytest.mark.parametrize("asked", [("--arm", "all"), ("--arm", "internal", "--no-baseline")], ids=["all", "internal"])
def test_what_is_said(call: Call, models, text, tmp_path, monkeypatch, asked) -> None:  # noqa: F811
    """Log calibration beside uniformity, and the relative anchor where the final norm goes; all in one run."""
    monkeypatch.setattr(forecast, "seconds_per_step", lambda *args: 0.5)
    monkeypatch.setattr(forecast, "seconds_per_target", lambda *args: 0.1)
    given = ("--data", text, "--calibration", "log", "--uniformity-weight", 0.01, "--prefix", "3", *QUICK)
    code, said, err = call("taper", models / "llama", "--out", tmp_path / "run", *asked, *given, "--json")
    assert code == 0, err
    whole = "--no-baseline" not in asked
    assert err.splitlines() == [
        f"tapernorm: {5 if whole else 4} of 5 norms go (arm {asked[1]}) in 12 steps of 64 tokens: 3 with the norms on, "
        "6 while they are turned off, 3 without them",
        "tapernorm: the constant prefix [3] in front; "
        + "the model trained with its norms as a teacher, its KL with weight 1, its residuals with 10; " * whole
        + "all weights trained",
        # 12 steps of 0.5 s with the norms on, and 12 of 0.7 s, or 0.8 with a teacher
        f"tapernorm: about {'15.6' if whole else '8.4'} s of training"
        + " for two trainings, one of them with the norms on, to compare with" * whole
        + ": a step with the norms on takes 0.5 s here, one of the taper about 1.4 times that",
    ]
    assert json.loads(said)["verify"]["passed"]
    taper = json.loads((tmp_path / "run" / "run.json").read_text())["taper"]
    assert (taper["anchor"], taper["calibration"], taper["uniformity_weight"]) == ("relative", "log", 0.01)
    config = json.loads((tmp_path / "run" / asked[1] / "final" / "config.json").read_text())
    assert config["tapered"]["anchor"] == "relative"
