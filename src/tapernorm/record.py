"""The folder of a run, and its record in run.json: what was asked for, on what, and all that was measured."""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
import transformers

import tapernorm
from tapernorm import _folder

_MAY_DIFFER = ("out", "tensorboard")  # when a run is resumed: where it is now, and what it is written to
_UNFINISHED = ".run.json"  # what a kill may leave of a record that was being written


class Settings(Protocol):
    """What a run was asked for, such as `RunConfig`."""

    @property
    def kind(self) -> str: ...
    @property
    def out(self) -> str: ...
    def to_dict(self) -> dict[str, Any]: ...


S = TypeVar("S", bound=Settings)


class Run(Generic[S]):
    """The folder of a run and its record, written whole at every change."""

    def __init__(self, config: S, record: dict[str, Any]) -> None:
        self.config = config
        self.folder = Path(config.out)
        self.record = record
        self.started = time.time() - record.get("seconds", 0.0)

    @classmethod
    def open(cls, config: S, overwrite: bool, resume: bool) -> Run[S]:
        """Check where the run is to go. Nothing is written before `begin`.

        Raises:
            ValueError: the folder cannot be written; it is not empty and neither overwrite nor resume was asked for;
                resume of something that is no run, or of one with other settings.
        """
        folder = Path(config.out)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file; give --out the name of a folder")
        _folder.refuse_unwritable(folder)
        occupied = folder.is_dir() and any(path.name != _UNFINISHED for path in folder.iterdir())
        if occupied and not overwrite and not resume:
            raise ValueError(
                f"{folder} is not empty; pass --overwrite to replace it, --resume to continue it, or another --out"
            )
        record: dict[str, Any] = {}
        if occupied and (resume or overwrite):
            try:
                record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
            except (OSError, ValueError):
                raise ValueError(
                    f"{folder} is not empty and holds no run (no readable run.json); it is left alone"
                ) from None
        if resume and record:
            theirs, ours = record.get("settings", {}), config.to_dict()
            other = [k for k in ours if k not in _MAY_DIFFER and theirs.get(k) != ours[k]]
            if other:
                was = ", ".join(f"{k}={theirs.get(k)!r} (now {ours[k]!r})" for k in other)
                raise ValueError(f"{folder} was started with other settings: {was}; resume it with the same ones")
        return cls(config, record if resume else {})

    def begin(self, caller: str, **facts: Any) -> None:
        """Make the folder and write what is known. Clears an old run that is to be overwritten.

        `caller` stands for the command where there is none: the function that a program called.
        """
        if not self.record and self.folder.is_dir():
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        command = ["tapernorm", *sys.argv[1:]] if Path(sys.argv[0]).stem.startswith(("tapernorm", "__main__")) else []
        began = datetime.datetime.fromtimestamp(self.started).astimezone()
        self.record.setdefault("started", began.isoformat(timespec="seconds"))
        self.record.setdefault("command", shlex.join(command) or f"{caller}(...)")
        self.update(
            kind=self.config.kind,
            status="running",
            settings=self.config.to_dict(),
            versions={
                "tapernorm": tapernorm.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
            threads=torch.get_num_threads(),
            **facts,
        )

    def update(self, **facts: Any) -> None:
        """Add to the record and write it, so that a kill never leaves half of it."""
        self.record.update(facts)
        self.record["seconds"] = time.time() - self.started
        temporary = self.folder / _UNFINISHED
        temporary.write_text(json.dumps(self.record, indent=2, default=str) + "\n", encoding="utf-8")
        temporary.replace(self.folder / "run.json")

    def event(self, step: int, kind: str, text: str) -> None:
        """Something that the reader of the report should know. Told twice it is one, as where a run was resumed."""
        events, new = self.record.get("events", []), {"step": step, "kind": kind, "text": text}
        if new not in events:
            self.update(events=[*events, new])
