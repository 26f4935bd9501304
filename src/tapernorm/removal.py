"""`tapernorm remove`: removal without training as a run, measured on text that it did not see, with a report.

RUN/run.json          what was asked for, and everything that was measured
RUN/model/            the model without the norms that went
RUN/text/             what the model wrote, where there was no text or it was to write some
RUN/report.html       for people

`remove_` fits and chooses on the training part of the text; everything said about the result is measured on the
validation part, by the model that was written and loaded again.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tapernorm import bench, card, data, hub, sources
from tapernorm.bos import take_over
from tapernorm.chain import Chain
from tapernorm.config import TaperConfig
from tapernorm.convert import choose
from tapernorm.headroom import largest_activation
from tapernorm.logits import batch_within
from tapernorm.material import (
    choose_prefix,
    continuations,
    device,
    load_original,
    model_facts,
    refuse_foreign_ids,
)
from tapernorm.page import plain
from tapernorm.precision import fast_products, refuse_bfloat16
from tapernorm.prefix import room
from tapernorm.progress import bar, stages
from tapernorm.record import Run
from tapernorm.remove import TAIL, Removal, remove_
from tapernorm.run_config import SELF_TOKENS, read_prefix, read_sources
from tapernorm.sites import NormSite, context_length, find_sites
from tapernorm.survey import parts_of
from tapernorm.verify import evaluate, verify

FINAL_STAYS = "the final norm stays: it anchors the scale of the logits, and without training nothing else can"
SLACK = 1.25  # times the budget: the loss on unseen text may rise by so much more than on the text that chose
_ROUNDS, _NEW_TOKENS = 7, 32  # of the decoding benchmark
_CSV = (
    "model", "data", "budget", "sites_removed", "sites_total", "loss_before", "loss_after", "gap_percent",
    "p999_before", "p999_after", "nonfinite", "minutes", "recipe",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RemovalConfig:
    """What `tapernorm remove` does.

    Args:
        model, data: as `tapernorm.from_pretrained` and `tapernorm.data.load_text` read them; several texts are mixed,
            and without one the model writes its own. out: the run's folder.
        budget: share by which the loss may rise, as a number (0.01) or as text ("1%").
        prefix: "auto", "none" or token ids with commas ("0,504").
        keep, refit, fit_tokens: as in `remove_`.
        eval_tokens: how much of the validation text to measure on.
        other_data: unrelated text to measure on as well.
        self_generate: so many tokens that the model writes itself, beside `data` or in place of it. Where they are the
            only text, half of them at most are fitted on, and a quarter measured on.
        csv: a file that one row is appended to.
        bf16: measure the losses with bfloat16 products.

    Raises:
        ValueError: a value that is out of range or cannot be read.
    """

    model: str
    data: str | tuple[str, ...] | None
    out: str
    budget: float | str = 0.01
    prefix: str = "auto"
    keep: tuple[str, ...] = ()
    refit: bool = True
    fit_tokens: int = 49_152
    eval_tokens: int = 65_536
    text_column: str = "text"
    split: str | None = None
    self_generate: int | None = None
    other_data: str | None = None
    csv: str | None = None
    bf16: bool = False
    kind: str = dataclasses.field(default="remove", init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", read_budget(self.budget))
        read_prefix(self.prefix)
        if not self.data and self.self_generate is None:
            object.__setattr__(self, "self_generate", SELF_TOKENS)
        object.__setattr__(self, "data", read_sources(self.data, self.self_generate))
        if not self.data and self.self_generate is not None:
            object.__setattr__(self, "fit_tokens", min(self.fit_tokens, max(1024, self.self_generate // 2)))
            object.__setattr__(self, "eval_tokens", min(self.eval_tokens, max(1024, self.self_generate // 4)))
        TaperConfig(keep=self.keep)  # refuses what is no sequence of patterns
        for field in ("fit_tokens", "eval_tokens"):
            value = getattr(self, field)
            if value < 1024:
                raise ValueError(f"{field}={value} must be at least 1,024, or the numbers say nothing")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}


def read_budget(value: float | str) -> float:
    """A share from "1%", "1 %", "0.01" or 0.01.

    Raises:
        ValueError: it is no number, not above 0, or 1 and more without a percent sign.
    """
    text = str(value).strip()
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        number = math.nan
    share = number / 100 if text.endswith("%") else number
    if not 0 < share < math.inf:
        raise ValueError(f"--budget {text}: it must be above 0, a percentage such as 1% or a share such as 0.01")
    if share >= 1:
        hint = f"; write {number:g}% for {number:g} %" if not text.endswith("%") else ""
        raise ValueError(f"--budget {text} would let the loss rise by {100 * share:g} %{hint}")
    return share


def model_name(source: str) -> str:
    """`smollm` of hub/smollm, models/smollm and smollm.gguf."""
    name = Path(source).name or Path(source).expanduser().resolve().name
    return re.sub(r"\.(bin|gguf)$", "", name)


def default_out(model: str, overwrite: bool = False) -> str:
    """runs/<model>-removed, with a number where that is taken and not to be replaced."""
    first = Path("runs") / f"{model_name(model)}-removed"
    folders = (first if n == 1 else first.with_name(f"{first.name}-{n}") for n in itertools.count(1))
    return str(next(folder for folder in folders if overwrite or not folder.exists()))


def execute(config: RemovalConfig, overwrite: bool = False) -> dict[str, Any]:
    """Do the removal. Returns the record that is in run.json.

    Raises:
        ValueError: bad input; nothing was written then.
        FoldError: see `fold_`; nothing was written.
    """
    from tapernorm.report import write_report

    _refuse_places(config, overwrite)
    run = Run.open(config, overwrite, resume=False)
    work = _Work.prepare(config)
    before = work.measure(work.model, "original", config.bf16)
    original = copy.deepcopy(work.model)  # remove_ works in place
    removal = _remove(config, work)
    run.begin("tapernorm.removal.execute", **work.facts)  # nothing that could be refused is left to do
    work.gathered.save(run.folder)
    folder = run.folder / "model"
    hub.save_pretrained(work.model, folder, tokenizer=work.tokenizer, overwrite=True)
    fold = removal.fold.to_dict() if removal.fold else {"folded": [], "c": {}}
    fold |= {"kept": list(removal.kept), "reasons": _reasons(work, removal)}
    fold |= {"kinds": {s.name: s.kind for s in work.sites}, "roles": {s.name: s.role for s in work.sites}}
    parts = parts_of(work.sites)
    run.update(
        **plain({"fold": fold, "removal": {k: v for k, v in removal.to_dict().items() if k != "fold"}}),
        parts=parts,
        sites_total=len(work.chosen),
        norm_free_model=str(folder),
    )
    loaded, _ = hub.from_pretrained(folder, device=device())  # what was written is what is judged
    run.update(verify=plain(verify(work.model, loaded, work.texts["validation"][:8]).to_dict()))
    after = work.measure(loaded, "norms removed", config.bf16)
    run.update(**plain({"before": before, "after": after}))
    run.update(bench={"rows": _speed(original, loaded, run.record["model"]["name"])})
    run.update(samples=_samples(original, loaded, work))
    prompt = run.record["samples"][0]["prompt"]
    run.update(generate_command=f"tapernorm generate {shlex.quote(str(folder))} --prompt {shlex.quote(prompt)}")
    run.update(failed=failures(run.record))
    card.write_card(folder, run.record)
    run.update(status="done", report=str(write_report(run.folder)))  # who waits for the end finds the page
    if config.csv:
        bench.append_csv(Path(config.csv), [csv_row(run.record)])
    return run.record


def failures(record: dict[str, Any]) -> list[str]:
    """What is wrong with a finished removal, in sentences; [] if nothing is."""
    budget = record["settings"]["budget"]
    before, after = (record[key]["losses"]["validation"] for key in ("before", "after"))
    found = []
    lost = after["nonfinite"] - before["nonfinite"]
    if lost > 0:
        found.append(f"The loss of {lost:,} tokens of the validation text is not finite; it was before.")
    gap = after["loss"] / before["loss"] - 1 if after["loss"] is not None else math.inf
    if gap > SLACK * budget:
        found.append(
            f"On validation text the loss rose by {100 * gap:.2f} %, and the budget is {100 * budget:g} %: the text "
            "that chose was too little or unlike it. Give more (--fit-tokens), or a smaller budget."
        )
    last, was = after["p999"], before["p999"]
    if last is not None and was and last > (1 + SLACK * TAIL) * was:
        found.append(
            f"The 99.9th percentile of token losses rose by {100 * (last / was - 1):.0f} % on validation text, "
            f"{100 * TAIL:g} % was to be the most: a rare token runs away and takes the rest of its sequence along. "
            "Keep norms of MLPs in the middle blocks (--keep), give more text (--fit-tokens), or a smaller budget."
        )
    if not record["verify"]["passed"]:
        found.append("The model that was written is not the model that was made: do not use it.")
    return found


def summary(record: dict[str, Any]) -> dict[str, Any]:
    """What `remove --json` prints."""
    before, after = (record[key]["losses"] for key in ("before", "after"))
    removal = record["removal"]
    return {
        "out": record["settings"]["out"],
        "loss_before": before["validation"]["loss"],
        "loss_after": after["validation"]["loss"],
        "budget": record["settings"]["budget"],
        "losses": {"before": before, "after": after},
        "fold": record["fold"],
        "prefix": removal["prefix"],
        "costs": removal["costs"],
        "tried": removal["tried"],
        "largest_activation": {key: record[key]["largest"] for key in ("before", "after")},
        "verify": record["verify"],
        "bench": record["bench"],
        "failed": record["failed"],
        "seconds": removal["seconds"],
        **({"trained": record["trained"]} if "trained" in record else {}),
        "model": record["norm_free_model"],
        "report": record["report"],
    }


def csv_row(record: dict[str, Any]) -> dict[str, Any]:
    """The row of a table of removals."""
    settings, removal = record["settings"], record["removal"]
    before, after = (record[key]["losses"]["validation"] for key in ("before", "after"))
    recipe = ["linear+refit" if settings["refit"] else "linear"]
    recipe += ["losses in bf16"] if settings["bf16"] else []
    recipe += [f"prefix {removal['prefix']}" if removal["prefix"] else "no prefix"]
    recipe += [f"{round(settings['fit_tokens'] / 1000)}k tokens"]
    gap = None if after["loss"] is None else round(100 * (after["loss"] / before["loss"] - 1), 3)
    values = (
        record["model"]["name"], record["data"]["name"], settings["budget"], len(record["fold"]["folded"]),
        record["sites_total"], before["loss"], after["loss"], gap, before["p999"], after["p999"], after["nonfinite"],
        round(removal["seconds"] / 60, 2), ", ".join(recipe),
    )  # fmt: skip
    return dict(zip(_CSV, values, strict=True))


@dataclasses.dataclass
class _Work:
    """Everything that can be refused before the long part begins."""

    model: Any
    tokenizer: Any
    gathered: sources.Gathered
    texts: dict[str, Tensor]  # "validation" and "other" -> [N, block] ids
    block: int
    prefix: tuple[int, ...]
    sites: list[NormSite]
    chosen: list[NormSite]
    facts: dict[str, Any]

    @classmethod
    def prepare(cls, config: RemovalConfig) -> _Work:
        model, tokenizer = load_original(config.model)
        if config.bf16:
            refuse_bfloat16(device())
        sites = find_sites(model)
        chosen = choose(sites, TaperConfig(keep=config.keep))
        gathered = sources.gather(config, model, tokenizer, device())
        text = gathered.text
        context = context_length(model)
        prefix = choose_prefix(read_prefix(config.prefix), model, tokenizer, shuffled(text.train), sites)
        block = min(512, room(model, prefix))
        take_over(model, tokenizer, prefix)  # the original is measured with it too: it would miss its first token
        count = max(1, config.eval_tokens // block)
        texts = {"validation": data.pack(text.validation, tokenizer, block, limit=count)}
        if config.other_data is not None:
            other = data.load_text(config.other_data, tokenizer=tokenizer)
            texts["other"] = data.pack(other.validation, tokenizer, block, limit=count)
        refuse_foreign_ids(texts["validation"], model)
        Chain(model, chosen, texts["validation"][:, : min(block, 16)])  # refuses what is no row of blocks
        facts = {
            "model": model_facts(model, model_name(config.model), context),
            "data": {**gathered.facts, "validation_tokens": texts["validation"].numel(), "block": block},
            "device": bench.device_name(device()),
        }
        if "other" in texts:
            facts["data"] |= {"other_text": other.name, "other_tokens": texts["other"].numel()}
        return cls(model.to(device()), tokenizer, gathered, texts, block, prefix, sites, chosen, facts)

    def measure(self, model: Any, label: str, fast: bool = False) -> dict[str, Any]:
        """{"losses": {text: Losses}, "largest": {"value", "where"}} of a model."""
        batch = batch_within(model, self.block)
        losses = {}
        for name, ids in self.texts.items():
            what = bar(f"loss on {name} text, {label}", math.ceil(len(ids) / batch))
            with what as advance, fast_products(model, fast):
                losses[name] = evaluate(model, ids, batch=batch, progress=advance).to_dict()
        value, where = largest_activation(model, self.texts["validation"][: max(1, 4096 // self.block)])
        return {"losses": losses, "largest": {"value": value, "where": where}}


def _remove(config: RemovalConfig, work: _Work) -> Removal:
    with stages() as tell:
        return remove_(
            work.model, shuffled(work.gathered.text.train), work.tokenizer, budget=read_budget(config.budget),
            prefix=work.prefix,
            keep=config.keep, refit=config.refit, fit_tokens=config.fit_tokens, block=work.block, progress=tell,
        )  # fmt: skip


def shuffled(train: Any) -> Iterator[str]:
    """Documents of every part of the text: its beginning may be unlike the rest."""
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0)).tolist()
    return (train[index] for index in order)


def _reasons(work: _Work, removal: Removal) -> dict[str, str]:
    """Why each norm that could not go, or was not to go, stays; what the search left has no reason of its own."""
    chosen = {site.name for site in work.chosen}
    reasons = {}
    for site in work.sites:
        if site.name not in removal.kept:
            continue
        if not site.removable:
            reasons[site.name] = site.reason
        elif site.name not in chosen:
            reasons[site.name] = FINAL_STAYS if site.role == "final" else "it was to be kept"
    return reasons


def _speed(original: Any, loaded: Any, name: str) -> list[dict[str, Any]]:
    with bar("decoding speed", _ROUNDS + 1) as advance:
        models = {"stock": original.eval(), "folded": loaded}
        return bench.bench(models, batch=1, new_tokens=_NEW_TOKENS, rounds=_ROUNDS, name=name, progress=advance)


def _samples(original: Any, loaded: Any, work: _Work) -> list[dict[str, str]]:
    """Greedy text of both models from the beginnings of two blocks."""
    before, after = (
        continuations(model, work.tokenizer, work.texts["validation"], count=2, new_tokens=40)
        for model in (original, loaded)
    )
    return [{"prompt": p, "before": b, "after": a} for (p, b), (_, a) in zip(before, after, strict=True)]


def _refuse_places(config: RemovalConfig, overwrite: bool) -> None:
    folder = Path(config.out)
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise ValueError(f"{folder} is not empty; pass --overwrite to replace the run in it, or another --out")
    if config.csv is None:
        return
    path = Path(config.csv)
    if path.is_dir():
        raise ValueError(f"--csv {path} is a folder; give the name of a file")
    if path.is_file():
        header = path.read_text(encoding="utf-8").partition("\n")[0].strip().split(",")
        if header != [""] and set(_CSV) - set(header):
            raise ValueError(f"--csv {path} has other columns ({', '.join(header)}); append to another file")
