"""The rows of log.jsonl as TensorBoard events, under the names that they have in the log. Needs the extra tensorboard.

transformers' own callback renames what it is given and never sees the gate, the scales or the guard's events.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def require() -> None:
    """Before the work, not after it.

    Raises:
        ImportError: the package tensorboard is not there.
    """
    import torch.utils.tensorboard  # noqa: F401


class Board:
    """Event files of one arm; what an earlier sitting wrote of `first_step` and later no longer counts."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=first_step if first_step > 1 else None)

    def write(self, row: Mapping[str, Any]) -> None:
        """`loss`, `gate` and the like as they are, what a row has by norm as `scale/<norm>`, the events as text."""
        step = row["step"]
        for key, value in row.items():
            if key == "events":
                for event in value:
                    self.writer.add_text("events", f"{event.get('kind')}: {event.get('text')}", event.get("step", step))
            elif isinstance(value, Mapping):
                for name, each in value.items():
                    self._scalar(f"{key}/{name}", each, step)
            elif key != "step":
                self._scalar(key, value, step)
        self.writer.flush()  # rows are few, and a run may be killed

    def close(self) -> None:
        self.writer.close()

    def _scalar(self, name: str, value: Any, step: int) -> None:
        if isinstance(value, int | float) and not isinstance(value, bool):
            self.writer.add_scalar(name, value, step)
