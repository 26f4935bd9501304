"""What commands print: tables for people, JSON for programs. Loads nothing heavy."""

from __future__ import annotations

import json
import sys
from typing import Any

# Exit codes: the input is wrong, a numerical check failed, the user stopped it.
INPUT, NUMERICAL, INTERRUPTED = 2, 3, 130


def print_json(value: Any) -> None:
    """One JSON object on stdout."""
    print(json.dumps(value, indent=2))


def console() -> Any:
    """A rich console on stdout; a pipe or a file has no width, and rich would take 80."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120)
