"""Horovod's DistributedOptimizer: any torch optimizer, whose gradients are reduced while the backward pass runs."""

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from netbottleneck.runtime import async_operations, job
from netbottleneck.runtime.members import ProcessSet, global_process_set
from netbottleneck.torch.adasum import adasum_optimizer
from netbottleneck.torch.carriers import Carrier, Wanted, carrier
from netbottleneck.torch.compression import Compression, Compressor
from netbottleneck.torch.remake import positive, remade

KIND = "optimizer"  # what the operations of one are called, by number: those of a process set count for themselves
AGE = "distributed optimizers"  # as what all that this process makes are numbered in a job


class _Distributed(torch.optim.Optimizer):
    """What a distributed optimizer adds to the class of the one that it was made from; the state is that one's."""

    _wanted: Wanted
    _age: int
    _job: job.Job
    _carrier: Carrier | None = None
    _close: Callable[[], Any] | None = None
    _ended: bool = False
    _resting: bool = False  # its job has ended, and it serves no other yet
    _parameter_names: dict[torch.Tensor, str]
    _synchronized: bool
    _should_synchronize: bool
    backward_passes_per_step: int

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Say how many backward passes come before a step, from now on."""
        self.backward_passes_per_step = positive(passes)
        if self._carrier is not None:
            self._carrier.passes = passes

    def synchronize(self) -> None:
        """Wait until all gradients are reduced, sending zeros for those that the backward pass did not reach.

        Where its job has ended it serves the one that runs from now on; ValueError where none does.
        """
        if self._ended:
            raise RuntimeError(
                "this DistributedOptimizer was made inside the function that elastic.run calls, for a job that has "
                "ended: make it before that function, or anew in each call of it"
            )
        if self._resting or (job.is_started() and self._job is not job.current()):
            self._again()
        if self._carrier is not None:
            self._carrier.flush()
            self._carrier.wait()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Generator[None, None, None]:
        """Make step() skip its own synchronize(): for gradients that were changed after one, as clipping does."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce what is left to reduce, and make a step; a closure's gradients are reduced after it."""
        if closure is not None and self._should_synchronize:
            return super().step(self._synchronizing(closure))
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): gradients are reduced twice",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step() if closure is None else super().step(closure)

    def _synchronizing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with torch.enable_grad():
                loss = closure()
            self.synchronize()
            self._synchronized = False
            return loss

        return run

    def _begin(self) -> None:
        """Have gradients reduced in the job that runs; what is on its way in an earlier one is forgotten."""
        self._leave()
        self._job, self._synchronized = job.current(), False
        self._carrier = carrier(self, self._parameter_names, self.backward_passes_per_step, self._wanted)
        self._ended = self._resting = False
        if self._carrier is not None:
            self._close = weakref.finalize(self, self._carrier.close)
            itself = weakref.ref(self)
            self._job.ending.append(lambda: _rest(itself()))

    def _again(self) -> None:
        """Serve the job that runs, which all ranks come to by the same call: its name there is one of that job's."""
        self._age = job.current().number(AGE)
        self._wanted = replace(self._wanted, label=_label(self._wanted.process_set))
        self._begin()

    def _leave(self) -> None:
        """Reduce no gradients."""
        close, self._close, self._carrier = self._close, None, None
        if close is not None:
            close()

    def _end(self) -> None:
        """Reduce gradients no more."""
        self._leave()
        self._ended = True

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Forget gradients, as the base class does; AssertionError while they are on their way."""
        if self._carrier is not None and self._carrier.pending:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(): the gradients are on their way to the other ranks"
            )
        super().zero_grad(*args, **kwargs)


def DistributedOptimizer(  # noqa: PLR0913, PLR0917 - Horovod's name and signature
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = async_operations.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer of the same class whose step() uses gradients that are reduced over all ranks.

    It shares parameters and state with the one that is given, which must not be used any more. Gradients travel in
    buckets, each as soon as it is complete; with compression, or sparse_as_dense, each gradient travels alone and
    Python runs for it: slower. backward_passes_per_step gradients are added up before they travel.
    gradient_predivide_factor divides before the sum, the rest of the division comes after it; only with op=Average.
    num_groups and groups are taken for compatibility: the buckets are such groups. Sparse gradients stay sparse; they
    travel alone, as indices and values, with op=Average or Sum; but dense in the first step, which shows what they are,
    in a measured run, and with sparse_as_dense. process_set: whose gradients are reduced; on other ranks the optimizer
    is as it was. op=Adasum: each rank makes its step, and the steps are joined.

    Raises ValueError for named_parameters that repeat a name or leave a parameter out, for a predivide factor with
    another op, and for a parameter that is not in host memory or whose type cannot be reduced.
    """
    if gradient_predivide_factor != 1.0 and op != async_operations.Average:
        raise ValueError("gradient_predivide_factor is for op=Average only")
    named = _named(optimizer, named_parameters)
    if op == async_operations.Adasum:
        return adasum_optimizer(optimizer, named, compression, backward_passes_per_step, process_set)
    result = remade(optimizer, _Distributed)
    result._age = job.current().number(AGE)
    result._parameter_names = {parameter: name for name, parameter in named}
    result._should_synchronize = True
    result.backward_passes_per_step = positive(backward_passes_per_step)
    result._wanted = Wanted(
        _label(process_set), compression, op, gradient_predivide_factor, sparse_as_dense, process_set
    )
    result._begin()
    _made.add(result)
    return result


def _label(process_set: ProcessSet) -> str:
    """Return what the next optimizer of these ranks is called, the same on all of them: others need not make it."""
    kind = KIND if process_set is global_process_set else f"{KIND}@{process_set.process_set_id}"
    return f"{kind}.{job.current().number(kind)}"


def _rest(optimizer: _Distributed | None) -> None:
    """Take an optimizer's hooks away while there is no job for its gradients."""
    if optimizer is not None and not optimizer._ended:
        optimizer._leave()
        optimizer._resting = True


_made: weakref.WeakSet[_Distributed] = weakref.WeakSet()


def mark() -> tuple[int, int]:
    """Return numbers between those of the distributed optimizers that this job has had and of those it will have."""
    return (job.current().number(AGE), job.current().number(KIND)) if job.is_started() else (0, 0)


def number_from(here: tuple[int, int]) -> None:
    """Have this job number its distributed optimizers as an earlier one did from its mark on."""
    for kind, first in zip((AGE, KIND), here, strict=True):
        while job.is_started() and job.current().number(kind) < first:
            pass


def renew(here: tuple[int, int]) -> None:
    """Have the distributed optimizers below the mark of an earlier job serve this one, and end those above it."""
    for optimizer in sorted(_made, key=lambda each: each._age):
        if optimizer._job is job.current():
            continue
        if optimizer._age < here[0]:
            optimizer._begin()
        else:
            optimizer._end()


def _named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> list[tuple[str, torch.Tensor]]:
    """Return (name, parameter) of all that the optimizer has, in its own order, which is that of the model."""
    own = [
        (f"allreduce.noname.{index}.{member}", parameter)
        for index, group in enumerate(optimizer.param_groups)
        for member, parameter in enumerate(group["params"])
    ]
    if named_parameters is None:
        return own
    given = list(named_parameters)
    if any(not isinstance(item, tuple) for item in given):
        raise ValueError("named_parameters must be (name, parameter) pairs, as model.named_parameters() gives them")
    repeated = sorted(name for name, times in Counter(name for name, _ in given).items() if times > 1)
    if repeated:
        raise ValueError(f"named_parameters must have unique names; these are repeated: {', '.join(repeated)}")
    names = {parameter: name for name, parameter in given}
    _all_named(own, names)
    return [(names[parameter], parameter) for _, parameter in own]


def _all_named(own: list[tuple[str, torch.Tensor]], names: dict[torch.Tensor, str]) -> None:
    missing = [name.removeprefix("allreduce.noname.") for name, parameter in own if parameter not in names]
    if missing:
        raise ValueError(
            f"named_parameters leaves out {len(missing)} parameters of the optimizer (by group and number: "
            f"{', '.join(missing)}): give all, or none"
        )
