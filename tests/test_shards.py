"""Folding from disk to disk: the same bits as in memory for every family, nothing half-written, and it goes on."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import tapernorm as tn
from families import FAMILIES
from folders import byte_tokenizer, taper_row, to_gate
from tapernorm import _folder, shard_plan, shards, streaming, untrusted
from tapernorm.modules import taper_norms

ROWS = {row.name: row for row in FAMILIES if row.goes and row.model_type != "timm"}


@torch.no_grad()
def half_tapered(row, folder, dtype, shard="6KB", gate=0.0, prefix=(), **changes):
    """A folder of a model of that family with gates at 0 and gains, biases and c of their own; and the model."""
    if row.is_moe:
        changes.setdefault("experts_implementation", "eager")
    model, example = row.build(**changes).to(dtype), row.example
    example = {k: v.to(dtype) if v.is_floating_point() else v for k, v in example.items()}
    taper_row(row, model, example, prefix=prefix)
    to_gate(model, gate)
    tn.save_pretrained(model, folder, tokenizer=byte_tokenizer(), max_shard_size=shard)
    return model, example


def contents(folder):
    """Every tensor in a folder's files, and its config."""
    tensors = {}
    for path in untrusted.weight_files(folder):
        tensors |= load_file(path)
    return tensors, json.loads((folder / "config.json").read_text())


def same_bits(one, two):
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype, name
        assert torch.equal(tensor, two[name]), (name, float((tensor.double() - two[name].double()).abs().max()))


@pytest.fixture
def few_numbers(monkeypatch):
    """Weights of the tiny models are cut into many parts, too."""
    monkeypatch.setattr(shard_plan, "NUMBERS", 40)


@pytest.mark.parametrize("name", ROWS)
def test_the_same_bits_as_in_memory(name, tmp_path, few_numbers):
    row = ROWS[name]
    dtype = torch.bfloat16 if len(name) % 2 else torch.float32
    model, example = half_tapered(row, tmp_path / "half", dtype)
    wanted = tn.fold_(model, example=example, allow_tail=True)
    tn.save_pretrained(model, tmp_path / "memory", max_shard_size="6KB")
    report = shards.fold_folder(tmp_path / "half", tmp_path / "disk")
    assert report.folded == wanted.folded and report.kept == wanted.kept and report.untied == wanted.untied
    assert sorted(report.new_biases) == sorted(wanted.new_biases) and report.prefix == wanted.prefix
    assert report.c == wanted.c and report.kinds == wanted.kinds and report.roles == wanted.roles
    assert report.rows_checked > 0 and report.shards > 1
    first, second = (tn.from_pretrained(tmp_path / place)[0] for place in ("memory", "disk"))
    same_bits(first.state_dict(), second.state_dict())
    assert contents(tmp_path / "memory")[1] == contents(tmp_path / "disk")[1]
    written = {path.name for path in (tmp_path / "disk").iterdir()} - {"fold.json"}
    assert {"README.md", *_folder.CODE, "tokenizer.json", untrusted.INDEX} <= written
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2-post", "mixtral", "phi", "bloom", "t5", "glm4-post"])
def test_other_dtypes(name, dtype, tmp_path, few_numbers):
    row = ROWS[name]
    model, example = half_tapered(row, tmp_path / "half", dtype)
    tn.fold_(model, example=example, allow_tail=True)
    tn.save_pretrained(model, tmp_path / "memory")
    shards.fold_folder(tmp_path / "half", tmp_path / "disk")
    first, second = (tn.from_pretrained(tmp_path / place)[0] for place in ("memory", "disk"))
    same_bits(first.state_dict(), second.state_dict())


# What goes wrong


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """Sharded and half-tapered: a Llama, and a GPT-2 with centring, a tied head and a bias to be made for it."""
    root = tmp_path_factory.mktemp("half")
    half_tapered(ROWS["llama"], root / "llama", torch.float32)
    half_tapered(ROWS["gpt2"], root / "gpt2", torch.float32)
    return root


def finished(staging):
    return {path.name: path.stat().st_mtime_ns for path in staging.glob("model*.safetensors")}


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError])
def test_a_run_that_was_stopped_goes_on(half, tmp_path, monkeypatch, stop):
    """Stopped in the middle of the second file: the first one is kept, of the second there is nothing."""
    whole = shards.fold_folder(half / "gpt2", tmp_path / "whole")
    original, calls = streaming.Stored.write, []

    def write(self, *args):
        calls.append(self.file.name)
        if len(set(calls)) == 2:
            raise stop("stopped")
        return original(self, *args)

    monkeypatch.setattr(streaming.Stored, "write", write)
    with pytest.raises(stop):
        shards.fold_folder(half / "gpt2", tmp_path / "out")
    staging = tmp_path / ".out.folding"
    kept = finished(staging)
    assert kept and len(kept) < whole.shards and not (tmp_path / "out").exists()
    assert not list(staging.glob(".*"))
    (staging / ".model-00002-of-00005.safetensors.partial").write_bytes(b"of a kill -9")
    monkeypatch.setattr(streaming.Stored, "write", original)
    report = shards.fold_folder(half / "gpt2", tmp_path / "out")
    assert report.resumed == len(kept) and not staging.exists()
    assert kept.items() <= finished(tmp_path / "out").items()
    same_bits(contents(tmp_path / "out")[0], contents(tmp_path / "whole")[0])
    assert [path.name for path in (tmp_path / "out").glob(".*")] == []


def test_what_lies_beside_the_weights_is_written_anew(half, tmp_path, monkeypatch):
    """A run that was stopped while it copied a file has left half of it."""
    monkeypatch.setattr(shards, "_compare", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        shards.fold_folder(half / "gpt2", tmp_path / "out", compare=True)
    monkeypatch.undo()
    left = tmp_path / ".out.folding" / "tokenizer.json"
    left.write_bytes(left.read_bytes()[:100])
    assert shards.fold_folder(half / "gpt2", tmp_path / "out").resumed > 1
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (half / "gpt2" / "tokenizer.json").read_bytes()


def test_of_another_checkpoint_nothing_is_kept(half, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_write_rest", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        shards.fold_folder(half / "gpt2", tmp_path / "out")
    monkeypatch.undo()
    assert finished(tmp_path / ".out.folding")
    report = shards.fold_folder(half / "llama", tmp_path / "out")
    assert report.resumed == 0
    assert type(tn.from_pretrained(tmp_path / "out")[0]).__name__ == "TaperNormLlamaForCausalLM"


def test_the_models_can_be_compared(half, tmp_path):
    report = shards.fold_folder(half / "gpt2", tmp_path / "out", compare=True)
    assert report.relative_error is not None and report.relative_error <= report.bound == 1e-4
    assert shards.fold_folder(half / "gpt2", tmp_path / "again").relative_error is None


def test_a_wrong_fold_is_seen(half, tmp_path, monkeypatch):
    """By the rows that are read again, and by the comparison."""
    original = shard_plan.Step.apply
    monkeypatch.setattr(shard_plan.Step, "apply", lambda self, w, index: original(self, w, index) * 1.001)
    with pytest.raises(tn.FoldError, match="a row that was written is off"):
        shards.fold_folder(half / "gpt2", tmp_path / "out")
    monkeypatch.setattr(shard_plan.Plan, "look", lambda self, folder: (0, 0.0))
    with pytest.raises(tn.FoldError, match="differs by"):
        shards.fold_folder(half / "gpt2", tmp_path / "out", compare=True)
    assert not (tmp_path / "out").exists()


def test_what_is_refused(half, tmp_path):
    half_tapered(ROWS["llama"], tmp_path / "open", torch.float32, gate=0.5)
    with pytest.raises(tn.FoldError, match=r"input_layernorm: the gate is 0\.5"):
        shards.fold_folder(tmp_path / "open", tmp_path / "out")
    model = ROWS["llama"].build()
    model.save_pretrained(tmp_path / "stock", max_shard_size="3KB")
    with pytest.raises(tn.FoldError, match=r"nothing to fold: .* its model type is llama"):
        shards.fold_folder(tmp_path / "stock", tmp_path / "out")
    with pytest.raises(ValueError, match=r"choose another folder|was not written by"):
        shards.fold_folder(half / "llama", half / "llama")
    big, _ = half_tapered(ROWS["llama"], tmp_path / "big", torch.float16)
    for module in taper_norms(big).values():
        module.fixed_norm.c.fill_(1e6)
    tn.save_pretrained(big, tmp_path / "big", max_shard_size="6KB")
    with pytest.raises(tn.FoldError, match=r"does not fit torch\.float16"):
        shards.fold_folder(tmp_path / "big", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("what", ["shape", "missing", "more", "state", "cut"])
def test_broken_checkpoints(half, tmp_path, what):
    folder = tmp_path / "half"
    shutil.copytree(half / "llama", folder)
    path = sorted(folder.glob("model-*.safetensors"))[0]
    state = load_file(path)
    index = json.loads((folder / untrusted.INDEX).read_text())
    name = next(n for n in state if state[n].dim() == 2)
    if what == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif what == "state":
        tensors = load_file(folder / "taper.safetensors")
        save_file({k: t + 0.1 if k.startswith("c.") else t for k, t in tensors.items()}, folder / "taper.safetensors")
    else:
        if what == "shape":
            state[name] = torch.cat([state[name], state[name]])
        elif what == "missing":
            del state[name], index["weight_map"][name]
        else:
            state["evil"], index["weight_map"]["evil"] = torch.ones(2), path.name
        save_file(state, path)
        (folder / untrusted.INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="half"):
        shards.fold_folder(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_constant_prefix_goes_along(tmp_path):
    model, _ = half_tapered(ROWS["llama"], tmp_path / "half", torch.float32, prefix=(3, 5))
    wanted = tn.fold_(model, allow_tail=True)
    report = shards.fold_folder(tmp_path / "half", tmp_path / "out", compare=True)
    loaded, _ = tn.from_pretrained(tmp_path / "out")
    assert report.prefix == wanted.prefix == (3, 5)
    same_bits(model.state_dict(), loaded.state_dict())


def test_the_command_streams_what_is_in_shards(half, tmp_path, capsys, monkeypatch):
    from tapernorm import commands

    commands.fold_model(str(half / "llama"), str(tmp_path / "out"), None, False, False, True)
    printed = json.loads(capsys.readouterr().out)
    assert printed["fold"]["shards"] > 1 and printed["fold"]["max_abs_logit_error"] is None
    commands.fold_model(str(half / "llama"), str(tmp_path / "memory"), False, False, False, True)
    assert json.loads(capsys.readouterr().out)["fold"]["max_abs_logit_error"] is not None
    same_bits(*(tn.from_pretrained(tmp_path / place)[0].state_dict() for place in ("out", "memory")))
    commands.fold_model(str(half / "gpt2"), str(tmp_path / "text"), None, False, False, False)
    assert "rows read again" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--compare is for"):
        commands.fold_model(str(half / "llama"), str(tmp_path / "x"), False, True, False, False)


# Large


def large(folder, gigabytes, shards_of=1 << 30):
    """A half-tapered Llama of some size in bfloat16, written without ever being in memory."""
    width, inner = 2048, 5632
    per_layer = 2 * (4 * width * width + 3 * width * inner)
    layers = max(1, round(gigabytes * 1e9 / per_layer))
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=16, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    small = transformers.LlamaForCausalLM(config.from_dict({**config.to_dict(), "num_hidden_layers": 1}))
    small = small.bfloat16()
    controller = tn.taper_(small, tn.TaperConfig())
    for module in taper_norms(small).values():
        module.set_gate(0.0)
        module.fixed_norm.c.fill_(0.37)
    tn.save_pretrained(small, folder)
    one = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    values = json.loads((folder / "config.json").read_text())
    values["num_hidden_layers"] = layers
    (folder / "config.json").write_text(json.dumps(values))
    tensors, scalars = load_file(folder / "taper.safetensors"), json.loads((folder / "taper.json").read_text())
    for layer in range(1, layers):
        for key in [k for k in tensors if ".layers.0." in k]:
            tensors[key.replace(".layers.0.", f".layers.{layer}.")] = tensors[key]
        for key in [k for k in scalars if ".layers.0." in k]:
            scalars[key.replace(".layers.0.", f".layers.{layer}.")] = scalars[key]
    assert len(controller.sites) == 2
    save_file({k: t.clone() for k, t in tensors.items()}, folder / "taper.safetensors")
    (folder / "taper.json").write_text(json.dumps(scalars))
    block = {k: t for k, t in one.items() if ".layers.0." in k}
    places, number, batch, size = {}, 0, {k: t for k, t in one.items() if k not in block}, 0

    def put():
        nonlocal number, batch, size
        number += 1
        name = f"model-{number:05d}-of-99999.safetensors"
        save_file(batch, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(batch, name))
        batch, size = {}, 0

    for layer in range(layers):
        for key, tensor in block.items():
            batch[key.replace(".layers.0.", f".layers.{layer}.")] = tensor.clone()
            size += tensor.nbytes
        if size > shards_of:
            put()
    put()
    (folder / untrusted.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return sum(path.stat().st_size for path in folder.glob("model-*")), max(
        path.stat().st_size for path in folder.glob("model-*")
    )


MEASURE = """
import json, sys, time
import torch
torch.set_num_threads(1)
from tapernorm import shards
started = time.perf_counter()
report = shards.fold_folder(sys.argv[1], sys.argv[2])
with open("/proc/self/status") as file:  # ru_maxrss would be that of the parent, too
    peak = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
seconds, cpu = time.perf_counter() - started, time.process_time()
print(json.dumps({"seconds": seconds, "cpu": cpu, "peak": peak, "rows": report.rows_checked}))
"""


def measured(root, gigabytes, shards_of):
    """(seconds of the fold, of a copy, peak memory, bytes, bytes of the largest shard) in a process of its own."""
    total, largest = large(root / "half", gigabytes, shards_of)
    os.sync()
    started = time.perf_counter()
    (root / "copy").mkdir()
    for path in sorted((root / "half").glob("model-*")):
        shutil.copyfile(path, root / "copy" / path.name)
        with (root / "copy" / path.name).open("rb") as file:
            os.fsync(file.fileno())
    copying = time.perf_counter() - started
    shutil.rmtree(root / "copy")
    command = [sys.executable, "-c", MEASURE, str(root / "half"), str(root / "out")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    out = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert out.returncode == 0, out.stderr[-2000:]
    found = json.loads(out.stdout.splitlines()[-1])
    print(f"of the process: {found}")
    return found["seconds"], copying, found["peak"], total, largest


@pytest.mark.slow
def test_six_gigabytes(tmp_path):
    seconds, copying, peak, total, largest = measured(tmp_path, 6.0, 1 << 30)
    print(f"{total / 1e9:.2f} GB: {seconds:.1f} s, a copy {copying:.1f} s, peak {peak / 1e9:.2f} GB, shard {largest}")
    assert peak < largest + 1e9
    assert seconds < 2 * copying


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_memory_stays_small(tmp_path):
    """A checkpoint of half a gigabyte: the peak is that of Python, torch and transformers, and a little."""
    _, _, peak, total, largest = measured(tmp_path, 0.3, 100 << 20)
    print(f"peak {peak / 1e9:.2f} GB")
    assert total > 4e8 and largest > 1e8 and peak < 1e9
