"""Plans: which gradients are sent together. Replay schedules: one step of one rank. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from netbottleneck.analysis.intervals import counted
from netbottleneck.trace.model import Collective, Parameter, Rank, Step, Trace
from netbottleneck.trace.transports import BARE, NULL, PSEUDO, SINGLE, Arm

# Plans as data: made here, run elsewhere.

FIRST_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
FUSION_BYTES = 64 << 20
CYCLE_NS = 5_000_000
RULES = ("explicit", "ddp", "horovod", "paper2020")
NO_TENSOR = -1  # in place of the tensors of an operation that are not known
# Most operations that may share the link at once.
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
        raise ValueError("the size of a tensor must be at least 0 bytes")
    done: list[list[int]] = []
    open_buckets: dict[Hashable, list[int]] = {}
    open_bytes: dict[Hashable, int] = {}
    limit: dict[Hashable, int] = {}
    for index in order:
        kind = dtypes[index]
        open_buckets.setdefault(kind, []).append(index)
        open_bytes[kind] = open_bytes.get(kind, 0) + sizes[index]
        if open_bytes[kind] >= limit.get(kind, first_bytes):
            done.append(open_buckets.pop(kind))
            open_bytes[kind] = 0
            limit[kind] = bucket_bytes
    position = {index: at for at, index in enumerate(order)}
    done.extend(open_buckets.values())
    return sorted(done, key=lambda bucket: position[bucket[-1]])


class SentBucket(Protocol):
    """A bucket as its sender keeps it; `parameters` are the indices of its tensors."""

    @property
    def name(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def dtype(self) -> object: ...
    @property
    def parameters(self) -> Sequence[int]: ...


def described(
    tensors: Iterable[tuple[str, int, object]], chosen: Sequence[SentBucket], key_of: Callable[[str], int]
) -> dict[str, list[dict[str, Any]]]:
    """Return a rank's record of its tensors, (name, bytes, type) each, and of their buckets.

    key_of: maps a bucket's name to its key on the wire. Types are written without the "torch." prefix.
    """
    bucket_of = {index: number for number, bucket in enumerate(chosen) for index in bucket.parameters}
    return {
        "parameters": [
            {"name": name, "bytes": nbytes, "dtype": _dtype_name(dtype), "bucket": bucket_of.get(index)}
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
            for bucket in chosen
        ],
    }


def _dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Plan:
    """When which gradients are sent, as data.

    rule: "explicit": `buckets`, tuples of tensor indices, each sent when its last member is ready. "ddp": buckets as
    `buckets()` makes them in the order of readiness, with first_bytes and fusion_bytes, sent in that order. "horovod":
    every cycle_ns from the step's begin, the tensors ready on all ranks are fused, up to fusion_bytes. A larger tensor
    goes alone. Tensors that cannot join are skipped while they too would fit (csrc/sim, enum nb_sim_rule).
    "paper2020": when a tensor arrives, all waiting tensors are sent if they hold fusion_bytes or if cycle_ns passed
    since the last send (arXiv 2006.10103; no timer). in_flight: operations that share the link; 1: one at a time.
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
        """Rule of the simulator of arXiv 2006.10103: checked when a tensor arrives, after it is added."""
        return cls("paper2020", fusion_bytes=fusion_bytes, cycle_ns=cycle_ns, in_flight=in_flight)

    @classmethod
    def of(cls, trace: Trace, transport: Arm | None = None) -> Plan:
        """Return the buckets that the run used in its steps, with its number of operations in flight.

        transport: None: the first that recorded its buckets. Raises ValueError if the trace has no buckets.
        """
        names = [transport] if transport is not None else [t for t in trace.arms if t not in PSEUDO]
        for name in names:
            used = _buckets_of_steps(trace, name)
            found = [trace.buckets[index].parameters for index in used if 0 <= index < len(trace.buckets)]
            if found and all(found):
                return cls.explicit(found, in_flight(trace, name))
        raise ValueError(f"the trace does not record the buckets of {transport or 'any of its transports'}")

    def resolve(
        self, sizes: Sequence[int], dtypes: Sequence[Hashable], order: Sequence[int]
    ) -> tuple[tuple[int, ...], ...]:
        """Return the buckets of a static rule, with all tensors in them; () for a rule that decides as tensors arrive.

        order: indices by readiness. Tensors in no bucket get one of their own. Raises ValueError if an explicit bucket
        has a tensor that is not in the trace.
        """
        if self.rule == "ddp":
            made = buckets(sizes, dtypes, order, self.first_bytes, self.fusion_bytes)
            return tuple(tuple(bucket) for bucket in made)
        if self.rule != "explicit":
            return ()
        members = {index for bucket in self.buckets for index in bucket}
        if not members <= set(range(len(sizes))):
            raise ValueError(f"the plan has tensor {max(members)}, the trace has {len(sizes)} tensors")
        return self.buckets + tuple((index,) for index in order if index not in members)


def _buckets_of_steps(trace: Trace, arm: Arm) -> list[int]:
    """Buckets of an arm's steps, without those of its first step alone: DDP makes new ones after it."""
    own = [(c.step, c.bucket) for c in trace.collectives if c.arm == arm]
    placed = [(step, bucket) for step, bucket in own if step is not None and bucket is not None]
    steps = {step for step, _ in placed}
    later = steps - {min(steps, default=-1)} or steps
    return sorted({bucket for step, bucket in placed if step in later})


def _tensors(trace: Trace, bucket: int | None) -> tuple[int, ...]:
    """The tensors of a bucket; (NO_TENSOR,) if they are not known."""
    known = bucket is not None and 0 <= bucket < len(trace.buckets)
    return trace.buckets[bucket or 0].parameters if known else (NO_TENSOR,)


def part_lacking(trace: Trace, arm: Arm) -> float:
    """Part of an arm's counted steps, or of all if none counts, that do not send all gradients that others send."""
    steps = [step for step in counted(trace) if step.arm == arm] or [step for step in trace.steps if step.arm == arm]
    sent: dict[int, set[int]] = {step.index: set() for step in steps}
    for one in trace.collectives:
        if one.arm == arm and one.kind == "allreduce" and not one.by_script and one.step in sent:
            sent[one.step].update(_tensors(trace, one.bucket))
    every = set[int]().union(*sent.values())
    return sum(own != every for own in sent.values()) / max(len(sent), 1)


def _least_in_flight(operations: Sequence[Collective]) -> int:
    """Least number of operations in flight together: one that ends first overtook those submitted before it."""
    ends = [c.done_ns for c in sorted(operations, key=lambda c: c.submit_ns) if c.done_ns is not None]
    return max((1 + sum(before > end for before in ends[:at]) for at, end in enumerate(ends)), default=1)


def in_flight(trace: Trace, transport: Arm) -> int:
    """Number of operations of a transport that shared the link: the least that explains the order of completion.

    The median over all steps of all ranks; 1 if no operation overtook another.
    """
    steps: dict[tuple[int, int | None], list[Collective]] = defaultdict(list)
    for operation in trace.collectives:
        if operation.arm == transport and operation.finished and operation.step is not None and not operation.by_script:
            steps[operation.rank, operation.step].append(operation)
    seen = [_least_in_flight(operations) for operations in steps.values()]
    return min(IN_FLIGHT_MAX, statistics.median_low(seen)) if seen else 1


# Replay schedule: one step of one rank as a value, made from a trace. study/task.py plays it.

ELEMENT = 4  # bytes: all gradients are sent as float32
DTYPE = "float32"


@dataclass(frozen=True, slots=True)
class ReplaySchedule:
    """One step of one rank. tensors: (name, bytes); ready: (index, ns after the step's begin), rising.

    forward_ns: until the backward pass begins. tail_ns: time after all gradients are back (the optimizer). buckets:
    tensor indices, each bucket sent when its last tensor is ready. note: source of the times.
    """

    name: str
    tensors: tuple[tuple[str, int], ...]
    ready: tuple[tuple[int, int], ...]
    forward_ns: int
    tail_ns: int
    buckets: tuple[tuple[int, ...], ...]
    note: str = ""

    @property
    def bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(size for _, size in self.tensors)

    @property
    def compute_ns(self) -> int:
        """The step without communication."""
        return self.ready[-1][1] + self.tail_ns

    def bucket_bytes(self, index: int) -> int:
        """Bytes of one bucket."""
        return sum(self.tensors[at][1] for at in self.buckets[index])

    def parts(self) -> list[tuple[list[int], list[int], list[int]]]:
        """Return the step cut where buckets are sent: (times, tensors, buckets complete at that point)."""
        missing = [len(bucket) for bucket in self.buckets]
        bucket_of = {at: number for number, bucket in enumerate(self.buckets) for at in bucket}
        found: list[tuple[list[int], list[int], list[int]]] = []
        times: list[int] = []
        tensors: list[int] = []
        for index, at in self.ready:
            times.append(at)
            tensors.append(index)
            missing[bucket_of[index]] -= 1
            if missing[bucket_of[index]] == 0:
                found.append((times, tensors, [bucket_of[index]]))
                times, tensors = [], []
        return found


def travelling_bytes(trace: Trace, arm: Arm | None = None) -> tuple[int, ...]:
    """Return the bytes of each gradient as it travels, which are fewer than in memory where something compresses it.

    It is its part of what an operation of its bucket moved. arm: of these operations; None: of all arms.
    """
    moved: dict[int, list[int]] = defaultdict(list)
    for one in trace.collectives:
        if one.bucket is not None and one.tensor_bytes and not one.by_script and arm in (None, one.arm):
            moved[one.bucket].append(one.tensor_bytes)
    part: dict[int, float] = {}
    for index, bucket in enumerate(trace.buckets):
        whole = sum(trace.parameters[at].bytes for at in bucket.parameters if 0 <= at < len(trace.parameters))
        if moved[index] and whole:
            part |= dict.fromkeys(bucket.parameters, statistics.median(moved[index]) / whole)
    return tuple(round(p.bytes * part.get(at, 1.0)) for at, p in enumerate(trace.parameters))


def replay_schedule(trace: Trace, plan: Plan, *, scale: float = 1.0, stretch: float = 1.0) -> ReplaySchedule:
    """Return the median step of the first rank that recorded gradient readiness, as a schedule for a static plan.

    A rank that ran alone comes first, then steps without communication. scale: factor on bytes; stretch: factor on
    times. Raises ValueError if no step recorded gradient readiness, for a plan that decides at run time, and for
    factors that are not positive or too large.
    """
    if not (0 < scale <= 64 and 0 < stretch <= 1000):
        raise ValueError(f"scale {scale} and stretch {stretch}: must be positive, and at most 64 and 1000")
    steps = _recorded_steps(trace)
    offsets: dict[int, list[int]] = defaultdict(list)
    for step in steps:
        for index, at in step.grad_ready:
            offsets[index].append(at - step.begin_ns)
    medians = {index: round(stretch * statistics.median_low(times)) for index, times in offsets.items()}
    ready = tuple(sorted(medians.items(), key=lambda row: row[1]))

    def scaled(nbytes: int) -> int:
        return max(ELEMENT, round(nbytes * scale / ELEMENT) * ELEMENT)

    tensors = tuple((p.name, scaled(sent)) for p, sent in zip(trace.parameters, travelling_bytes(trace), strict=True))
    if len(ready) != len(tensors):
        raise ValueError(f"run {trace.id}: only {len(ready)} of {len(tensors)} gradients record when they are ready")
    buckets = plan.resolve(
        [scaled(p.bytes) for p in trace.parameters], [DTYPE] * len(tensors), [index for index, _ in ready]
    )
    if not buckets:
        raise ValueError(f"the rule {plan.rule} chooses buckets at run time: a replay needs the rule ddp or explicit")
    forwards = [step.backward_begin_ns - step.begin_ns for step in steps]
    forward = min(round(stretch * statistics.median_low(forwards)), ready[0][1])
    tail = round(stretch * statistics.median_low([_tail_ns(step) for step in steps]))
    note = f"{trace.origin}: {', '.join(trace.notes)}" if trace.notes else trace.origin
    return ReplaySchedule(trace.model or trace.id, tensors, ready, forward, tail, buckets, note)


score = replay_schedule  # the name in earlier releases, for one release more


def _recorded_steps(trace: Trace) -> Sequence[Step]:
    recorded = [step for step in trace.steps if step.grad_ready and step.arm != BARE]
    if not recorded:
        raise ValueError(f"run {trace.id}: no step records when its gradients were ready")
    order = [SINGLE, NULL, *trace.arms, *(step.arm for step in recorded)]
    first = min(recorded, key=lambda step: (order.index(step.arm), step.rank))
    own = [step for step in recorded if (step.rank, step.arm) == (first.rank, first.arm)]
    firsts: dict[int, int] = {}
    for step in own:
        firsts[step.block] = min(step.index, firsts.get(step.block, step.index))
    return [step for step in own if step.index != firsts[step.block]] or own


def _tail_ns(step: Step) -> int:
    return max(0, sum(end - begin for begin, end in step.optimizer))


def as_trace(schedule: ReplaySchedule) -> Trace:
    """Return a schedule as a run of one rank with one step: its compute, without communication."""
    ready_ns = schedule.ready[-1][1]
    end_ns = ready_ns + schedule.tail_ns
    step = Step(
        rank=0,
        index=0,
        block=0,
        arm=SINGLE,
        begin_ns=0,
        end_ns=end_ns,
        forward=((0, schedule.forward_ns),),
        optimizer=((ready_ns, end_ns),),
        grad_ready=schedule.ready,
    )
    return Trace(
        f"replay-{schedule.name}",
        1,
        (SINGLE,),
        origin="simulated",
        model=schedule.name,
        notes=(schedule.note,) if schedule.note else (),
        ranks=(Rank(0, finished=True),),
        parameters=tuple(Parameter(name, size, DTYPE) for name, size in schedule.tensors),
        steps=(step,),
    )
