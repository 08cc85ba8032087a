"""Horovod's DistributedOptimizer: any torch optimizer, whose gradients are reduced while the backward pass runs."""

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from netbottleneck import collectives, job, steps
from netbottleneck.members import Members, ProcessSet, global_process_set, members_of
from netbottleneck.torch.adasum import adasum_optimizer
from netbottleneck.torch.compression import Compression, Compressor
from netbottleneck.torch.gradients import Gradients
from netbottleneck.torch.one_by_one import PassGuard, PerParameter, SparseApart, Ways
from netbottleneck.torch.reductions import allreduce_async_
from netbottleneck.torch.remake import positive, remade
from netbottleneck.torch.scatters import sparse_allreduce_async


class Reduction(Protocol):
    """What carries an optimizer's gradients."""

    passes: int

    @property
    def pending(self) -> int:
        """How much was sent and not waited for."""

    def flush(self) -> None:
        """Send what is not sent."""

    def wait(self) -> None:
        """Wait until all gradients are back."""

    def close(self) -> None:
        """Remove the hooks."""


class _Distributed(torch.optim.Optimizer):
    """What a distributed optimizer adds to the class of the one that it was made from; the state is that one's."""

    _reduction: Reduction | None
    _guard: PassGuard | None
    _parameter_names: dict[torch.Tensor, str]
    _synchronized: bool
    _should_synchronize: bool
    backward_passes_per_step: int

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Say how many backward passes come before a step, from now on."""
        self.backward_passes_per_step = positive(passes)
        if self._reduction is not None:
            self._reduction.passes = passes
        if self._guard is not None:
            self._guard.limit = passes

    def synchronize(self) -> None:
        """Wait until all gradients are reduced, sending zeros for those that the backward pass did not reach."""
        if self._reduction is not None:
            self._reduction.flush()
            self._reduction.wait()
        if self._guard is not None:
            self._guard.reset()
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

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Forget gradients, as the base class does; AssertionError while they are on their way."""
        if self._reduction is not None and self._reduction.pending:
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
    op: int = steps.Average,
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
    if gradient_predivide_factor != 1.0 and op != steps.Average:
        raise ValueError("gradient_predivide_factor is for op=Average only")
    named = _named(optimizer, named_parameters)
    result = remade(optimizer, _Distributed)
    result._parameter_names = {parameter: name for name, parameter in named}
    result._synchronized = False
    result._should_synchronize = True
    result.backward_passes_per_step = positive(backward_passes_per_step)
    this = job.current()
    label = f"optimizer.{this.number('optimizer')}"
    result._reduction = None
    result._guard = None
    if process_set.included() is False:
        return result
    among = members_of(process_set)
    if op == steps.Adasum and among.size > 1:
        return adasum_optimizer(optimizer, named, compression, backward_passes_per_step, process_set)
    op = steps.Sum if op == steps.Adasum else op
    steps.reduction(op, among.size)
    if among.size == 1 and this.recorder is None:
        return result
    ways = _ways(label, op, (1.0 / gradient_predivide_factor, gradient_predivide_factor), process_set)
    all_sparse = isinstance(optimizer, torch.optim.SparseAdam)  # which takes no others
    if compression is not Compression.none or sparse_as_dense or all_sparse:
        carrier = PerParameter(named, compression, ways, result.backward_passes_per_step, (sparse_as_dense, all_sparse))
        result._reduction = carrier
        weakref.finalize(result, carrier.close)
    else:
        _use_buckets(result, named, label, ways, (op, gradient_predivide_factor, process_set))
    return result


def _use_buckets(
    result: Any,
    named: list[tuple[str, torch.Tensor]],
    label: str,
    ways: Ways,
    reduced: tuple[int, float, ProcessSet],
) -> None:
    """Let the gradients of an optimizer travel in buckets. reduced: by which op, divided before by what, over whom."""
    op, predivide, process_set = reduced
    this, among = job.current(), members_of(process_set)
    everybody = process_set is global_process_set
    passes = result.backward_passes_per_step
    # Autograd would add to memory that is being reduced.
    result._guard = PassGuard([p for _, p in named if p.requires_grad], passes)
    apart = this.recorder is None and op in (steps.Average, steps.Sum)
    gradients = Gradients(
        named,
        recorder=this.recorder,
        passes=passes,
        direct_bytes=this.settings.direct_bytes,
        label=label,
        agree=None if everybody else _agreement(label, among),
        among=None if everybody else among,
        drop_sparse=apart,
    )
    moved = among.size > 1 and this.settings.transports[0] != "null"
    reduction, _ = steps.reduction(op, among.size)
    gradients.target(this.comm if moved else None, op == steps.Average, predivide=predivide, op=reduction)
    result._reduction = SparseApart(gradients, ways) if apart else gradients
    weakref.finalize(result, result._reduction.close)
    weakref.finalize(result, result._guard.close)
    this.observer.gradients(gradients, result)


def _agreement(label: str, among: Members) -> Callable[[bytes], bytes]:
    """Return what gives all ranks of a set the bytes of its first one."""

    def agree(mine: bytes) -> bytes:
        array = np.frombuffer(bytearray(mine), np.uint8)
        code = int(job.core().UINT8)
        name = steps.label("order", f"{label}.{job.current().number(label)}", among)
        steps.Pending(collectives.broadcast_steps(array, code, among.ranks[0], name, among)).wait()
        return array.tobytes()

    return agree


def _ways(label: str, op: int, factors: tuple[float, float], process_set: ProcessSet) -> Ways:
    """Return how gradients travel one by one; factors: before and after a dense sum."""

    def dense(tensor: torch.Tensor, name: str) -> int:
        before, after = factors
        name = f"{label}.{name}"
        return allreduce_async_(
            tensor, name=name, op=op, prescale_factor=before, postscale_factor=after, process_set=process_set
        )

    return Ways(dense, lambda tensor, name: sparse_allreduce_async(tensor, f"{label}.{name}", op, process_set))


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
