"""Horovod's DistributedOptimizer: any torch optimizer, with gradients reduced during the backward pass."""

import contextlib
import functools
import hashlib
import json
import math
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from netbottleneck.errors import FAILURES, HorovodInternalError
from netbottleneck.runtime import async_operations, job
from netbottleneck.runtime.async_operations import Array, Members, ProcessSet, global_process_set, members_of
from netbottleneck.torch.compression import Compression, Compressor, check_compression
from netbottleneck.torch.gradients import Gradients, bucket_limits, own_type
from netbottleneck.torch.handles import synchronize
from netbottleneck.torch.mpi_ops import allreduce_async_, sparse_allreduce_async
from netbottleneck.torch.python_hooks import PassGuard, PerParameter, SparseApart, Ways

OTHERS = ("netbottleneck", "torch")  # packages whose lines a warning does not name

# Conversion of an optimizer to a class with the same name and state, and more methods.


def remade(optimizer: torch.optim.Optimizer, added: type[torch.optim.Optimizer]) -> Any:
    """Return an object of a new class of the same name, with the optimizer's own state."""
    base = type(optimizer)

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        return added.step(self, closure)

    step.hooked = True  # type: ignore[attr-defined] # torch has the hooks run by the step of `base`, which it calls
    parts = {"__doc__": base.__doc__, "_made_from": base, "step": functools.wraps(added.step)(step)}
    made: type[Any] = type(base.__name__, (added, base), parts)
    result: Any = object.__new__(made)
    # A scheduler made earlier has replaced the old optimizer's step; the new one must not inherit that.
    result.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    return result


def _warn(text: str) -> None:
    """Warn at the line of the script: a scheduler, and a class that is made here, have frames in between."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in OTHERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def own_step(optimizer: torch.optim.Optimizer) -> None:
    """Call step of the optimizer's original class, which waits for no other rank."""
    base = getattr(type(optimizer), "_made_from", None)
    if base is None:
        optimizer.step()
    else:
        base.step(optimizer)


def positive(passes: Any) -> int:
    """Return a number of backward passes; ValueError unless it is a whole number of at least 1."""
    try:
        whole = int(passes) if passes == int(passes) else 0
    except (TypeError, ValueError, OverflowError):
        whole = 0
    if whole < 1:
        raise ValueError(f"backward_passes_per_step={passes!r}: a whole number, at least 1, is required")
    return whole


# Optimizer whose steps are combined by Adasum, in place of averaged gradients.


class _Adasum(torch.optim.Optimizer):
    """Methods added to the class of an optimizer whose steps, not gradients, are combined."""

    _parameter_names: dict[torch.Tensor, str]
    _process_set: ProcessSet
    _compression: type[Compressor]
    _left: int
    backward_passes_per_step: int

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes before a step, from now on."""
        self.backward_passes_per_step = positive(passes)

    def synchronize(self) -> None:
        """Do nothing: steps are combined, not gradients."""

    @contextmanager
    def skip_synchronize(self) -> Generator[None, None, None]:
        """Do nothing if this rank is alone; else raise AssertionError: there is nothing to skip."""
        if not self._alone():
            raise AssertionError("skip_synchronize() is not for op=Adasum: no gradient is reduced")
        yield

    def _alone(self) -> bool:
        """True if the running job has no other rank to combine steps with."""
        return self._process_set.included() is False or members_of(self._process_set).size == 1

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make this rank's own step, then replace it by the Adasum of all ranks' steps."""
        if self._alone():
            return super().step() if closure is None else super().step(closure)
        before = {parameter: parameter.detach().clone() for parameter in self._parameter_names}
        loss = super().step() if closure is None else super().step(closure)
        sent = []
        for parameter, name in self._parameter_names.items():
            delta, context = self._compression.compress(parameter.detach() - before[parameter])
            handle = allreduce_async_(
                delta.contiguous(), name=f"adasum.{name}", op=async_operations.Adasum, process_set=self._process_set
            )
            sent.append((parameter, handle, context))
        for parameter, handle, context in sent:
            joined = self._compression.decompress(synchronize(handle), context)
            parameter.detach().copy_(before[parameter] + joined)
        return loss


def adasum_optimizer(
    optimizer: torch.optim.Optimizer,
    named: list[tuple[str, torch.Tensor]],
    compression: type[Compressor],
    passes: int,
    process_set: ProcessSet,
) -> Any:
    """Return an optimizer of the same class whose steps are combined over a process set."""
    result = remade(optimizer, _Adasum)
    # Adasum has several rounds, and each begins only in a wait: all ranks wait in one order.
    in_order = sorted(named, key=lambda pair: pair[0])
    result._parameter_names = {parameter: name for name, parameter in in_order if parameter.requires_grad}
    result._process_set = process_set
    result._compression = compression
    result.backward_passes_per_step = positive(passes)
    return result


# Carriers of a distributed optimizer's gradients in the current job: in buckets, or one by one.

NAMED_MOST = 4  # parameters that an error names for each rank


class Carrier(Protocol):
    """Sends an optimizer's gradients."""

    passes: int

    @property
    def begun(self) -> bool:
        """True from the first complete gradient of a step until `wait`."""

    def flush(self) -> None:
        """Send what has not been sent."""

    def wait(self) -> None:
        """Wait until all gradients are back."""

    def restart(self) -> None:
        """Begin the step again: see GradientSink.restart."""

    def close(self) -> None:
        """Remove the hooks."""


@dataclass(frozen=True)
class Wanted:
    """How an optimizer's gradients are reduced, in every job: the arguments of DistributedOptimizer."""

    label: str  # of its operations: the same on all ranks, and unique to this optimizer
    compression: type[Compressor]
    op: int
    predivide: float
    sparse_as_dense: bool
    process_set: ProcessSet
    by_name: bool = False  # gradients match by the script's names; else by their places in the optimizer


class Guarded:
    """A carrier with a guard that keeps autograd from adding to memory that is being reduced."""

    def __init__(self, inner: Carrier, guard: PassGuard) -> None:
        self.inner = inner
        self._guard = guard

    @property
    def passes(self) -> int:
        """Backward passes a step."""
        return self.inner.passes

    @passes.setter
    def passes(self, value: int) -> None:
        self.inner.passes = value
        self._guard.limit = value

    @property
    def begun(self) -> bool:
        """True from the first complete gradient of a step until `wait`."""
        return self.inner.begun

    def flush(self) -> None:
        """Send what has not been sent."""
        self.inner.flush()

    def wait(self) -> None:
        """Wait until all gradients are back."""
        try:
            self.inner.wait()
        finally:
            self._guard.reset()

    def restart(self) -> None:
        """Begin the step again: see GradientSink.restart."""
        try:
            self.inner.restart()
        finally:
            self._guard.reset()

    def close(self) -> None:
        """Remove the hooks."""
        self.inner.close()
        self._guard.close()


def carrier(
    optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str], passes: int, wanted: Wanted
) -> Carrier | None:
    """Return the carrier of an optimizer's gradients in the running job; None if they are not reduced.

    Raises ValueError for a process set that this job does not know, and as Gradients.
    """
    if wanted.process_set.included() is False:
        return None
    among = members_of(wanted.process_set)
    async_operations.reduction(wanted.op)  # validate the op even when the set has one rank
    if among.size == 1 and job.current().recorder is None:
        return None
    all_sparse = isinstance(optimizer, torch.optim.SparseAdam)  # SparseAdam takes no other gradients
    alone = all_sparse or wanted.sparse_as_dense or any(map(own_type, names))
    if alone or wanted.compression is not Compression.none:
        named = ((name, parameter) for parameter, name in names.items())
        each = PerParameter(named, wanted.compression, _ways(wanted), passes, (wanted.sparse_as_dense, all_sparse))
        if wanted.process_set is global_process_set:
            job.current().observer.gradients(each, optimizer)
        return each
    # The guard's hooks must come first.
    guard = PassGuard([parameter for parameter in names if parameter.requires_grad], passes)
    try:
        return Guarded(_buckets(optimizer, names, passes, wanted), guard)
    except BaseException:
        guard.close()
        raise


def _buckets(optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str], passes: int, wanted: Wanted) -> Carrier:
    this, among = job.current(), members_of(wanted.process_set)
    everybody = wanted.process_set is global_process_set
    apart = wanted.op in (async_operations.Average, async_operations.Sum)
    gradients = Gradients(
        ((name, parameter) for parameter, name in names.items()),
        recorder=this.recorder,
        passes=passes,
        direct_bytes=this.settings.direct_bytes,
        limits=bucket_limits(this.settings),
        label=wanted.label,
        agree=_agreement(wanted.label, among) if among.size > 1 else None,
        among=None if everybody else among,
        drop_sparse=apart,
        by_name=wanted.by_name and among.size > 1,
    )
    moved = among.size > 1 and this.settings.transports[0] != "null"
    reduction = async_operations.reduction(wanted.op)
    average = wanted.op == async_operations.Average
    gradients.target(this.comm if moved else None, average, predivide=wanted.predivide, op=reduction)
    if everybody:  # an observer may need a collective of all ranks
        this.observer.gradients(gradients, optimizer)
    return SparseApart(gradients, _ways(wanted)) if apart else gradients


def _sum(kind: str, label: str, among: Members, values: Array) -> Array:
    """Add up an array over the ranks of a set, in place, and return it. A rank that has joined adds zeros."""
    this, core = job.current(), job.core()
    name, code = async_operations.label(kind, label, among), async_operations.code_of(values)
    this.wait([this.comm.submit(name, core.ALLREDUCE, values, code, group=among.number, keep=values)])
    return values


def _agreement(label: str, among: Members) -> Callable[[bytes], bytes | None]:
    """Return a function that gives all ranks of a set the 32-bit integers of its first rank, as bytes.

    While a rank has joined, it returns None, because that rank would keep its buckets. It uses an all-reduce, because a
    rank that has joined takes part in no exchange.
    """

    def agree(mine: bytes) -> bytes | None:
        present, values = 1, np.frombuffer(mine, np.int32)
        own = [present, *(values if among.rank == 0 else np.zeros_like(values))]
        sums = _sum("order", label, among, np.array(own, np.int32))
        return sums[1:].tobytes() if sums[0] == among.size else None

    return agree


def _described(names: dict[torch.Tensor, str], by_name: bool) -> list[str]:
    """Return what matches the gradients of each parameter on all ranks, and its shape; sorted."""
    return sorted(
        f"{name if by_name else f'parameter {place}'} {list(parameter.shape)}"
        for place, (parameter, name) in enumerate(names.items())
        if parameter.requires_grad
    )


def _compare(label: str, among: Members, own: list[str]) -> bool:
    """Return True if all ranks of a set have described the same parameters, False while one has joined.

    Raises ValueError on all ranks, with the first two that differ, and what only one of them has.
    """
    text = json.dumps(own).encode()
    seen = np.zeros((among.size, 2), np.int64)
    seen[among.rank] = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big"), len(text)
    _sum("parameters", label, among, seen)
    present = np.flatnonzero(seen[:, 1]).tolist()
    first = present[0]
    other = next((rank for rank in present if seen[rank, 0] != seen[first, 0]), None)
    if other is None:
        return len(present) == among.size
    split, end = np.cumsum(seen[[first, other], 1]).tolist()
    both = np.zeros(end, np.uint8)
    if among.rank == first:
        both[:split] = np.frombuffer(text, np.uint8)
    elif among.rank == other:
        both[split:] = np.frombuffer(text, np.uint8)
    _sum("parameters.differ", label, among, both)
    here, there = json.loads(both[:split].tobytes()), json.loads(both[split:].tobytes())
    raise ValueError(
        f"{label}: the ranks optimize different parameters, so their gradients do not match: "
        f"{_only(among.ranks[first], here, there)}; {_only(among.ranks[other], there, here)}"
    )


def _only(rank: int, own: list[str], others: list[str]) -> str:
    return f"only rank {rank} has {_some(sorted(set(own) - set(others)))}"


def _some(found: list[str]) -> str:
    more = f" and {len(found) - NAMED_MOST} more" if len(found) > NAMED_MOST else ""
    return f"{', '.join(found[:NAMED_MOST]) or 'none'}{more}"


def _ways(wanted: Wanted) -> Ways:
    """Return the operations for gradients that are sent one by one."""

    def dense(tensor: torch.Tensor, name: str) -> int:
        return allreduce_async_(
            tensor,
            name=f"{wanted.label}.{name}",
            op=wanted.op,
            prescale_factor=1.0 / wanted.predivide,
            postscale_factor=wanted.predivide,
            process_set=wanted.process_set,
        )

    def sparse(tensor: torch.Tensor, name: str) -> Callable[[], torch.Tensor]:
        return sparse_allreduce_async(tensor, f"{wanted.label}.{name}", wanted.op, wanted.process_set)

    among = members_of(wanted.process_set)
    reduction = async_operations.reduction(wanted.op)
    factors = (wanted.op == async_operations.Average, wanted.predivide, reduction)
    return Ways(
        dense,
        sparse,
        lambda name: async_operations.label("allreduce", f"{wanted.label}.{name}", among),
        factors,
        wanted.by_name,
        _agreement(wanted.label, among) if among.size > 1 else None,
    )


# The optimizer.

KIND = "optimizer"  # operation name of an optimizer, followed by its number; each process set has its own count
AGE = "distributed optimizers"  # counter of all distributed optimizers that this process makes in a job


class _Distributed(torch.optim.Optimizer):
    """Methods added to the class of a distributed optimizer; it shares the original's state."""

    _wanted: Wanted
    _age: int
    _job: job.Job
    _carrier: Carrier | None = None
    _close: Callable[[], Any] | None = None
    _ended: bool = False
    _resting: bool = False  # its job has ended, and it has not joined another
    _uncompared: list[str] | None = None  # its parameters, until all ranks have been found to have the same
    _parameter_names: dict[torch.Tensor, str]
    _frozen: list[torch.Tensor]  # those without a gradient when it joined its job
    _warned: bool = False  # of parameters that were unfrozen or added
    _synchronized: bool
    _should_synchronize: bool
    backward_passes_per_step: int

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes before a step, from now on."""
        self.backward_passes_per_step = positive(passes)
        if self._carrier is not None:
            self._carrier.passes = passes

    def synchronize(self) -> None:
        """Wait until all gradients are reduced; those that the backward pass did not reach are sent as zeros.

        If its job has ended, it joins the running job; ValueError if there is none. Raises ValueError in the first step
        if the ranks have different parameters. Warns once of a parameter that was unfrozen or added.
        """
        if self._ended:
            raise RuntimeError(
                "this DistributedOptimizer was made inside the function that elastic.run calls, for a job that has "
                "ended: make it before that function, or anew in each call of it"
            )
        if self._resting or (job.is_started() and self._job is not job.current()):
            self._again()
        if self._carrier is not None:
            self._warn_of_own()
            self._carrier.flush()
            self._compare()
            self._carrier.wait()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Generator[None, None, None]:
        """Make step() skip its synchronize(): for gradients changed after a synchronize(), as by clipping."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the remaining gradients, and make a step; a closure's gradients are reduced after it."""
        if closure is not None and self._should_synchronize:
            return super().step(self._synchronizing(closure))
        if self._should_synchronize:
            if self._synchronized:
                _warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): gradients are reduced twice"
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
        """Reduce gradients in the running job; transfers of an earlier job are dropped."""
        self._leave()
        self._job, self._synchronized = job.current(), False
        self._carrier = carrier(self, self._parameter_names, self.backward_passes_per_step, self._wanted)
        self._frozen = [parameter for parameter in self._parameter_names if not parameter.requires_grad]
        self._uncompared = _described(self._parameter_names, self._wanted.by_name)
        self._ended = self._resting = False
        if self._carrier is not None:
            self._close = weakref.finalize(self, self._carrier.close)
            itself = weakref.ref(self)
            self._job.ending.append(lambda: _rest(itself()))

    def _warn_of_own(self) -> None:
        """Warn once if parameters are trained by this rank's gradients alone, as they are with Horovod."""
        count = sum(len(group["params"]) for group in self.param_groups)
        alike = count == len(self._parameter_names) and not any(parameter.requires_grad for parameter in self._frozen)
        if alike or self._warned:
            return
        unfrozen = [parameter for parameter in self._frozen if parameter.requires_grad]
        own = [f"{self._parameter_names[parameter]} (unfrozen)" for parameter in unfrozen]
        own += [
            f"number {place} of group {index} (added)"
            for index, group in enumerate(self.param_groups)
            for place, parameter in enumerate(group["params"])
            if parameter.requires_grad and parameter not in self._parameter_names
        ]
        if own:
            self._warned = True
            _warn(
                "this DistributedOptimizer does not reduce the gradients of parameters that were unfrozen or added "
                f"after it was made, so ranks train them apart: {_some(own)}. To train them together, replace it by "
                "the DistributedOptimizer of a new optimizer"
            )

    def _compare(self) -> None:
        """Compare the parameters of all ranks, once in a job, before any sum is used."""
        if self._uncompared is not None:
            among = members_of(self._wanted.process_set)
            if among.size == 1 or _compare(self._wanted.label, among, self._uncompared):
                self._uncompared = None

    def _again(self) -> None:
        """Join the running job under a new name. All ranks reach this by the same call."""
        self._age = job.current().number(AGE)
        self._wanted = replace(self._wanted, label=_label(self._wanted.process_set))
        self._begin()

    def _leave(self) -> None:
        """Stop reducing gradients."""
        close, self._close, self._carrier = self._close, None, None
        if close is not None:
            close()

    def _end(self) -> None:
        """Stop reducing gradients for good."""
        self._leave()
        self._ended = True

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load a state, as the base class does, and begin the step again: earlier backward passes no longer count.

        Once a gradient is complete, every rank calls it. It waits for all; they then count as not reduced.
        """
        if self._carrier is not None:
            # Nobody uses these sums. The next operation raises a failure of the job.
            with contextlib.suppress(*FAILURES, HorovodInternalError):
                self._carrier.restart()
        self._synchronized = False
        super().load_state_dict(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear gradients, as the base class does; AssertionError from the first complete one until the step."""
        if self._carrier is not None and self._carrier.begun:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(): gradients are on their way to the other ranks"
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
    """Return an optimizer of the same class whose step() uses gradients reduced over all ranks.

    It shares parameters and state with the given optimizer, which must not be used any more. Gradients are sent in
    buckets, each as soon as it is complete. With compression or sparse_as_dense, each gradient is sent alone from
    Python, which is slower. backward_passes_per_step: gradients are accumulated over this many passes before they are
    sent. gradient_predivide_factor divides before the sum, the rest of the division follows it; only with op=Average.
    num_groups and groups are accepted for compatibility: buckets serve as groups. Sparse gradients stay sparse and are
    sent alone, as indices and values, with op=Average or Sum. They are sent dense in the first step, which detects
    them, in a measured run, and with sparse_as_dense. process_set: whose gradients are reduced; on other ranks the
    optimizer is unchanged. op=Adasum: each rank makes its step, and the steps are combined.

    Raises ValueError for an optimizer that is distributed already, for named_parameters that repeat a name or omit a
    parameter, for groups that are neither a number nor lists of tensors, for a predivide factor with another op, for
    other values that fit no argument, and for a parameter that is neither in host nor in CUDA memory, or whose type
    cannot be reduced.
    """
    if isinstance(optimizer, _Distributed | _Adasum):
        raise ValueError(f"this {type(optimizer).__name__} is a DistributedOptimizer already: use it as it is")
    check_compression(compression)
    _check_predivide(gradient_predivide_factor, op)
    _check_groups(num_groups if groups is None else groups)
    named = _named(optimizer, named_parameters)
    if op == async_operations.Adasum:
        return adasum_optimizer(optimizer, named, compression, backward_passes_per_step, process_set)
    result = remade(optimizer, _Distributed)
    result._age = job.current().number(AGE)
    result._parameter_names = {parameter: name for name, parameter in named}
    result._should_synchronize = True
    result.backward_passes_per_step = positive(backward_passes_per_step)
    result._wanted = Wanted(
        _label(process_set),
        compression,
        op,
        gradient_predivide_factor,
        sparse_as_dense,
        process_set,
        by_name=named_parameters is not None,
    )
    result._begin()
    _made.append(weakref.ref(result, _made.remove))  # by identity: a script's class may be unhashable
    return result


def _check_predivide(factor: Any, op: int) -> None:
    try:
        divides = math.isfinite(factor) and factor != 0
    except TypeError:
        divides = False
    if not divides:
        raise ValueError(f"gradient_predivide_factor={factor!r}: a finite number other than 0 is required")
    if factor != 1.0 and op != async_operations.Average:
        raise ValueError("gradient_predivide_factor is for op=Average only")


def _check_groups(groups: Any) -> None:
    """Raise ValueError for groups that Horovod would refuse."""
    if isinstance(groups, int) and groups >= 0:
        return
    if not isinstance(groups, list) or not all(map(_is_list, groups)):
        raise ValueError(f"groups={groups!r}: must be a whole number, at least 0, or a list of lists of tensors")
    members = [member for group in groups for member in group]
    if not all(isinstance(member, torch.Tensor) for member in members):
        raise ValueError("groups must consist of tensors")
    if len(set(map(id, members))) < len(members):
        raise ValueError("a tensor may be in groups only once")


def _is_list(group: Any) -> bool:
    return isinstance(group, Iterable) and not isinstance(group, torch.Tensor)


def _label(process_set: ProcessSet) -> str:
    """Return the name of these ranks' next optimizer, the same on all of them; other ranks need not make one."""
    kind = KIND if process_set is global_process_set else f"{KIND}@{process_set.process_set_id}"
    return f"{kind}.{job.current().number(kind)}"


def _rest(optimizer: _Distributed | None) -> None:
    """Remove an optimizer's hooks while there is no job for its gradients."""
    if optimizer is not None and not optimizer._ended:
        optimizer._leave()
        optimizer._resting = True


_made: list[weakref.ref[_Distributed]] = []


def _alive() -> list[_Distributed]:
    return [optimizer for optimizer in (reference() for reference in tuple(_made)) if optimizer is not None]


def rest() -> None:
    """Make all distributed optimizers leave the running job, in mid-pass too: a gradient under way gets no sum.

    The sums of other ranks must fail for lack of this rank's gradients: its job is to be stopped.
    """
    for optimizer in _alive():
        _rest(optimizer)


def mark() -> tuple[int, int]:
    """Return a mark that separates this job's existing distributed optimizers from later ones."""
    return (job.current().number(AGE), job.current().number(KIND)) if job.is_started() else (0, 0)


def number_from(here: tuple[int, int]) -> None:
    """Continue the numbering of distributed optimizers from an earlier job's mark."""
    for kind, first in zip((AGE, KIND), here, strict=True):
        while job.is_started() and job.current().number(kind) < first:
            pass


def renew(here: tuple[int, int]) -> None:
    """Move the distributed optimizers below an earlier job's mark to this job, and end those above it."""
    for optimizer in sorted(_alive(), key=lambda each: each._age):
        if optimizer._job is job.current():
            continue
        if optimizer._age < here[0]:
            optimizer._begin()
        else:
            optimizer._end()


def _named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> list[tuple[str, torch.Tensor]]:
    """Return (name, parameter) of all parameters in the optimizer's own order, which may differ between ranks."""
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
