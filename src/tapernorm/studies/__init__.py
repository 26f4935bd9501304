"""The paper's tables and figures as commands: `tapernorm study NAME`.

A study is a list of runs, each of which is a row of `results.csv`, and what is made of the rows: figures and a page.
Its module holds one `Study` named `STUDY`, and loads nothing heavy before a run.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from tapernorm.config import nearest

if TYPE_CHECKING:
    from tapernorm.studies.base import Study

STUDIES = {
    "tinystories": "tapernorm.studies.tinystories",
    "logit-chasing": "tapernorm.studies.logit_chasing",
    "throughput": "tapernorm.studies.throughput",
    "finetune": "tapernorm.studies.finetune",
    "alternatives": "tapernorm.studies.alternatives",
    "transfer": "tapernorm.studies.transfer",
}


def names() -> list[str]:
    """The studies that are there."""
    return [name for name, module in STUDIES.items() if importlib.util.find_spec(module) is not None]


def load(name: str) -> Study:
    """The study of that name.

    Raises:
        ValueError: there is none.
    """
    known = names()
    if name not in known:
        raise ValueError(f"there is no study {name!r}{nearest(name, known)}; there are {', '.join(known)}")
    return importlib.import_module(STUDIES[name]).STUDY
