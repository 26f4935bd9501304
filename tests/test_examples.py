"""Every example runs, offline, and asserts its claim; none is longer than a page."""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
# what each needs beyond the library, and what it prints
SAYS = {
    "plain_loop": ((), "4 norms folded, 1 kept"),
    "trainer": ((), "5 norms folded, none kept"),
    "trl_lora": (("trl", "peft"), "gate 0.0, 4 norms folded"),
    "custom_model": ((), "4 norms folded; the output moved by"),
    "vit": ((), "of images right without any norm"),
    "transformers_alone": ((), "TaperNormLlamaForCausalLM without"),
}
APART = ("distributed", "logit_attribution")  # the first below, the second in test_export.py


def test_every_example_is_run_and_short() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    assert {file.stem for file in files} == {*SAYS, *APART}
    for file in files:
        assert len(file.read_text(encoding="utf-8").splitlines()) < 60, file.name
        assert f"examples/{file.name}" in (EXAMPLES.parent / "docs" / "examples.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SAYS)
def test_example(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    needed, said = SAYS[name]
    for package in needed:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert said in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes() -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    done = subprocess.run(
        [sys.executable, *launch, str(EXAMPLES / "distributed.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "2 processes, gate 0.0, 4 norms folded" in done.stdout
