"""Write architectures.md, the table of families, from the rows that the tests run on (tests/families.py).

python docs/architectures.py
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from families import FAMILIES  # noqa: E402
from family import Family  # noqa: E402

HEAD = """\
# Architectures

What can go from each family, and what stays and why. Nothing in the library knows a family by its name: one small
forward is traced, and every norm is judged by what reads it. So a model that is not in this table works as well, or is
told which norm is in the way:

    tapernorm inspect MODEL

Every row is a tiny model in the tests, on which all of this is checked in float64: at gate 1 the tapered model is the
same to the bit, at gate 0 the folded model equals the unfolded one to 1e-10 (1e-6 where the last column says what is
computed in float32), every gain and bias counts, no other weight changes, experts are chosen as before, and a saved
folder loads as the same model.

A star stands for a layer's number. Post-norms, on the output of a block, stay unless they are asked for with
`TaperConfig(post=True)`: they are then folded backwards, into the linear map that they read.

This page is made by `python docs/architectures.py`.
"""


def page() -> str:
    """The text of architectures.md."""
    refused = [row for row in FAMILIES if not row.goes]
    asked = [row for row in FAMILIES if row.post]
    usual = [row for row in FAMILIES if row.goes and not row.post]
    types = len({row.model_type for row in FAMILIES})
    parts = [HEAD, f"{len(FAMILIES)} rows, {types} model types.\n"]
    parts += ["## What goes\n", _table(usual)]
    parts += ["## Post-norms, with `post=True`\n", _table(asked)]
    parts += ["## Refused\n", "Post-norm models: their norms are on the residual stream itself.\n", _table(refused)]
    return "\n".join(parts)


def _table(rows: list[Family]) -> str:
    lines = ["| family | head | goes | stays, and why | float32 |", "| --- | --- | --- | --- | --- |"]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cells(row: Family) -> list[str]:
    post = {pattern for pattern, reason in row.stays.items() if row.post and reason == "it is a post-norm"}
    goes = [f"`{word}`" for word in [*row.goes.split(), *sorted(post)]]
    stays = [f"`{pattern}`: {reason}" for pattern, reason in row.stays.items() if pattern not in post]
    head = row.head.removeprefix("AutoModelFor").replace("AutoModel", "none")
    return [row.name, head, "<br>".join(goes), "<br>".join(stays), row.float32]


if __name__ == "__main__":
    (HERE / "architectures.md").write_text(page(), encoding="utf-8")
