"""Ways to break a model folder: each makes a function that is given the folder and changes it."""

import json
import os
import shutil
import struct

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tapernorm import untrusted

WEIGHTS = "model.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"


def edit(name, **changes):
    """Change entries of a JSON file; a key with `__` reaches into an object, and `...` takes one away."""

    def change(folder):
        path = folder / name
        values = json.loads(path.read_text())
        for key, value in changes.items():
            *places, last = key.split("__")
            inner = values
            for place in places:
                inner = inner[place]
            if value is ...:
                del inner[last]
            else:
                inner[last] = value
        path.write_text(json.dumps(values))

    return change


def config(**changes):
    return edit("config.json", **changes)


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


def weights(change, name=WEIGHTS):
    """Change the dict of tensors of a safetensors file."""

    def apply(folder):
        state = load_file(folder / name)
        with safe_open(folder / name, "pt") as file:
            metadata = file.metadata()
        change(state)
        save_file(state, folder / name, metadata=metadata)

    return apply


def raw(change, name=WEIGHTS):
    """Change the bytes of a file."""

    def apply(folder):
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return apply


def header(change, name=WEIGHTS):
    """Change the header of a safetensors file and leave its data."""

    def apply(data):
        size = struct.unpack("<Q", data[:8])[0]
        values = json.loads(data[8 : 8 + size])
        change(values)
        made = json.dumps(values).encode()
        return struct.pack("<Q", len(made)) + made + data[8 + size :]

    return raw(apply, name)


def link(name, to):
    def change(folder):
        target = folder.parent / "elsewhere"
        if to == "outside":
            shutil.copyfile(folder / name, target)
        (folder / name).unlink()
        (folder / name).symlink_to({"outside": target, "nowhere": folder / "nothing", "itself": folder / name}[to])

    return change


def pipe(name):
    def change(folder):
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def directory(name):
    def change(folder):
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def index(rename):
    """The index names other files: `rename` is given the folder and the names that are in it, in order."""

    def change(folder):
        path = folder / untrusted.INDEX
        values = json.loads(path.read_text())
        renamed = rename(folder, sorted(set(values["weight_map"].values())))
        values["weight_map"] = {k: renamed.get(v, v) for k, v in values["weight_map"].items()}
        path.write_text(json.dumps(values))

    return change


def shard(new):
    """The index names another file in place of the first shard, which is there."""

    def rename(folder, files):
        outside = folder.parent / "elsewhere.safetensors"
        shutil.copyfile(folder / files[0], outside)
        return {files[0]: str(outside) if new == "absolute" else new}

    return index(rename)


def both(*changes):
    return lambda folder: [change(folder) for change in changes]


def entry(name, **values):
    return header(lambda head: head[name].update(values))


def gates(state, value):
    return {name: torch.full_like(t, value) for name, t in state.items() if name.endswith(".gate")}
