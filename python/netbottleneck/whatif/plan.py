"""Which gradients travel together: a plan is data, made here and run elsewhere."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from netbottleneck.trace.model import PSEUDO, Collective, Trace

FIRST_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
FUSION_BYTES = 64 << 20
CYCLE_NS = 5_000_000
RULES = ("explicit", "ddp", "horovod", "paper2020")
# So many operations may share the link at once.
IN_FLIGHT_MAX = 16


def buckets(
    sizes: Sequence[int],
    dtypes: Sequence[Hashable],
    order: Sequence[int] | None = None,
    first_bytes: int = FIRST_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
) -> list[list[int]]:
    """Return the buckets, each the indices of its tensors, in the order in which they become complete.

    sizes: bytes of each tensor. dtypes: its type; a bucket holds one type. order: the indices in the order in which
    the tensors become ready; None: from the last to the first, as a backward pass goes. A bucket of a type is closed
    by the tensor that brings it to its limit (first_bytes for the first, bucket_bytes for all others), as
    torch.nn.parallel.DistributedDataParallel does with its 1 MiB and 25 MiB.

    Raises ValueError when the lengths differ, order is no permutation, a size is negative or a limit is not positive.
    """
    count = len(sizes)
    if order is None:
        order = range(count - 1, -1, -1)
    if len(dtypes) != count:
        raise ValueError(f"{count} sizes but {len(dtypes)} dtypes")
    if sorted(order) != list(range(count)):
        raise ValueError(f"order must name each of the {count} tensors once, got {list(order)}")
    if first_bytes <= 0 or bucket_bytes <= 0:
        raise ValueError(f"a bucket needs at least 1 byte, got limits {first_bytes} and {bucket_bytes}")
    if any(size < 0 for size in sizes):
        raise ValueError("a tensor of fewer than 0 bytes")
    done: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    held: dict[Hashable, int] = {}
    limit: dict[Hashable, int] = {}
    for index in order:
        kind = dtypes[index]
        filling.setdefault(kind, []).append(index)
        held[kind] = held.get(kind, 0) + sizes[index]
        if held[kind] >= limit.get(kind, first_bytes):
            done.append(filling.pop(kind))
            held[kind] = 0
            limit[kind] = bucket_bytes
    place = {index: at for at, index in enumerate(order)}
    done.extend(filling.values())
    return sorted(done, key=lambda bucket: place[bucket[-1]])


class Carried(Protocol):
    """A bucket as whoever sends it keeps it; `parameters` are indices of its tensors."""

    @property
    def name(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def dtype(self) -> object: ...
    @property
    def parameters(self) -> Sequence[int]: ...


def described(
    tensors: Iterable[tuple[str, int, object]], made: Sequence[Carried], key_of: Callable[[str], int]
) -> dict[str, list[dict[str, Any]]]:
    """Return what a rank's record says of its tensors, (name, bytes, type) each, and of the buckets made of them.

    key_of: the key on the wire of a bucket's name. A type is told without its library's name."""
    home = {index: number for number, bucket in enumerate(made) for index in bucket.parameters}
    return {
        "parameters": [
            {"name": name, "bytes": nbytes, "dtype": _dtype_name(dtype), "bucket": home.get(index)}
            for index, (name, nbytes, dtype) in enumerate(tensors)
        ],
        "buckets": [
            {
                "name": bucket.name,
                "key": key_of(bucket.name),
                "bytes": bucket.nbytes,
                "dtype": _dtype_name(bucket.dtype),
                "parameters": list(bucket.parameters),
            }
            for bucket in made
        ],
    }


def _dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Plan:
    """When which gradients are sent, as data.

    rule: "explicit": `buckets`, tuples of indices of tensors, each sent when its last member is ready. "ddp": as
    `buckets()` makes them in the order of readiness, with first_bytes and fusion_bytes, sent in that order. "horovod":
    every cycle_ns from the step's begin, what is ready on all ranks is fused, never above fusion_bytes, but a tensor
    that is larger goes alone; what does not go with the others is passed over as long as it too would fit (csrc/sim,
    enum nb_sim_rule). "paper2020": when a tensor arrives, all that waits is sent if it has fusion_bytes or if cycle_ns
    have passed since the last send (arXiv 2006.10103; not a timer). in_flight: operations that share the link; 1: each
    waits for the one before it.
    """

    rule: str
    buckets: tuple[tuple[int, ...], ...] = ()
    fusion_bytes: int = BUCKET_BYTES
    cycle_ns: int = CYCLE_NS
    in_flight: int = 1
    first_bytes: int = FIRST_BYTES

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}, not {self.rule!r}")
        for name, value in (("fusion_bytes", self.fusion_bytes), ("first_bytes", self.first_bytes)):
            if not 0 < value < 1 << 62:
                raise ValueError(f"{name} must be a positive number of bytes, not {value}")
        if not 0 < self.cycle_ns < 1 << 53:
            raise ValueError(f"cycle_ns must be a positive number of ns, not {self.cycle_ns}")
        if not 1 <= self.in_flight <= IN_FLIGHT_MAX:
            raise ValueError(f"in_flight must be from 1 to {IN_FLIGHT_MAX}, not {self.in_flight}")
        if self.rule == "explicit" and not self.buckets:
            raise ValueError("an explicit plan needs buckets")
        members = [index for bucket in self.buckets for index in bucket]
        if len(set(members)) != len(members) or any(not bucket for bucket in self.buckets):
            raise ValueError("each tensor belongs to one bucket, and each bucket has a tensor")

    @classmethod
    def explicit(cls, chosen: Sequence[Sequence[int]], in_flight: int = 1) -> Plan:
        """These buckets of indices, each sent when its last member is ready."""
        return cls("explicit", tuple(tuple(bucket) for bucket in chosen), in_flight=in_flight)

    @classmethod
    def ddp(cls, bucket_bytes: int = BUCKET_BYTES, first_bytes: int = FIRST_BYTES, in_flight: int = 1) -> Plan:
        """Buckets as torch.nn.parallel.DistributedDataParallel makes them once it has seen the order of readiness."""
        return cls("ddp", fusion_bytes=bucket_bytes, first_bytes=first_bytes, in_flight=in_flight)

    @classmethod
    def horovod(cls, fusion_bytes: int = FUSION_BYTES, cycle_ns: int = CYCLE_NS, in_flight: int = 1) -> Plan:
        """Horovod's rule: a timer, and fusion that stays within its limit."""
        return cls("horovod", fusion_bytes=fusion_bytes, cycle_ns=cycle_ns, in_flight=in_flight)

    @classmethod
    def paper2020(cls, fusion_bytes: int = FUSION_BYTES, cycle_ns: int = CYCLE_NS, in_flight: int = 1) -> Plan:
        """The rule of the simulator of arXiv 2006.10103: checked when a tensor arrives, after it was added."""
        return cls("paper2020", fusion_bytes=fusion_bytes, cycle_ns=cycle_ns, in_flight=in_flight)

    @classmethod
    def of(cls, trace: Trace, transport: str | None = None) -> Plan:
        """Return the buckets that the run really used, and as many operations in flight as it had.

        transport: of which transport; None: the first that recorded its buckets. Raises ValueError where the trace does
        not know its buckets."""
        names = [transport] if transport is not None else [t for t in trace.transports if t not in PSEUDO]
        for name in names:
            used = sorted({c.bucket for c in trace.collectives if c.transport == name and c.bucket is not None})
            found = [trace.buckets[index].parameters for index in used if index < len(trace.buckets)]
            if found and all(found):
                return cls.explicit(found, in_flight(trace, name))
        raise ValueError(f"the trace does not know the buckets of {transport or 'any of its transports'}")

    def resolve(
        self, sizes: Sequence[int], dtypes: Sequence[Hashable], order: Sequence[int]
    ) -> tuple[tuple[int, ...], ...]:
        """Return the buckets of a static rule, all tensors in them; () for a rule that decides as tensors arrive.

        order: indices by readiness. Raises ValueError for an explicit bucket of tensors that are not there; those that
        no bucket has travel alone."""
        if self.rule == "ddp":
            made = buckets(sizes, dtypes, order, self.first_bytes, self.fusion_bytes)
            return tuple(tuple(bucket) for bucket in made)
        if self.rule != "explicit":
            return ()
        members = {index for bucket in self.buckets for index in bucket}
        if not members <= set(range(len(sizes))):
            raise ValueError(f"the plan has tensor {max(members)}, the trace has {len(sizes)} tensors")
        return self.buckets + tuple((index,) for index in order if index not in members)


def _overtaken(operations: Sequence[Collective]) -> int:
    """How many operations must have been under way together: one that ends began after all that entered before it."""
    ends = [c.done_ns for c in sorted(operations, key=lambda c: c.submit_ns) if c.done_ns is not None]
    return max((1 + sum(before > end for before in ends[:at]) for at, end in enumerate(ends)), default=1)


def in_flight(trace: Trace, transport: str) -> int:
    """How many operations of a transport shared the link: the least that explains in which order they ended.

    The middle one of all steps of all ranks; 1 where nothing was overtaken."""
    steps: dict[tuple[int, int | None], list[Collective]] = defaultdict(list)
    for operation in trace.collectives:
        if operation.transport == transport and operation.finished and operation.step is not None:
            steps[operation.rank, operation.step].append(operation)
    seen = [_overtaken(operations) for operations in steps.values()]
    return min(IN_FLIGHT_MAX, statistics.median_low(seen)) if seen else 1
