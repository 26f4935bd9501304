"""`tapernorm watch`: what a run says while it runs, and how the watching ends."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from command import run_command
from runs import gpt2_run, half_run, llama_run, log_rows, removed_run, write_run
from tapernorm import watch
from tapernorm.config import TaperConfig
from tapernorm.reading import read_log

SITES = ["model.norm"]
COMMAND = [sys.executable, "-c", "from tapernorm.cli import main; main()", "watch"]


def running(folder: Path, steps: int = 210, **facts) -> Path:
    """A pretraining of two arms of 400 steps; the tapered one is at `steps`."""
    config = TaperConfig(warmup_steps=100, taper_steps=200)
    tapered = log_rows(SITES, config, steps, 8.3, tapered=True) if steps else []
    if tapered:
        tapered[-1]["events"] = [{"step": 207, "kind": "guard", "text": "the gate is held"}]
    logs = {"rms": log_rows(SITES, config, 400, 8.3, tapered=False), "internal": tapered}
    data = {
        "kind": "pretrain", "status": "running", "arm": "internal", "baseline_arm": "rms",
        "settings": {"steps": 400, "batch": 8, "accumulate": 2, "baseline": True}, "data": {"block": 64},
        "taper": config.to_dict(), "losses": {"rms": {"loss": 2.9}}, "model": {"name": "1m"},
    }  # fmt: skip
    return write_run(folder, data | facts, {arm: rows for arm, rows in logs.items() if rows})


def call(monkeypatch, capsys, *arguments) -> tuple[int, str, str]:
    return run_command(monkeypatch, capsys, "watch", *arguments)


def test_a_snapshot_has_what_the_log_says(tmp_path):
    run = running(tmp_path / "run")
    seen = watch.snapshot(run, now=time.time() + 60)
    rows = [json.loads(row) for row in (run / "internal" / "log.jsonl").read_text().splitlines()]
    base = [json.loads(row) for row in (run / "rms" / "log.jsonl").read_text().splitlines()]
    assert (seen["stage"], seen["arm"], seen["phase"]) == ("training internal", "internal", "taper")
    assert (seen["step"], seen["steps"], seen["loss"], seen["gate"]) == (210, 400, rows[-1]["loss"], rows[-1]["gate"])
    at = rows[-1]["step"]  # the last step is measured in the tapered arm alone
    assert "eval_loss" in rows[-1] and "eval_loss" not in base[at - 1]
    assert seen["gap_percent"] == pytest.approx(100 * (rows[199]["eval_loss"] / base[199]["eval_loss"] - 1))
    speed = sum(row["tokens_per_second"] for row in rows[-5:]) / 5
    assert seen["tokens_per_second"] == pytest.approx(speed)
    assert seen["remaining_seconds"] == pytest.approx(190 * 8 * 2 * 64 / speed)
    assert seen["events"] == rows[-1]["events"]
    assert 50 < seen["seconds_since_written"] < 70
    assert seen["result"] is None


def test_time_left_counts_the_arms_to_come(tmp_path):
    run = running(tmp_path / "run", steps=0, losses={})
    (run / "rms" / "log.jsonl").write_text(json.dumps({"step": 100, "tokens_per_second": 1024.0}) + "\n")
    assert watch.snapshot(run)["remaining_seconds"] == 700  # 300 of this arm and 400 of the next, a second each


@pytest.mark.parametrize(
    ("facts", "steps", "stage", "phase"),
    [
        ({"losses": {}}, 0, "measuring the loss of rms", "norms kept"),
        ({}, 0, "about to train internal", "norms kept"),
        ({}, 50, "training internal", "warm-up"),
        ({}, 350, "training internal", "at gate 0"),
        ({}, 400, "measuring the loss of internal", "at gate 0"),
        ({"losses": {"rms": {}, "internal": {}}}, 400, "folding", "at gate 0"),
        ({"losses": {"rms": {}, "internal": {}}, "fold": {"folded": []}}, 400, "verifying", "at gate 0"),
    ],
)
def test_stages(tmp_path, facts, steps, stage, phase):
    seen = watch.snapshot(running(tmp_path / "run", steps, **facts))
    assert (seen["stage"], seen["phase"]) == (stage, phase)


def test_a_row_is_strict_json_whatever_the_loss(tmp_path, monkeypatch):
    """A step that was not finite is null in the log, and the reader says so."""
    from types import SimpleNamespace

    import torch

    from tapernorm.packing import Blocks
    from tapernorm.runlog import RunLog

    ids = torch.ones(1, 4, dtype=torch.long)
    controller = SimpleNamespace(
        gate=0.5, scales={"a": math.inf}, config=SimpleNamespace(stagger=0), events=[], guard=1
    )
    log = RunLog(tmp_path / "internal", Blocks(ids, ids), [], controller, 3, lambda *_: None)
    log.path.parent.mkdir()
    state = SimpleNamespace(global_step=1, max_steps=9, is_world_process_zero=True)
    model = torch.nn.Linear(2, 2)
    log.on_log(None, state, None, logs={"loss": math.nan, "learning_rate": 0.1, "grad_norm": math.inf}, model=model)

    def refuse(name):
        raise AssertionError(name)

    row = json.loads(log.path.read_text(), parse_constant=refuse)
    assert row["loss"] is None and row["grad_norm"] is None and row["c"] == {"a": None} and row["gate"] == 0.5
    notes = []
    assert read_log(log.path, notes) == [row] and "not finite in 1 row" in notes[0]


def test_before_the_first_row(tmp_path):
    data = {"kind": "taper", "status": "running", "arm": "internal", "settings": {"baseline": False}}
    run = write_run(tmp_path / "run", data, {})
    seen = watch.snapshot(run)
    assert seen["stage"] == "measuring the loss of the original"
    assert watch.line(seen) == "measuring the loss of the original"
    json.dumps(seen, allow_nan=False)


def test_a_line_and_a_panel_show_it(tmp_path, monkeypatch):
    seen = watch.snapshot(running(tmp_path / "[run]"))
    line = watch.line(seen)
    for part in ("training internal, step 210 of 400", "phase taper", "gate 0.", "tokens/s 9,", "training left"):
        assert part in line
    assert "\n" not in line
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    out = io.StringIO()
    Console(file=out, width=60).print(watch.panel(seen))
    text = out.getvalue()
    for part in ("[run]", "210 of 400", "taper", "step 207: guard: the gate is held", "gap so far", "█"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 60


def test_no_time_is_left_when_the_training_is_over(tmp_path):
    seen = watch.snapshot(running(tmp_path / "run", steps=400, losses={"rms": {}, "internal": {}}))
    assert seen["stage"] == "folding" and "training left" not in watch.line(seen)


def test_a_silent_run_is_told(tmp_path):
    run = running(tmp_path / "run")
    assert "nothing written" not in watch.line(watch.snapshot(run, now=time.time() + 200))
    assert "nothing written for 16 min 40 s" in watch.line(watch.snapshot(run, now=time.time() + 1000))


def test_sparkline(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert watch.sparkline([8, 1]) == "█▁"
    assert watch.sparkline([2, 2, 2]) == "▁▁▁"
    assert watch.sparkline([1]) == ""
    assert len(watch.sparkline(list(range(1000)))) == 32
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert watch.sparkline([8, 1]) == ""


@pytest.mark.parametrize(
    ("make", "code", "words"),
    [
        (llama_run, 0, "done: 16 of 17 norms removed, loss 2.9203 (+0.56 % against norms kept), 1.21 × the stock"),
        (gpt2_run, 3, "FAILED: The verification after folding failed"),
        (removed_run, 0, "done: 16 of 25 norms removed, loss 3.4383 (+0.83 % against before)"),
    ],
)
def test_it_ends_with_the_run_and_says_the_result_last(tmp_path, monkeypatch, capsys, make, code, words):
    run = make(tmp_path / "run")
    ended, said, err = call(monkeypatch, capsys, run)
    assert (ended, err) == (code, "")
    assert words in said.splitlines()[-1]
    assert call(monkeypatch, capsys, run, "--once")[0] == 0


def test_a_stopped_run_says_why(tmp_path, monkeypatch, capsys):
    why = {"step": -1, "kind": "GuardStop", "text": "the guard gave up"}
    code, said, _ = call(monkeypatch, capsys, running(tmp_path / "run", status="stopped", events=[why]))
    assert code == 3 and said == "stopped at step 210: the guard gave up\n"


def test_json_is_one_snapshot(tmp_path, monkeypatch, capsys):
    code, said, _ = call(monkeypatch, capsys, half_run(tmp_path / "run"), "--json")
    seen = json.loads(said)
    assert code == 0 and seen["step"] == 210 and seen["status"] == "running" and "curve" not in seen


def test_refusals(tmp_path, monkeypatch, capsys):
    for arguments, words in (
        ([tmp_path], "is not a run folder"),
        ([tmp_path / "nowhere"], "is not a folder"),
        ([tmp_path, "--every", 0], "at least 0.1"),
    ):
        code, said, err = call(monkeypatch, capsys, *arguments)
        assert (code, said, err.count("\n")) == (2, "", 1) and words in err


def test_in_a_pipe_it_says_a_line_at_a_time_and_ends_with_the_run(tmp_path):
    run = running(tmp_path / "run")
    environment = {**os.environ, "PYTHONUTF8": "1"}
    process = subprocess.Popen(
        [*COMMAND, str(run), "--every", "0.2"], stdout=subprocess.PIPE, text=True, env=environment, encoding="utf-8"
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    assert first.startswith("training internal, step 210 of 400")
    llama_run(run)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and rest.splitlines()[-1].startswith("done: 16 of 17 norms removed")


def test_in_a_terminal_the_panel_has_the_curve_and_the_result_comes_once(tmp_path):
    run = running(tmp_path / "run")
    ours, theirs = os.openpty()
    environment = {**os.environ, "PYTHONUTF8": "1", "TERM": "xterm", "COLUMNS": "80", "LINES": "30"}
    process = subprocess.Popen([*COMMAND, str(run), "--every", "0.2"], stdout=theirs, env=environment)
    os.close(theirs)
    shown = b""
    while "█".encode() not in shown and shown.count(b"training internal") < 20:
        shown += os.read(ours, 4096)
    assert "█".encode() in shown
    llama_run(run)
    with contextlib.suppress(OSError):  # Linux: the other end is closed
        while block := os.read(ours, 4096):
            shown += block
    os.close(ours)
    assert process.wait(timeout=60) == 0
    last = shown.decode().split("\x1b[?25h")[-1]  # the cursor is back
    assert last.startswith("done: 16 of 17 norms removed") and shown.count(b"16 of 17") == 1


def test_ctrl_c_ends_it_quietly(tmp_path):
    process = subprocess.Popen(
        [*COMMAND, str(running(tmp_path / "run")), "--every", "0.2"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background has it ignored
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")


def test_it_loads_nothing_heavy():
    script = (
        "import sys, tapernorm.watch; print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"
