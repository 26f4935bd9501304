"""`tapernorm inspect MODEL --text FILE`: what a survey found, in sentences, as a table, as JSON and as a page."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from pathlib import Path
from typing import Any

import torch
from markupsafe import Markup
from rich.table import Table

from tapernorm import __version__, canvas, depth_figures, hub
from tapernorm.convert import get_controller
from tapernorm.data import load_text
from tapernorm.inspection import as_rows
from tapernorm.page import plain, render
from tapernorm.progress import stages
from tapernorm.survey import ABOVE, CHEAP, COSTLY, MASSIVE, Survey, survey, text_ids

_BUDGET = 0.01  # of the loss: the budget of the recommended command


@dataclasses.dataclass(frozen=True)
class Look:
    """A survey and what it is of."""

    model: str
    text: str
    model_type: str
    parameters: int
    tokenizer: Any
    found: Survey


def look(model: str, text: str, tokens: int, column: str = "text", split: str | None = None) -> Look:
    """Load a model and a text, and survey them, with a progress bar.

    Raises:
        ValueError: as `tapernorm.hub.from_pretrained`, `tapernorm.data.load_text` and `tapernorm.survey.survey`; the
            model has no tokenizer, is tapered, or does not know the ids that its tokenizer makes.
    """
    if tokens < 256:
        raise ValueError(f"--tokens {tokens} is too little to see outliers in; give at least 256")
    loaded, tokenizer = hub.from_pretrained(model)
    if tokenizer is None:
        raise ValueError(f"{model} has no tokenizer beside it; put its tokenizer's files into the folder")
    if get_controller(loaded) is not None:
        raise ValueError(f"{model} is tapered; give the original model, or a folded one")
    ids = text_ids(loaded, tokenizer, load_text(text, column, split, tokenizer=tokenizer).train, tokens)
    if int(ids.max()) >= loaded.config.vocab_size:
        raise ValueError(
            f"the tokenizer makes ids up to {int(ids.max())}, and the model knows {loaded.config.vocab_size}: "
            "they do not belong together"
        )
    parameters = sum(p.numel() for p in loaded.parameters())
    with stages() as tell:
        found = survey(loaded, tokenizer, ids, progress=tell)
    return Look(model, text, loaded.config.model_type, parameters, tokenizer, found)


# In words


def sentences(seen: Look) -> list[str]:
    """What was found and what taking the norms out will do about it, in plain sentences."""
    found = seen.found
    return [*_outliers(seen), _prefix(seen), *_costs(found), *(f"Note: {note}." for note in found.notes)]


def _outliers(seen: Look) -> list[str]:
    found = seen.found
    share = 100 * found.above / found.total
    said = [
        f"Of {found.total:,} tokens looked at, {found.above:,} ({share:.2g} %) stand above {ABOVE:g} times the median "
        f"scale at some norm, {found.massive:,} of them above {MASSIVE:g} times (massive)."
    ]
    if not found.above:
        return [f"No token of {found.total:,} stands above {ABOVE:g} times the median scale at any norm."]
    place, often = found.positions[0]
    blocks = found.total // found.block
    if often > 0.5 * blocks and place < 4:
        said.append(f"Position {place} of a sequence does so in {often:,} of {blocks:,} sequences.")
    names = ", ".join(f"{_text(seen, token)} ({count:,})" for token, count in found.tokens[:5])
    said.append(f"Most often it is {names}.")
    return said


def _prefix(seen: Look) -> str:
    found = seen.found
    if not found.trials:
        return "No prefix was looked for."
    worst = found.trials[0]
    where = f"{worst.ratio:,.0f} times the median" if math.isfinite(worst.ratio) else "not finite"
    if found.prefix == ():
        return (
            f"No constant prefix is needed: no token is above {MASSIVE:g} times the median "
            f"(the largest is at {worst.ratio:.1f})."
        )
    if found.prefix is None:
        best = min(found.trials, key=lambda trial: trial.ratio)
        return (
            f"The largest token is at {where}, and none of {len(found.trials)} constant prefixes holds all below "
            f"{MASSIVE:g}; the best, {list(best.prefix)}, leaves {best.ratio:.1f}. Norms in front of those tokens will "
            "have to stay, or be trained away."
        )
    words = " ".join(_text(seen, token) for token in found.prefix)
    clean = found.trials[-1].ratio
    return (
        f"A constant prefix is needed, and {list(found.prefix)} ({words}) does it: the largest token falls from "
        f"{where} to {clean:.1f} times. `remove` looks for one and puts it in by itself."
    )


def _costs(found: Survey) -> list[str]:
    if not found.costs:
        return []
    with_prefix = ", the prefix in place" if found.after else ""
    costs = {name: cost for name, cost in found.costs.items() if found.parts[name] != "head"}
    cheap = sum(cost < CHEAP for cost in costs.values())
    costly = sorted((name for name in costs if costs[name] > COSTLY), key=lambda name: -costs[name])
    said = [
        f"Replaced alone by its best fixed scale, without training{with_prefix}, {cheap} of {len(costs)} internal "
        f"norms cost under {CHEAP:g} nats each (the loss is {found.loss_prefix or found.loss:.3f})."
    ]
    if costly:
        names = ", ".join(f"{name} ({_nats(costs[name])})" for name in costly[:4])
        more = f", and {len(costly) - 4} more" if len(costly) > 4 else ""
        said.append(
            f"Above {COSTLY:g}: {names}{more}. A full matrix in place of the scale, which `remove` fits, often costs "
            "less."
        )
    else:
        said.append(f"No norm costs more than {COSTLY:g}.")
    final = [name for name in found.costs if found.parts[name] == "head"]
    if final:
        cost = _nats(found.costs[final[0]])
        said.append(f"The final norm costs {cost} alone; it stays, unless `tapernorm taper --arm all` trains it away.")
    return said


def command(seen: Look) -> str:
    """The command to try next."""
    return shlex.join(["tapernorm", "remove", seen.model, "--data", seen.text, "--budget", "1%", "--out", "RUN"])


def advice(seen: Look) -> str:
    """Why that command, in one sentence."""
    costs = [cost for name, cost in seen.found.costs.items() if seen.found.parts[name] != "head"]
    if not costs:
        return "Removal without training needs norms in a row of blocks; `tapernorm taper` trains them away."
    allowed = _BUDGET * seen.found.loss
    total, reach = 0.0, 0
    for cost in sorted(costs):
        total += max(0.0, cost)
        reach += total <= allowed
    if reach:
        return (
            f"By their costs alone, about {reach} of {len(costs)} internal norms fit into a loss budget of 1 % without "
            "training (fitted matrices usually bring more). To take out all of them, train: `tapernorm taper`."
        )
    return (
        "With plain scales no norm fits into a loss budget of 1 %; fitted matrices, which `remove` uses, may. To take "
        "out all of them, train: `tapernorm taper`."
    )


def _nats(cost: float) -> str:
    return f"{cost:.3g}" if math.isfinite(cost) else "not finite"


def _text(seen: Look, token: int) -> str:
    return f"“{_decoded(seen, token)}”"


def _decoded(seen: Look, token: int) -> str:
    return seen.tokenizer.decode([token]).replace("\n", "⏎")


# As data


def to_dict(seen: Look) -> dict[str, Any]:
    """All numbers, plain JSON: the keys of `inspect --json`, and what the text told."""
    found = seen.found
    sites = as_rows(found.sites)
    for site, row in zip(found.sites, sites, strict=True):
        if site.name in found.before:
            row["scale"] = dataclasses.asdict(found.before[site.name])
        if site.name in found.after:
            row["scale_with_prefix"] = dataclasses.asdict(found.after[site.name])
        if site.name in found.costs:
            row |= {"cost": found.costs[site.name], "c": found.c[site.name], "feeds": found.parts[site.name]}
    trials = [
        {"prefix": list(t.prefix), "text": "".join(_decoded(seen, x) for x in t.prefix), "ratio": t.ratio,
         "site": t.site, "token": t.token, "token_text": _decoded(seen, t.token)}
        for t in found.trials
    ]  # fmt: skip
    return plain(
        {
            "model_type": seen.model_type,
            "sites": sites,
            "text": seen.text,
            "tokens": found.total,
            "block": found.block,
            "loss": found.loss,
            "loss_with_prefix": found.loss_prefix,
            "cost_tokens": found.cost_tokens,
            "outliers": {
                "above_4": found.above,
                "above_20": found.massive,
                "tokens": [{"token": t, "text": _decoded(seen, t), "count": n} for t, n in found.tokens],
                "positions": [{"position": p, "count": n} for p, n in found.positions],
            },
            "prefix": {"chosen": None if found.prefix is None else list(found.prefix), "tried": trials},
            "says": [*sentences(seen), advice(seen)],
            "command": command(seen),
            "notes": list(found.notes),
        }
    )


def scale_table(seen: Look) -> Table:
    """One row a norm that reads the text token by token."""
    found = seen.found
    after = bool(found.after)
    table = Table("#", title=f"{Path(seen.model).name}: r / median over {found.total:,} tokens")
    table.add_column("norm", overflow="fold")
    for name in ("median r", "99 %", "largest"):
        table.add_column(name)
    if after:
        table.add_column("with prefix")
    table.add_column("cost alone")
    table.add_column("can go")
    for column in table.columns[2 : 5 + after + 1]:
        column.justify = "right"
    for number, site in enumerate(_measured(found), 1):
        row = found.before[site.name]
        cells = [str(number), site.name, f"{row.median:.3g}", f"{row.quantiles[-1]:.2f}", f"{row.largest:.1f}"]
        cells += [f"{found.after[site.name].largest:.1f}"] if after else []
        cost = found.costs.get(site.name)
        table.add_row(*cells, "–" if cost is None else _cost(cost), "yes" if site.removable else "no")
    return table


def _cost(cost: float) -> str:
    return f"{cost:.4f}" if math.isfinite(cost) else "not finite"


def _measured(found: Survey) -> list[Any]:
    return [site for site in found.sites if site.name in found.before]


# As a page


def page_name(model: str) -> str:
    """`inspect-<model>.html`, of a folder, an id or a file."""
    name = re.sub(r"[^\w.-]+", "-", re.sub(r"\.(bin|gguf)$", "", Path(model).name)).strip("-.") or "model"
    return f"inspect-{name}.html"


def write_page(seen: Look, path: Path) -> Path:
    """Write the page and return its path."""
    found, data = seen.found, to_dict(seen)
    sites = _measured(found)
    rows = [{**row, "number": i} for i, row in enumerate((r for r in data["sites"] if "scale" in r), 1)]
    drawn = [("r / median, the model as it is", [dataclasses.asdict(found.before[s.name]) for s in sites])]
    if found.after:
        title = f"r / median, with the prefix {list(found.prefix or ())} in front"
        drawn.append((title, [dataclasses.asdict(found.after[s.name]) for s in sites]))
    label = f"Percentiles of r over its median at {len(sites)} norms, in order of execution, with outliers as dots."
    figure = {"scales": Markup(canvas.inline(depth_figures.scale_bands(plain(drawn, infinite=1e6)), "scales", label))}
    if found.costs:
        costs = [{"number": r["number"], "part": r["feeds"], "cost": r["cost"]} for r in rows if "cost" in r]
        draw = depth_figures.cost_by_depth(costs, _BUDGET * (found.loss_prefix or found.loss))
        figure["cost"] = Markup(canvas.inline(draw, "cost", "Cost of each norm taken out alone, in nats, over depth."))
    view = {
        "name": Path(seen.model).name or seen.model, "data": data, "rows": rows, "figure": figure,
        "says": sentences(seen), "advice": advice(seen), "command": command(seen), "costs": bool(found.costs),
        "facts": {
            "model": seen.model, "model type": seen.model_type, "parameters": seen.parameters, "text": seen.text,
            "tokens looked at": found.total, "tokens in a sequence": found.block,
            "tokens for the costs": found.cost_tokens, "loss": found.loss, "loss with the prefix": found.loss_prefix,
        },
        "versions": {"tapernorm": __version__, "torch": torch.__version__},
    }  # fmt: skip
    path.write_text(render("survey.html.j2", view), encoding="utf-8")
    return path
