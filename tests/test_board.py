"""TensorBoard events: the rows of the log, under the log's names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from test_cli import QUICK, Call, call, models, text  # noqa: F401  (fixtures)

NEEDED = ("loss", "gate", "lr", "grad_norm", "tokens_per_second", "eval_loss", "logit_std")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = events.EventAccumulator(str(folder))
    found.Reload()
    return {name: [(e.step, e.value) for e in found.Scalars(name)] for name in found.Tags()["scalars"]}


def test_events_are_the_rows_of_the_log(call: Call, models: Path, text: Path, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    out = tmp_path / "run"
    code, _, err = call("taper", models / "llama", "--data", text, "--out", out, *QUICK, "--tensorboard")
    assert code == 0, err
    for arm in ("internal", "normed"):
        rows = [json.loads(row) for row in (out / arm / "log.jsonl").read_text().splitlines()]
        written = scalars(out / "tensorboard" / arm)
        assert set(NEEDED) <= set(written)
        for name in NEEDED:
            wanted = [(row["step"], pytest.approx(row[name], rel=1e-5)) for row in rows if row.get(name) is not None]
            assert written[name] == wanted, name
    site = "model.layers.0.input_layernorm"
    assert written.keys() >= {f"scale/{site}"}
    assert f"c/{site}" in scalars(out / "tensorboard" / "internal")


def test_a_step_that_was_trained_again_counts_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tapernorm.board import Board

    for first, steps, loss in ((1, (1, 2, 3), 9.0), (3, (3, 4), 4.0)):
        board = Board(tmp_path, first)
        for step in steps:
            board.write({"step": step, "loss": loss, "events": [{"step": step, "kind": "guard", "text": "held"}]})
        board.close()
    assert scalars(tmp_path)["loss"] == [(1, 9.0), (2, 9.0), (3, 4.0), (4, 4.0)]


def test_without_the_package_nothing_is_begun(
    call: Call,  # noqa: F811
    models: Path,  # noqa: F811
    text: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    out = tmp_path / "run"
    code, said, err = call("pretrain", "--data", text, "--out", out, *QUICK, "--tensorboard")
    assert (code, said, out.exists()) == (2, "", False)
    assert "pip install 'tapernorm[tensorboard]'" in err and err.count("\n") == 1


def test_an_older_run_is_resumed_and_may_get_events(tmp_path: Path) -> None:
    from tapernorm.record import Run
    from tapernorm.run_config import RunConfig

    old = RunConfig(kind="pretrain", data="x", out=str(tmp_path)).to_dict()
    del old["tensorboard"]
    (tmp_path / "run.json").write_text(json.dumps({"settings": old}))
    for asked in (False, True):
        run = Run.open(RunConfig(kind="pretrain", data="x", out=str(tmp_path), tensorboard=asked), False, True)
        assert run.record["settings"] == old
