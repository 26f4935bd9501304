"""Functions of the package that are called like the module that they are in.

`tn.verify` is a function, and `import tapernorm.verify` binds the module to the same name, whichever comes first. So
such a module can be called: it is the function.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any


def call_module(name: str, function: Callable[..., Any]) -> None:
    """Calls of the module `name` are calls of `function` from now on."""

    class Callable_(types.ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    sys.modules[name].__class__ = Callable_
