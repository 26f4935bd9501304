"""A model with norms becomes a model with TaperNorms, and back. In place; checked before anything is touched."""

from __future__ import annotations

import fnmatch
import functools
from typing import Any

from torch import nn

from tapernorm import adapters, schedule
from tapernorm.config import TaperConfig, nearest
from tapernorm.controller import TaperController
from tapernorm.modules import TaperNorm, evaluation, taper_norms
from tapernorm.prefix import attach_prefix, detach_prefix, prefix_of
from tapernorm.sites import NormSite, default_example, find_sites, run

_ATTRIBUTE = "_tapernorm_controller"


def taper_(model: nn.Module, config: TaperConfig | None = None, example: Any = None) -> TaperController:
    """Replace the norms that `config` asks for by TaperNorms at gate 1. In place; the output stays the same bits.

    With a prefix, that is attached too (`tapernorm.prefix`), and the bits are those of the model with it.

    Args:
        model: a pre-norm model; its weights may be trained or fresh.
        config: what to taper and how; `TaperConfig()` if None.
        example: inputs for one forward, for a model that `tapernorm.sites.default_example` cannot serve.

    Returns:
        The controller. Call its `step()` once after every optimizer step; `get_controller(model)` finds it again.

    Raises:
        ValueError: nothing can go, a `keep` pattern matches no norm, `post=True` without post-norms,
            `arm="all"` with a final norm that cannot go, an anchor without a final norm, an `order` that does not fit
            the sites, a model that is tapered already, one whose own code looks into its norms, or one that cannot
            hold the prefix (see `attach_prefix`). The model is untouched then.
    """
    config = config or TaperConfig()
    if taper_norms(model):
        raise ValueError("the model is tapered already; tn.restore_(model) takes the taper back")
    sites = find_sites(model, example)
    chosen = choose(sites, config)
    final = next((site for site in sites if site.role == "final" and site.probed is not None), None)
    if config.weight > 0 and final is None:
        raise ValueError(
            f"anchor_weight={config.weight:g} needs a final norm before the output head, and none was found; "
            "set anchor_weight=0"
        )
    schedule.places([site.name for site in chosen], config)  # refuses an order that does not fit
    for site in chosen:
        assert site.probed is not None  # choose() takes removable sites only
        neighbour = site.links[0] if site.removable or site.producer is None else site.producer
        like = model.get_parameter(neighbour.weight)
        linear = config.fixed == "linear"
        tapered = TaperNorm(model.get_submodule(site.name), site.probed, site.width, like=like, linear=linear)
        model.set_submodule(site.name, tapered)
    try:
        with evaluation(model):
            run(model, default_example(model) if example is None else example)
    except Exception as error:  # whatever a model that looks into its norms may raise
        _put_back(model)
        raise ValueError(
            f"{type(model).__name__} does not run with its norms replaced, it looks into them ({error}); "
            "nothing was changed"
        ) from error
    try:  # the norms are whole at gate 1, so the constants are those of the original model
        if config.prefix and config.prefix != prefix_of(model):
            attach_prefix(model, config.prefix)
    except BaseException:
        _put_back(model)
        raise
    controller = TaperController(model, config, final)
    setattr(model, _ATTRIBUTE, controller)
    guard_saving(model)
    return controller


def choose(sites: list[NormSite], config: TaperConfig) -> list[NormSite]:
    """The sites that `config` tapers, out of those that were found.

    Raises:
        ValueError: as for `taper_`.
    """
    names = [site.name for site in sites]
    if not sites:
        raise ValueError("the model has no normalization layers that could be found: nothing to remove")
    for pattern in config.keep:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"keep={pattern!r} matches none of the model's norms{nearest(pattern, names)}")
    if config.post and not any(site.role == "post" for site in sites):
        raise ValueError("post=True, but the model has no post-norms; leave post out")
    roles = ("internal", "final") if config.arm == "all" else ("internal",)
    final = [site for site in sites if site.role == "final"]
    wanted = [site for site in sites if not any(fnmatch.fnmatch(site.name, p) for p in config.keep)]
    if config.arm == "all":
        for site in final:
            if not site.removable and site in wanted:
                raise ValueError(f'arm="all" takes the final norm too, but {site.name} cannot go: {site.reason}')
    chosen = [
        site
        for site in wanted
        if (site.removable and site.role in roles) or (config.post and site.producer is not None)
    ]
    if not chosen:
        default = "all are kept by keep=..."
        if any(site.removable and site.role == "final" for site in wanted):
            default = f'arm="{config.arm}" keeps the final norm, and no other is left; arm="all" takes it too'
        # the reason of a norm in a place from which norms can go says more than that of another
        refused = sorted((site for site in wanted if site.reason), key=lambda site: site.role not in roles)
        why = f"{refused[0].name}: {refused[0].reason}" if refused else default
        raise ValueError(f"none of the model's {len(sites)} norms can be removed ({why})")
    return chosen


def get_controller(model: nn.Module) -> TaperController | None:
    """The controller of a tapered model, or None."""
    return getattr(model, _ATTRIBUTE, None)


def restore_(model: nn.Module) -> nn.Module:
    """Put the stock norms back, with the gains and biases they have now, and take a constant prefix out. In place;
    before folding. (The rows that a learned position table lost to a prefix do not come back.)

    Raises:
        ValueError: the model is not tapered.
    """
    if not taper_norms(model):
        raise ValueError("the model is not tapered (or is folded already, which cannot be taken back)")
    _put_back(model)
    release(model)
    if prefix_of(model):
        detach_prefix(model)
    for part in (model, adapters.unwrapped(model)):
        vars(part).pop("save_pretrained", None)
    return model


def _put_back(model: nn.Module) -> None:
    for name, module in taper_norms(model).items():
        model.set_submodule(name, module.norm)


def guard_saving(model: Any) -> None:
    """Route `model.save_pretrained` through `tapernorm.save_pretrained`, also when a stock Trainer calls it.

    transformers' own would write a stock config; from that folder a stock model loads with fresh norms in it, and
    nothing but a warning.
    """
    for part in {id(m): m for m in (model, adapters.unwrapped(model))}.values():
        if hasattr(part, "save_pretrained"):
            part.save_pretrained = functools.partial(_save_as_it_is, part)  # a partial, for deepcopy and pickle


def _save_as_it_is(model: Any, save_directory: Any, **ignored: Any) -> None:
    from tapernorm import hub  # imports this module

    hub.save_pretrained(model, save_directory, overwrite=True)


def release(model: nn.Module) -> None:
    """Take the controller and its hooks off a model."""
    controller = get_controller(model)
    if controller is not None:
        controller.detach()
        delattr(model, _ATTRIBUTE)
