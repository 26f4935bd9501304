"""Every family that folds, in a fresh process: transformers alone loads the folder, with the flag and not without,
and never a model whose norms have grown back; with tapernorm it needs no flag."""

import functools
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

import tapernorm as tn
from families import FAMILIES
from folders import BLOCKED, taper_row, to_gate
from tapernorm.sites import run
from tapernorm.trace import tensors

ROWS = {row.name: row for row in FAMILIES if row.goes and row.model_type != "timm"}

# Facts about one folder; what does not hold is recorded, by family.
BODY = """
import pathlib, torch, transformers as tf
torch.set_num_threads(1)
root, trust, families = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]
failed = {family: [] for family in families}

def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict) or hasattr(value, "items"):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)

@torch.no_grad()
def outputs(model, example):
    torch.manual_seed(0)
    return [t.float() for t in tensors(model.eval()(**example)) if t.is_floating_point()]

def differ(new, old):
    if len(new) != len(old):
        return f"{len(new)} outputs and not {len(old)}"
    error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(new, old))
    return "" if error < 1e-5 else f"off by {error:.1g}"

def refuses(load, *words):
    try:
        load()
    except Exception as error:
        return "" if all(word in str(error) for word in words) else f"{words} not in: {error}"
    return "it loads"

def facts(family, folder, made):
    values = json.loads((folder / "config.json").read_text())
    arch = values["architectures"][0]
    autos = [k for k, v in values["auto_map"].items() if v.endswith("." + arch)]
    auto, stock = getattr(tf, autos[0] if autos else arch.removeprefix("TaperNorm")), arch.removeprefix("TaperNorm")
    if not autos:  # no Auto class builds it: by the module that AutoConfig has loaded
        config = tf.AutoConfig.from_pretrained(folder, **trust)
        auto, flags = getattr(sys.modules[type(config).__module__], arch), {}
    else:
        flags = trust
    model, info = auto.from_pretrained(folder, output_loading_info=True, **flags)
    yield "class", "" if type(model).__name__ == arch else type(model).__name__
    yield "keys", str({k: v for k, v in info.items() if v}) if any(info.values()) else ""
    yield "norms", "" if norms(model) == made["norms"] else f"{norms(model)}"
    yield "outputs", differ(outputs(model, made["example"]), made["outputs"])
    yield "as stock", refuses(lambda: getattr(tf, stock).from_pretrained(folder), "norms were taken out")
    half = root / "moved" / "tapered" / family
    yield "half-tapered", refuses(lambda: auto.from_pretrained(half, **flags), "tapernorm.from_pretrained")
    yield "half-tapered as stock", refuses(lambda: getattr(tf, stock).from_pretrained(half), "norms were taken out")
    if not trust:
        return
    if autos:
        yield "no flag", refuses(lambda: auto.from_pretrained(folder))
    again = root / "again" / family
    model.save_pretrained(again)
    yield "saved again", differ(outputs(auto.from_pretrained(again, **flags), made["example"]), made["outputs"])
    half = auto.from_pretrained(folder, dtype=torch.bfloat16, **flags)
    kinds = {p.dtype for n, p in half.named_parameters()} - {torch.float32 if made["wide"] else None}
    yield "bfloat16", "" if kinds == {torch.bfloat16} else str(kinds)
    placed = auto.from_pretrained(folder, device_map="cpu", **flags)
    yield "device_map", differ(outputs(placed, made["example"]), made["outputs"])
    with torch.device("meta"):
        bare = (auto.from_config if autos else auto._from_config)(model.config, **flags)
    yield "meta", "" if all(p.is_meta for p in bare.parameters()) and norms(bare) == made["norms"] else "not all meta"
    values["removed_norms"] = []
    (again / "config.json").write_text(json.dumps(values))
    if family == "olmo":
        return  # a norm without a weight leaves no trace in the weights, so config.json is all there is to go by
    yield "norms grown back", refuses(lambda: auto.from_pretrained(again, **flags), "not of one model")

def norms(model):
    return sorted(n for n, m in model.named_modules() if "norm" in type(m).__name__.lower() and not list(m.children()))

for family in families:
    try:
        made = torch.load(root / f"{family}.pt")
        for what, wrong in facts(family, root / "moved" / "free" / family, made):
            if wrong:
                failed[family].append(f"{what}: {wrong}")
    except Exception as error:
        failed[family].append(f"{type(error).__name__}: {error}")
print()
print(json.dumps(failed))
"""


def norms(model):
    kinds = [(n, m) for n, m in model.named_modules() if "norm" in type(m).__name__.lower()]
    return sorted(n for n, m in kinds if not list(m.children()))


@torch.no_grad()
def make(row, root):
    """A half-tapered folder and a norm-free one, float32, and what the model puts out."""
    before = torch.get_default_dtype()
    changes = {"experts_implementation": "eager"} if row.is_moe else {}
    model, example = row.build(**changes), row.example
    taper_row(row, model, example)
    to_gate(model)
    tn.save_pretrained(model, root / "written" / "tapered" / row.name)
    tn.fold_(model, example=example)
    torch.manual_seed(0)
    wanted = [t.clone() for t in tensors(run(model, example)) if t.is_floating_point()]
    tn.save_pretrained(model, root / "written" / "free" / row.name)
    wide = bool(model._keep_in_fp32_modules_strict or model._keep_in_fp32_modules)
    made = {"example": example, "outputs": wanted, "norms": norms(model), "wide": wide}
    torch.save(made, root / f"{row.name}.pt")
    assert torch.get_default_dtype() == before


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("alone")
    for row in ROWS.values():
        make(row, root)
    shutil.move(root / "written", root / "moved")
    return root


@pytest.fixture(scope="module")
def facts(root):
    @functools.cache
    def of(start):
        lines, trust = {
            "alone": (BLOCKED, {"trust_remote_code": True}),
            "with-tapernorm": ("import sys, json, tapernorm\n", {}),
        }[start]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(root / "cache"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", lines + BODY, str(root), json.dumps(trust), *ROWS]
        result = subprocess.run(
            command, env=environment, cwd=root, text=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=600
        )
        assert result.returncode == 0, result.stderr[-2000:]
        return json.loads(result.stdout.splitlines()[-1])

    return of


@pytest.mark.parametrize("start", ["alone", "with-tapernorm"])
@pytest.mark.parametrize("name", ROWS)
def test_a_fresh_process_loads_every_family(name, start, facts):
    assert facts(start)[name] == []
