"""The model card: what is known is in it, what is not known is left out, and what is somebody's own stays."""

import copy
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from huggingface_hub import ModelCard
from huggingface_hub.utils import EntryNotFoundError

import tapernorm as tn
from folders import byte_tokenizer, folded_by_hand, logits, tiny
from runs import gpt2_run, llama_run
from tapernorm import _folder, card


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("card") / "fox-1m"
    tn.save_pretrained(folded_by_hand("llama"), folder, tokenizer=byte_tokenizer())
    return folder


@pytest.fixture
def own(folder, tmp_path):
    """A copy of the folder that may be changed."""
    shutil.copytree(folder, tmp_path / "fox-1m")
    return tmp_path / "fox-1m"


def record_of(run):
    return json.loads((run / "run.json").read_text())


def removal_record():
    losses = {"loss": 2.0, "median": 1.5, "p99": 8.0, "p999": 9.5, "tokens": 4096}
    worse = {key: value * 1.01 if key != "tokens" else value for key, value in losses.items()}
    return {
        "kind": "remove",
        "settings": {"model": "smollm2-135m", "budget": 0.01},
        "data": {"name": "roneneldan/TinyStories"},
        "before": {"losses": {"validation": losses, "other": losses}},
        "after": {"losses": {"validation": worse}},
        "removal": {"refitted": ["a", "b", "c"]},
        "fold": {"folded": ["model.layers.0.input_layernorm"], "kept": ["model.norm"]},
    }


def rows(text):
    """Every table row of a card, as cells."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_a_save_writes_what_the_folder_itself_tells(folder):
    text = (folder / "README.md").read_text()
    data = ModelCard(text).data
    assert data.library_name == "tapernorm" and data.pipeline_tag == "text-generation"
    assert data.base_model is None and data.datasets is None and data.license is None
    assert "# fox-1m" in text and 'from_pretrained("fox-1m", trust_remote_code=True)' in text
    assert [
        "norms gone",
        "`model.layers.*.input_layernorm`, `model.layers.*.post_attention_layernorm`, `model.norm`",
    ] in (rows(text))
    for unknown in ("Loss", "Speed", "Checks", "kept", "steps", "None", "nan", "{{", "{%"):
        assert unknown not in text, unknown


def test_a_run_tells_the_rest(folder, tmp_path):
    text = card.render_card(folder, record_of(llama_run(tmp_path / "run")))
    found = rows(text)
    assert ["norms kept", "1: `model.norm`"] in found
    assert ["arm", "internal: the final norm stays and anchors the scale"] in found
    assert ["data", "tinystories.txt"] in found and ["optimizer steps", "800"] in found
    assert ["norms removed", "2.9203", "2.2778", "9.9290", "12.2653", "65,536"] in found
    assert ["same training, with its norms", "2.9041", "2.2652", "9.8739", "12.1972", "65,536"] in found
    assert ["folded against unfolded, largest logit error", "4.8e-06, 3.1e-07 of the largest"] in found
    assert ["decode", "folded", "1", "no", "float32", "500", "1.213"] in found
    assert "Measured on cpu" in text and "with 16 of its normalization layers" in " ".join(text.split())
    assert re.search(r"^\| what .*\n\|---.*\n\| decode", text, re.MULTILINE)  # a table is not torn apart


def test_numbers_that_were_not_measured_are_dashes(folder, tmp_path):
    record = record_of(gpt2_run(tmp_path / "run"))
    del record["losses"]["all"]["p999"]
    found = rows(card.render_card(folder, record))
    assert ["decode", "unfused", "1", "no", "float32", "428", "–"] in found
    assert next(row for row in found if row[0] == "norms removed")[4] == "–"
    assert ["greedy tokens equal", "99.999 %"] in found


@pytest.mark.parametrize("key", ["fold", "losses", "bench", "verify", "data", "arm", "taper", "settings"])
def test_any_fact_may_be_missing(folder, tmp_path, key):
    record = record_of(llama_run(tmp_path / "run"))
    whole = card.render_card(folder, copy.deepcopy(record))
    del record[key]
    text = card.render_card(folder, record)
    assert text != whole and len(text) < len(whole)
    assert not re.search(r"\b(None|nan|Undefined)\b|\{\{", text)


def test_a_removal(folder):
    text = card.render_card(folder, removal_record())
    found = rows(text)
    assert ModelCard(text).data.datasets == ["roneneldan/TinyStories"]
    assert ["method", "removal without training"] in found and ["loss budget", "1 %"] in found
    assert ["before, unrelated text", "2.0000", "1.5000", "8.0000", "9.5000", "4,096"] in found
    assert ["after, validation", "2.0200", "1.5150", "8.0800", "9.5950", "4,096"] in found
    assert ["linear maps fitted again", "3"] in found
    assert "# smollm2-135m without norms" in text


@pytest.mark.parametrize(
    ("name", "known"),
    [("meta-llama/Llama-3.2-1B", True), ("/home/me/secret/llama", False), ("./llama", False), ("llama", False)],
)
def test_the_base_model_is_named_to_the_hub_only_if_it_is_there(folder, name, known):
    text = card.render_card(folder, {}, name=name)
    assert (ModelCard(text).data.base_model == name) == known
    assert "/home/me" not in text and "llama" in text.lower()


def test_names_cannot_write_into_the_card(folder):
    record = {
        "kind": "taper",
        "data": {"name": "x |\n\n# Evil\n<script>alert(1) ` |"},
        "settings": {"steps": 3},
    }
    text = card.render_card(folder, record)
    assert "# Evil" not in text.splitlines() and "<script" not in text
    assert next(row for row in rows(text) if row[0] == "data")[1] == "x ¦ # Evil ‹script›alert(1) ' ¦"


def test_a_card_of_ones_own_is_not_written_over(own, tmp_path):
    (own / "README.md").write_text("# Mine\n")
    assert card.write_card(own, {"kind": "taper"}) is None
    assert (own / "README.md").read_text() == "# Mine\n"
    model, _ = tn.from_pretrained(own)
    with pytest.raises(ValueError, match=r"README\.md.*overwrite=True"):
        tn.save_pretrained(model, own)
    tn.save_pretrained(model, own, overwrite=True)
    assert (own / "README.md").read_text() == "# Mine\n"


def test_a_card_of_the_librarys_own_is_renewed(own):
    model, _ = tn.from_pretrained(own)
    (own / "README.md").write_text(f"<!-- {card.CARD_MARK} -->\nold")
    tn.save_pretrained(model, own)  # without a word about what is in it
    assert "# fox-1m" in (own / "README.md").read_text()
    assert card.write_card(own, removal_record()) == own / "README.md"
    assert "removal without training" in (own / "README.md").read_text()


def test_only_norm_free_folders_have_one(tmp_path):
    tn.save_pretrained(tiny("llama"), tmp_path / "stock")
    model = tiny("llama")
    tn.taper_(model, tn.TaperConfig())
    tn.save_pretrained(model, tmp_path / "tapered")
    for kind in ("stock", "tapered"):
        assert not (tmp_path / kind / "README.md").exists()
        with pytest.raises(ValueError, match="holds no norm-free model"):
            card.render_card(tmp_path / kind, {})
    for folder in (tmp_path / "stock", tmp_path):
        assert card.write_card(folder) is None and not (folder / "README.md").exists()


# The hub, as it answers


class FakeApi:
    """Records what would be uploaded."""

    def __init__(self, remote_card=None, root=None):
        self.remote_card, self.root, self.sent = remote_card, root, {}

    def __call__(self, *args, **kwargs):
        return self

    def create_repo(self, repo_id, **kwargs):
        return SimpleNamespace(repo_id=repo_id)

    def file_exists(self, repo_id, name, **kwargs):
        return self.remote_card is not None

    def hf_hub_download(self, repo_id, name, **kwargs):
        path = self.root / "remote.md"
        path.write_text(self.remote_card)
        return str(path)

    def upload_folder(self, repo_id, folder_path, ignore_patterns=(), **kwargs):
        self.sent = {p.name: p.read_bytes() for p in folder_path.iterdir() if p.name not in ignore_patterns}
        return f"https://huggingface.co/{repo_id}"

    def create_commit(self, repo_id, operations, **kwargs):
        self.sent = {op.path_in_repo: Path(op.path_or_fileobj).read_bytes() for op in operations}
        return f"https://huggingface.co/{repo_id}"


NEEDED = {"config.json", "model.safetensors", "generation_config.json", *_folder.CODE}


@pytest.mark.parametrize("what", ["folder", "loaded", "folded"])
def test_push_to_hub(what, folder, tmp_path, monkeypatch):
    api = FakeApi(root=tmp_path)
    monkeypatch.setattr("tapernorm.hub.HfApi", api)
    model = {
        "folder": lambda: folder, "loaded": lambda: tn.from_pretrained(folder)[0],
        "folded": lambda: folded_by_hand("llama"),
    }[what]()  # fmt: skip
    address = tn.push_to_hub(model, "me/fox", tokenizer=byte_tokenizer())
    assert address == "https://huggingface.co/me/fox"
    assert NEEDED | {"README.md", "tokenizer.json"} <= set(api.sent)
    restored = tmp_path / "restored"
    restored.mkdir()
    for name, content in api.sent.items():
        (restored / name).write_bytes(content)
    assert logits(tn.from_pretrained(restored)[0]).equal(logits(folded_by_hand("llama")))
    assert b"library_name: tapernorm" in api.sent["README.md"]
    if what != "folder":
        assert b"# fox" in api.sent["README.md"]


def test_a_card_on_the_hub_that_is_somebodys_stays(folder, tmp_path, monkeypatch):
    for remote, sent in (("# Mine", False), (f"<!-- {card.CARD_MARK} -->", True)):
        api = FakeApi(remote, tmp_path)
        monkeypatch.setattr("tapernorm.hub.HfApi", api)
        tn.push_to_hub(folder, "me/fox")
        assert ("README.md" in api.sent) == sent and set(api.sent) >= NEEDED


@pytest.mark.parametrize("theirs", [None, "---\nlibrary_name: mine\n---\n# Mine\n"])
def test_transformers_own_push_to_hub(theirs, folder, tmp_path, monkeypatch):
    """The folder's card goes along where the repository has none."""
    api = FakeApi()
    monkeypatch.setattr(transformers.utils.hub, "hf_api", api)

    def load(repo_id, **kwargs):
        if theirs is None:
            raise EntryNotFoundError("no card")
        return ModelCard(theirs)

    monkeypatch.setattr(transformers.utils.hub.ModelCard, "load", staticmethod(load))
    model, _ = tn.from_pretrained(folder)
    model.push_to_hub("me/fox")
    assert set(api.sent) >= NEEDED | {"README.md"}
    assert (b"# Mine" if theirs else b"library_name: tapernorm") in api.sent["README.md"]


def test_a_folder_that_is_no_model_is_not_pushed(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        tn.push_to_hub(tmp_path, "me/fox")
