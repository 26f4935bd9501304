"""Teach transformers' Auto classes the model types `tapernorm_*`, whichever of the two is imported first.

Neither torch nor transformers is imported here. `install` is called once, by `import tapernorm`:

- transformers' table of configurations is there already: it is extended at once;
- it is not: a finder waits for that one module, extends the table right after it was executed, and goes away.

The table gets no entries, only a rule ("tapernorm_" before a model type that transformers knows), so a family's
classes are made when a folder that needs them is read, and at no other time.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_TABLE = "transformers.models.auto.configuration_auto"
_TYPE_PREFIX = "tapernorm_"  # as in modeling_tapernorm, which would import torch


class _Families(dict):
    """The extra entries of `CONFIG_MAPPING`, with `tapernorm_<base>` for every base that transformers knows."""

    def __init__(self, entries: dict[str, Any], base_types: dict[str, str]) -> None:
        super().__init__(entries)
        self._base_types = base_types

    def __contains__(self, model_type: object) -> bool:
        return super().__contains__(model_type) or self._base_type(model_type) in self._base_types

    def __missing__(self, model_type: str) -> Any:
        base_type = self._base_type(model_type)
        if base_type not in self._base_types:
            raise KeyError(model_type)
        from tapernorm import modeling_tapernorm

        self[model_type] = modeling_tapernorm.config_class_of(base_type)
        return self[model_type]

    @staticmethod
    def _base_type(model_type: object) -> str:
        """`"llama"` for `"tapernorm_llama"`; an empty string, which no table holds, for anything else."""
        if isinstance(model_type, str) and model_type.startswith(_TYPE_PREFIX):
            return model_type.removeprefix(_TYPE_PREFIX)
        return ""


class _Waiter(MetaPathFinder):
    """Finds nothing itself: lets the other finders find the table, and has it extended after it was executed."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _TABLE:
            return None
        sys.meta_path.remove(self)  # first: the line below asks every finder again
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_extend(module: ModuleType) -> None:
                execute(module)
                _extend(module)

            spec.loader.exec_module = execute_and_extend  # this loader is this module's alone
        return spec


def _extend(module: ModuleType) -> None:
    mapping = module.CONFIG_MAPPING
    if not isinstance(mapping._extra_content, _Families):
        mapping._extra_content = _Families(mapping._extra_content, module.CONFIG_MAPPING_NAMES)


def install() -> None:
    """Make `AutoConfig` and the `AutoModel…` classes know `tapernorm_*`, now or as soon as they are imported."""
    module = sys.modules.get(_TABLE)
    if module is not None and hasattr(module, "CONFIG_MAPPING"):
        _extend(module)
    elif not any(isinstance(finder, _Waiter) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiter())
