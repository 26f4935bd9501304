"""Folders from elsewhere: whatever is wrong with one, loading it ends in a ValueError of one sentence, runs no code
and makes no other model."""

import copy
import json
import math
import random
import shutil
import signal
import struct

import pytest
import torch

import tapernorm as tn
from broken import (
    UP,
    WEIGHTS,
    both,
    config,
    directory,
    edit,
    entry,
    gates,
    index,
    link,
    pipe,
    raw,
    shard,
    text,
    weights,
)
from folders import byte_tokenizer, folded_by_hand, logits, tiny
from tapernorm import _folder, untrusted


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One folder of each kind: norm-free, in shards, half-tapered, stock."""
    root = tmp_path_factory.mktemp("made")
    tn.save_pretrained(folded_by_hand("llama"), root / "free", tokenizer=byte_tokenizer())
    tn.save_pretrained(folded_by_hand("gpt2"), root / "gpt2")
    tn.save_pretrained(tiny("llama"), root / "stock")
    model = tiny("llama")
    tn.taper_(model, tn.TaperConfig())
    tn.save_pretrained(model, root / "tapered")
    loaded, _ = tn.from_pretrained(root / "free")
    loaded.save_pretrained(root / "shards", max_shard_size="30KB")
    assert len(list((root / "shards").glob("model-*.safetensors"))) > 2
    return root


@pytest.fixture(autouse=True)
def no_hang():
    def stop(*args):
        raise AssertionError("it hangs")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)


Q = "model.layers.0.self_attn.q_proj"
EVIL = "open(__file__ + '.ran', 'w').close()\n"

# (folder, what is done to it, a part of the sentence)
BROKEN = {
    # config.json
    "config-empty": ("free", text("config.json", ""), "not sound JSON"),
    "config-cut": ("free", raw(lambda data: data[: len(data) // 2], "config.json"), "not sound JSON"),
    "config-a-list": ("free", text("config.json", "[]"), "holds a list and not an object"),
    "config-binary": ("free", raw(lambda data: b"\xff\xfe" + data, "config.json"), "not sound JSON"),
    "config-deep": ("free", text("config.json", "[" * 100_000), "not sound JSON"),
    "config-nan": ("free", config(guarded={"rms_norm_eps": math.nan}), "NaN"),
    "config-long-number": ("free", text("config.json", '{"vocab_size": ' + "9" * 10_000 + "}"), "not sound JSON"),
    "config-gone": ("free", lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "config-a-folder": ("free", directory("config.json"), "no config.json"),
    "config-a-pipe": ("free", pipe("config.json"), "no config.json|not a file"),
    "type-a-number": ("free", config(model_type=5), "model_type is a int"),
    "type-of-another": ("free", config(model_type="tapernorm_gpt2"), "free"),
    "type-stock": ("free", config(model_type="llama", architectures=["LlamaForCausalLM"]), "free"),
    "type-unknown": ("free", config(model_type="tapernorm_nonesuch"), "needs code from its own folder"),
    "type-a-path": ("free", config(model_type="../../evil"), "free"),
    "architectures-a-text": ("free", config(architectures="TaperNormLlamaForCausalLM"), "must be a list"),
    "architectures-numbers": ("free", config(architectures=[5]), "must hold names"),
    "architectures-none": ("tapered", config(architectures=[]), "tapered"),
    "architectures-odd": ("tapered", config(architectures=["os.system"]), "tapered"),
    "kernel-from-the-hub": ("free", config(attn_implementation="somebody/evil-kernel"), "names code from elsewhere"),
    "kernel-inside": ("stock", config(_attn_implementation_internal="a/b"), "names code from elsewhere"),
    "code-unknown-type": (
        "stock", both(config(model_type="evil", auto_map={"AutoConfig": "evil.Config"}), text("evil.py", EVIL)),
        "needs code from its own folder",
    ),
    "code-of-a-tokenizer": (
        "free",
        both(edit("tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", None]}, tokenizer_class="T"),
             text("evil.py", EVIL)),
        "needs code from its own folder",
    ),
    "code-elsewhere": ("stock", config(model_type="evil", auto_map={"AutoConfig": "a/b--evil.Config"}), "needs code"),
    "layers-many": ("free", config(num_hidden_layers=900_000), "num_hidden_layers is 900000"),
    "layers-endless": ("free", config(num_hidden_layers=10**12), "which no model has"),
    "layers-fewer": ("free", config(num_hidden_layers=1), "free"),
    "layers-negative": ("free", config(num_hidden_layers=-1), "free"),
    "layers-a-text": ("free", config(num_hidden_layers="two"), "free"),
    "labels-endless": ("free", config(num_labels=10**11), "num_labels is"),
    "vocabulary-huge": ("free", config(vocab_size=10**11), "weights, and the files beside it hold"),
    "vocabulary-endless": ("free", config(vocab_size=10**30), "which no model has"),
    "vocabulary-other": ("free", config(vocab_size=301), "free"),
    "width-other": ("free", config(hidden_size=64), "free"),
    "width-zero": ("free", config(hidden_size=0), "free"),
    "heads-other": ("free", config(num_key_value_heads=4), "free"),
    "heads-zero": ("free", config(num_attention_heads=0), "free"),
    "activation-unknown": ("free", config(hidden_act="nonesuch"), "free"),
    "dtype-none": ("free", config(dtype="save"), "free"),
    "guard-a-text": ("free", config(guarded="abc"), "free"),
    "quantized-oddly": ("free", config(quantization_config={"quant_method": "nonesuch"}), "quantized by 'nonesuch'"),
    "quantized-a-list": ("free", config(quantization_config=[1]), "must be a dict"),
    # what the layout says
    "norms-grown-back": ("free", config(removed_norms=[]), "missing from it"),
    "norms-fewer": ("free", config(removed_norms=["model.norm"]), "missing from it"),
    "norms-a-text": ("free", config(removed_norms="model.norm"), "free"),
    "norms-numbers": ("free", config(removed_norms=[1, 2]), "free"),
    "norms-that-are-none": ("free", config(removed_norms=["model.layers.*.mlp"]), "is no norm"),
    "norms-unknown": ("free", config(removed_norms=["model.nonesuch"]), "has no module"),
    "norms-everything": ("free", config(removed_norms=["model"]), "is no norm"),
    "biases-fewer": ("free", config(added_biases=[]), "knows no place for 4"),
    "biases-unknown": ("free", config(added_biases=["model.nonesuch"]), "has no module"),
    "biases-of-no-linear": ("free", config(added_biases=["model.layers.*.mlp"]), "takes no bias"),
    "biases-of-an-embedding": ("free", config(added_biases=["model.embed_tokens"]), "takes no bias"),
    "prefix-without-tensors": (
        "free",
        config(constant_prefix=[1], prefix_shapes={"model.layers.*.self_attn": [2, 1, 8, 8]}), "missing from it",
    ),
    "prefix-huge": (
        "free",
        config(constant_prefix=[1], prefix_shapes={"model.layers.*.self_attn": [2, 10**11, 8, 8]}), "free",
    ),
    "prefix-oddly-shaped": ("free", config(constant_prefix=[1], prefix_shapes={"model.layers.*": "abc"}), "free"),
    # weights
    "weights-gone": ("free", lambda folder: (folder / WEIGHTS).unlink(), "free"),
    "weights-empty": ("free", raw(lambda data: b""), "not a whole safetensors file"),
    "weights-cut-short": ("free", raw(lambda data: data[:-4]), "not a whole safetensors file"),
    "weights-cut-in-the-header": ("free", raw(lambda data: data[:100]), "not a whole safetensors file"),
    "weights-too-long": ("free", raw(lambda data: data + b"evil"), "not a whole safetensors file"),
    "weights-shifted": ("free", raw(lambda data: b"\0" + data), "not a whole safetensors file"),
    "weights-a-page": ("free", raw(lambda data: b"<html>404</html>"), "not a whole safetensors file"),
    "weights-header-endless": ("free", raw(lambda data: b"\xff" * 8 + data[8:]), "not a whole safetensors file"),
    "weights-header-no-json": ("free", raw(lambda data: data[:8] + b"}" + data[9:]), "not a whole safetensors file"),
    "weights-shape": ("free", entry(UP, shape=[16, 64]), "free"),
    "weights-shape-too-large": ("free", entry(UP, shape=[10**9, 10**9]), "not a whole safetensors file"),
    "weights-dtype-unknown": ("free", entry(UP, dtype="X9"), "not a whole safetensors file"),
    "weights-dtype-whole": ("free", entry(UP, dtype="I32"), "is I32, which is not a dtype of weights"),
    "weights-overlapping": ("free", entry(UP, data_offsets=[0, 4096]), "not a whole safetensors file"),
    "weights-outside": ("free", entry(UP, data_offsets=[10**9, 10**9 + 4096]), "not a whole safetensors file"),
    "weights-fewer": ("free", weights(lambda s: s.pop(UP)), "missing from it, such as model.layers.1.mlp.up_proj"),
    "weights-renamed": ("free", weights(lambda s: s.update({"evil": s.pop(UP)})), "missing from it"),
    "weights-more": ("free", weights(lambda s: s.update({"evil.weight": torch.ones(2)})), "knows no place for 1"),
    "weights-with-a-norm": (
        "free", weights(lambda s: s.update({"model.norm.weight": torch.ones(32)})), "knows no place for 1",
    ),
    "weights-transposed": ("gpt2", weights(lambda s: s.update({
        "transformer.h.0.mlp.c_fc.weight": s["transformer.h.0.mlp.c_fc.weight"].T.contiguous()})), "gpt2"),
    "weights-of-another": ("free", weights(lambda s: (s.clear(), s.update(x=torch.ones(3)))), "free"),
    "weights-link-outside": ("free", link(WEIGHTS, "outside"), "leads out of its folder"),
    "weights-link-nowhere": ("free", link(WEIGHTS, "nowhere"), "cannot be read"),
    "weights-link-in-a-circle": ("free", link(WEIGHTS, "itself"), "cannot be read"),
    "weights-a-pipe": ("free", pipe(WEIGHTS), "is not a file that can be read"),
    "weights-a-folder": ("free", directory(WEIGHTS), "is not a file that can be read"),
    "stock-bias-left-out": (
        "stock", weights(lambda s: s.update({f"{Q}.bias": torch.ones(32)})), "knows no place for 1",
    ),
    "stock-weights-fewer": ("stock", weights(lambda s: s.pop(UP)), "missing from it"),
    # shards
    "shard-above": ("shards", shard("../elsewhere.safetensors"), "not a file of this folder"),
    "shard-absolute": ("shards", shard("absolute"), "not a file of this folder"),
    "shard-empty-name": ("shards", shard(""), "not a file of this folder"),
    "shard-nul": ("shards", shard("a\0b"), "not a file of this folder"),
    "shard-here": ("shards", shard("."), "not a file of this folder"),
    "shard-missing": ("shards", shard("model-00009-of-00009.safetensors"), "is missing, though"),
    "index-empty": ("shards", edit(untrusted.INDEX, weight_map={}), "names no weights"),
    "index-a-list": ("shards", edit(untrusted.INDEX, weight_map=[]), "must be an object"),
    "index-gone": ("shards", lambda folder: (folder / untrusted.INDEX).unlink(), "no model.safetensors.index.json"),
    "index-cut": ("shards", raw(lambda data: data[:50], untrusted.INDEX), "not sound JSON"),
    "index-numbers": ("shards", edit(untrusted.INDEX, weight_map={"a": 5}), "not a file of this folder"),
    "index-says-other": (
        "shards", index(lambda _, files: {files[0]: files[1], files[1]: files[0]}), "does not hold it|does not say",
    ),
    "index-forgets": ("shards", edit(untrusted.INDEX, **{f"weight_map__{UP}": ...}), "does not say"),
    # half-tapered
    "taper-unknown-field": ("tapered", config(tapered={"evil": 1}), "no field 'evil'"),
    "taper-a-list": ("tapered", config(tapered=[1]), "must be a dict"),
    "taper-wrong-arm": ("tapered", config(tapered__arm="none"), "arm"),
    "taper-odd-steps": ("tapered", config(tapered__warmup_steps="many"), "tapered"),
    "taper-other-sites": ("tapered", config(tapered__keep=["model.layers.0.*"]), "tapered"),
    "taper-state-gone": ("tapered", lambda folder: (folder / "taper.json").unlink(), "tapered"),
    "taper-state-cut": ("tapered", raw(lambda data: data[:20], "taper.json"), "tapered"),
    "taper-state-a-list": ("tapered", text("taper.json", "[]"), "tapered"),
    "taper-tensors-cut": ("tapered", raw(lambda data: data[:-1], "taper.safetensors"), "tapered"),
    "taper-state-half": ("tapered", edit("taper.json", step_count=...), "tapered"),
    "taper-state-odd": ("tapered", edit("taper.json", taper_clock="noon"), "tapered"),
    "taper-gate-above": ("tapered", weights(lambda s: s.update(gates(s, 2.0))), "has gate 2"),
    "taper-gate-nan": ("tapered", weights(lambda s: s.update(gates(s, math.nan))), "has gate nan"),
    "taper-gates-disagree": ("tapered", weights(lambda s: s.update(gates(s, 0.0))), "not those in its weights"),
    "taper-weights-fewer": ("tapered", weights(lambda s: s.pop(UP)), "tapered"),
    "taper-weights-whole": ("tapered", entry(UP, dtype="I32"), "is I32"),
    # tokenizers
    "tokenizer-no-json": ("free", text("tokenizer.json", "{"), "free"),
    "tokenizer-of-nothing": ("free", text("tokenizer.json", '{"version": "1.0", "model": {}}'), "free"),
    "tokenizer-file-outside": ("free", edit("tokenizer_config.json", vocab_file="/etc/passwd"), "not a file of this"),
    "tokenizer-link-outside": ("free", link("tokenizer.json", "outside"), "leads out of its folder"),
    "tokenizer-config-list": ("free", text("tokenizer_config.json", "[]"), "holds a list"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused_in_a_sentence(case, made, tmp_path):
    kind, change, words = BROKEN[case]
    folder = tmp_path / kind
    shutil.copytree(made / kind, folder)
    change(folder)
    with pytest.raises(ValueError, match=words) as caught:
        tn.from_pretrained(folder)
    said = str(caught.value)
    assert str(folder) in said and "\n" not in said and len(said) > len(str(folder)) + 10
    assert not list(tmp_path.rglob("*.ran"))


def test_there_are_fifty_of_them():
    assert len(BROKEN) >= 50


@pytest.mark.parametrize("kind", ["free", "shards", "tapered", "stock"])
def test_the_same_folders_load_when_they_are_whole(made, kind):
    model, _ = tn.from_pretrained(made / kind)
    assert torch.isfinite(logits(model)).all()


def test_the_folders_own_code_is_not_run(made, tmp_path):
    """The installed classes are used, and the copy in the folder is for those who have none."""
    shutil.copytree(made / "free", tmp_path / "model")
    for name in _folder.CODE:
        (tmp_path / "model" / name).write_text(EVIL)
    model, _ = tn.from_pretrained(tmp_path / "model")
    assert torch.equal(logits(model), logits(tn.from_pretrained(made / "free")[0]))
    assert not list(tmp_path.rglob("*.ran"))
    assert type(model).__module__ == "tapernorm.modeling_tapernorm"


def test_a_head_that_differs_from_the_embedding_is_not_tied_to_it(made, tmp_path):
    """Whatever config.json says: both are in the file."""
    shutil.copytree(made / "free", tmp_path / "model")
    config(untied=[], tie_word_embeddings=True)(tmp_path / "model")
    assert torch.equal(logits(tn.from_pretrained(tmp_path / "model")[0]), logits(tn.from_pretrained(made / "free")[0]))


def test_links_within_the_hubs_cache_are_its_way_of_storing(made, tmp_path):
    """snapshots/<revision>/<name> -> ../../blobs/<hash>"""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "123", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted((made / "free").iterdir())):
        shutil.copyfile(path, blobs / str(number))
        (snapshot / path.name).symlink_to(blobs / str(number))
    model, tokenizer = tn.from_pretrained(snapshot)
    assert tokenizer is not None and torch.equal(logits(model), logits(tn.from_pretrained(made / "free")[0]))


def test_paths_of_another_machine_in_a_tokenizer_do_no_harm(made, tmp_path):
    shutil.copytree(made / "free", tmp_path / "model")
    edit("tokenizer_config.json", tokenizer_file="/home/nobody-at-all/.cache/tokenizer.json")(tmp_path / "model")
    assert tn.from_pretrained(tmp_path / "model")[1]("a b").input_ids


@pytest.mark.parametrize(
    ("name", "content"), [("modules.json", "[]"), ("trainer_state.json", '{"loss": NaN}'), ("notes.json", "{")]
)
def test_json_that_no_load_reads_does_no_harm(made, tmp_path, name, content):
    shutil.copytree(made / "free", tmp_path / "model")
    (tmp_path / "model" / name).write_text(content)
    assert torch.equal(logits(tn.from_pretrained(tmp_path / "model")[0]), logits(tn.from_pretrained(made / "free")[0]))


def _evil(chance):
    return chance.choice(
        [None, -1, 0, 1, 3, 2**31, 10**12, 1e308, -0.5, True, "", "x", "../x", [], [[]], {}, {"a": 1}, ["model"]]
    )


@pytest.mark.parametrize("kind", ["free", "tapered", "shards"])
@pytest.mark.parametrize("seed", range(4))
def test_random_values_in_the_config(made, tmp_path, kind, seed):
    """Refused in a sentence, or the same weights: of a value that steers arithmetic nobody knows what it was."""
    chance = random.Random(f"{kind} {seed}")
    whole = json.loads((made / kind / "config.json").read_text())
    wanted = tn.from_pretrained(made / kind)[0].state_dict()
    folder = tmp_path / "model"
    shutil.copytree(made / kind, folder)
    for _ in range(12):
        values = copy.deepcopy(whole)
        inner = chance.choice([values, *(v for v in values.values() if isinstance(v, dict) and v)])
        key = chance.choice(sorted(inner))
        inner[key] = _evil(chance)
        (folder / "config.json").write_text(json.dumps(values))
        try:
            state = tn.from_pretrained(folder)[0].state_dict()
        except ValueError as error:
            assert str(folder) in str(error) and "\n" not in str(error), (key, inner[key])
            continue
        assert state.keys() == wanted.keys(), (key, inner[key])
        assert all(torch.equal(state[k].float(), wanted[k].float()) for k in wanted), (key, inner[key])


@pytest.mark.parametrize("name", ["model.safetensors", "taper.safetensors"])
def test_random_bytes_in_a_header(made, tmp_path, name):
    chance, folder = random.Random(name), tmp_path / "model"
    shutil.copytree(made / "tapered", folder)
    whole = (folder / name).read_bytes()
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    wanted = logits(tn.from_pretrained(folder)[0])
    for _ in range(30):
        data = bytearray(whole)
        for _ in range(chance.choice([1, 3])):
            data[chance.randrange(end)] = chance.randrange(256)
        (folder / name).write_bytes(data)
        try:
            model, _ = tn.from_pretrained(folder)
        except ValueError as error:
            assert str(folder) in str(error) and "\n" not in str(error)
        else:
            assert torch.equal(logits(model), wanted)
