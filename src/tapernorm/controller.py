"""The one thing that knows about steps: it drives gate, statistics, calibration and the anchor.

    warm-up   gate 1; statistics gathered
    k_w       c and s_tgt frozen, γ̃ ← γ, β̃ ← β, optimizer state of γ copied to γ̃
    taper     gate falls
    k_t       gate 0

Two counts: `step_count`, the optimizer steps that happened, and `taper_clock`, the schedule's argument.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tapernorm import schedule
from tapernorm.config import TaperConfig
from tapernorm.losses import ScaleAnchor
from tapernorm.modules import TaperNorm, taper_norms
from tapernorm.sites import NormSite
from tapernorm.statistics import Average, Inputs, SiteStatistics, all_reduce, refuse_massive, scale


class TaperController:
    """Moves a tapered model through its life. Made by `tapernorm.taper_`; call `step()` after each optimizer step.

    Args:
        model: a model that contains TaperNorms.
        config: the schedule and the rest.
        final: the final norm's site, for the anchor; None if the model has none.
    """

    def __init__(self, model: nn.Module, config: TaperConfig, final: NormSite | None) -> None:
        self.config = config
        self.final = final.name if final else None
        # Modules, not tensors: a conversion of the model replaces tensors.
        self.sites: dict[str, TaperNorm] = taper_norms(model)
        self.step_count = 0
        self.taper_clock = 0
        self.dropped_batches = 0  # micro-batches left out of the statistics because they were not finite
        self._inputs = Inputs()
        self._statistics = {name: SiteStatistics(m, config, self._inputs) for name, m in self.sites.items()}
        self._average = Average(len(self.sites), 4, config.ema_decay)
        self._optimizer: Any = None
        self.anchor: ScaleAnchor | None = None
        # The body too: PEFT calls the wrapped model's forward without its hooks.
        watched = {id(m): m for m in (model, getattr(model, "base_model", model))}.values()
        self._handles = [m.register_forward_pre_hook(self._note_inputs, with_kwargs=True) for m in watched]
        if config.weight > 0 and final is not None and final.probed is not None:
            self.anchor = ScaleAnchor(final.name, final.probed.kind, final.probed.eps, config, self._inputs)
            module = model.get_submodule(final.name)
            self._handles.append(module.register_forward_pre_hook(self.anchor.hook))
        self._set_gates()

    # What a training loop calls

    def step(self, skipped: bool = False) -> None:
        """Count one optimizer step and move the gate. Call once per optimizer step, on every rank.

        Args:
            skipped: the optimizer did not step (a GradScaler found infinities): nothing is counted and what was
                gathered for this step is dropped.

        Raises:
            RuntimeError: the anchor is on and `auxiliary_loss()` was not called for this step's forwards.
            RuntimeError: at the end of warm-up, if a site never saw a finite token in training mode.
            MassiveTokenError: at the end of warm-up, if a token stood far above its site's median.

        Nothing has been counted when it raises; the next call tries again.
        """
        if skipped:
            for site in self._statistics.values():
                site.take()
            if self.anchor is not None:
                self.anchor.drop()
            return
        if self.anchor is not None and self.anchor.pending:
            raise RuntimeError(
                f"anchor_weight={self.config.weight:g}, but auxiliary_loss() was not added to the loss for "
                f"{self.anchor.pending} training forward(s) before this step; add controller.auxiliary_loss() to "
                "the loss, or set anchor_weight=0"
            )
        if self.phase == "warmup":
            last = self.taper_clock + 1 == self.config.warmup_steps
            if last:
                refuse_massive({name: s.worst() for name, s in self._statistics.items()}, self.config)
            self._commit()
            if last:
                self._refuse_unmeasured()
        self.step_count += 1
        self.taper_clock += 1
        if self.taper_clock == self.config.warmup_steps:
            self._calibrate()
        self._set_gates()

    def auxiliary_loss(self) -> Tensor:
        """λ times the scale loss, averaged over the tokens of the training forwards since the last call. Scalar.

        It consumes them: a second call gives 0. It is 0 before the end of warm-up and when the anchor is off. Scale
        it exactly as the cross-entropy (by the same number of accumulation steps, for one).
        """
        loss, tokens = self.take_anchor()
        if loss is None or tokens is None:
            return torch.zeros((), device=next(iter(self.sites.values())).gate.device)
        return loss / tokens.clamp(min=1)  # a micro-batch of padding alone

    def take_anchor(self) -> tuple[Tensor | None, Tensor | None]:
        """(sum over tokens of λ · loss, number of tokens) since the last call, for a caller that weights by tokens."""
        return (None, None) if self.anchor is None else self.anchor.take()

    def attach_optimizer(self, optimizer: Any) -> None:
        """Let the controller copy the optimizer's state of γ and β to γ̃ and β̃ at the end of warm-up.

        An idle Adam has a clock near zero, and its first updates of γ̃ would be two to three times too large.
        Parameters that the optimizer lacks (it was built before `taper_`) are added, without weight decay and
        otherwise with the settings of their norm's group.

        Raises:
            ValueError: parameters are missing, and a learning-rate scheduler would not know of their new group.
        """
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        missing: dict[int, tuple[Any, list[nn.Parameter]]] = {}
        for module in self.sites.values():
            like = next((groups[id(p)] for p in module.norm.parameters() if id(p) in groups), {})
            new = [p for p in module.fixed_norm.parameters() if p.requires_grad and id(p) not in groups]
            missing.setdefault(id(like), (like, []))[1].extend(new)
        for like, new in missing.values():
            if new and like and not like.get("weight_decay"):
                like["params"].extend(new)
            elif new and "initial_lr" in like:  # written by a scheduler, which counts the groups
                raise ValueError(
                    f"the optimizer was built before taper_ and lacks {len(new)} parameters of the tapered norms, and "
                    "its learning-rate scheduler cannot take in another group; build both after tapernorm.taper_, or "
                    "call controller.attach_optimizer(optimizer) before making the scheduler"
                )
            elif new:
                optimizer.add_param_group({**like, "params": new, "weight_decay": 0.0})
        self._optimizer = optimizer

    # What can be read

    @property
    def gates(self) -> dict[str, float]:
        """The gate of every site."""
        return {name: float(module.gate) for name, module in self.sites.items()}

    @property
    def gate(self) -> float:
        """The largest gate."""
        return max(self.gates.values())

    @property
    def phase(self) -> schedule.Phase:
        """ "warmup", "taper" or "done"."""
        return schedule.phase(self.taper_clock, self.config)

    @property
    def scales(self) -> dict[str, float]:
        """c of every site: the running value in warm-up, the frozen one after."""
        return {name: float(module.fixed_norm.c) for name, module in self.sites.items()}

    @property
    def scale_target(self) -> float | None:
        """s_tgt, or None before it is frozen or without an anchor."""
        return None if self.anchor is None else self.anchor.target

    def state_dict(self) -> dict[str, Any]:
        """Everything that a fresh process needs to go on: flat, str -> tensor or JSON scalar."""
        state: dict[str, Any] = {
            "step_count": self.step_count,
            "taper_clock": self.taper_clock,
            "dropped_batches": self.dropped_batches,
            "average.total": self._average.total.clone(),
            "average.weight": self._average.weight.clone(),
        }
        for name, module in self.sites.items():
            state[f"gate.{name}"] = module.gate.detach().clone()
            state[f"c.{name}"] = module.fixed_norm.c.detach().clone()
        for name, statistics in self._statistics.items():
            if statistics._worst is not None:
                state[f"worst.{name}"] = statistics._worst.clone()
        if self.anchor is not None:
            state["anchor.target"] = self.anchor.target
            state["anchor.total"] = self.anchor.average.total.clone()
            state["anchor.weight"] = self.anchor.average.weight.clone()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`, on a model that was tapered with the same config.

        Raises:
            ValueError: the state is of a model with other sites, or of another anchor setting.
        """
        theirs = {key.removeprefix("c.") for key in state if key.startswith("c.")}
        if theirs != set(self.sites):
            odd = sorted(theirs ^ set(self.sites))
            raise ValueError(f"the taper state is of other norms than this model's: {', '.join(odd[:3])}")
        if ("anchor.target" in state) != (self.anchor is not None):
            raise ValueError("the taper state was written with another anchor_weight than this controller's")
        self.step_count = int(state["step_count"])
        self.taper_clock = int(state["taper_clock"])
        self.dropped_batches = int(state["dropped_batches"])
        self._average.total = state["average.total"].clone()
        self._average.weight = state["average.weight"].clone()
        for name, module in self.sites.items():
            module.fixed_norm.c.copy_(state[f"c.{name}"])
            module.set_gate(float(state[f"gate.{name}"]))
            self._statistics[name].restart(state.get(f"worst.{name}"))
        if self.anchor is not None:
            self.anchor.drop()
            self.anchor.target = state["anchor.target"]
            self.anchor.average.total = state["anchor.total"].clone()
            self.anchor.average.weight = state["anchor.weight"].clone()
        self._observe()

    def detach(self) -> None:
        """Take every hook off the model; the controller is of no use after that."""
        for handle in self._handles:
            handle.remove()
        for module in self.sites.values():
            module.observer = None

    # The steps of step()

    def _note_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        ids = kwargs.get("input_ids", args[0] if args else None)
        self._inputs.mask = mask if isinstance(mask, Tensor) else None
        self._inputs.ids = ids if isinstance(ids, Tensor) and not ids.is_floating_point() else None

    def _commit(self) -> None:
        """Enter this step's sums into the moving averages, and show the running c."""
        sums = all_reduce(torch.stack([site.take() for site in self._statistics.values()]))
        count, totals, dropped = sums[:, :1], sums[:, 1:5], sums[:, 5]
        self._average.update(totals / count, valid=count[:, 0] > 0)
        self.dropped_batches += int(dropped.max())
        for module, c in zip(self.sites.values(), scale(self._average.value(), self.config.calibration), strict=True):
            module.fixed_norm.c.fill_(c)
        if self.anchor is not None:
            self.anchor.commit()

    def _refuse_unmeasured(self) -> None:
        for name, module in self.sites.items():
            if not torch.isfinite(module.fixed_norm.c).all():
                raise RuntimeError(
                    f"{name}: no finite statistics were gathered in {self.config.warmup_steps} warm-up steps; "
                    "is the model in training mode, and is its loss finite?"
                )

    @torch.no_grad()
    def _calibrate(self) -> None:
        for module in self.sites.values():
            module.fixed_norm.weight.copy_(module.gain())
            pairs = [
                (module.probed.gain, module.fixed_norm.weight),
                (module.probed.bias, module.fixed_norm.bias),
            ]
            for source, target in pairs:
                if source is None or target is None:
                    continue
                parameter = getattr(module.norm, source)
                if target is module.fixed_norm.bias:
                    target.copy_(parameter)
                self._copy_optimizer_state(parameter, target)
        if self.anchor is not None:
            self.anchor.freeze()
        self._observe()

    def _copy_optimizer_state(self, source: nn.Parameter, target: nn.Parameter) -> None:
        optimizer = self._optimizer
        if optimizer is None:
            return
        for key, value in optimizer.state.get(source, {}).items():
            optimizer.state[target][key] = value.clone() if isinstance(value, Tensor) else value

    def _set_gates(self) -> None:
        # Rounded as the buffer rounds it, or a resumed run would take another path where it rounds to 1.
        value = float(torch.tensor(schedule.gate(self.taper_clock, self.config), dtype=torch.float32))
        for module in self.sites.values():
            module.set_gate(value)
        self._observe()

    def _observe(self) -> None:
        """Statistics are gathered in warm-up only."""
        for name, module in self.sites.items():
            module.observer = self._statistics[name] if self.phase == "warmup" else None
