"""The code that a model folder brings along: all of it, wherever it goes, and old folders that hold one file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.dynamic_module_utils import get_imports, get_relative_import_files

import tapernorm as tn
from folders import BLOCKED
from fusing import fused, parts_of
from tapernorm import _folder, decode_step, fused_tapernorm
from tapernorm import modeling_tapernorm as modeling
from zoo import IDS, logits

torch.set_num_threads(1)
MAIN, REST = _folder.CODE[0], _folder.CODE[1:]
ALONE = (
    BLOCKED
    + """
import pathlib, torch, transformers as tf
torch.set_num_threads(1)
root = pathlib.Path(sys.argv[1])
wanted, ids = torch.load(root / "wanted.pt"), torch.load(root / "ids.pt")
load = lambda place: tf.AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True)
"""
)
SAME = """
for index, place in enumerate(sys.argv[2:]):
    model = load(place)
    assert torch.equal(model(input_ids=ids).logits, wanted), place
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    short = [m for m in model.modules() if "short" in vars(m)]
    assert len(short) == 4 and all("transformers_modules." in m.forward.func.__module__ for m in short), place
    model.save_pretrained(root / f"again-{index}", max_shard_size="6KB")
    assert torch.equal(load(root / f"again-{index}")(input_ids=ids).logits, wanted), place
print("done")
"""
FAILS = """
for place in sys.argv[2:]:
    try:
        load(place)
    except Exception as error:
        print(json.dumps(str(error)))
"""


@pytest.fixture(scope="module")
def model():
    return fused("llama-tied", dtype=torch.float32)[1]


@pytest.fixture
def alone(model, tmp_path):
    """The lines that a process without tapernorm prints, given the names of models; its hub is a folder."""
    torch.save(logits(model), tmp_path / "wanted.pt")
    torch.save(IDS, tmp_path / "ids.pt")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    for name in ("HF_HUB_CACHE", "HF_MODULES_CACHE"):
        environment.pop(name, None)

    def run(lines, *places):
        command = [sys.executable, "-c", ALONE + lines, str(tmp_path), *map(str, places)]
        options = {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": 300}
        made = subprocess.run(command, env=environment, cwd=tmp_path, text=True, **options)
        assert made.returncode == 0, made.stderr[-2000:]
        return made.stdout.splitlines()

    return run


def on_the_hub(model, root):
    """Save a model where the hub's cache keeps what was downloaded of `me/fox`."""
    cached = root / "cache" / "hub" / "models--me--fox"
    tn.save_pretrained(model, cached / "snapshots" / ("0123456789" * 4))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123456789" * 4)
    return cached / "snapshots" / ("0123456789" * 4)


def code_in(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.py")}


def shipped():
    return {name: Path(modeling.__file__).with_name(name).read_bytes() for name in _folder.CODE}


def to_one_file(folder):
    """The code as earlier versions wrote it: all of it in the first file."""
    main = (folder / MAIN).read_text()
    for name in REST:
        lines = [line for line in main.splitlines() if line.startswith(f"from .{name.removesuffix('.py')} import")]
        assert len(lines) == 1
        main = main.replace(lines[0], (folder / name).read_text())
        (folder / name).unlink()
    (folder / MAIN).write_text(main)


def test_the_list_is_what_transformers_copies():
    needed = [modeling.__file__, *get_relative_import_files(modeling.__file__)]
    assert sorted(Path(file).name for file in needed) == sorted(_folder.CODE)
    for file in needed:
        assert set(get_imports(file)) <= {"torch", "transformers", *sys.stdlib_module_names}
    assert all(_folder.is_own_file(name) for name in _folder.CODE)


@pytest.mark.parametrize("name", ["out", "my model-1.5", "2nd"])
def test_folders_in_one_file_and_in_shards(name, model, alone, tmp_path):
    """Names that transformers has to change for Python, too."""
    tn.save_pretrained(model, tmp_path / name)
    tn.save_pretrained(model, tmp_path / "shards" / name, max_shard_size="6KB")
    assert len(list((tmp_path / "shards" / name).glob("model-*.safetensors"))) > 1
    assert alone(SAME, tmp_path / name, tmp_path / "shards" / name) == ["done"]
    for folder in (name, f"shards/{name}", "again-0", "again-1"):
        assert code_in(tmp_path / folder) == shipped()


def test_a_repository_of_the_hub(model, alone, tmp_path):
    on_the_hub(model, tmp_path)
    assert alone(SAME, "me/fox") == ["done"]
    assert code_in(tmp_path / "again-0") == shipped()


def test_save_pretrained_of_transformers_with_tapernorm(model, tmp_path):
    tn.save_pretrained(model, tmp_path / "out")
    tn.from_pretrained(tmp_path / "out")[0].save_pretrained(tmp_path / "again")
    assert code_in(tmp_path / "again") == shipped()


# Folders of earlier versions


def test_a_folder_of_one_file(model, alone, tmp_path):
    """Alone, by the code in it, and saved so again; with tapernorm, by tapernorm's, and saved with all of it."""
    tn.save_pretrained(model, tmp_path / "old")
    to_one_file(tmp_path / "old")
    old = code_in(tmp_path / "old")
    assert set(old) == {MAIN}
    assert alone(SAME, tmp_path / "old") == ["done"]
    assert code_in(tmp_path / "again-0") == old
    _folder.refuse_missing_code(tmp_path / "old")
    loaded, _ = tn.from_pretrained(tmp_path / "old")
    assert type(loaded).__module__ == modeling.__name__ and torch.equal(logits(loaded), logits(model))
    tn.save_pretrained(loaded, tmp_path / "old")
    assert code_in(tmp_path / "old") == shipped()


def test_old_and_new_side_by_side(model, alone, tmp_path):
    """One process, folders of one name: neither gets the code of the other."""
    tn.save_pretrained(model, tmp_path / "old" / "model")
    to_one_file(tmp_path / "old" / "model")
    tn.save_pretrained(model, tmp_path / "new" / "model")
    assert alone(SAME, tmp_path / "old" / "model", tmp_path / "new" / "model") == ["done"]
    assert code_in(tmp_path / "again-0").keys() == {MAIN} and code_in(tmp_path / "again-1") == shipped()


# A file that was lost


@pytest.mark.parametrize("name", REST)
def test_a_missing_file(name, model, alone, tmp_path):
    """transformers names it before any line of the folder's code runs; with tapernorm it is not needed."""
    tn.save_pretrained(model, tmp_path / "out")
    (tmp_path / "out" / name).unlink()
    snapshot = on_the_hub(model, tmp_path)
    (snapshot / name).unlink()
    known = snapshot.parents[1] / ".no_exist" / snapshot.name / name  # what an answer of the hub leaves
    known.parent.mkdir(parents=True)
    known.touch()
    local, remote = map(json.loads, alone(FAILS, tmp_path / "out", "me/fox"))
    assert str(tmp_path / "out" / name) in local
    assert name in remote and "me/fox" in remote
    with pytest.raises(ValueError, match=rf"{name} is missing, which {MAIN} .* save it again") as caught:
        tn.push_to_hub(tmp_path / "out", "me/fox")
    assert str(tmp_path / "out") in str(caught.value)
    loaded, _ = tn.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model))
    tn.save_pretrained(loaded, tmp_path / "out")
    assert code_in(tmp_path / "out") == shipped()


# What else depends on the code


def test_compiled_steps_follow_every_file(model, monkeypatch):
    key = decode_step.step_key(decode_step.Step(model, False), 1)
    digest = decode_step._digest_of
    assert parts_of(model)
    monkeypatch.setattr(
        decode_step, "_digest_of", lambda file: "other" if file == fused_tapernorm.__file__ else digest(file)
    )
    assert decode_step.step_key(decode_step.Step(model, False), 1) != key
