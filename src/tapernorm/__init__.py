"""Take the normalization layers out of a pre-norm transformer, and prove that nothing else changed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tapernorm import _register

__version__ = "0.1.0"

# Public name -> the module that holds it. Nothing is imported before it is asked for, so that
# `import tapernorm` and `tapernorm --help` load neither torch nor transformers.
_WHERE = {
    "ExportError": "export.norms",
    "FoldError": "fold",
    "FoldReport": "fold",
    "GuardStop": "guard",
    "MassiveTokenError": "statistics",
    "NormSite": "sites",
    "Removal": "remove",
    "TaperCallback": "train",
    "TaperConfig": "config",
    "TaperController": "controller",
    "TaperMixin": "train",
    "TaperNorm": "modules",
    "TaperTrainer": "train",
    "export": "export",
    "find_prefix": "prefix",
    "find_sites": "sites",
    "fold_": "fold",
    "from_pretrained": "hub",
    "generate": "generate",
    "get_controller": "convert",
    "load_checkpoint": "checkpoint",
    "push_to_hub": "hub",
    "remove_": "remove",
    "restore_": "convert",
    "save_checkpoint": "checkpoint",
    "save_pretrained": "hub",
    "taper_": "convert",
    "verify": "verify",
}

if TYPE_CHECKING:
    from tapernorm.checkpoint import load_checkpoint as load_checkpoint
    from tapernorm.checkpoint import save_checkpoint as save_checkpoint
    from tapernorm.config import TaperConfig as TaperConfig
    from tapernorm.controller import TaperController as TaperController
    from tapernorm.convert import get_controller as get_controller
    from tapernorm.convert import restore_ as restore_
    from tapernorm.convert import taper_ as taper_
    from tapernorm.export import export as export
    from tapernorm.export.norms import ExportError as ExportError
    from tapernorm.fold import FoldError as FoldError
    from tapernorm.fold import FoldReport as FoldReport
    from tapernorm.fold import fold_ as fold_
    from tapernorm.generate import generate as generate
    from tapernorm.guard import GuardStop as GuardStop
    from tapernorm.hub import from_pretrained as from_pretrained
    from tapernorm.hub import push_to_hub as push_to_hub
    from tapernorm.hub import save_pretrained as save_pretrained
    from tapernorm.modules import TaperNorm as TaperNorm
    from tapernorm.prefix import find_prefix as find_prefix
    from tapernorm.remove import Removal as Removal
    from tapernorm.remove import remove_ as remove_
    from tapernorm.sites import NormSite as NormSite
    from tapernorm.sites import find_sites as find_sites
    from tapernorm.statistics import MassiveTokenError as MassiveTokenError
    from tapernorm.train import TaperCallback as TaperCallback
    from tapernorm.train import TaperMixin as TaperMixin
    from tapernorm.train import TaperTrainer as TaperTrainer
    from tapernorm.verify import verify as verify

__all__ = [*_WHERE, "__version__"]


_register.install()


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'tapernorm' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tapernorm.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
