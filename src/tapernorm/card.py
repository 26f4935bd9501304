"""The model card of a norm-free folder: README.md, with what is known of how the model was made.

Facts come from the folder's config.json and from the record of the run that wrote it. A fact that is not known is
left out. A README.md without this module's mark is somebody's own, and is never written over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from tapernorm._folder import CARD, CARD_MARK, is_own_card, model_type
from tapernorm.modeling_tapernorm import TYPE_PREFIX

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")
_SHOWN = 4  # names of norms


def write_card(
    folder: str | Path, record: Mapping[str, Any] | None = None, name: str = "", place: str = ""
) -> Path | None:
    """Write README.md into a norm-free model folder; None, and nothing written, where a user's own is there, or where
    no norm is gone.

    Args:
        folder: as `tapernorm.save_pretrained` writes it.
        record: what is in the run's run.json, or a part of it such as `{"fold": report.to_dict()}`.
        name: of the model it was made from, where the record does not say.
        place: how the folder will be called, where that is not its name now.
    """
    folder = Path(folder)
    path = folder / CARD
    if not model_type(folder).startswith(TYPE_PREFIX) or (path.exists() and not is_own_card(path)):
        return None
    path.write_text(render_card(folder, record or {}, name, place), encoding="utf-8")
    return path


def render_card(folder: Path, record: Mapping[str, Any], name: str = "", place: str = "") -> str:
    """The text of the card, with its metadata in front. Arguments as of `write_card`.

    Raises:
        ValueError: the folder holds no norm-free model.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        family = str(config["model_type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} holds no norm-free model: {error}") from error
    if not family.startswith(TYPE_PREFIX) or config.get("tapered"):
        raise ValueError(f"{folder} holds no norm-free model: its model type is {family}")
    fold, settings = record.get("fold") or {}, record.get("settings") or {}
    base = name or str((settings.get("model") if record.get("kind") != "pretrain" else "") or "")
    gone = [str(n) for n in fold.get("folded") or config.get("removed_norms") or ()]
    kept = [str(n) for n in fold.get("kept") or ()]
    place = _plain(place or folder.resolve().name)
    title = _plain(place if not base else f"{_short_name(base)} without norms")
    losses, text = _losses(record)
    bench = (record.get("bench") or {}).get("rows") or []
    content = {
        "marker": CARD_MARK,
        "title": title,
        "base": _plain(_short_name(base)),
        "family": _plain(family.removeprefix(TYPE_PREFIX)),
        "auto": _auto(config),
        "place": place,
        "count": 0 if any("*" in each for each in gone) else len(gone),  # a star stands for nobody knows how many
        "gone": _names(gone),
        "kept": f"{len(kept)}: {_names(kept)}" if kept else "",
        "facts": list(_facts(config, record)),
        "losses": losses,
        "text": text,
        "checks": list(_checks(record)),
        "speeds": [_speed(row) for row in bench],
        "device": _plain(next((row["device"] for row in bench if row.get("device")), "")),
    }
    template = Path(__file__).with_name("card.md.j2").read_text(encoding="utf-8")
    card = ModelCard.from_template(_data(config, record, base), template_str=_tight(template), **content)
    return re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n"


def _tight(template: str) -> str:
    """Statements that stand alone on a line leave no empty line behind, or the tables would be torn apart."""
    return re.sub(r"^(\{%.*%\})\n", r"\1", template, flags=re.MULTILINE)


def _data(config: Mapping[str, Any], record: Mapping[str, Any], base: str) -> ModelCardData:
    """The metadata that the hub reads: only what is sure."""
    known: dict[str, Any] = {"library_name": "tapernorm", "tags": ["tapernorm", "norm-free", "custom_code"]}
    if _is_repository(base):
        known["base_model"] = base
    data = str((record.get("data") or {}).get("name") or "")
    if _is_repository(data):
        known["datasets"] = [data]
    if _auto(config) == "CausalLM":
        known["pipeline_tag"] = "text-generation"
    return ModelCardData(**known)


def _is_repository(name: str) -> bool:
    """Whether a name is one on the hub, as far as can be told here: not that of a folder or file that is there."""
    return bool(_REPOSITORY.match(name)) and not Path(name).expanduser().exists()


def _short_name(base: str) -> str:
    """A hub id as it is; of a path on somebody's machine, the last part."""
    return base if _is_repository(base) else Path(base).name


def _auto(config: Mapping[str, Any]) -> str:
    """`CausalLM` of `AutoModelForCausalLM`, for the class that was saved."""
    name = next(iter(config.get("architectures") or ()), "")
    autos = [auto for auto, made in (config.get("auto_map") or {}).items() if str(made).endswith(f".{name}")]
    heads = [auto.removeprefix("AutoModelFor") for auto in autos if auto.startswith("AutoModelFor")]
    return "CausalLM" if "CausalLM" in heads or not heads else heads[0]


def _facts(config: Mapping[str, Any], record: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    fold, settings, data = (record.get(key) or {} for key in ("fold", "settings", "data"))
    removal = record.get("removal") or {}
    arms = {"internal": "internal: the final norm stays and anchors the scale", "all": "all: the final norm went too"}
    if record.get("kind") == "remove":
        yield "method", "removal without training"
    elif record.get("arm") in arms:
        yield "arm", arms[record["arm"]]
    if config.get("added_biases"):
        yield "biases made", _names(config["added_biases"])
    if config.get("untied"):
        yield "untied", _names(config["untied"])
    if config.get("constant_prefix"):
        yield "constant prefix", f"token ids {', '.join(str(int(t)) for t in config['constant_prefix'])}"
    if data.get("name"):
        yield "data", _plain(_short_name(str(data["name"])))
    if data.get("train_tokens"):
        yield "training tokens at hand", f"{data['train_tokens']:,}"
    if settings.get("steps") and record.get("kind") in ("taper", "pretrain"):
        yield "optimizer steps", f"{settings['steps']:,}"
    taper = record.get("taper") or {}
    if taper.get("warmup_steps") is not None and taper.get("taper_steps") is not None:
        yield "of these", f"{taper['warmup_steps']:,} at gate 1, {taper['taper_steps']:,} while it falls"
    if record.get("kind") == "remove" and settings.get("budget") is not None:
        yield "loss budget", f"{100 * float(settings['budget']):g} %"
    if removal.get("refitted"):
        yield "linear maps fitted again", str(len(removal["refitted"]))
    if fold.get("new_biases") and not config.get("added_biases"):
        yield "biases made", _names(fold["new_biases"])


def _losses(record: Mapping[str, Any]) -> tuple[list[list[str]], str]:
    """(rows of the table, the name of the text)."""
    data = record.get("data") or {}
    rows: dict[str, Any] = {}
    if record.get("kind") == "remove":
        for label, key in (("before", "before"), ("after", "after")):
            rows |= {
                f"{label}, {'unrelated text' if text == 'other' else text}": values
                for text, values in ((record.get(key) or {}).get("losses") or {}).items()
            }
    else:
        names = {"original": "original", str(record.get("arm")): "norms removed"}
        names[str(record.get("baseline_arm"))] = "same training, with its norms"
        rows = {names.get(str(key), str(key)): values for key, values in (record.get("losses") or {}).items()}
    table = [
        [_plain(name), *(_number(values.get(key)) for key in ("loss", "median", "p99", "p999")),
         f"{values['tokens']:,}" if values.get("tokens") else "–"]
        for name, values in rows.items() if isinstance(values, Mapping)
    ]  # fmt: skip
    return table, f"the validation part of {_plain(_short_name(str(data['name'])))}" if data.get("name") else ""


def _checks(record: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    fold, verify = record.get("fold") or {}, record.get("verify") or {}
    if fold.get("max_abs_logit_error") is not None:
        relative = fold.get("relative_error")
        of = f", {relative:.1e} of the largest" if relative is not None else ""
        yield "folded against unfolded, largest logit error", f"{fold['max_abs_logit_error']:.1e}{of}"
    if verify.get("max_abs_logit_error") is not None:
        yield "this folder against the model before folding", f"{verify['max_abs_logit_error']:.1e}"
    if verify.get("greedy_match") is not None:
        yield "greedy tokens equal", f"{100 * verify['greedy_match']:.6g} %"


def _speed(row: Mapping[str, Any]) -> list[str]:
    speed, ratio = row.get("tokens_per_second"), row.get("ratio")
    return [
        _plain(row.get("mode") or "decode"),
        _plain(row.get("variant") or "–"),
        str(row.get("batch", "–")),
        {True: "yes", False: "no"}.get(row.get("compiled"), "–"),  # type: ignore[arg-type]
        _plain(row.get("dtype") or "–"),
        f"{speed:,.0f}" if isinstance(speed, int | float) else "–",
        f"{ratio:.3f}" if isinstance(ratio, int | float) else "–",
    ]


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "–"


def _names(names: Iterable[Any]) -> str:
    """A few names; the others counted."""
    found = [f"`{_plain(name)}`" for name in names]
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more


def _plain(text: Any) -> str:
    """One line that means nothing to Markdown's tables, and nothing to HTML."""
    line = " ".join(str(text).split())
    return line.replace("<", "‹").replace(">", "›").replace("|", "¦").replace("`", "'")
