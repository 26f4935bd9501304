"""The one thing that knows about steps: it drives gates, statistics, calibration, losses and the guard.

    warm-up   gate 1; statistics gathered
    k_w       c and s_tgt frozen, γ̃ ← γ (or a fitted matrix), β̃ ← β, optimizer state of γ copied to γ̃
    taper     gates fall, all at once or one site after another
    k_t       all gates 0

Two counts: `step_count`, the optimizer steps that happened, and `taper_clock`, the schedule's argument, which the guard
may hold, slow or take back.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tapernorm import optimizers, schedule
from tapernorm.config import TaperConfig
from tapernorm.guard import Guard, ResidualScale
from tapernorm.held import Gone, Held
from tapernorm.linear_branch import LinearBranches
from tapernorm.losses import ScaleAnchor
from tapernorm.modules import TaperNorm, taper_norms
from tapernorm.sites import NormSite
from tapernorm.statistics import (
    FIELDS,
    Average,
    Inputs,
    SiteStatistics,
    gather,
    most_outstanding,
    pending,
    refuse_massive,
    scale,
    spread,
)
from tapernorm.uniformity import Uniformity

logger = logging.getLogger("tapernorm")


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
        self.held: dict[str, Held] = {}  # norms that went before
        self.step_count = 0
        self.taper_clock = 0.0
        self.dropped_batches = 0  # micro-batches left out of the statistics because they were not finite
        self.places = schedule.places(list(self.sites), config)  # 0: starts first, 1: last
        self.guard = Guard(config) if config.guard_margin is not None else None
        self._inputs = Inputs()
        self._statistics = {name: SiteStatistics(m, config, self._inputs) for name, m in self.sites.items()}
        self._maps = LinearBranches(self.sites, config.ema_decay) if config.fixed == "linear" else None
        if self._maps is not None:
            for name, statistics in self._statistics.items():
                statistics.note = functools.partial(self._maps.add, name)
        self._average = Average(len(self.sites), len(FIELDS), config.ema_decay)
        self._worst = torch.zeros(len(self.sites), 3)  # r / median, position, token id, over warm-up and ranks
        self._optimizer: Any = None
        self.anchor: ScaleAnchor | None = None
        self._residual: ResidualScale | None = None
        # The body too: PEFT calls the wrapped model's forward without its hooks.
        watched = {id(m): m for m in (model, getattr(model, "base_model", model))}.values()
        self._handles = [m.register_forward_pre_hook(self._inputs.note, with_kwargs=True) for m in watched]
        if final is not None and (probed := final.probed) is not None:
            if config.weight > 0:
                self.anchor = ScaleAnchor(probed.kind, probed.eps, config, self._inputs)
            if self.guard is not None:
                self._residual = ResidualScale(probed.kind, probed.eps, self._inputs)
            hooks = [part.hook for part in (self.anchor, self._residual) if part is not None]
            module = model.get_submodule(final.name)
            self._handles += [module.register_forward_pre_hook(hook, with_kwargs=True) for hook in hooks]
        self.uniformity = Uniformity(self.sites, config, self._inputs) if config.uniformity_weight > 0 else None
        for module in self.sites.values():
            module.gradient_cap = config.gradient_cap
        self._set_gates()

    # What a training loop calls

    def step(self, skipped: bool = False, loss: Tensor | float | None = None) -> None:
        """Count one optimizer step and move the gates. Call once per optimizer step, on every rank.

        Args:
            skipped: the optimizer did not step (a GradScaler found infinities): nothing is counted and what was
                gathered for this step is dropped.
            loss: of this step, without the controller's own losses, for the guard; the mean is taken over ranks. NaN
                where a gradient was not finite. Not looked at without `guard_margin`.

        Raises:
            RuntimeError: the anchor or the uniformity loss is on and `auxiliary_loss()` was not called for this step's
                forwards, or was not a part of what went backwards.
            RuntimeError: at the end of warm-up, if a site never saw a finite token in training mode.
            MassiveTokenError: at the end of warm-up, if a token stood far above its site's median, on any rank.
            ValueError: there is a guard, and no loss.
            GuardStop: see `tapernorm.guard`.

        Nothing has been counted when it raises; the next call tries again.
        """
        clock = self.taper_clock + (0.0 if skipped else 1.0)
        if not skipped:
            self._refuse_unconsumed()
            if self.guard is not None and loss is None:
                raise ValueError("guard_margin needs the loss of every step: controller.step(loss=loss)")
            if self.phase == "warmup":
                self._commit()
        self._drop()
        if self.guard is not None and loss is not None:
            mean, size = self._over_ranks(loss)  # on every rank, before anything that could differ between them
            if not (skipped and math.isfinite(mean)):
                clock = self.guard.judge(mean, self.taper_clock, self.step_count + 1, size)
                if skipped:
                    clock = min(clock, self.taper_clock)
        before, self.taper_clock = self.taper_clock, clock
        self.step_count += not skipped
        if before < self.config.warmup_steps <= clock:
            self._calibrate()
        self._set_gates()

    def auxiliary_loss(self) -> Tensor:
        """The scale and the uniformity loss with their weights, averaged over the tokens of the training forwards
        since the last call. Scalar.

        It consumes them: a second call gives 0. The scale loss is 0 before the end of warm-up. Scale it exactly as the
        cross-entropy (by the same number of accumulation steps, for one), and let both go backwards together.
        """
        loss, tokens = self.take_losses()
        if loss is None or tokens is None:
            return torch.zeros((), device=next(iter(self.sites.values())).gate.device)
        return loss / tokens.clamp(min=1)  # a micro-batch of padding alone

    def take_losses(self) -> tuple[Tensor | None, Tensor | None]:
        """(sum over tokens of the losses with their weights, number of tokens) since the last call, for a caller that
        weights by tokens."""
        found = [part.take() for part in (self.anchor, self.uniformity) if part is not None]
        losses = [loss for loss, _ in found if loss is not None]
        tokens = [count for _, count in found if count is not None]
        if not losses:
            return None, None
        return sum(losses[1:], losses[0]), tokens[0]

    def hold(self, model: nn.Module, gone: Mapping[str, Gone]) -> None:
        """Hold norms that went before (`tapernorm.held.gone` finds them) as those that go now, in training."""
        for name, found in gone.items():
            held = self.held[name] = Held(found.r, found.kind, self.config.gradient_cap)
            self._handles.append(model.get_submodule(name).register_forward_pre_hook(held))
            if self.uniformity is not None:
                self.uniformity.add(held)
        self._observe()

    def attach_optimizer(self, optimizer: Any) -> None:
        """Let the controller copy the optimizer's state of γ and β to γ̃ and β̃ at the end of warm-up.

        An idle Adam has a clock near zero, and its first updates of γ̃ would be two to three times too large.
        Parameters that the optimizer lacks (it was built before `taper_`) are added, without weight decay and
        otherwise with the settings of their norm's group.

        Raises:
            ValueError: parameters are partitioned by ZeRO-3; or they are missing, and a learning-rate scheduler would
                not know of their new group.
        """
        optimizers.complete(optimizer, self.sites)
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
    def events(self) -> list[dict[str, Any]]:
        """What the guard did: {"step", "kind", "text"}."""
        return [] if self.guard is None else list(self.guard.events)

    @property
    def spreads(self) -> dict[str, float]:
        """The standard deviation of log r over tokens at every site, as measured in warm-up; NaN before."""
        return dict(zip(self.sites, spread(self._average.value()).tolist(), strict=True))

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
            "worst": self._worst.clone(),
        }
        for name, module in self.sites.items():
            state[f"gate.{name}"] = module.gate.detach().clone()
            state[f"c.{name}"] = module.fixed_norm.c.detach().clone()
            state[f"place.{name}"] = self.places[name]
        for part in (self.guard, self._maps):
            if part is not None:
                state |= part.state()
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
        self.taper_clock = float(state["taper_clock"])
        self.dropped_batches = int(state["dropped_batches"])
        self._average.total = state["average.total"].clone()
        self._average.weight = state["average.weight"].clone()
        self._worst = state["worst"].clone()
        self._drop()
        if self._residual is not None:
            self._residual.take()
        for part in (self.guard, self._maps):
            if part is not None:
                part.load(state)
        for name, module in self.sites.items():
            module.fixed_norm.c.copy_(state[f"c.{name}"])
            module.set_gate(float(state[f"gate.{name}"]))
            self.places[name] = float(state[f"place.{name}"])
        if self.anchor is not None:
            self.anchor.target = state["anchor.target"]
            self.anchor.average.total = state["anchor.total"].clone()
            self.anchor.average.weight = state["anchor.weight"].clone()
        self._observe()

    def back_to_sound(self, events: list[dict[str, Any]]) -> None:
        """After a checkpoint was loaded because the guard gave up: set the gates to where it last saw a sound step
        (those of the checkpoint were still to be tried), and keep what has happened since."""
        if self.guard is not None:
            self.guard.events = events
            self.taper_clock = self.guard.sound_clock
            self._set_gates()

    def detach(self) -> None:
        """Take every hook off the model; the controller is of no use after that."""
        for handle in self._handles:
            handle.remove()
        for module in self.sites.values():
            module.observer = module.pull = module.cap = module.gradient_cap = None

    # The steps of step()

    def _refuse_unconsumed(self) -> None:
        anchor, uniformity = self.anchor, self.uniformity
        if anchor is not None and anchor.pending:
            raise RuntimeError(
                f"anchor_weight={self.config.weight:g}, but auxiliary_loss() was not added to the loss for "
                f"{anchor.pending} training forward(s) before this step; add controller.auxiliary_loss() to "
                "the loss, or set anchor_weight=0"
            )
        if uniformity is not None and (uniformity.pending or uniformity.missed):
            raise RuntimeError(
                f"uniformity_weight={uniformity.weight:g}, but auxiliary_loss() was not a part of the loss that went "
                "backwards; call (loss + controller.auxiliary_loss()).backward() after every training forward, or set "
                "uniformity_weight=0"
            )

    def _drop(self) -> None:
        """Forget what was gathered for this optimizer step."""
        for site in self._statistics.values():
            site.drop()
        for part in (self.anchor, self.uniformity, self._maps):
            if part is not None:
                part.drop()

    def _commit(self) -> None:
        """Enter this step's sums, of all ranks, into the moving averages, and show the running c."""
        device = next(iter(self.sites.values())).gate.device
        rows = gather(pending(list(self._statistics.values())))
        sums, found = rows[..., :-3].sum(0), rows[..., -3:]
        count, totals, dropped = sums[:, :1], sums[:, 1:-1], sums[:, -1]
        worst = most_outstanding(torch.cat([self._worst.to(device)[None], found]))
        valid = count[:, 0] > 0
        if self.taper_clock + 1 >= self.config.warmup_steps:
            refuse_massive(dict(zip(self.sites, worst.tolist(), strict=True)), self.config)
            self._refuse_unmeasured(valid | (self._average.weight[:, 0].to(device) > 0))
        self._worst = worst
        self._average.update(totals / count, valid=valid)
        if lost := int(dropped.max()):
            self.dropped_batches += lost
            logger.warning("step %d: %d batches were not finite: left out of the statistics", self.step_count + 1, lost)
        for module, c in zip(self.sites.values(), scale(self._average.value(), self.config.calibration), strict=True):
            module.fixed_norm.c.fill_(c)
        for part in (self.anchor, self._maps):
            if part is not None:
                part.commit()

    def _refuse_unmeasured(self, measured: Tensor) -> None:
        for name, is_measured in zip(self.sites, measured.tolist(), strict=True):
            if not is_measured:
                raise RuntimeError(
                    f"{name}: no finite statistics were gathered in {self.config.warmup_steps} warm-up steps; "
                    "is the model in training mode, and is its loss finite?"
                )

    def _over_ranks(self, loss: Tensor | float) -> tuple[float, float | None]:
        """The mean loss over ranks and the residual's scale, the same numbers on each, or they would part ways."""
        device = next(iter(self.sites.values())).gate.device
        sums = torch.zeros(2) if self._residual is None else self._residual.take()
        mine = torch.as_tensor(loss, dtype=torch.float32).detach()
        found = gather(torch.cat([mine.reshape(1).to(device), sums.to(device)]))
        mean, total, tokens = float(found[:, 0].mean()), *found[:, 1:].sum(0).tolist()
        return mean, total / tokens if tokens else None

    @torch.no_grad()
    def _calibrate(self) -> None:
        for name, module in self.sites.items():
            module.fixed_norm.weight.copy_(module.gain() if self._maps is None else self._maps.solve(name))
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
                optimizers.copy_state(self._optimizer, parameter, target)
        if self._maps is not None:
            self._maps.forget()
        if self.anchor is not None:
            self.anchor.freeze()
        self.places = schedule.places(list(self.sites), self.config, self.spreads)

    def _set_gates(self) -> None:
        for name, module in self.sites.items():
            # Rounded as the buffer rounds it, or a resumed run would take another path where it rounds to 1.
            value = schedule.gate(self.taper_clock, self.config, self.places[name])
            module.set_gate(float(torch.tensor(value, dtype=torch.float32)))
        self._observe()

    def _observe(self) -> None:
        """Statistics are gathered in warm-up only; uniformity asks for a c; the seat belt has its time too."""
        for name, module in self.sites.items():
            module.observer = self._statistics[name] if self.phase == "warmup" else None
        for part in (*self.sites.values(), *self.held.values()):
            part.cap = schedule.cap(self.taper_clock, self.config)
        if self.uniformity is not None:
            self.uniformity.active = self.step_count > 0
