"""The blocks of a model in a row, so that a forward can begin at one of them and end at another.

Removing norms one after another asks for the part of a forward behind each of them, many times. Blocks in front are
short-circuited and the hidden state is handed to the first one that runs; embedding, masks and rotary tables are made
by the model itself, so nothing here knows an architecture.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tapernorm.modules import evaluation
from tapernorm.precision import fast_products
from tapernorm.sites import NormSite


class _Stop(Exception):
    """Ends a forward whose rest nobody needs."""


class Chain:
    """The blocks (decoder layers) of a causal language model.

    Args:
        model: a transformers model.
        sites: its norms; the blocks are the list of modules that holds most of them.
        ids: [N, T] some token ids, for a trial.
        batch: sequences in one forward.
        fast: bfloat16 products where the processor has them; hidden states keep the model's dtype.

    Raises:
        ValueError: the norms do not sit in one list of blocks that hand one hidden state on.
    """

    def __init__(self, model: Any, sites: list[NormSite], ids: Tensor, batch: int = 4, fast: bool = False) -> None:
        self.model, self.batch = model, batch
        self.fast = fast
        lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        held = Counter(name for site in sites for name in lists if site.name.startswith(f"{name}."))
        if not held:
            raise ValueError(f"{type(model).__name__}: its norms do not sit in a list of blocks")
        most = max(held.values())
        self.name = min((name for name, count in held.items() if count == most), key=len)
        self.blocks: list[Any] = list(model.get_submodule(self.name))
        self._tuples = self._check(ids[:1])

    def block_of(self, name: str) -> int | None:
        """The index of the block that holds a module, or None."""
        rest = name.removeprefix(f"{self.name}.")
        return int(rest.split(".")[0]) if rest != name else None

    def _check(self, ids: Tensor) -> list[int]:
        """The length of each block's output where it is a tuple, else 0."""
        inputs: list[Tensor] = []
        outputs: list[Any] = []
        handles = []
        for block in self.blocks:
            before = block.register_forward_pre_hook(lambda m, a, k: inputs.append(_hidden(a, k)), with_kwargs=True)
            handles += [before, block.register_forward_hook(lambda m, a, out: outputs.append(out))]
        try:
            with evaluation(self.model):
                self._forward(ids)
        finally:
            for handle in handles:
                handle.remove()
        firsts = [out[0] if isinstance(out, tuple) else out for out in outputs]
        if len(inputs) != len(self.blocks) or any(a is not b for a, b in zip(firsts, inputs[1:], strict=False)):
            raise ValueError(f"{type(self.model).__name__}: its blocks ({self.name}) do not hand one hidden state on")
        return [len(out) if isinstance(out, tuple) else 0 for out in outputs]

    def _forward(self, ids: Tensor) -> Tensor:
        device = next(self.model.parameters()).device
        with fast_products(self.model, self.fast):
            return self.model(input_ids=ids.to(device), use_cache=False).logits

    def start(self, ids: Tensor) -> Tensor:
        """The hidden state that the first block reads. [N, T, D]"""
        return self._run(ids, 0, None, take={f"{self.name}.0": "input"})[1][f"{self.name}.0"]

    def through(self, index: int, ids: Tensor, hidden: Tensor) -> Tensor:
        """What block `index` makes of `hidden`. [N, T, D] -> [N, T, D]"""
        name = f"{self.name}.{index}"
        return self._run(ids, index, hidden, take={name: "output"})[1][name]

    def inside(self, index: int, ids: Tensor, hidden: Tensor, take: dict[str, str]) -> dict[str, Tensor]:
        """Inputs or outputs of modules in block `index`: take is {name: "input" | "output"}; the last one ends it."""
        return self._run(ids, index, hidden, take)[1]

    def rest(self, index: int, ids: Tensor, hidden: Tensor, use: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The forward from block `index` on; `use(logits, ids)` is collected batch by batch."""
        return self._run(ids, index, hidden, {}, use)[0]

    def head(self, ids: Tensor, hidden: Tensor, use: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """What comes after the last block, from what it put out."""
        return self._run(ids, len(self.blocks), hidden, {}, use)[0]

    def _run(
        self,
        ids: Tensor,
        first: int,
        hidden: Tensor | None,
        take: dict[str, str],
        use: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        taken: dict[str, list[Tensor]] = {name: [] for name in take}
        made: list[Tensor] = []
        with evaluation(self.model):
            for at in range(0, len(ids), self.batch):
                rows = ids[at : at + self.batch]
                part = None if hidden is None else hidden[at : at + self.batch]
                with self._watched(take, taken, at // self.batch + 1), self._from(first, part):
                    try:
                        logits = self._forward(rows)
                        made.append(use(logits, rows) if use else logits)
                    except _Stop:
                        pass
        return (torch.cat(made) if made else torch.empty(0)), {k: torch.cat(v) for k, v in taken.items()}

    @contextlib.contextmanager
    def _watched(self, take: dict[str, str], taken: dict[str, list[Tensor]], goal: int) -> Iterator[None]:
        """Collect what is asked for; end the forward when all of it is there."""

        def keep(name: str, value: Any) -> None:
            value = value[0] if isinstance(value, tuple) else value
            taken[name].append(value.detach().clone())
            if all(len(parts) == goal for parts in taken.values()):
                raise _Stop

        with contextlib.ExitStack() as stack:
            for name, what in take.items():
                module = self.model.get_submodule(name)
                handle = (
                    module.register_forward_pre_hook(
                        lambda m, a, k, name=name: keep(name, _hidden(a, k)), with_kwargs=True
                    )
                    if what == "input"
                    else module.register_forward_hook(lambda m, a, out, name=name: keep(name, out))
                )
                stack.callback(handle.remove)
            yield

    @contextlib.contextmanager
    def _from(self, first: int, hidden: Tensor | None) -> Iterator[None]:
        """Blocks before `first` do nothing but hand `hidden` on, from the last of them."""
        if hidden is None:
            yield
            return

        # The last skipped block is the one that gets it, so that behind the last block of all is a place like others.
        def skip(length: int) -> Callable[..., Any]:
            return lambda state, *args, **kwargs: (state, *[None] * (length - 1)) if length else state

        def inject(module: Any, args: Any, kwargs: Any) -> Any:
            if args:
                return (hidden, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": hidden}

        handle = self.blocks[max(0, first - 1)].register_forward_pre_hook(inject, with_kwargs=True, prepend=True)
        try:
            for block, length in zip(self.blocks[:first], self._tuples, strict=False):
                block.forward = skip(length)
            yield
        finally:
            handle.remove()
            for block in self.blocks[:first]:
                vars(block).pop("forward", None)


def _hidden(args: Any, kwargs: Any) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]
