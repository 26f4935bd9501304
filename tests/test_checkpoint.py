"""Checkpoints: bit-equal to never having stopped, whenever a run is killed, and nothing that is unpickled."""

import json
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import time

import numpy as np
import pytest
import torch

import killed
from tapernorm import TaperConfig, get_controller, load_checkpoint, save_checkpoint, taper_
from tapernorm.train import last_checkpoint
from zoo import BY_NAME, randomise

torch.set_num_threads(1)


def ready(name="gpt2", config=None):
    model = randomise(BY_NAME[name].build()).float().train()
    taper_(model, config or TaperConfig(arm="all", warmup_steps=2, taper_steps=3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer


def step(model, optimizer):
    rows = torch.randint(16, (2, 8))
    loss = model(input_ids=rows, labels=rows).loss + get_controller(model).auxiliary_loss()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    get_controller(model).step()
    return loss.item()


# What is in a checkpoint


def test_every_generator_goes_on(tmp_path):
    model, optimizer = ready()
    losses = [step(model, optimizer)]
    save_checkpoint(tmp_path, 1, model, optimizer, extra={"position": [1, None, "a"]})
    wanted = [step(model, optimizer) for _ in range(4)], random.random(), np.random.rand(), np.random.randn()
    model, optimizer = ready()
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    found = load_checkpoint(tmp_path, model, optimizer)
    assert (found.step, found.extra) == (1, {"position": [1, None, "a"]})
    assert ([step(model, optimizer) for _ in range(4)], random.random(), np.random.rand(), np.random.randn()) == wanted
    assert losses


def test_every_kind_of_optimizer(tmp_path):
    for number, kind in enumerate((torch.optim.SGD, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Adafactor)):
        model, _ = ready("llama")
        optimizer = kind(model.parameters(), lr=torch.tensor(1e-3) if kind is torch.optim.Adafactor else 1e-3)
        step(model, optimizer)
        save_checkpoint(tmp_path / str(number), 1, model, optimizer)
        wanted = [step(model, optimizer) for _ in range(2)]
        fresh, _ = ready("llama")
        again = kind(fresh.parameters(), lr=torch.tensor(1e-3) if kind is torch.optim.Adafactor else 1e-3)
        load_checkpoint(tmp_path / str(number), fresh, again)
        assert [step(fresh, again) for _ in range(2)] == wanted, kind


def test_the_newest_whole_one_counts_and_old_ones_go(tmp_path):
    model, optimizer = ready()
    assert load_checkpoint(tmp_path, model, optimizer) is None
    for number in (9, 10, 11):
        save_checkpoint(tmp_path, number, model, optimizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-11"]
    (tmp_path / ".checkpoint-12.abc.partial").mkdir()
    (tmp_path / "checkpoint-13").mkdir()  # whoever made it
    (tmp_path / "checkpoint-x").mkdir()
    assert load_checkpoint(tmp_path, model, optimizer).step == 11
    save_checkpoint(tmp_path, 11, model, optimizer, keep=1)  # once more, in its place
    with pytest.raises(ValueError, match="keep=0"):
        save_checkpoint(tmp_path, 12, model, optimizer, keep=0)
    assert load_checkpoint(tmp_path, model, optimizer).step == 11
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-11", "checkpoint-13", "checkpoint-x"]


def test_nothing_is_pickled(tmp_path):
    model, optimizer = ready()
    step(model, optimizer)
    folder = save_checkpoint(tmp_path, 1, model, optimizer)
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    json.loads((folder / "state.json").read_text())


def test_what_does_not_belong_together_is_refused(tmp_path):
    model, optimizer = ready()
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    save_checkpoint(tmp_path / "a", 1, model, optimizer, scheduler=scheduler)
    with pytest.raises(ValueError, match="was written with a scheduler"):
        load_checkpoint(tmp_path / "a", model, optimizer)
    save_checkpoint(tmp_path / "b", 1, model, optimizer)
    with pytest.raises(ValueError, match="was written without a scheduler"):
        load_checkpoint(tmp_path / "b", model, optimizer, scheduler=scheduler)
    stock = BY_NAME["gpt2"].build()
    with pytest.raises(ValueError, match="was written with a controller"):
        load_checkpoint(tmp_path / "b", stock, torch.optim.AdamW(stock.parameters()))
    other, others = ready("llama")
    with pytest.raises(ValueError, match="is of another model"):
        load_checkpoint(tmp_path / "b", other, others)
    with pytest.raises(ValueError, match=r"optimizer\.x is a object, which is neither"):
        save_checkpoint(tmp_path / "c", 1, model, type("Odd", (), {"state_dict": lambda self: {"x": object()}})())
    assert not (tmp_path / "c").exists()


# Kill -9

LOOPS = ("plain", "trainer")


@pytest.fixture(scope="module")
def start():
    """Start a loop in a process of its own, forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["killed", "tapernorm.train", "tapernorm.checkpoint"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # for the server, which imports

    def run(name, folder, moment=None):
        process = context.Process(target=killed.run, args=(name, folder, moment))
        process.start()
        return process

    yield run
    os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """Runs that were never stopped: (seconds, log, end, folder) by loop."""
    found = {}
    for name in LOOPS:
        folder = tmp_path_factory.mktemp(name)
        started = time.monotonic()
        process = start(name, folder)
        process.join()
        assert process.exitcode == 0
        found[name] = time.monotonic() - started, read(folder), torch.load(folder / "end.pt"), folder
    return found


def read(folder):
    """The row of every step. One that was lost is done again, and must give the same numbers."""
    rows = {}
    path = folder / "log.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut short
        assert rows.setdefault(row["step"], row) == row
    return rows


def survive(start, folder, name, kills, seconds, seed):
    """Kill the run `kills` times, in turn at a random time and at a random change of a file; then let it end."""
    moments = random.Random(seed)
    for number in range(kills):
        if number % 2:
            process = start(name, folder, moment=moments.randint(1, 60))
            process.join()
        else:
            process = start(name, folder)
            process.join(moments.uniform(0.1, 0.6) * seconds)
            process.kill()
            process.join()
        if (folder / "end.pt").exists():  # it was over before: begin again, with the kills that are left
            shutil.rmtree(folder)
            folder.mkdir()
        else:
            assert process.exitcode == -signal.SIGKILL
    process = start(name, folder)
    process.join()
    assert process.exitcode == 0


def check(start, whole, name, folder, kills, seed=0):
    seconds, rows, end, _ = whole[name]
    survive(start, folder, name, kills, seconds, seed)
    assert read(folder) == rows and len(rows) == killed.STEPS
    found = torch.load(folder / "end.pt")
    for part in ("model", "controller"):
        assert found[part].keys() == end[part].keys()
        for key, value in end[part].items():
            assert torch.equal(found[part][key], value), key


@pytest.mark.parametrize("name", LOOPS)
def test_killed_and_gone_on(start, whole, name, tmp_path):
    """Losses, gate, c, s_tgt, averages and weights are those of a run that was never stopped, to the bit."""
    check(start, whole, name, tmp_path, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_killed_twenty_times(start, whole, name, tmp_path):
    check(start, whole, name, tmp_path, 20, seed=1)


# Pickles


class Bomb:
    def __reduce__(self):
        return (exec, ("raise SystemExit('a stranger has run code')",))


@pytest.mark.parametrize("name", ("optimizer.pt", "scheduler.pt", "rng_state.pth"))
def test_a_strangers_pickle_is_not_run(whole, name, tmp_path):
    """transformers' own checkpoints hold pickles: they are read as weights only."""
    shutil.copytree(whole["trainer"][3], tmp_path, dirs_exist_ok=True)
    checkpoint = last_checkpoint(tmp_path)
    assert (checkpoint / name).exists()
    with (checkpoint / name).open("wb") as file:
        pickle.dump(Bomb(), file)
    with pytest.raises(pickle.UnpicklingError, match=r"weights_only|Weights only"):
        killed.trainer(tmp_path)
