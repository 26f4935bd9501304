"""What `tapernorm inspect` shows: the norms of a model that may be known by its config alone, a row for each kind."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rich.table import Column, Table

from tapernorm import hub
from tapernorm.modeling_tapernorm import starred
from tapernorm.sites import NormSite, find_sites

_NARROW = 72  # columns of a terminal
FIELDS = ("name", "kind", "role", "removable", "reason", "consumers")


def inspect_source(source: str) -> tuple[str, list[NormSite]]:
    """(model type, its norms) of a folder, hub id or file. Weights are read only where the config is not enough.

    Raises:
        ValueError: as `hub.from_pretrained`; no norms were found.
    """
    model = hub.skeleton(source)
    try:
        sites = None if model is None else find_sites(model)
    except (ValueError, RuntimeError, NotImplementedError):  # its code looks into values, which a skeleton has none of
        sites = None
    if sites is None:
        model, _ = hub.from_pretrained(source)
        sites = find_sites(model)
    assert model is not None  # a type checker cannot see it
    if not sites:
        raise ValueError(f"{source}: no normalization layers were found in {type(model).__name__}")
    return model.config.model_type, sites


def as_rows(sites: Sequence[NormSite]) -> list[dict[str, Any]]:
    """Plain JSON values, one object a norm."""
    return [{field: getattr(site, field) for field in FIELDS} for site in sites]


def table(source: str, sites: list[NormSite], width: int = 120) -> Table:
    """One row for all norms that differ by a layer's number only; on a narrow terminal, lines instead of columns."""
    groups = grouped(sites)
    title = f"{source}: {len(sites)} norms"
    narrow = width < _NARROW
    names = Column("norm", overflow="fold", min_width=min(30, max(len(name) for name, _ in groups)))
    made = Table(names, "", "kind", "can go", "read by", title=title)
    if narrow:
        made = Table(Column(overflow="fold"), show_header=False, box=None, title=title, title_justify="left")
    for name, group in groups:
        first = group[0]
        readers = dict.fromkeys(reader.removesuffix(".weight").rpartition(".")[2] for reader in first.consumers)
        verdict = "yes" if first.removable else "no"
        told = _starred(first.reason) or ", ".join(readers)
        kind = f"{first.kind} {first.role}"
        if narrow:
            made.add_row(f"{name} ×{len(group)}\n  {kind}; can go: {verdict}\n  {told}")
        else:
            made.add_row(name, f"×{len(group)}", kind, verdict, told)
    return made


def grouped(sites: list[NormSite]) -> list[tuple[str, list[NormSite]]]:
    """(pattern, norms): a star stands for every layer's number, a range where layers differ."""
    groups: dict[tuple[Any, ...], list[NormSite]] = {}
    for site in sites:
        readers = tuple(dict.fromkeys(starred(reader) for reader in site.consumers))
        key = starred(site.name), site.kind, site.role, site.removable, _starred(site.reason), readers
        groups.setdefault(key, []).append(site)
    patterns = [key[0] for key in groups]
    return [
        (key[0] if patterns.count(key[0]) == 1 else _ranges([site.name for site in group]), group)
        for key, group in groups.items()
    ]


def _starred(reason: str) -> str:
    return re.sub(r"(?<=\w)\.\d+(?=[\s.,;:)]|\Z)", ".*", reason)


def _ranges(names: list[str]) -> str:
    """`model.layers.0.norm`, `model.layers.1.norm`, `model.layers.5.norm` -> `model.layers.{0-1,5}.norm`."""
    parts = [name.split(".") for name in names]
    shown = []
    for column in zip(*parts, strict=True):
        if len(set(column)) == 1:
            shown.append(column[0])
            continue
        numbers = sorted({int(value) for value in column})
        starts = [n for n in numbers if n - 1 not in numbers]
        ends = [n for n in numbers if n + 1 not in numbers]
        spans = (str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
        shown.append("{" + ",".join(spans) + "}")
    return ".".join(shown)
