"""The page and the table about a removal without training, from the record that `tapernorm.removal` writes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.table import Table
from rich.text import Text

from tapernorm import canvas, depth_figures
from tapernorm.page import (
    format_count,
    format_error,
    format_gap,
    format_loss,
    format_ratio,
    format_speed,
    number,
    part,
    render,
)

FP16_LARGEST = 65_504.0
_SHORT = 60_000  # tokens: with fewer, the 99.9th percentile is a guess
_LABELS = {"validation": "validation text", "other": "unrelated text"}


def render_removal(run: Path, record: Mapping[str, Any]) -> str:
    """The page about `record`, the content of run.json; what is not in it is said to be not measured."""
    from tapernorm.reading import bench_groups
    from tapernorm.report import fold_rows

    removal, fold = part(record, "removal"), part(record, "fold")
    costs = part(removal, "costs")
    view = {
        "run": record, "name": run.resolve().name, "removal": removal, "fold": fold, "part": lambda k: part(record, k),
        "verdict": verdict(record), "failed": list(record.get("failed") or ()), "verify": part(record, "verify"),
        "fold_rows": fold_rows(record, part(fold, "kinds")), "bench": bench_groups(record), "texts": loss_rows(record),
        "costs": {name: format_loss(cost) if cost is not None else "not finite" for name, cost in costs.items()},
        "removed": _removed(record), "headroom": headroom(record), "warnings": warnings(record),
        "samples": [s for s in record.get("samples") or () if isinstance(s, dict)],
        "settings": _settings(record), "prefix": list(removal.get("prefix") or ()), "figure": _draw(record),
    }  # fmt: skip
    return render("removal.html.j2", view)


def verdict(record: Mapping[str, Any]) -> list[str]:
    """The removal in sentences."""
    fold, removal = part(record, "fold"), part(record, "removal")
    model = part(record, "model").get("name") or "the model"
    budget = number(part(record, "settings").get("budget"))
    limit = f"{100 * budget:g} %" if budget else "the budget"
    if not fold:
        return [f"No norm of {model} has been removed so far."]
    folded, total = len(fold.get("folded") or ()), record.get("sites_total") or "?"
    said = [f"{folded} of {total} norms of {model} were taken out without training, under a loss budget of {limit}."]
    if not folded:
        said[0] = f"Not one of {total} norms of {model} goes without training under a loss budget of {limit}."
    before, after = _losses(record, "before", "validation"), _losses(record, "after", "validation")
    if before and after:
        mean, tail = (format_gap(after.get(key), before.get(key), "not finite") for key in ("loss", "p999"))
        lost, tokens = number(after.get("nonfinite")), format_count(after.get("tokens"))
        many = f"{lost:,.0f} tokens of {tokens} have" if lost else f"No token of {tokens} has"
        said.append(
            f"On validation text the loss is {format_loss(after.get('loss'))} against "
            f"{format_loss(before.get('loss'))} ({mean}), the 99.9th percentile of token losses {tail}. "
            f"{many} a loss that is not finite."
        )
    if prefix := removal.get("prefix"):
        said.append(f"A constant prefix of {len(prefix)} tokens, {prefix}, takes the place of massive tokens.")
    said += _speed(record) if folded else []
    trained = _trained(record)
    return [*said, *(trained or _help(record))]


def _trained(record: Mapping[str, Any]) -> list[str]:
    """What training did about the norms that were left, in sentences; nothing where none was asked for."""
    trained = part(record, "trained")
    if not trained or trained.get("stopped"):
        return [str(trained["stopped"])] if trained else []
    gone, loss = len(trained.get("folded") or ()), part(trained, "losses").get("loss")
    before = _losses(record, "before", "validation").get("loss")
    said = [
        f"Then {_count(gone, 'norm')} more were trained away in {trained.get('steps')} steps: the loss of the model in "
        f"{trained.get('model')} is {format_loss(loss)} ({format_gap(loss, before, 'not finite')})."
    ]
    one, two = number(loss), number(before)
    budget = number(part(record, "settings").get("budget"))
    if one and two and budget and one > (1 + budget) * two:
        said.append("That is beyond the budget: more --minutes, or more text, would bring it down.")
    if trained.get("verified") is False:
        said.append("The model that was written is not the model that was trained: do not use it.")
    return said


def _speed(record: Mapping[str, Any]) -> list[str]:
    """How fast, in a sentence, where it was measured."""
    for group in _bench(record):
        now, was = (format_speed(group[variant].get("tokens_per_second")) for variant in ("folded", "stock"))
        times = format_ratio(group["folded"].get("ratio"))
        return [f"It writes {now} tokens a second, and the original {was} ({times}), one text at a time."]
    return []


def _help(record: Mapping[str, Any]) -> list[str]:
    """What would take out more, in a sentence; nothing where only norms stay that were to stay."""
    fold, settings = part(record, "fold"), part(record, "settings")
    reasons = part(fold, "reasons")
    left = [name for name in fold.get("kept") or () if name not in reasons]
    if not left:
        return []
    ways = ["a larger --budget"]
    if part(record, "data").get("self_generated") and not settings.get("data"):
        ways.append("text like what the model is for (--data FILE), of which there can be more,")
    else:
        ways.append("more text to fit on (--fit-tokens)")
    ways.append("`tapernorm taper` on the model that was written, which trains the rest away")
    return [f"{_count(len(left), 'norm')} could still go: {ways[0]} may do it, {ways[1]} or {ways[2]}."]


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def loss_rows(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """[{"label", "rows": [(name, Losses)], "change": {column: shown}}], a table for each text."""
    tables = []
    for key, label in _LABELS.items():
        before, after = _losses(record, "before", key), _losses(record, "after", key)
        if not before and not after:
            continue
        columns = ("loss", "median", "p99", "p999")
        change = {column: format_gap(after.get(column), before.get(column), "–") for column in columns}
        for column in ("over_10", "nonfinite"):
            one, two = number(before.get(column)), number(after.get(column))
            if one is None or two is None:
                change[column] = "–"
            else:
                change[column] = f"{two - one:+,.0f}".replace("-", "−") if one != two else "0"
        name = part(record, "data").get("name" if key == "validation" else "other_text")
        rows = [("original", before), ("norms removed", after)]
        tables.append({"label": f"{label}, {name}" if name else label, "rows": rows, "change": change})
    return tables


def headroom(record: Mapping[str, Any]) -> dict[str, Any]:
    """The largest activation before and after, as {"rows", "said"}: how much of float16's range it takes."""
    rows = []
    for key, label in (("before", "original"), ("after", "norms removed")):
        largest = part(part(record, key), "largest")
        if largest:
            share = (number(largest.get("value")) or math.inf) / FP16_LARGEST
            shown = f"{100 * share:.2g} %" if share <= 1 else "over"
            rows.append({"label": label, "value": largest.get("value"), "where": largest.get("where", "")})
            rows[-1] |= {"part": share, "share": shown}
    if not rows:
        return {"rows": rows, "said": ""}
    taken, limit = rows[-1]["part"], f"the largest number of float16, {FP16_LARGEST:,.0f}"
    said = f"Nothing comes near {limit}."
    if taken > 0.5:
        said = f"Too close to {limit}, or beyond it: run the model in bfloat16 or float32."
    elif taken > 0.125:
        said = f"Below half of {limit}."
    return {"rows": rows, "said": said}


def warnings(record: Mapping[str, Any]) -> list[str]:
    """What does not fail a removal, and should be known."""
    found = []
    before, after = _losses(record, "before", "validation"), _losses(record, "after", "validation")
    one, two = number(before.get("p999")), number(after.get("p999"))
    if one and two and two > 1.1 * one:
        found.append(f"The 99.9th percentile of token losses rose by {100 * (two / one - 1):.1f} %: the tail suffers "
                     "more than the mean.")  # fmt: skip
    if part(record, "data").get("self_generated"):
        found.append(
            "The text, or a part of it, was written by the model itself: the losses are those of what the model "
            "expects, and on text by people they may be others."
        )
    tokens = number(after.get("tokens"))
    if tokens and tokens < _SHORT:
        found.append(f"Measured on {tokens:,.0f} tokens, all that the validation text or --eval-tokens gave; a 99.9th "
                     f"percentile wants {_SHORT:,} or more.")  # fmt: skip
    return found


def removal_table(record: Mapping[str, Any]) -> Table:
    """What a person wants to know at the end of a removal, narrow enough for any terminal."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", max_width=22)
    table.add_column(overflow="fold")

    def add(what: str, shown: str, note: str = "") -> None:
        table.add_row(Text(what), Text(f"{shown:>7}  {note}".rstrip()))

    add("norms removed", _removed(record))
    for key, label in (("validation", ""), ("other", ", unrelated text")):
        before, after = _losses(record, "before", key), _losses(record, "after", key)
        if before or after:
            add(f"loss{label}", format_loss(after.get("loss")), f"{format_gap(after.get('loss'), before.get('loss'))}, "
                f"before {format_loss(before.get('loss'))}")  # fmt: skip
            tail = f"before {format_loss(before.get('p999'))}"
            add("  99.9th percentile", format_loss(after.get("p999")),
                f"{format_gap(after.get('p999'), before.get('p999'))}, {tail}")  # fmt: skip
            add("  over 10 nats", format_count(after.get("over_10")), f"before {format_count(before.get('over_10'))}")
            add("  not finite", format_count(after.get("nonfinite")), f"of {format_count(after.get('tokens'))} tokens")
    fold, verify = part(record, "fold"), part(record, "verify")
    if fold.get("folded"):
        add("logit error, fold", format_error(fold.get("max_abs_logit_error"), plain=True))
    add("logit error, reload", format_error(verify.get("max_abs_logit_error"), plain=True))
    rows = headroom(record)["rows"]
    if rows:
        add("largest activation", format_speed(rows[-1]["value"]), f"float16 ends at {FP16_LARGEST:,.0f}")
    for group in _bench(record):
        add("tokens/s, before", format_speed(group["stock"]["tokens_per_second"]))
        ratio = format_ratio(group["folded"].get("ratio"), "")
        add("tokens/s, after", format_speed(group["folded"]["tokens_per_second"]), ratio)
    prefix = part(record, "removal").get("prefix")
    add("constant prefix", ", ".join(map(str, prefix)) if prefix else "none")
    for label, key in (("report", "report"), ("model", "norm_free_model")):
        if record.get(key):
            table.add_row(Text(label), Text(str(record[key])))
    return table


def _bench(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = part(record, "bench").get("rows") or []
    by_variant = {row["variant"]: row for row in rows}
    return [by_variant] if {"stock", "folded"} <= set(by_variant) else []


def _draw(record: Mapping[str, Any]) -> dict[str, Markup]:
    removal, fold = part(record, "removal"), part(record, "fold")
    budget = number(part(record, "settings").get("budget"))
    before = number(removal.get("loss_before"))
    drawn = {}
    names = list(part(fold, "kinds"))
    costs, parts = part(removal, "costs"), part(record, "parts")
    if costs:
        folded = set(fold.get("folded") or ())
        rows = [
            {"number": i, "part": parts.get(name, "other"), "cost": costs[name], "removed": name in folded}
            for i, name in enumerate(names or list(costs), 1)
            if name in costs
        ]
        draw = depth_figures.cost_by_depth(rows, budget * before if budget and before else None)
        drawn["cost"] = draw, "Cost of each norm taken out alone, in nats, over depth; filled marks were removed."
    if (tried := removal.get("tried")) and budget and before:
        draw = depth_figures.search_curve(tried, before, budget, len(fold.get("folded") or ()))
        drawn["search"] = draw, "Norms removed against the held-out loss above the original's, in percent."
    return {name: Markup(canvas.inline(draw, name, label)) for name, (draw, label) in drawn.items()}


def _settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for, less what is nothing or stands elsewhere on the page."""
    values = {k: v for k, v in part(record, "settings").items() if v not in (None, [], ()) and k not in ("kind", "csv")}
    budget = number(values.get("budget"))
    return values | ({"budget": f"{100 * budget:g} %"} if budget else {})


def _removed(record: Mapping[str, Any]) -> str:
    fold = part(record, "fold")
    return f"{len(fold.get('folded') or ())} of {record.get('sites_total', '?')}" if fold else ""


def _losses(record: Mapping[str, Any], when: str, text: str) -> dict[str, Any]:
    return part(part(part(record, when), "losses"), text)
