"""The variants compute what they claim, and the rows say what was measured. Nothing here depends on the clock."""

import csv

import pytest
import torch
import transformers

import tiny_models
from tapernorm import TaperConfig, get_controller, taper_
from tapernorm import bench as bench_module
from tapernorm.bench import append_csv, bench
from tapernorm.hub import save_pretrained
from tapernorm.modules import taper_norms
from tapernorm.variants import VARIANTS, stock_like, variants

torch.set_num_threads(1)

FAMILIES = ("llama", "gemma", "gpt2")
# DESIGN, the public API
SCHEMA = {"model", "mode", "variant", "batch", "cache", "compiled", "dtype", "tokens_per_second", "ratio"}


def tiny(family="llama", layers=2):
    return tiny_models.tiny(family, layers=layers, max_position_embeddings=128).eval()


IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


def close(a, b):
    largest = float(b.abs().max())
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * largest)


def kinds(model):
    return sorted(type(m).__name__ for m in model.modules() if type(m).__name__.endswith(("Norm", "Identity")))


@pytest.mark.parametrize("arm", ("internal", "all"))
@pytest.mark.parametrize("family", FAMILIES)
def test_variants_of_a_stock_model(family, arm):
    model = tiny(family)
    before = logits(model)
    made = variants(model, arm=arm)
    fuses = family != "gpt2"  # whose queries, keys and values are one product already
    assert tuple(made) == (VARIANTS if fuses else VARIANTS[:-1])
    assert torch.equal(logits(made["stock"]), before)
    close(logits(made["functional"]), before)
    close(logits(made["folded"]), logits(made["unfused"]))
    if fuses:
        close(logits(made["folded-fused"]), logits(made["folded"]))
    assert not torch.allclose(logits(made["folded"]), before, rtol=1e-2)
    assert not any(variant.training for variant in made.values())
    # Those of a controller would break every compiled graph of the unfused one.
    assert not any(m._forward_pre_hooks for variant in made.values() for m in variant.modules())
    # The norms are what they are called.
    count = 5 if arm == "all" else 4
    assert kinds(made["functional"]) == ["FunctionalNorm"] * 5
    assert len(taper_norms(made["unfused"])) == count
    assert {m.path for m in taper_norms(made["unfused"]).values()} == {"fixed"}
    assert kinds(made["folded"]).count("Identity") == count
    assert not taper_norms(made["folded"]) and not taper_norms(made["stock"])
    assert get_controller(model) is None and torch.equal(logits(model), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_variants_of_a_tapered_model_are_the_model(family):
    model = tiny(family)
    stock = logits(model)
    controller = taper_(model, TaperConfig(warmup_steps=1, taper_steps=1, keep=("*.0.*",)))
    model.train()
    model(input_ids=IDS)
    model.eval()
    controller.step()
    controller.step()
    with torch.no_grad():
        for module in taper_norms(model).values():
            module.fixed_norm.weight.mul_(torch.rand_like(module.fixed_norm.weight) + 0.5)
    tapered = logits(model)
    made = variants(model)
    assert torch.equal(logits(made["stock"]), stock)
    close(logits(made["functional"]), stock)
    assert torch.equal(logits(made["unfused"]), tapered)
    close(logits(made["folded"]), tapered)
    assert len(taper_norms(made["unfused"])) == 2  # its own choice of norms
    assert get_controller(model) is controller and torch.equal(logits(model), tapered)


def test_variants_of_a_model_in_warm_up():
    model = tiny()
    taper_(model, TaperConfig(keep=("*.0.*",)))
    before = logits(model)
    made = variants(model)
    assert torch.equal(logits(made["stock"]), before)
    assert len(taper_norms(made["unfused"])) == 2
    close(logits(made["folded"]), logits(made["unfused"]))


def test_a_deep_model_does_not_overflow():
    """With scales of 1 a gated MLP, which is quadratic, blows up within some twenty layers."""
    made = variants(tiny(layers=24), arm="all")
    assert torch.isfinite(logits(made["folded"])).all()
    close(logits(made["folded"]), logits(made["unfused"]))


def test_rows():
    model = tiny()
    calls = []
    rows = bench(
        variants(model), batch=2, prompt=3, new_tokens=2, rounds=3, name="tiny", progress=lambda: calls.append(1)
    )
    assert [row["variant"] for row in rows] == list(VARIANTS)
    assert len(calls) == 4  # one round is not counted
    assert rows[0]["python"] and rows[0]["transformers"] == transformers.__version__
    assert len({tuple(row) for row in rows}) == 1
    for row in rows:
        assert set(row) >= SCHEMA
        wanted = {"model": "tiny", "mode": "decode", "batch": 2, "cache": "dynamic", "compiled": False, "rounds": 3}
        assert {k: row[k] for k in wanted} == wanted
        assert (row["dtype"], row["prompt"], row["new_tokens"]) == ("float32", 3, 2)
        assert row["compiled"] is False
        assert 0 < row["p20"] <= row["tokens_per_second"] <= row["p80"]
        assert row["ratio"] > 0
        assert row["device"] and row["threads"] == torch.get_num_threads() and row["torch"] == torch.__version__
    assert rows[0]["ratio"] == 1.0


def test_the_ratio_is_to_the_first_without_a_stock_model():
    model = tiny(layers=1)
    rows = bench({"one": model, "two": model}, prompt=2, new_tokens=1, rounds=2)
    assert rows[0]["ratio"] == 1.0 and rows[1]["ratio"] > 0


class Clock:
    """Stands for `Work.seconds`: what each model takes, in a machine that slows down from round to round."""

    def __init__(self, monkeypatch, seconds):
        self.seconds, self.calls = seconds, []
        monkeypatch.setattr(bench_module.Work, "warm_up", lambda work: None)
        monkeypatch.setattr(bench_module, "_repeats", lambda work: 1)
        monkeypatch.setattr(bench_module.Work, "seconds", lambda work, repeats=1: self.take(work))

    def take(self, work):
        self.calls.append((work.model, work.how, work.ids, work.setting))
        number = (len(self.calls) - 1) // len(self.seconds)
        return self.seconds[work.model, work.how] * (1 + number)


def test_the_ratio_is_the_median_within_rounds(monkeypatch):
    """The machine slows down from round to round; the second model is twice as fast in each of them."""
    model, twin = tiny(layers=1), tiny(layers=1)
    Clock(monkeypatch, {(model, ""): 2.0, (twin, ""): 1.0})
    rows = bench({"stock": model, "fast": twin}, batch=3, new_tokens=10, rounds=5)
    assert [row["ratio"] for row in rows] == [1.0, 2.0]
    assert [(row["ratio_p20"], row["ratio_p80"]) for row in rows] == [(1.0, 1.0), (2.0, 2.0)]
    # rounds 1 to 5 take 2 to 6 units; the one before is not counted
    assert rows[0]["tokens_per_second"] == pytest.approx(3 * 10 / (2.0 * 4))
    assert rows[1]["tokens_per_second"] == pytest.approx(3 * 10 / 4)
    assert rows[1]["p20"] == pytest.approx(3 * 10 / 5) and rows[1]["p80"] == pytest.approx(3 * 10 / 3)


def test_the_ratio_is_to_stock_compiled_the_same_way(monkeypatch):
    stock, folded = tiny(layers=1), tiny(layers=1)
    Clock(monkeypatch, {(stock, ""): 6.0, (folded, ""): 4.0, (stock, "default"): 3.0, (folded, "default"): 1.0})
    rows = bench({"stock": stock, "folded": folded}, rounds=2, compile=("", "default"))
    found = {(row["variant"], row["compile_mode"]): row["ratio"] for row in rows}
    assert found[("folded", "")] == pytest.approx(1.5) and found[("folded", "default")] == pytest.approx(3.0)
    assert found[("stock", "")] == found[("stock", "default")] == 1.0
    assert [row["compiled"] for row in rows] == [False, False, True, True]


def test_every_variant_decodes_the_same_prompt_and_all_take_turns(monkeypatch):
    models = {name: tiny(layers=1) for name in ("stock", "a", "b")}
    clock = Clock(monkeypatch, {(model, ""): 1.0 for model in models.values()})
    bench(models, batch=2, prompt=5, new_tokens=7, rounds=5)
    assert all(torch.equal(ids, clock.calls[0][2]) and ids.shape == (2, 5) for _, _, ids, _ in clock.calls)
    order = [next(k for k, m in models.items() if m is called) for called, *_ in clock.calls]
    rounds = [tuple(order[i : i + 3]) for i in range(0, 18, 3)]
    assert {frozenset(each) for each in rounds} == {frozenset(models)}
    assert len(set(rounds)) > 2  # in changing order


def test_csv(tmp_path):
    path = tmp_path / "deep" / "rows.csv"
    rows = [{"a": 1, "b": "x, y"}, {"a": 2, "b": "é"}]
    append_csv(path, rows)
    append_csv(path, [{"b": "z", "a": 3}])  # in another order
    append_csv(path, [])
    with path.open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert found == [{"a": "1", "b": "x, y"}, {"a": "2", "b": "é"}, {"a": "3", "b": "z"}]
    assert path.read_text(encoding="utf-8").count("a,b") == 1
    before = path.read_bytes()
    with pytest.raises(ValueError, match="'c'"):
        append_csv(path, [{"a": 4, "b": "", "c": 5}])
    assert path.read_bytes() == before


def test_stock_like(tmp_path):
    model = tiny()
    save_pretrained(model, tmp_path / "stock")
    assert torch.equal(logits(stock_like(str(tmp_path / "stock"))), logits(model))
    save_pretrained(variants(model)["folded"], tmp_path / "folded")
    stock = stock_like(str(tmp_path / "folded"))
    assert type(stock) is transformers.LlamaForCausalLM
    assert kinds(stock) == ["LlamaRMSNorm"] * 5
    assert stock.config.hidden_size == 16 and stock.dtype == torch.float32
