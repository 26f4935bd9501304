"""Commands as a new user types them: what was tried, and what it says.

`TRIED` is the table. What needs more than one line follows it: full disks, Ctrl-C at every stage, terminals, pipes.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tapernorm as tn
from command import run_command
from tapernorm import failures
from tapernorm.data import train_tokenizer

SENTENCE = "the cat sat on a mat and saw that it was good to sit in the sun with nothing to do"
QUICK = ("--steps", 12, "--batch", 2, "--block", 32, "--warmup-steps", 3, "--taper-steps", 6, "--eval-tokens", 256)
LONG = "x" * 300  # longer than a file system lets a name be
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `llama`, `stories.jsonl`, `file`, `empty`, `run.yaml`, and a `model.gguf` that is none."""
    root = tmp_path_factory.mktemp("users")
    words = SENTENCE.split()
    rows = [" ".join(words[(i * k) % len(words)] for k in range(1, 31)) for i in range(1, 301)]
    (root / "stories.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    tokenizer = train_tokenizer(rows, 300)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(root / "llama")
    tokenizer.save_pretrained(root / "llama")
    (root / "file").write_text("a file")
    (root / "empty").mkdir()
    (root / "model.gguf").write_bytes(b"GGUF no more")
    (root / "run.yaml").write_text("stesp: 3\n")
    return root


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command in this process: (exit code, stdout, stderr)."""
    monkeypatch.setattr("tapernorm.runs._ROUNDS", 1)  # speed is not tested here
    return functools.partial(run_command, monkeypatch, capsys)


# what was tried: (the command, what it says). Each ends with exit code 2; {at} is the folder of `place`.
TRIED = {
    "model: no such path": ("inspect ./nowhere", "no such file or folder, and not the form of a hub id"),
    "model: an empty folder": ("inspect {at}/empty", "there is no config.json in it"),
    "model: a file of another kind": ("inspect {at}/file", "cannot read a nameless file; pass a folder"),
    "model: a broken GGUF file": ("eval {at}/model.gguf --data {at}/stories.jsonl", "model.gguf"),
    "model: a name that is too long": (f"inspect {{at}}/{LONG}", "File name too long; give a shorter name"),
    "model: not given": ("inspect", "Missing argument"),
    "command: a typo": ("inspct {at}/llama", "Did you mean 'inspect'?"),
    "option: a typo": ("inspect {at}/llama --jsno", "--json"),
    "option: of another command": ("inspect {at}/llama --steps 3", "No such option: --steps"),
    "option: a word for a number": ("pretrain --data x --out {out} --steps many", "Invalid value for '--steps'"),
    "option in the YAML file: a typo": (
        "pretrain --config {at}/run.yaml --data {at}/stories.jsonl --out {out}", "did you mean 'steps'?"
    ),
    "YAML file: not there": ("inspect {at}/llama --config {at}/none.yaml", "none.yaml: cannot be read as YAML"),
    "arm: a typo": ("taper {at}/llama --data {at}/stories.jsonl --out {out} --arm al", "did you mean 'all'?"),
    "arm of bench: a typo": ("bench {at}/llama --arm intenal", "did you mean 'internal'?"),
    "calibration: a typo": ("taper {at}/llama --data {at}/stories.jsonl --out {out} --calibration robst", "'robust'"),
    "anchor: a typo": ("taper {at}/llama --data {at}/stories.jsonl --out {out} --anchor relativ", "'relative'"),
    "order: a typo": ("taper {at}/llama --data {at}/stories.jsonl --out {out} --order dpeth", "'depth'"),
    "size: a typo": ("pretrain --data {at}/stories.jsonl --out {out} --size 1mm", "did you mean '1m'?"),
    "format: a typo": ("export {at}/llama --out {out} --format onxx", "did you mean 'onnx'?"),
    "budget: no number": ("remove {at}/llama --data {at}/stories.jsonl --out {out} --budget little", "such as 1%"),
    "budget: a percentage without its sign": (
        "remove {at}/llama --data {at}/stories.jsonl --out {out} --budget 3", "write 3% for 3 %"
    ),
    "data: no such file": ("eval {at}/llama --data {at}/storys.jsonl", "storys.jsonl"),
    "data: another kind": ("eval {at}/llama --data {at}/run.yaml", "unknown kind of file '.yaml'"),
    "data: no such column": ("eval {at}/llama --data {at}/stories.jsonl --text-column txt", "did you mean 'text'?"),
    "out: a file": ("taper {at}/llama --data {at}/stories.jsonl --out {at}/file", "is a file; give"),
    "out: below a file": ("taper {at}/llama --data {at}/stories.jsonl --out {at}/file/run", "is a file; give"),
    "out: below a file, fold": ("fold {at}/llama --out {at}/file/run", "is a file; give"),
    "out: below a file, export": ("export {at}/llama --out {at}/file/run", "is a file; give"),
    "out: below a file, remove": ("remove {at}/llama --data {at}/stories.jsonl --out {at}/file/run", "is a file; give"),
    "out: a name that is too long": (
        f"taper {{at}}/llama --data {{at}}/stories.jsonl --out {{at}}/{LONG}", "File name too long"
    ),
    "page of inspect: no such folder": (
        "inspect {at}/llama --text {at}/stories.jsonl --out {at}/none/page.html", "there is no folder"
    ),
    "report: no run": ("report {at}/empty", "is not a run folder"),
    "report: no folder": ("report {at}/nowhere", "is not a folder"),
    "watch: no run yet": ("watch {at}/nowhere", "a run makes it when"),
    "report: a file": ("report {at}/file", "is not a folder"),
    "prompt: too long": ("generate {at}/llama --prompt '{words}'", "the model's context is 64"),
    "resume: nothing to go on with": (
        "taper {at}/llama --data {at}/stories.jsonl --out {at}/llama --resume", "holds no run"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TRIED)
def test_what_it_says(call: Call, place: Path, tmp_path: Path, case: str) -> None:
    command, expected = TRIED[case]
    names = {"at": place, "out": tmp_path / "run", "words": SENTENCE.replace(" ", "_") * 8}
    code, out, err = call(*(part.strip("'").format(**names) for part in command.split()))
    assert code == 2 and out == ""
    assert expected in " ".join(err.split()) and "Traceback" not in err
    if err.startswith("tapernorm: "):
        assert err.count("\n") == 1
    else:  # the parser's own: how the command is used, and one line
        assert err.startswith("Usage: ") and "\nError: " in err
    assert not (tmp_path / "run").exists()


def test_no_permission(call: Call, place: Path, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("the superuser may write everywhere")
    tmp_path.chmod(0o500)
    arguments = (place / "llama", "--data", place / "stories.jsonl", "--out", tmp_path / "run")
    code, _, err = call("taper", *arguments, *QUICK)
    assert code == 2 and "no permission to write into" in err


# what goes wrong outside: (the error, what is said)
OUTSIDE = {
    "disk": (OSError(errno.ENOSPC, "No space left on device", "/data/run"), "no space left on device at /data/run"),
    "quota": (OSError(errno.EDQUOT, "Disk quota exceeded"), "no space left on device; make room"),
    "disk, told by torch": (RuntimeError("write failed: No space left on device"), "no space left on device"),
    "permission": (PermissionError(errno.EACCES, "Permission denied", "/data/run"), "/data/run: Permission denied;"),
    "read-only": (OSError(errno.EROFS, "Read-only file system", "/data"), "nothing can be written there"),
    "memory": (MemoryError(), "out of memory; lower --batch or --block"),
    "memory of a GPU": (torch.OutOfMemoryError("CUDA out of memory.\nMore"), "out of memory: CUDA out of memory."),
    "extra": (ModuleNotFoundError("No module named 'onnx'", name="onnx"), "pip install 'tapernorm[onnx]'"),
    "extra, inside": (ModuleNotFoundError("No module", name="peft.tuners"), "pip install 'tapernorm[peft]'"),
}  # fmt: skip


@pytest.mark.parametrize("case", OUTSIDE)
def test_what_goes_wrong_outside(call: Call, place: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    error, expected = OUTSIDE[case]

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr("tapernorm.inspection.inspect_source", fail)
    code, out, err = call("inspect", place / "llama")
    assert code == 2 and out == "" and expected in err and err.count("\n") == 1


def test_a_mistake_of_the_library_keeps_its_traceback(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (RuntimeError("a shape"), KeyError("x"), ModuleNotFoundError("No module named 'x'", name="x")):
        assert failures.told(error) is None


def test_missing_extras_are_named(call: Call, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec
    gone = ("gguf", "onnx", "onnxruntime", "openvino", "executorch", "transformer_lens")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in gone else found(name, *a))
    model, out = tmp_path / "free", tmp_path / "out"
    llama, _ = tn.from_pretrained(place / "llama")
    controller = tn.taper_(llama, tn.TaperConfig(arm="all", anchor_weight=0, warmup_steps=1, taper_steps=1))
    for _ in range(2):
        llama.train()(input_ids=torch.arange(3, 35)[None])
        controller.step()
    tn.fold_(llama)
    tn.save_pretrained(llama, model)
    for format, extra in (("onnx", "onnx"), ("openvino", "openvino"), ("executorch", "executorch")):
        code, _, err = call("export", model, "--out", out, "--format", format)
        assert code == 2 and f"tapernorm[{extra}]" in err.replace(f"onnx,{extra}", extra), err
    code, _, err = call("inspect", place / "model.gguf", "--text", place / "stories.jsonl", "--json")
    assert code == 2 and "pip install gguf" in err
    assert not out.exists()


@pytest.mark.slow
def test_no_network(place: Path) -> None:
    """The hub cannot be reached: within its library's own patience, and with what to pass instead."""
    script = (
        "import sys\nfrom tapernorm.cli import main\n"
        "for line in sys.argv[1:]:\n    sys.argv = ['tapernorm', *line.split()]\n"
        "    try: main()\n    except SystemExit as end: print('code', end.code, file=sys.stderr, flush=True)\n"
    )
    lines = ("inspect owner/name", f"eval {place}/llama --data owner/name")
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script, *lines], env={**os.environ, **nowhere}, **PIPED)
    said = [line for line in done.stderr.splitlines() if line.startswith(("tapernorm: ", "code"))]
    assert len(said) == 4 and said[1] == said[3] == "code 2", done.stderr
    assert "pass its local folder" in said[0] and "pass the path of a local file" in said[2]
    assert time.monotonic() - started < 300


def test_a_full_disk_leaves_a_run_that_goes_on(
    call: Call, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    arguments = ("taper", place / "llama", "--data", place / "stories.jsonl", "--out", out, "--no-baseline", *QUICK)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(out / "model"))

    with monkeypatch.context() as patched:
        patched.setattr("tapernorm._folder.take_place", full)
        code, _, err = call(*arguments)
    last = err.splitlines()[-1]
    assert code == 2 and "no space left on device" in last and "--resume" in last and err.count("no space") == 1
    assert json.loads((out / "run.json").read_text())["status"] == "stopped"
    assert not list(out.rglob("*.partial")) and not (out / "model").exists()
    code, said, err = call(*arguments, "--resume", "--json")
    assert code == 0 and json.loads(said)["verify"]["passed"], err


# Ctrl-C


STAGES = (
    "tapernorm.material.load_original", "tapernorm.sources.gather", "tapernorm.packing.pack_labelled",
    "tapernorm.forecast.seconds_per_step",  # before the folder is there
    "tapernorm.runs.evaluate", "tapernorm.train.TaperMixin.compute_loss", "tapernorm._folder.take_place",
    "tapernorm.runs.fold_", "tapernorm.runs.verify", "tapernorm.bench.bench", "tapernorm.runs.write_report",
)  # fmt: skip


def test_ctrl_c_at_every_stage(call: Call, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, exit code 130, nothing half-written, and the next call goes on to the next stage."""
    out = tmp_path / "run"
    arguments = ("taper", place / "llama", "--data", place / "stories.jsonl", "--out", out, "--no-baseline", *QUICK)

    def stop(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    for number, stage in enumerate(STAGES):
        with monkeypatch.context() as patched:
            patched.setattr(stage, stop)
            code, said, err = call(*arguments, "--resume")
        assert code == 130 and said == "", (stage, err)
        *plan, last = err.splitlines()
        assert last.startswith("tapernorm: stopped; the same command with --resume"), stage
        assert len(plan) == (3 if 3 < number < 8 else 0), (stage, "said until all is trained")
        assert out.exists() == (number > 3), stage
        assert not list(tmp_path.rglob("*.partial")) and not list(tmp_path.rglob("*.old"))
        if out.exists():
            assert json.loads((out / "run.json").read_text())["status"] == "stopped"
        if (out / "model").exists():
            tn.from_pretrained(out / "model")
    code, said, err = call(*arguments, "--resume", "--json")
    assert code == 0 and json.loads(said)["verify"]["passed"], err


@pytest.mark.parametrize(
    "stage, command",
    [
        ("tapernorm.removal.remove_", "remove {at}/llama --data {at}/stories.jsonl --eval-tokens 1024 --out {out}"),
        ("tapernorm.commands.from_pretrained", "fold {at}/llama --out {out}"),
        ("tapernorm.commands.from_pretrained", "generate {at}/llama --prompt cat"),
        ("tapernorm.inspection.inspect_source", "inspect {at}/llama"),
    ],
)
def test_ctrl_c_elsewhere(
    call: Call, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, command: str
) -> None:
    def stop(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stage, stop)
    code, out, err = call(*command.format(at=place, out=tmp_path / "run").split())
    assert (code, out) == (130, "")
    assert err == ("" if command.startswith("generate") else "tapernorm: stopped\n")  # ending a text is no news
    assert not (tmp_path / "run").exists()


PIPED: dict[str, Any] = {
    "stdin": subprocess.DEVNULL,
    "stdout": subprocess.PIPE,
    "stderr": subprocess.PIPE,
    "text": True,
}


def heard() -> None:
    """A process of a shell's background has Ctrl-C ignored, and hands that on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_a_real_ctrl_c(place: Path, tmp_path: Path) -> None:
    """The signal, to a process of its own, in training."""
    steps = ("--steps", "2000", "--batch", "2", "--block", "32", "--eval-tokens", "256", "--no-baseline")
    command = ("taper", f"{place}/llama", "--data", f"{place}/stories.jsonl", "--out", f"{tmp_path}/run", *steps)
    with subprocess.Popen([sys.executable, "-m", "tapernorm", *command], **PIPED, preexec_fn=heard) as process:
        deadline = time.monotonic() + 300
        while not (tmp_path / "run" / "internal" / "log.jsonl").exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and out == ""
    assert err.splitlines()[-1].startswith("tapernorm: stopped; the same command with --resume")
    assert "Traceback" not in err
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "stopped"


# Terminals and pipes


def test_a_narrow_terminal(call: Call, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    code, out, _ = call("--help")
    assert code == 0 and "pretrain" in out
    monkeypatch.setattr("tapernorm.output.sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    code, out, _ = call("inspect", place / "llama")
    shown = re.sub("\x1b\\[[0-9;]*m", "", out).splitlines()[:-1]
    assert code == 0 and shown and all(len(line) <= 40 for line in shown)
    assert "…" not in out and out.count("can go: yes") == 3


def test_no_colour_where_none_is_wanted(call: Call, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    colour = re.compile("\x1b\\[[0-9;]*3[0-9]")
    _, piped, _ = call("inspect", place / "llama")
    assert "\x1b" not in piped and max(map(len, piped.splitlines())) <= 120
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    _, out, _ = call("inspect", place / "llama")
    assert not colour.search(out)


def test_pipes_and_full_devices(place: Path) -> None:
    """What reads may stop, and what is written to may be full: no traceback, and an exit code that says so."""
    line = f'"{sys.executable}" -m tapernorm inspect "{place}/llama"'
    head = subprocess.run(f"{line} | head -n 1", shell=True, **PIPED)
    assert head.stdout.strip() and head.stderr == ""
    if Path("/dev/full").exists():
        full = subprocess.run(f"{line} --json > /dev/full", shell=True, **PIPED)
        assert full.returncode == 2 and full.stderr.count("\n") == 1
        assert full.stderr.startswith("tapernorm: no space left on device")


def test_long_and_foreign_paths(call: Call, place: Path, tmp_path: Path) -> None:
    """Spaces, quotes, letters of every alphabet, and a path of 600 bytes; the command that it prints works."""
    folder = tmp_path / "о моделях 模型 'ø' \"q\"" / ("d" * 200) / ("é" * 100) / ("模" * 60)
    folder.mkdir(parents=True)
    (folder / "llama").symlink_to(place / "llama")
    text = folder / "тексты 📚.jsonl"
    text.write_bytes((place / "stories.jsonl").read_bytes())
    out = folder / "run [1] ü"
    code, said, err = call("taper", folder / "llama", "--data", text, "--out", out, "--no-baseline", *QUICK)
    assert code == 0, err
    assert "模" in said
    printed = said.splitlines()[-1].strip()
    import shlex

    words = shlex.split(json.loads((out / "run.json").read_text())["generate_command"])
    assert printed.startswith("tapernorm generate") and words[2] == str(out / "model")
    code, said, err = call(*words[1:], "--max-new-tokens", 3)
    assert code == 0 and said, err
    code, said, _ = call("report", out)
    assert code == 0 and str(out / "report.html") in said
