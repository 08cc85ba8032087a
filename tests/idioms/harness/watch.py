"""Watch: records what an idiom shows of its training, or compares it with the record of the untouched run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from harness.compare import Event, Log, apart, differ, digest, flatten, sum_bound, unit_roundoff

MOST_DIFFERENCES = 6


@dataclass(frozen=True)
class Rounding:
    """What the bound needs beside the gradients.

    rate: of the update that a step made. summed_in: the type of the sum. times: what the average is multiplied by.
    """

    rate: float | None = None
    summed_in: torch.dtype | None = None
    times: float = 1.0


class Watch:
    """Records what an idiom shows, and compares it with the untouched run.

    reference: the untouched run's logs of all ranks, or None in that run itself. bounded: sums are in another order
    than in the untouched run; averaged gradients may differ by the bound of compare.sum_bound, and are then set to the
    untouched run's. sums: record the sums of |gradient| that the bound needs.
    """

    def __init__(
        self, rank: int, reference: list[Log] | None = None, *, bounded: bool = False, sums: bool = False
    ) -> None:
        self.log = Log()
        self.differences: list[str] = []
        self.count = 0
        self._rank = rank
        self._reference = reference
        self._bounded = bounded
        self._sums = sums
        self._local: dict[int, torch.Tensor] = {}
        self._known: dict[int, torch.Tensor] = {}
        self.on_event: Callable[[], None] = lambda: None

    # -- what idioms call

    def look(self, name: str, what: Any, *, summed_in: torch.dtype | None = None) -> None:
        """Record the gradients of a model, an optimizer or parameters; of other tensors the values.

        summed_in: the type that gradients were added up in, where that is not their own.
        """
        named = dict(_named(what))
        gradients = {key: tensor for key, tensor in named.items() if _has_gradient(tensor)}
        values = {key: tensor.grad if key in gradients else tensor for key, tensor in named.items()}
        self._event(f"look {name}", values, gradients, {}, Rounding(None, summed_in))

    def step(
        self,
        *,
        model: Any = None,
        optimizer: Any = None,
        loss: Any = None,
        rate: float | None = None,
        summed_in: torch.dtype | None = None,
        times: float = 1.0,
    ) -> None:
        """Record the end of a step: weights, gradients, buffers, optimizer state, random states and losses.

        model, optimizer, loss: one, or several in a list. rate: the learning rate of plain SGD, for a script that has
        no point to look at gradients between their average and the update. summed_in: as for look. times: the number of
        ranks, for gradients that are summed and not averaged.
        """
        values: dict[str, Any] = {}
        gradients: dict[str, torch.Tensor] = {}
        weights: dict[str, torch.Tensor] = {}
        for index, module in enumerate(_list(model)):
            for key, parameter in module.named_parameters():
                weights[f"{index} weight {key}"] = parameter
                gradients[f"{index} gradient {key}"] = parameter
            values.update({f"{index} buffer {key}": buffer for key, buffer in module.named_buffers()})
        values.update({key: parameter.detach() for key, parameter in weights.items()})
        values.update({key: parameter.grad for key, parameter in gradients.items()})
        for index, each in enumerate(_list(optimizer)):
            values.update(flatten(each.state_dict(), f"{index} optimizer"))
        for index, each in enumerate(_list(loss)):
            values[f"{index} loss"] = each.detach() if isinstance(each, torch.Tensor) else each
        values["random torch"] = torch.get_rng_state()
        values["random python"] = random.getstate()
        values["random numpy"] = str(np.random.get_state())  # noqa: NPY002 - the state that old scripts use
        self._event("step", values, gradients, weights, Rounding(rate, summed_in, times))

    def note(self, name: str, value: Any) -> None:
        """Record a number, a text, or tensors as they are."""
        self._event(f"note {name}", dict(flatten(value, name)), None, {}, Rounding())

    # -- what the harness calls

    def sum_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Add up |gradient| of these parameters from now on, where the log of this run is to hold it."""
        for parameter in parameters:
            if self._sums and parameter.requires_grad and id(parameter) not in self._known:
                self._known[id(parameter)] = parameter
                parameter.register_hook(lambda gradient, parameter=parameter: self.add(parameter, gradient))

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add what autograd, or a script without DDP, adds to a gradient before it is averaged."""
        if id(parameter) not in self._known:
            return
        # What this rank hands to the sum is all that its .grad will hold.
        held = gradient.detach() if parameter.grad is None else parameter.grad.detach() + gradient.detach()
        size = (held.to_dense() if held.layout == torch.sparse_coo else held).abs().double()
        before = self._local.get(id(parameter))
        self._local[id(parameter)] = size if before is None else before + size

    def end(self) -> None:
        """Compare the number of events."""
        if self._reference is not None and self.count != len(self._reference[self._rank].events):
            self._differs(f"{self.count} records, untouched {len(self._reference[self._rank].events)}")

    def _differs(self, text: str) -> None:
        if len(self.differences) < MOST_DIFFERENCES:
            self.differences.append(text)

    def _event(
        self,
        name: str,
        values: Mapping[str, Any],
        gradients: Mapping[str, torch.Tensor] | None,
        weights: Mapping[str, torch.Tensor],
        rounding: Rounding,
    ) -> None:
        self.on_event()
        index, self.count = self.count, self.count + 1
        if self._reference is None:
            event = Event(name, {key: self.log.keep(value) for key, value in values.items()})
            for key, parameter in {**(gradients or {}), **weights}.items():
                if id(parameter) in self._local:
                    event.local[key] = self.log.keep(self._local[id(parameter)])
            if gradients is not None:
                self._local.clear()
            self.log.events.append(event)
            return
        mine = self._reference[self._rank]
        if index >= len(mine.events) or mine.events[index].name != name:
            detail = mine.events[index].name if index < len(mine.events) else "nothing"
            self._differs(f"record {index}: untouched {detail}, here {name}")
            return
        event = mine.events[index]
        where = f"{name} (record {index})"
        if missing := sorted(set(event.values) ^ set(values)):
            self._differs(f"{where}: only in one run: {', '.join(missing[:4])}")
        for key in event.values.keys() & values.keys():
            if digest(values[key]) == event.values[key]:
                continue
            theirs = mine.store[event.values[key]]
            far = self._apart(index, key, values[key], theirs, rounding, key in weights)
            if far > 1.0:
                detail = f", {far:.3g} times the bound" if far < float("inf") else ""
                self._differs(f"{where}: {key}: {differ(values[key], theirs)}{detail}")
            if self._bounded and isinstance(theirs, torch.Tensor) and isinstance(values[key], torch.Tensor):
                _load(values[key], theirs, (gradients or {}).get(key))

    def _apart(self, index: int, key: str, mine: Any, theirs: Any, rounding: Rounding, is_weight: bool) -> float:
        """Return how far a value is from the untouched run's, in units of what another order of the sum explains."""
        assert self._reference is not None
        rate = rounding.rate if is_weight else None
        if not self._bounded or (is_weight and rate is None):
            return float("inf")
        # The record of the same name and turn on each rank. One without it has left (model.join()), and adds nothing.
        events = self._reference[self._rank].events[: index + 1]
        turn = sum(event.name == events[-1].name for event in events)
        there, names = [], []
        for log in self._reference:
            same = [event for event in log.events if event.name == events[-1].name]
            if turn <= len(same):
                there.append(log)
                names.append(same[turn - 1].local.get(key))
        if None in names or not isinstance(mine, torch.Tensor):
            return float("inf")
        parts = [log.store[name] for log, name in zip(there, names, strict=True) if name is not None]
        bound = rounding.times * sum_bound(parts, rounding.summed_in or theirs.dtype)
        if rate is not None:
            # The product with the rate and the difference are rounded, in each of the two runs.
            size = theirs.detach().abs().double() + rate * torch.stack(parts).sum(0)
            bound = rate * bound + 4 * unit_roundoff(theirs.dtype) * size
        return apart(mine, theirs, bound)


def _list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _has_gradient(tensor: Any) -> bool:
    if isinstance(tensor, torch.nn.Parameter):
        return True
    return isinstance(tensor, torch.Tensor) and tensor.is_leaf and tensor.requires_grad


def _load(mine: torch.Tensor, theirs: torch.Tensor, parameter: torch.Tensor | None) -> None:
    """Set a value to the untouched run's, in place where that is possible."""
    if theirs.layout == torch.strided and mine.layout == torch.strided and mine.shape == theirs.shape:
        with torch.no_grad():
            mine.copy_(theirs)
    elif parameter is not None:
        parameter.grad = theirs.clone()


def _named(what: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(what, torch.nn.Module):
        return what.named_parameters()
    if isinstance(what, torch.optim.Optimizer):
        what = [parameter for group in what.param_groups for parameter in group["params"]]
    if isinstance(what, torch.Tensor):
        what = [what]
    if isinstance(what, Mapping):
        return what.items()
    return ((str(index), tensor) for index, tensor in enumerate(what))
