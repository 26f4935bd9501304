"""Fold a half-tapered checkpoint from disk to disk, for models that do not fit into memory.

    plan      on a model on the meta device: which weight is scaled by what, as `fold_` would
    read      gates, c, γ̃ and β̃, which are small
    stream    each tensor from its input shard to the output shard, some rows at a time, the products in float64, in
              the order and with the rounding of `fold_`: the same bits
    look      rows of every weight that takes up one norm are read again from both files, compared by other arithmetic

An output shard is written under another name, flushed and renamed. A run that was stopped goes on after the last shard
that is whole. Memory: a few times the rows in flight, some 100 MB beside Python and torch themselves.

What `fold_` learns from forward passes, this cannot know: that the folded model computes what the unfolded one does
(`compare=True` loads both, one after the other), that no token is lost, and that the seat belt is not reached.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

import tapernorm
from tapernorm import _folder, card, hub, untrusted
from tapernorm import modeling_tapernorm as modeling
from tapernorm.config import TaperConfig
from tapernorm.convert import taper_
from tapernorm.fold import compare_outputs, outputs_of
from tapernorm.half_tapered import read_taper_state
from tapernorm.inputs import default_example
from tapernorm.layout import changed_config, layout_of
from tapernorm.modules import evaluation, taper_norms
from tapernorm.shard_plan import Plan, make_plan
from tapernorm.soundness import FoldError
from tapernorm.streaming import Fill, copier, stored, sync_folder, write_file

_STATE = "fold.json"  # in the unfinished folder: of what it is


@dataclasses.dataclass(frozen=True)
class StreamReport:
    """What `fold_folder` did. Names are full module or parameter names.

    folded, kept: norms that are gone, and norms that stay. reasons: why, for each kept one. new_biases: biases that
    were made. untied: heads cut loose from the embedding. c: by site. shards: files written; resumed: those of them
    that an earlier run had left whole. rows_checked: rows that were read again and compared, row_error: the largest
    relative error among them. max_abs_logit_error, relative_error, bound: as of `FoldReport`, None unless the models
    were compared.
    """

    folded: tuple[str, ...]
    kept: tuple[str, ...]
    reasons: dict[str, str]
    new_biases: tuple[str, ...]
    untied: tuple[str, ...]
    prefix: tuple[int, ...]
    c: dict[str, float]
    kinds: dict[str, str]
    roles: dict[str, str]
    shards: int
    resumed: int
    bytes_written: int
    seconds: float
    rows_checked: int
    row_error: float
    max_abs_logit_error: float | None = None
    relative_error: float | None = None
    bound: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}


def is_sharded(source: str | Path) -> bool:
    """Whether a source is a folder whose weights are in several files."""
    return (Path(source).expanduser() / untrusted.INDEX).is_file()


def fold_folder(
    source: str | Path,
    target: str | Path,
    overwrite: bool = False,
    compare: bool = False,
) -> StreamReport:
    """Fold the half-tapered folder `source` into a norm-free folder `target`, without loading the model.

    Args:
        source: a folder that `save_pretrained` wrote for a tapered model whose gates are all 0.
        target: a new or empty folder, or one that an earlier save wrote.
        overwrite: as of `save_pretrained`.
        compare: at the end, load the unfolded model, then the folded one, and hold their outputs to the bounds of
            `fold_`; needs memory for the model.

    Raises:
        ValueError: `source` is no sound half-tapered folder; `target` is somebody's; the disk is too small.
        FoldError: a gate that is not 0; a norm whose readers cannot take it up; a scaled weight that overflows its
            dtype; rows that are not what they should be; with `compare`, an error above the bound. `target` is as it
            was then.
    """
    began = time.perf_counter()
    source, target = Path(source).expanduser(), Path(target).expanduser().resolve()
    _folder.refuse_occupied(target, overwrite)
    if target == source.resolve() or target in source.resolve().parents:
        raise ValueError(f"{target} is, or holds, the checkpoint that is to be folded; choose another folder")
    config, model, plan = _prepare(source)
    staging = target.parent / f".{target.name}.folding"
    total = sum(tensor.nbytes for shard in plan.shards.values() for tensor in shard.values())
    finished = _open_staging(staging, _fingerprint(source))
    _refuse_full_disk(target, total - sum((staging / name).stat().st_size for name in finished))
    for name, shard in plan.shards.items():
        if name not in finished:
            write_file(staging / name, _fills(plan, shard), last=set(plan.shifted))
    _write_rest(source, staging, config, model, plan)
    rows, row_error = plan.look(staging)
    errors = _compare(source, staging, target) if compare else (None, None, None)
    report = StreamReport(
        folded=tuple(site.name for site, _ in plan.sites),
        kept=tuple(plan.kept),
        reasons=plan.kept,
        new_biases=tuple(plan.new_biases),
        untied=tuple(plan.untied),
        prefix=tuple(getattr(model.config, "constant_prefix", None) or ()),
        c={site.name: branch.c for site, branch in plan.sites},
        kinds=plan.kinds,
        roles=plan.roles,
        shards=len(plan.shards),
        resumed=len(finished),
        bytes_written=total,
        seconds=time.perf_counter() - began,
        rows_checked=rows,
        row_error=row_error,
        max_abs_logit_error=errors[0],
        relative_error=errors[1],
        bound=errors[2],
    )
    card.write_card(staging, {"fold": report.to_dict()}, place=target.name)
    (staging / _STATE).unlink()
    _folder.take_place(staging, target)
    sync_folder(target.parent)
    return report


def _prepare(source: Path) -> tuple[Any, Any, Plan]:
    """The config, the folded model on the meta device, and what is to be written."""
    values = untrusted.check_folder(source)
    found = untrusted.headers(source)
    if not found:
        raise ValueError(f"{source} holds no safetensors files; a fold from disk to disk needs them")
    untrusted.check_layers(source / "config.json", values, len(found))
    with untrusted.explained(str(source)):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    if getattr(config, "tapered", None) is None:
        raise FoldError(
            f"nothing to fold: {source} has no TaperNorm (it was never tapered, or is folded already); its model type "
            f"is {config.model_type}"
        )
    with untrusted.explained(str(source)):
        model = hub.skeleton_of(config)
        untrusted.check_size(source, model, found)
        taper_(model, TaperConfig.from_dict(config.tapered))
    tensors: dict[str, Any] = {}
    for path in untrusted.weight_files(source):
        tensors |= stored(path)
    names = _names(source, model, tensors)
    _refuse_other_state(source, model, tensors)
    return config, model, make_plan(model, tensors, names)


def _names(source: Path, model: Any, tensors: dict[str, Any]) -> dict[str, str]:
    """Each name in the model's state dict -> the name in the files, which hold one of tensors that are one.

    Raises:
        ValueError: the files hold other tensors than the tapered model has, or others of a shape.
    """
    groups: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    names: dict[str, str] = {}
    for group in groups.values():
        held = [name for name in group if name in tensors]
        if len(held) != 1:
            what = "is missing from it" if not held else f"is one tensor with {held[1]}, and both are there"
            raise ValueError(f"{source}: config.json and the weights beside it are not of one model: {group[0]} {what}")
        names |= dict.fromkeys(group, held[0])
    for name, tensor in model.state_dict().items():
        there, wanted = list(tensors[names[name]].shape), list(tensor.shape)
        if there != wanted:
            raise ValueError(f"{source}: {name} is {there}, and the model of config.json has {wanted}")
    odd = sorted(set(tensors) - set(names.values()))
    if odd:
        raise ValueError(f"{source}: config.json knows no place for {len(odd)} of its weights, such as {odd[0]}")
    return names


def _refuse_other_state(source: Path, model: Any, tensors: dict[str, Any]) -> None:
    """Raises ValueError where the controller's state says something else of a gate or a scale than the weights."""
    state = read_taper_state(source)
    for name in taper_norms(model):
        for mine, theirs in ((f"{name}.gate", f"gate.{name}"), (f"{name}.fixed_norm.c", f"c.{name}")):
            there = tensors[mine].read((slice(None),))
            if theirs not in state or not torch.equal(
                torch.as_tensor(state[theirs]).reshape(-1).float(), there.float()
            ):
                raise ValueError(f"{source}: {mine} in the weights is not what taper.safetensors says")


def _fills(plan: Plan, shard: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...], Fill]]:
    return {
        name: (out.dtype, out.shape, plan.filler(name, out) if out.changed else copier(out.source))
        for name, out in shard.items()
    }


def _fingerprint(source: Path) -> str:
    """What a fold depends on, without reading all of the weights."""
    digest = hashlib.sha256(tapernorm.__version__.encode())
    for name in ("config.json", "taper.json"):
        digest.update((source / name).read_bytes())
    for path in untrusted.weight_files(source):
        stat = path.stat()
        with path.open("rb") as file:
            head = file.read(8)
            head += file.read(int.from_bytes(head, "little"))
        digest.update(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode() + head)
    return digest.hexdigest()


def _open_staging(staging: Path, fingerprint: str) -> set[str]:
    """Make the unfinished folder, or go on with it; returns the shards in it that are whole."""
    try:
        if json.loads((staging / _STATE).read_text(encoding="utf-8"))["fingerprint"] == fingerprint:
            for path in staging.glob(".*.partial"):  # what a kill has left of a file
                path.unlink()
            return {path.name for path in staging.glob("model*.safetensors")}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    shutil.rmtree(staging, ignore_errors=True)  # of another checkpoint, or of none
    staging.mkdir(parents=True)
    (staging / _STATE).write_text(json.dumps({"fingerprint": fingerprint}) + "\n", encoding="utf-8")
    return set()


def _refuse_full_disk(target: Path, needed: int) -> None:
    place = next(path for path in target.parents if path.is_dir())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise ValueError(f"{place} has {free / 1e9:.1f} GB free, and the folded model needs {needed / 1e9:.1f} GB")


def _write_rest(source: Path, staging: Path, config: Any, model: Any, plan: Plan) -> None:
    """Everything but weights: config and code, the index, and what lies beside a model, as it is."""
    if len(plan.shards) > 1:
        places = {name: file for file, shard in plan.shards.items() for name in shard}
        size = sum(out.nbytes for shard in plan.shards.values() for out in shard.values())
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        (staging / untrusted.INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    folded = changed_config(model, layout_of(model), tapered=None)
    folded.dtype = config.dtype
    for part in getattr(config, "sub_configs", {}):  # the skeleton has set those of its parts, too
        if hasattr(getattr(config, part, None), "dtype"):
            getattr(folded, part).dtype = getattr(config, part).dtype
    folded.save_pretrained(staging)
    _folder.copy_code(staging)
    for path in sorted(source.iterdir()):
        skipped = _folder.is_weights(path.name) or path.name in ("config.json", "taper.json", *_folder.CODE)
        if skipped or not _folder.is_own_file(path.name):
            continue
        if path.is_dir():
            shutil.copytree(path, staging / path.name, dirs_exist_ok=True)
        else:
            shutil.copyfile(path, staging / path.name)
    with torch.device("meta"):
        twin = modeling.get_class(folded.architectures[0])(folded)
    written = {name: out.shape for shard in plan.shards.values() for name, out in shard.items()}
    wanted = {name: tuple(t.shape) for name, t in twin.state_dict().items() if name not in twin.all_tied_weights_keys}
    if written != wanted:
        odd = sorted(written.items() ^ wanted.items())[0][0]
        raise FoldError(f"{odd}: the folded model that config.json describes is not the one that was written")


def _compare(source: Path, staging: Path, target: Path) -> tuple[float, float, float]:
    """The errors of the folded model's output against the unfolded one's. Only one of them is in memory at a time."""
    outputs = []
    for place in (source, staging):
        model, _ = hub.from_pretrained(place)
        inputs = default_example(model, batch=2, length=16)
        with evaluation(model):
            outputs.append(outputs_of(model, inputs))
        del model
    if not all(torch.isfinite(t).all() for t in outputs[0]):
        raise FoldError(f"the unfolded model's output is not finite; {target} was not written")
    return compare_outputs(*outputs, left=f"{target} was not written")
