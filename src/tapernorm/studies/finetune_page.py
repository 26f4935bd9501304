"""The figures and the page of the study `finetune`."""

from __future__ import annotations

from pathlib import Path

from tapernorm.canvas import ACCENT, FOURTH, THIRD, save
from tapernorm.studies.base import Row
from tapernorm.studies.drawing import dots
from tapernorm.studies.finetune import CORPORA, METHODS
from tapernorm.studies.rows import distinct, table, with_error
from tapernorm.studies.tinystories_page import percent

WITHOUT = METHODS[1:]
COLOURS = (FOURTH, ACCENT, THIRD)
# OpenWebText, cross-entropy of the models that FakeLN's authors published: fine-tuned with norms, and without
PUBLISHED = {
    "gpt2": (3.0126, 3.0797),
    "gpt2-medium": (2.7390, 2.7642),
    "gpt2-large": (2.6240, 2.6384),
    "gpt2-xl": (2.4799, 2.5052),
}
NEAR = 0.5  # percent of vanilla that `internal` is to stay within

HEAD = """\
# Norms taken out by fine-tuning

One pretrained GPT-2 (layer norms, biases, learned positions, tied head), fine-tuned four times on the same batches:

| method | what becomes of the norms |
| --- | --- |
| `vanilla` | they stay |
| `fakeln` | switched off one after another (arXiv 2507.02559): none is left |
| `internal` | tapered, all but the final one |
| `all` | tapered, with the scale loss: none is left |

The loss is the cross-entropy of what is left at inference, folded, on validation text of what is tuned on, and of
another text. A gap is by how many percent it lies above that of `vanilla` **of the same seed**. After ± stands the
standard error over seeds.

    tapernorm study finetune --data D --set other=E
    tapernorm study finetune --scale paper --data OPENWEBTEXT --set other=PILE --set gpt2_path=FOLDER
"""

SETTING = """\
## What was chosen, and what differs

- At scale `small` the model is not OpenAI's: a GPT-2 of 10 M parameters that the study pretrains itself, on half of
  either text, as the rows say. It is short of trained, so fine-tuning still lowers its loss in all four ways.
- The steps are those of FakeLN's authors for GPT-2 small; theirs are of half a million tokens, these of a thousand.
- `fakeln` is this library's own (`tapernorm.baselines.fakeln`), written from its description: the gaps between its
  switches and its λ (0.1) are not theirs. Its last switch is at 45 % of the steps.
- The taper's gate is 1 for a twentieth of the steps and falls for a quarter, as in `tapernorm taper`; λ is 0.1,
  relative. Massive tokens are let be.
- Learning rate, decay, clipping and batches are the same in all four. Nothing is tuned by method.
"""


def figures(rows: list[Row], folder: Path) -> list[Path]:
    """gap.svg: a dot for each seed."""
    found = {}
    for model in distinct(rows, "model"):
        for corpus in CORPORA:
            values = {method: [gap for _, gap in gaps(rows, model, corpus, method)] for method in WITHOUT}
            if any(values.values()):
                found[f"{model}, {_text(rows, corpus)}"] = values
    title = "cross-entropy above fine-tuning with norms, in percent"
    return [save(dots(found, title, colours=COLOURS), folder / "gap.svg", title)] if found else []


def gaps(rows: list[Row], model: str, corpus: str, method: str) -> list[tuple[int, float]]:
    """(seed, gap) of the runs of a method that did not diverge."""
    own = [row for row in rows if row["model"] == model and row["corpus"] == corpus and row["val_loss"] is not None]
    found = []
    for row in own:
        key = ("seed", "steps", "scale")
        pair = [r for r in own if r["method"] == "vanilla" and all(r[k] == row[k] for k in key)]
        if row["method"] == method and pair:
            found.append((row["seed"], 100 * (row["val_loss"] / pair[0]["val_loss"] - 1)))
    return found


def text(rows: list[Row]) -> str:
    """The page."""
    parts = [HEAD]
    if any(gaps(rows, model, corpus, m) for model in distinct(rows, "model") for corpus in CORPORA for m in WITHOUT):
        parts.append("![Cross-entropy above fine-tuning with norms, by text, method and seed](gap.svg)\n")
    for model in distinct(rows, "model"):
        first = next(row for row in rows if row["model"] == model)
        parts.append(
            f"**{model}**, pretrained: {first['pretrained']}; tuned on {_text(rows, 'tuned')}: {first['steps']:,} "
            f"steps of {first['batch']} × {first['block']} tokens; {first['device']}, torch {first['torch']}\n"
        )
        parts.append(_methods(rows, model))
    return "\n".join([*parts, _verdicts(rows), _published(rows), SETTING])


def _text(rows: list[Row], corpus: str) -> str:
    return next((str(row["text"]) for row in rows if row["corpus"] == corpus), corpus)


def _methods(rows: list[Row], model: str) -> str:
    lines = []
    for corpus in CORPORA:
        for method in METHODS:
            own = [r for r in rows if (r["model"], r["corpus"], r["method"]) == (model, corpus, method)]
            if not own:
                continue
            loss = with_error([row["val_loss"] for row in own if row["val_loss"] is not None])
            gap = "" if method == "vanilla" else percent([g for _, g in gaps(rows, model, corpus, method)])
            lost = sum(bool(row["diverged"]) for row in own)
            lines.append([_text(rows, corpus), f"`{method}`", own[0]["norms"], len(own), loss, gap, lost])
    return table(("text", "method", "norms left", "seeds", "cross-entropy", "gap", "diverged"), lines, left=2)


def _verdicts(rows: list[Row]) -> str:
    """What was aimed at, and whether it was reached."""
    below, within, compared, near = 0, 0, 0, 0
    for model in distinct(rows, "model"):
        for corpus in CORPORA:
            fake, ours = (dict(gaps(rows, model, corpus, method)) for method in ("fakeln", "all"))
            both = fake.keys() & ours.keys()
            compared, below = compared + len(both), below + sum(ours[seed] < fake[seed] for seed in both)
            internal = [gap for _, gap in gaps(rows, model, corpus, "internal")]
            near, within = near + len(internal), within + sum(gap <= NEAR for gap in internal)
    return (
        "## What was aimed at\n\n"
        f"- `all` below `fakeln` in every cell: in {below} of {compared}.\n"
        f"- `internal` at most {NEAR} % above `vanilla` in every cell: in {within} of {near}.\n"
    )


def _published(rows: list[Row]) -> str:
    """The published models on OpenWebText, and ours beside them where the same models were tuned."""
    lines = []
    for model, (vanilla, free) in PUBLISHED.items():
        own = {r["method"]: r["val_loss"] for r in rows if r["model"] == model and r["corpus"] == "tuned"}
        ours = [f"{own[method]:.4f}" if own.get(method) is not None else "" for method in METHODS]
        lines.append([model, f"{vanilla:.4f}", f"{free:.4f}", f"{100 * (free / vanilla - 1):+.2f} %", *ours])
    head = ("OpenWebText", "vanilla, published", "FakeLN, published", "gap", *(f"`{m}`, here" for m in METHODS))
    return "## The published models\n\n" + table(head, lines)
