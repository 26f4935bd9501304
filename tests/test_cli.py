"""The command line as a user meets it: what it prints, what it refuses, and with which exit code."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import tapernorm as tn
from command import run_command
from tapernorm.data import train_tokenizer

WORDS = re.findall(r"\w+", "the cat sat on a mat and saw that it was good to sit in the sun with nothing to do")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = torch.Generator().manual_seed(0)
    lines = []
    for _ in range(300):
        picked = torch.randint(len(WORDS), (30,), generator=generator).tolist()
        lines.append(json.dumps({"text": " ".join(WORDS[i] for i in picked), "number": 1}))
    path = tmp_path_factory.mktemp("text") / "stories.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """Folders with tiny models: llama, gpt2, bert (post-norm), plain (no norms), headless of its tokenizer."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = train_tokenizer([json.loads(line)["text"] for line in text.read_text().splitlines()], 300)
    size: dict[str, Any] = {"vocab_size": len(tokenizer), "max_position_embeddings": 64, "pad_token_id": 2}
    wide: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**size, **wide)).save_pretrained(root / "llama")
    GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=1
        )
    ).save_pretrained(root / "gpt2")
    BertLMHeadModel(BertConfig(is_decoder=True, **size, **wide)).save_pretrained(root / "bert")
    LlamaForCausalLM(LlamaConfig(**size, **wide)).save_pretrained(root / "mute")
    for name in ("llama", "gpt2", "bert"):
        tokenizer.save_pretrained(root / name)
    (root / "empty").mkdir()
    return root


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command in this process: (exit code, stdout, stderr)."""
    monkeypatch.setattr("tapernorm.runs._ROUNDS", 1)  # speed is not tested here
    return functools.partial(run_command, monkeypatch, capsys)


QUICK = ("--steps", 12, "--batch", 2, "--block", 32, "--warmup-steps", 3, "--taper-steps", 6, "--eval-tokens", 256)


def test_help_is_quick_and_loads_neither_torch_nor_transformers() -> None:
    script = "import sys, tapernorm.cli; print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"


def test_version_and_every_command_has_help(call: Call) -> None:
    assert call("--version")[1].strip() == f"tapernorm {tn.__version__}"
    for command in (
        "inspect",
        "remove",
        "taper",
        "pretrain",
        "fold",
        "verify",
        "eval",
        "bench",
        "export",
        "generate",
        "report",
        "watch",
    ):
        code, out, _ = call(command, "--help")
        assert code == 0 and "Usage:" in out


def test_inspect_tells_which_norms_can_go(call: Call, models: Path) -> None:
    code, out, _ = call("inspect", models / "llama")
    assert code == 0 and "5 of 5 norms can go, 1 of them final" in out
    code, out, _ = call("inspect", models / "gpt2", "--json")
    found = json.loads(out)
    assert found["model_type"] == "gpt2" and len(found["sites"]) == 5
    assert found["sites"][0]["consumers"] == ["transformer.h.0.attn.c_attn.weight"]
    assert set(found["sites"][0]) == {"name", "kind", "role", "removable", "reason", "consumers"}
    code, out, _ = call("inspect", models / "bert", "--json")
    assert code == 0 and not any(site["removable"] for site in json.loads(out)["sites"])


@pytest.mark.parametrize("name, arm", [("llama", "internal"), ("gpt2", "all")])
def test_taper_end_to_end(call: Call, models: Path, text: Path, tmp_path: Path, name: str, arm: str) -> None:
    out = tmp_path / "run"
    code, said, noise = call("taper", models / name, "--data", text, "--out", out, "--arm", arm, *QUICK, "--json")
    assert code == 0, noise
    result = json.loads(said)
    assert set(result) >= {"out", "loss_before", "loss_after", "fold", "bench", "report"}
    assert len(result["fold"]["folded"]) == (5 if arm == "all" else 4)
    assert result["verify"]["passed"] and result["verify"]["greedy_match"] == 1 and result["verify"]["cached_match"]
    assert result["loss_after"] < result["loss_before"]
    variants = {"stock", "functional", "unfused", "folded"} | ({"folded-fused"} if name == "llama" else set())
    assert {row["variant"] for row in result["bench"]["rows"]} == variants
    assert "<svg" in Path(result["report"]).read_text()
    assert not list((out / arm).glob("checkpoint-*"))

    code, said, _ = call("verify", out / arm / "final", out / "model", "--data", text, "--block", 32, "--json")
    assert code == 0 and json.loads(said)["max_abs_logit_error"] < 1e-4
    code, said, _ = call("verify", models / name, out / "model", "--json")
    assert code == 3 and not json.loads(said)["passed"]  # trained meanwhile: another function
    code, said, _ = call("eval", out / "model", "--data", text, "--block", 32, "--eval-tokens", 256, "--json")
    assert code == 0 and json.loads(said)["loss"] == pytest.approx(result["loss_after"], rel=1e-4)
    code, said, _ = call("fold", out / arm / "final", "--out", tmp_path / "folded", "--json")
    assert code == 0 and json.loads(said)["fold"]["folded"] == result["fold"]["folded"]
    code, said, _ = call("generate", out / "model", "--prompt", "the cat", "--max-new-tokens", 5)
    assert code == 0 and said.startswith("the cat")
    code, said, _ = call("report", out)
    assert code == 0 and said.strip().endswith("report.html")
    assert call("taper", models / name, "--data", text, "--out", out, "--arm", arm, *QUICK, "--resume")[0] == 0  # done


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_taper_with_a_constant_prefix(call: Call, models: Path, text: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "run"
    code, said, noise = call("taper", models / name, "--data", text, "--out", out, "--prefix", "3,5", *QUICK, "--json")
    assert code == 0, noise
    assert json.loads(said)["fold"]["prefix"] == [3, 5]
    assert json.loads(said)["verify"]["passed"]
    assert json.loads((out / "run.json").read_text())["prefix"] == [3, 5]
    model, _ = tn.from_pretrained(out / "model")
    assert list(model.config.constant_prefix) == [3, 5]
    assert json.loads((out / "model" / "config.json").read_text())["constant_prefix"] == [3, 5]
    baseline, _ = tn.from_pretrained(out / "normed" / "final")
    assert not getattr(baseline.config, "constant_prefix", ())  # it is what people have without this library


def test_taper_looks_for_a_prefix_where_tokens_are_massive(
    call: Call, models: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tapernorm.material.find_prefix", lambda *args, **kwargs: (7,))
    code, said, noise = call(
        "taper", models / "llama", "--data", text, "--out", tmp_path / "run", "--no-baseline", *QUICK, "--json"
    )
    assert code == 0, noise
    assert json.loads(said)["fold"]["prefix"] == [7]


def test_pretrain_compares_with_the_norms_kept(
    call: Call, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    arguments = ("--size", "1m", "--vocab-size", 300, "--data", text, *QUICK, "--lr", 1e-4)
    code, said, noise = call("pretrain", *arguments, "--out", out)
    assert code == 0, noise
    assert "norms removed" in said and f"tapernorm generate {out / 'model'}" in said
    record = json.loads((out / "run.json").read_text())
    assert record["status"] == "done" and set(record["losses"]) == {"rms", "internal"}
    logs = {arm: [json.loads(row) for row in (out / arm / "log.jsonl").open()] for arm in ("rms", "internal")}
    # the same weights and the same batches: until the gate moves, the same losses
    assert [row["loss"] for row in logs["rms"]][:3] == [row["loss"] for row in logs["internal"]][:3]
    assert logs["internal"][-1]["gate"] == 0 and len(logs["internal"][-1]["c"]) == 16
    assert record["model"]["parameters"] == pytest.approx(395e3 + 300 * 64, rel=0.05)
    seen: list[str] = []  # what is done has its page: who waits for the end looks for it

    def page(run: Path) -> Path:
        seen.append(json.loads((run / "run.json").read_text())["status"])
        return run / "report.html"

    monkeypatch.setattr("tapernorm.runs.write_report", page)
    code, _, _ = call("pretrain", *arguments, "--arm", "rms", "--out", tmp_path / "rms")
    assert code == 0 and not (tmp_path / "rms" / "model").exists() and seen == ["running"]


def test_a_run_that_diverges_says_so(call: Call, text: Path, tmp_path: Path) -> None:
    arguments = ("--size", "1m", "--vocab-size", 300, "--data", text, *QUICK, "--lr", 0.5, "--no-baseline")
    code, _, err = call("pretrain", *arguments, "--out", tmp_path / "run", "--guard-margin", 0)
    assert code == 3 and "the loss is nan at step" in err and err.count("\n") == 1
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "stopped"


def test_a_guard_that_slowed_the_taper_too_much_says_so(call: Call, text: Path, tmp_path: Path) -> None:
    arguments = ("--size", "1m", "--vocab-size", 300, "--data", text, *QUICK, "--lr", 0.5, "--no-baseline")
    code, _, err = call("pretrain", *arguments, "--out", tmp_path / "run")
    assert code == 3 and "instead of 0 after 12 steps; raise steps" in err and err.rstrip().count("\n") == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["events"][0]["kind"] == "hold"


def test_a_run_that_the_guard_stops(
    call: Call, models: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below gate 0.5 every step gets an outlier: exit code 3, every event in log and report, a sound model kept."""
    from tapernorm.train import TaperTrainer

    def outlier(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        loss, outputs = compute(trainer, *args, **(kwargs | {"return_outputs": True}))
        if trainer.controller.gate < 0.5 and trainer.model.training:
            trainer._taper_callback.losses[-1] += 50.0
        return (loss, outputs) if kwargs.get("return_outputs") else loss

    compute = TaperTrainer.compute_loss
    monkeypatch.setattr(TaperTrainer, "compute_loss", outlier)
    out = tmp_path / "run"
    steps = ("--steps", 150, "--batch", 1, "--block", 16, "--warmup-steps", 3, "--taper-steps", 8)
    quick = (*steps, "--eval-tokens", 64, "--no-baseline")
    code, _, err = call("taper", models / "llama", "--data", text, "--out", out, *quick)
    assert code == 3 and "after 3 rewinds" in err and err.rstrip().endswith(str(out / "internal" / "sound"))
    record = json.loads((out / "run.json").read_text())
    assert record["status"] == "stopped"
    told = [event["kind"] for event in record["events"]]
    assert told[:7] == ["hold", "rewind", "hold", "rewind", "hold", "rewind", "hold"] and "stop" in told
    logged = [event for row in (out / "internal" / "log.jsonl").open() for event in json.loads(row).get("events", [])]
    assert [event["kind"] for event in logged] == told[:7]
    assert call("report", out)[0] == 0
    assert "goes back from" in (out / "report.html").read_text()
    model, _ = tn.from_pretrained(out / "internal" / "sound")
    controller = tn.get_controller(model)
    assert controller is not None and controller.gate >= 0.5


def test_a_config_file_sets_options_and_flags_win(call: Call, models: Path, text: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"data: {text}\nblock: 32\neval-tokens: 64\n")
    code, out, noise = call("eval", models / "llama", "--config", config, "--json")
    assert code == 0, noise
    assert json.loads(out)["tokens"] == 2 * 31
    code, out, _ = call("eval", models / "llama", "--config", config, "--eval-tokens", 128, "--json")
    assert json.loads(out)["tokens"] == 4 * 31
    config.write_text("blok: 32\n")
    code, _, err = call("eval", models / "llama", "--config", config)
    assert code == 2 and "no option 'blok' (did you mean 'block'?)" in err


BAD = {
    "post-norm": (["taper", "{models}/bert", "--data", "{text}"], "post-norm"),
    "not a model": (["taper", "{models}/empty", "--data", "{text}"], "is not a model folder"),
    "no such model": (["taper", "./nowhere/at/all", "--data", "{text}"], "no such file or folder"),
    "no tokenizer": (["taper", "{models}/mute", "--data", "{text}"], "has no tokenizer beside it"),
    "no such data": (["taper", "{models}/llama", "--data", "/nowhere.jsonl"], "no such file or folder"),
    "empty data": (["taper", "{models}/llama", "--data", "{empty}"], "empty"),
    "broken data": (["taper", "{models}/llama", "--data", "{broken}"], "broken.parquet"),
    "no such column": (["taper", "{models}/llama", "--data", "{text}", "--text-column", "txt"], "did you mean 'text'"),
    "column of numbers": (["taper", "{models}/llama", "--data", "{text}", "--text-column", "number"], "number"),
    "no such split": (["taper", "{models}/llama", "--data", "{text}", "--split", "trian"], "did you mean 'train'"),
    "block too long": (["taper", "{models}/llama", "--data", "{text}", "--block", "65"], "context of 64 tokens"),
    "block too long, pretrain": (["pretrain", "--data", "{text}", "--block", "513"], "context of 512 tokens"),
    "taper beyond the run": (
        ["pretrain", "--data", "{text}", "--steps", "10", "--taper-steps", "99"],
        "beyond the run",
    ),
    "unknown arm": (["pretrain", "--data", "{text}", "--arm", "intrenal"], "did you mean 'internal'"),
    "unknown size": (["pretrain", "--data", "{text}", "--size", "2m"], "is not one of"),
    "no warm-up": (["pretrain", "--data", "{text}", "--warmup-steps", "0"], "warmup_steps=0 must be"),
    "no taper": (["pretrain", "--data", "{text}", "--taper-steps", "0"], "taper_steps=0 must be"),
    "a prefix of words": (["taper", "{models}/llama", "--data", "{text}", "--prefix", "autom"], "did you mean 'auto'"),
    "a prefix beyond the vocabulary": (["taper", "{models}/llama", "--data", "{text}", "--prefix", "99999"], "vocabul"),
    "keep matches nothing": (["taper", "{models}/llama", "--data", "{text}", "--keep", "h.*"], "matches none"),
    "no data given": (["pretrain"], "--data"),
    "unknown option": (["pretrain", "--data", "{text}", "--step", "3"], "--steps"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(call: Call, models: Path, text: Path, tmp_path: Path, case: str) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not a table")
    names = {"models": models, "text": text, "empty": tmp_path / "empty.txt", "broken": tmp_path / "broken.parquet"}
    arguments, expected = BAD[case]
    out = tmp_path / "run"
    code, said, err = call(*(a.format(**names) for a in arguments), "--out", out)
    assert code == 2
    assert expected in err and said == ""
    if case not in ("no data given", "unknown option"):  # the parser's own errors show the usage as well
        assert err.count("\n") == 1 and err.startswith("tapernorm: ")
    assert not out.exists()


def test_an_occupied_folder_is_left_alone(call: Call, models: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / "thesis.txt").write_text("irreplaceable")
    for flags in ([], ["--overwrite"], ["--resume"]):
        code, _, err = call("taper", models / "llama", "--data", text, "--out", out, *QUICK, *flags)
        assert code == 2 and "not empty" in err
    code, _, err = call("fold", models / "llama", "--out", out)
    assert code == 2 and "not empty" in err
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]


def test_fold_of_a_stock_model_is_refused(call: Call, models: Path, tmp_path: Path) -> None:
    code, _, err = call("fold", models / "llama", "--out", tmp_path / "folded")
    assert code == 3 and "never tapered" in err and not (tmp_path / "folded").exists()


def test_a_killed_run_goes_on_with_resume(call: Call, models: Path, text: Path, tmp_path: Path) -> None:
    """Killed at its first checkpoint of the tapered arm; the resumed run ends where an undisturbed one does."""
    steps = ("--steps", 40, "--batch", 2, "--block", 32, "--warmup-steps", 5, "--taper-steps", 20, "--eval-tokens", 256)
    arguments = ("taper", models / "llama", "--data", text, *steps, "--no-baseline")
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [
        sys.executable,
        "-c",
        "from tapernorm.cli import main; main()",
        *map(str, arguments),
        "--out",
        str(killed),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 120
    while not list(killed.glob("internal/checkpoint-*/trainer_state.json")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    assert process.wait() != 0
    assert json.loads((killed / "run.json").read_text())["status"] == "running"
    code, _, err = call(*arguments, "--out", killed)
    assert code == 2 and "--resume" in err
    code, _, err = call(*arguments, "--seed", 1, "--out", killed, "--resume")
    assert code == 2 and "seed=0 (now 1)" in err
    results = []
    for out, flags in ((killed, ["--resume"]), (whole, [])):
        code, said, err = call(*arguments, "--out", out, *flags, "--json")
        assert code == 0, err
        results.append(json.loads(said))
    assert results[0]["loss_after"] == results[1]["loss_after"]
    logs = [[json.loads(row)["loss"] for row in (out / "internal" / "log.jsonl").open()] for out in (killed, whole)]
    assert logs[0] == logs[1] and len(logs[0]) == 40
