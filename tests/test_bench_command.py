"""`tapernorm bench` as a user meets it: rows, files, counts, and what it refuses."""

import csv
import functools
import json

import pytest
import torch

import tiny_models
from command import run_command
from tapernorm import bandwidth
from tapernorm import bench as bench_module
from tapernorm.hub import save_pretrained

torch.set_num_threads(1)

SCHEMA = {"model", "mode", "variant", "batch", "cache", "compiled", "dtype", "tokens_per_second", "ratio"}
QUICK = ("--new-tokens", 2, "--rounds", 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_pretrained(tiny_models.tiny("llama", layers=1).eval(), path)
    return path


@pytest.fixture
def call(monkeypatch, capsys):
    """Run a command in this process: (exit code, stdout, stderr)."""
    monkeypatch.setattr(bandwidth, "_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(bench_module, "_SHORTEST", 0.0)
    return functools.partial(run_command, monkeypatch, capsys)


def test_json_and_csv(call, folder, tmp_path):
    path = tmp_path / "rows.csv"
    modes = ("--mode", "decode", "--mode", "last-token", "--length", 8, "--batch", 2, "--self-check", "--csv", path)
    code, out, _ = call("bench", folder, *modes, "--arm", "all", *QUICK, "--json")
    rows = json.loads(out)["rows"]
    assert code == 0 and all(set(row) >= SCHEMA for row in rows)
    found = [(row["mode"], row["cache"], row["variant"]) for row in rows]
    names = ["stock", "functional", "unfused", "folded", "folded-fused", "stock-again"]
    assert found == [(m, c, n) for m, c in (("decode", "dynamic"), ("last-token", "none")) for n in names]
    assert {(row["model"], row["arm"], row["compiled"], row["prompt"]) for row in rows} == {
        ("tiny-llama", "all", False, 8)
    }
    with path.open(newline="", encoding="utf-8") as file:
        assert [row["variant"] for row in csv.DictReader(file)] == names * 2


def test_table(call, folder):
    code, out, err = call("bench", folder, "--batch", 1, *QUICK)
    assert code == 0 and not err
    assert "tiny-llama: decode, batch 1, dynamic cache, eager, float32" in " ".join(out.split())
    assert "stock" in out and "1.000" in out and "bandwidth" in out


def test_counts(call, folder):
    code, out, _ = call("bench", folder, "--counts", "--cache", "dynamic", "--cache", "static", "--json")
    rows = json.loads(out)["counts"]
    assert code == 0 and {row["cache"] for row in rows} == {"dynamic", "static"}
    assert all(row["per_token"] > row["per_layer"] > 0 for row in rows)
    code, out, _ = call("bench", folder, "--counts")
    assert code == 0 and "aten operations per decoded token" in " ".join(out.split())


@pytest.mark.parametrize(
    "wrong, word",
    [
        (("--mode", "decoed"), "decode"), (("--cache", "statik"), "static"), (("--arm", "al"), "all"),
        (("--device", "cuda:99"), "GPUs"), (("--dtype", "float23"), "float32"), (("--batch", 0), "batch"),
        (("--mode", "last-token", "--length", 65), "context of 64"),
    ],
)  # fmt: skip
def test_refusals(call, folder, wrong, word):
    code, out, err = call("bench", folder, *wrong, *QUICK)
    assert code == 2 and word in err and not out
