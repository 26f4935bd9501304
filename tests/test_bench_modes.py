"""Every mode, cache and variant, eager and compiled, computes what it is named after, and settings are refused early.

torch.compile stands on a backend here that traces and compiles nothing: what is tested is what is compiled and when.
"""

import copy
import functools
import io

import pytest
import torch

import tiny_models
from tapernorm import bandwidth
from tapernorm import bench as bench_module
from tapernorm.bench import GRAPHS, Setting, Work, bench, compile_modes
from tapernorm.bench_command import read_device, read_dtype, settings, tables
from tapernorm.kernels import count_rows, layers_of
from tapernorm.variants import AGAIN, variants
from tapernorm.verify import greedy_tokens

torch.set_num_threads(1)

MODES = (
    ("decode", "dynamic"), ("decode", "static"), ("last-token", "none"), ("prefill", "dynamic"), ("prefill", "static"),
)  # fmt: skip
IDS = tiny_models.ids(rows=2, length=6)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(bandwidth, "_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(bench_module, "_SHORTEST", 0.0)
    bandwidth.copy_bandwidth.cache_clear()
    yield
    bandwidth.copy_bandwidth.cache_clear()


@pytest.fixture
def traced(monkeypatch):
    """torch.compile that traces and then runs what it traced."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, mode: real(function, backend="eager"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@functools.cache
def models():
    return variants(tiny_models.tiny("llama", layers=1).eval(), again=True)


@pytest.mark.parametrize("mode, cache", MODES)
def test_every_mode_times_every_variant(mode, cache):
    rows = bench(models(), batch=2, prompt=6, new_tokens=3, rounds=2, name="tiny", mode=mode, cache=cache)
    assert [row["variant"] for row in rows] == list(models())
    for row in rows:
        assert (row["mode"], row["cache"], row["batch"], row["prompt"]) == (mode, cache, 2, 6)
        assert row["new_tokens"] == (3 if mode == "decode" else 0)
        assert row["ratio_p20"] <= row["ratio"] <= row["ratio_p80"]
        share = row["tokens_per_second"] * row["bytes_per_token"] / row["copy_bandwidth"]
        assert row["bandwidth_share"] == pytest.approx(share, rel=0.01) and share > 0
    assert rows[0]["ratio"] == 1.0 and rows[-1]["variant"] == AGAIN


@pytest.mark.parametrize("how", ("", "default"))
@pytest.mark.parametrize("mode, cache", MODES)
@torch.no_grad()
def test_what_is_timed_is_the_model(mode, cache, how, traced):
    """Twice, so that a cache that kept something from the first time would show."""
    model = models()["folded"]
    work = Work(model, Setting(mode, 2, cache, 6, 4 if mode == "decode" else 1, (how,)), how, IDS)
    assert (work.step is work.eager) is (how == "")
    wanted = greedy_tokens(model, IDS, 5)
    for _ in range(2):
        made = work.run(*work.prepare())
        assert torch.equal(made, wanted[:, 4:] if mode == "decode" else wanted[:, :1])
    if cache != "none":
        (held,) = work.cache.values()
        assert int(held.get_seq_length()) == (6 + 4 if mode == "decode" else 6)
    assert work.tokens == 2 * (4 if mode == "decode" else 6)


@pytest.mark.parametrize("mode, cache", (("decode", "static"), ("last-token", "none")))
@torch.no_grad()
def test_a_compilation_in_a_timed_part_is_an_error(mode, cache, traced):
    work = Work(models()["stock"], Setting(mode, 2, cache, 6, 1, ("default",)), "default", IDS)
    with pytest.raises(RuntimeError, match="fail_on_recompile"):
        work.seconds()
    work.warm_up()
    assert work.seconds(2) > 0


def test_each_candidate_is_compiled_for_itself(traced):
    """torch.compile keeps what it made by code object, and looks it up among all of one code object."""
    setting = Setting("last-token", 2, "none", 6)
    works = [Work(model, setting, "default", IDS) for model in models().values()]
    assert len({id(work.step.__wrapped__.__code__) for work in works}) == len(works)


@torch.no_grad()
def test_bytes_that_must_be_read():
    model = tiny_models.tiny("llama", layers=1, tie_word_embeddings=False).eval()
    everything = sum(p.nbytes for p in model.parameters())
    table = model.get_input_embeddings().weight.nbytes
    assert bandwidth.weight_bytes(model) == everything - table
    tied = tiny_models.tiny("llama", layers=1, tie_word_embeddings=True).eval()
    assert bandwidth.weight_bytes(tied) == everything - table  # read as the head
    place = 2 * 8 * 4  # key and value of one head of 8 in float32
    for cache, places in (("static", 6 + 3), ("dynamic", 6 + 2)):  # in the mean of steps with 7, 8 and 9
        work = Work(model, Setting("decode", 2, cache, 6, 3), "", IDS)
        work.warm_up()
        assert work.bytes_per_token() == pytest.approx((everything - table) / 2 + places * place)
    assert bandwidth.copy_bandwidth(torch.device("cpu"), 1) > 1e6


def test_counts():
    """An RMS norm is seven operations, by transformers or by torch: power, sum, division, sum, root, two products.
    Three maps as one and two as one are three products less, and queries and keys turned together are one rotation
    less: two products, a negation, a concatenation, a sum."""
    rows = {row["variant"]: row for row in count_rows(models(), name="tiny")}
    layer = {variant: row["per_layer"] for variant, row in rows.items()}
    assert rows["stock"]["counted"] == "aten operations" and rows["stock"]["layers"] == 1
    assert layer["stock"] == layer[AGAIN] and rows["stock"]["per_token"] == rows[AGAIN]["per_token"]
    assert layer["stock"] - layer["folded"] == 2 * 7 == layer["functional"] - layer["folded"]
    assert layer["folded"] < layer["unfused"] < layer["stock"]
    assert layer["folded"] - layer["folded-fused"] == 3 + 5
    for variant in ("unfused", "folded", "folded-fused"):  # nothing changed outside the layer
        outside = rows[variant]["per_token"] - layer[variant]
        assert outside == rows["stock"]["per_token"] - layer["stock"]
    assert len(layers_of(models()["stock"])) == 1
    with pytest.raises(ValueError, match="GPU"):
        count_rows({"stock": models()["stock"]}, compile="default")


def test_counts_scale_with_depth():
    made = {depth: tiny_models.tiny("llama", layers=depth).eval() for depth in (1, 3)}
    one, three = (count_rows({"stock": made[depth]})[0] for depth in (1, 3))
    assert three["per_layer"] == one["per_layer"] and three["layers"] == 3
    assert three["per_token"] - one["per_token"] == 2 * one["per_layer"]


@pytest.mark.parametrize(
    "wrong, word",
    [
        ({"mode": "decod"}, "decode"), ({"cache": "statik"}, "static"), ({"mode": "last-token"}, "none"),
        ({"rounds": 0}, "rounds"), ({"batch": 0}, "batch"), ({"compile": ("fast",)}, "fast"), ({"compile": ()}, "None"),
        ({"compile": (GRAPHS,)}, "static cache"),
    ],
)  # fmt: skip
def test_settings_that_are_refused(wrong, word):
    with pytest.raises(ValueError, match=word):
        Setting(**wrong)


def test_lengths_beyond_the_context():
    model = {"stock": models()["stock"]}  # 64 tokens
    with pytest.raises(ValueError, match="context of 64"):
        bench(model, mode="prefill", prompt=65)
    row = bench(model, prompt=1000, new_tokens=1000, rounds=1)[0]
    assert (row["prompt"], row["new_tokens"]) == (32, 31)


def test_a_model_that_cannot_leave_out_logits():
    class Old(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config = models()["stock"].config
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, input_ids):
            raise AssertionError

    with pytest.raises(ValueError, match="Old has no logits_to_keep"):
        bench({"stock": Old()}, mode="last-token", prompt=4)


OPTIONS = {"mode": None, "batch": None, "cache": None, "length": None, "new_tokens": 8, "rounds": 3, "compile": False}


def test_settings_of_options():
    cpu = torch.device("cpu")
    found = settings(OPTIONS, cpu)
    assert [(s.mode, s.batch, s.cache, s.prompt) for s in found] == [
        ("decode", 1, "dynamic", 16),
        ("decode", 4, "dynamic", 16),
    ]
    asked = {"mode": ["last-token", "prefill"], "cache": ["static", "dynamic"], "batch": [2], "length": [128, 256]}
    found = settings(OPTIONS | asked, cpu)
    assert [(s.mode, s.cache, s.prompt) for s in found] == [
        ("last-token", "none", 128), ("last-token", "none", 256), ("prefill", "static", 128),
        ("prefill", "static", 256), ("prefill", "dynamic", 128), ("prefill", "dynamic", 256),
    ]  # fmt: skip


def test_compile_modes(monkeypatch):
    gpu = torch.device("cuda")
    assert compile_modes(gpu, "static") == ("", "default", "reduce-overhead") == compile_modes(gpu, "none")
    assert compile_modes(gpu, "dynamic") == ("", "default")
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ValueError, match="C\\+\\+ compiler"):
        compile_modes(torch.device("cpu"), "static")


def test_devices_and_dtypes():
    assert read_device("cpu") == torch.device("cpu") and read_dtype(None) is None
    assert read_dtype("bfloat16") is torch.bfloat16
    for wrong in ("tpu9", "meta", "cuda:99"):
        with pytest.raises(ValueError, match="device"):
            read_device(wrong)
    with pytest.raises(ValueError, match="bfloat16"):
        read_dtype("bfloat61")


def test_the_table_fits_a_narrow_terminal():
    from rich.console import Console

    rows = bench(models(), prompt=4, new_tokens=2, rounds=2)
    rows += bench({"stock": models()["stock"]}, prompt=4, rounds=1, mode="last-token")
    made = tables(rows, "some/folder/of/a-model")
    assert len(made) == 2
    for width in (80, 60):
        console = Console(width=width, record=True, file=io.StringIO())
        for each in made:
            console.print(each)
        text = console.export_text()
        assert all(name in text for name in models()) and max(map(len, text.splitlines())) <= width
    assert "last-token, batch 1, T 4, eager, float32" in " ".join(text.split())


@pytest.mark.slow
def test_a_variant_against_itself_reads_one():
    """No candidate may gain from its place in a round, or from a cache that is warm for it alone."""
    model = tiny_models.tiny("llama", layers=4, hidden_size=64, intermediate_size=128).eval()
    same = {"stock": model, "same": model, "copy": copy.deepcopy(model)}
    for row in bench(same, prompt=8, new_tokens=16, rounds=41):
        assert row["ratio"] == pytest.approx(1.0, abs=0.05), row["variant"]


@pytest.mark.slow
def test_compiled_by_inductor():
    """Real compilation, which takes minutes; the numbers stay those of the model."""
    compile_modes(torch.device("cpu"), "static")
    two = {name: models()[name] for name in ("stock", "folded")}
    for mode, cache in MODES:
        rows = bench(two, prompt=6, new_tokens=4, rounds=2, mode=mode, cache=cache, compile=("", "default"))
        assert {(row["variant"], row["compiled"]) for row in rows} == {
            (name, how) for name in two for how in (False, True)
        }
