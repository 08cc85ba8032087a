"""Trace format: the values that describe a run, measured or simulated, its hosts' counters, and their files.

Code upstream of this module is live; code downstream is a pure function of a Trace. Times are integer ns of rank 0's
monotonic clock. None means that the source does not have the value; it never stands for an estimate.
"""

from __future__ import annotations

import gzip
import io
import json
import types
import typing
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from netbottleneck.trace.files import whole_file
from netbottleneck.trace.run_steps import RunSteps
from netbottleneck.trace.transports import OWN_PATH, Arm, backends

VERSION = 3
FORMAT = "netbottleneck-trace"

# Largest number of ranks of a run.
SIZE_MAX = 10_000_000
# Part of a note: the gradients travel by a hook that cannot be timed.
NOT_TIMED = "its buckets are not timed"
# Part of a note: the gradients travel by a hook of the script, so no transport takes turns.
HOOKED = "its buckets travel as that hook sends them"
# Part of a note: the run communicates through operations that are not recorded.
NOT_RECORDED = "what it communicates is not in this record"
# Part of a note: time in transfer cannot be told from waiting for other ranks.
NOT_MATCHED = "which operations of the ranks belong together is not known"
# Begin of a note that arms no longer take turns, and that no step is recorded from there on.
STAYS = "all further steps use"
# Begin of a note that transports no longer alternate, as their differences are known.
KNOWN = "The differences between the transports are known"
# Part of a note about damaged records.
LEFT_OUT = "left out: "
# End of a note: what is left out, for a rank's file of events is missing.
NO_EVENTS = ".ring cannot be read"
# The lane of an operation's bytes between ranks that share memory: csrc/engine/shared.h.
MEMORY_LANE = 64
# Tables of a trace whose rows each belong to one rank.
BY_RANK = ("ranks", "steps", "collectives", "nccl", "faults")

Interval = tuple[int, int]
# A number whose 64 bits have no sign, such as a key. Others fit an array of int64.
Word = Annotated[int, "64 bits"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A trainable tensor; its index is its position in Trace.parameters."""

    name: str
    bytes: int
    dtype: str
    bucket: int | None = None


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are reduced together; `parameters` are indices."""

    name: str
    key: Word
    bytes: int
    dtype: str
    parameters: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Probe:
    """A probe of `lanes` network streams: `bytes` per rank, one way, in `ns`."""

    lanes: int
    bytes: int
    ns: int

    @property
    def bits_per_s(self) -> float:
        return 8e9 * self.bytes / self.ns if min(self.lanes, self.ns) > 0 else 0.0


@dataclass(frozen=True, slots=True)
class TransportInfo:
    """A transport as one rank recorded it.

    streams_asked: 0: auto. link_bps, mtu_bytes: of `interface`; declared: link_bps is stated by the user, of the
    network in use. shm: "on", "on: " and ranks, or "off: " and the reason. cpu: the core that its thread is pinned to.
    costs: ns per step, per byte on the wire, per byte added; then, of two levels, a fixed ns and ns per byte beyond its
    time on the wire; empty if not measured. ports: at which its lanes accept TCP connections; empty if not known."""

    name: str
    provider: str | None = None
    streams_open: int | None = None
    streams_used: int | None = None
    bytes_out: int | None = None
    bytes_in: int | None = None
    streams_asked: int | None = None
    interface: str | None = None
    link_bps: int | None = None
    shm: str | None = None
    cpu: int | None = None
    probe: tuple[Probe, ...] = ()
    costs: tuple[float, ...] = ()
    ports: tuple[int, ...] = ()
    declared: bool = False
    mtu_bytes: int | None = None

    @property
    def interface_known(self) -> bool:
        """True if its data travel over `interface`. For the script's own path that is the address of the host's name.

        Gloo uses that address. NCCL and MPI choose their network themselves, for example InfiniBand.
        """
        return self.name not in OWN_PATH or backends(self.provider) == {"gloo"}


@dataclass(frozen=True, slots=True)
class Clock:
    """The offset of a rank's clock to rank 0's, and how it was found.

    method: "rank 0", "heartbeat", "jumped", "same clock", "wall" or "none". offset_ns: this clock minus rank 0's, where
    it is best known. error_ns: None if not known. points: of a clock that drifts, its time and its offset then."""

    method: str = "none"
    offset_ns: int = 0
    error_ns: int | None = None
    points: tuple[tuple[int, int], ...] = ()

    def to_rank_0(self, time_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return times of this clock as times of rank 0's. Before and after the points the mean drift goes on."""
        if len(self.points) < 2:
            return time_ns - self.offset_ns
        (begin, first), (end, last) = self.points[0], self.points[-1]
        drift = (last - first) / (end - begin)
        at = np.array([at - begin for at, _ in self.points], float)
        bent = np.array([offset - first for _, offset in self.points], float) - drift * at
        since = (time_ns - begin).astype(float)
        moved: NDArray[np.int64] = np.rint(drift * since + np.interp(since, at, bent)).astype(np.int64)
        return time_ns - (first + moved)


@dataclass(frozen=True, slots=True)
class Rank:
    """A process of the run, and the missing parts of its record. cores: the cores in its affinity mask.

    machine_id: equal for all hosts of one machine, such as its containers or network namespaces; "" if not recorded.
    quota_cores: the cores' worth of processor time that its control group allows, None without a quota; quota_group:
    the group, whose processes share it, after its namespace (older traces: without). device_error_ns: the training's
    times are those of its GPU, on the host's clock within so much; None: the host's. run_steps: sums over the steps of
    the whole run, if some are left out. stock_variables: the environment variables that choose the network of the
    script's own path, as it got them.
    """

    rank: int
    hostname: str = ""
    host_id: str = ""
    pid: int = 0
    finished: bool = False
    error: str | None = None
    clock: Clock = Clock()
    steps_unfinished: int = 0
    events_dropped: int = 0
    cores: tuple[int, ...] = ()
    transports: tuple[TransportInfo, ...] = ()
    device_error_ns: int | None = None
    quota_cores: float | None = None
    quota_group: str = ""
    machine_id: str = ""
    run_steps: tuple[RunSteps, ...] = ()
    stock_variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def machine(self) -> str:
        """What tells its machine from others, as far as it was recorded. Machines may have equal hostnames."""
        return self.machine_id or self.host_id or self.hostname


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer update on one rank.

    forward, optimizer, evaluation (forward passes without gradients), checkpoints: intervals. modules: (module index,
    begin, end) of sampled steps. grad_ready: (parameter index, ns) in order of time. waits: (key of the operation or 0,
    begin, end) while the training thread was blocked. cpu_ns: CPU time of all threads of the process. probed: its
    operations waited for a probe of the streams."""

    rank: int
    index: int
    block: int
    arm: Arm
    begin_ns: int
    end_ns: int
    plan: str | None = None
    sampled: bool = False
    forward: tuple[Interval, ...] = ()
    optimizer: tuple[Interval, ...] = ()
    modules: tuple[tuple[int, int, int], ...] = ()
    grad_ready: tuple[tuple[int, int], ...] = ()
    waits: tuple[tuple[Word, int, int], ...] = ()
    evaluation: tuple[Interval, ...] = ()
    checkpoints: tuple[Interval, ...] = ()
    cpu_ns: int | None = None
    probed: bool = False

    @property
    def transport(self) -> str:
        """Return the transport of its arm."""
        return self.arm.transport

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.begin_ns

    @property
    def backward_begin_ns(self) -> int:
        """Return the end of the last forward pass before the last gradient: a later pass has no backward pass."""
        last_ns = max((at for _, at in self.grad_ready), default=self.begin_ns)
        return max((end for _, end in self.forward if end <= last_ns), default=self.begin_ns)


@dataclass(frozen=True, slots=True)
class Collective:
    """One operation on one rank. lanes: (lane, bytes sent, bytes received); step: None outside steps; bucket: index.

    tensor_bytes: None where torch recorded itself, without sizes. arm: that of its step; outside steps, its transport
    alone. phase: "reduce" for gradients; for the script's own calls of torch.distributed or of Horovod's API, which no
    arm moves, the phase of the step: "forward", "backward", "optimizer" or "other". ranks: those of its group, None:
    all. Of a flight recorder's dump alone: state, one of STATES; start_seen_ns, done_seen_ns: when a watchdog noticed,
    later by an unknown time."""

    rank: int
    arm: Arm
    key: Word
    round: int
    submit_ns: int
    tensor_bytes: int | None
    name: str = ""
    step: int | None = None
    comm: int = 0
    ranks: int | None = None
    kind: str = "allreduce"
    dtype: str = "float32"
    priority: int = 0
    part: int = 0
    parts: int = 1
    phase: str = "reduce"
    bucket: int | None = None
    device: int = 0
    algorithm: str | None = None
    wire_bytes: int | None = None
    agreed_ns: int | None = None
    start_ns: int | None = None
    first_byte_ns: int | None = None
    done_ns: int | None = None
    error: int = 0
    lanes: tuple[tuple[int, int, int], ...] | None = None
    state: str | None = None
    start_seen_ns: int | None = None
    done_seen_ns: int | None = None

    @property
    def transport(self) -> str:
        """Return the transport of its arm."""
        return self.arm.transport

    @property
    def known_bytes(self) -> int:
        """Return tensor_bytes; 0 if they are not known."""
        return self.tensor_bytes or 0

    @property
    def by_script(self) -> bool:
        """True for a call of the script: no gradient, and not moved by the arm."""
        return self.phase != "reduce"

    @property
    def finished(self) -> bool:
        return self.start_ns is not None and self.done_ns is not None and self.error == 0

    @property
    def match(self) -> tuple[Arm, int, int, int]:
        """The key that is equal on all ranks of one operation."""
        return self.arm, self.comm, self.key, self.round


# States of an operation: submitted; begun; done; over, with or without an error.
STATES = SCHEDULED, STARTED, COMPLETED, ENDED = ("scheduled", "started", "completed", "ended")
# What torch recorded itself: the key of a send or receive, or of a batch of them, is this or more.
POINT_TO_POINT = 1 << 32
# Likewise, the key of an operation that is not matched with those of other ranks is this or more.
ALONE = 1 << 56
# Kinds of operations.
TWO_SIDED = ("send", "recv")
UNEVEN = ("alltoall", "gather", "scatter")  # their sizes may differ between ranks
# No rank can end these before all have begun. The root of a broadcast, for example, ends once it has sent.
ENDS_TOGETHER = ("allreduce", "allgather", "reducescatter", "alltoall", "barrier")


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """A process group of torch.distributed; Collective.comm is its position in Trace.groups.

    ranks: its members, None if not known. last: (rank, number of the last operation that the rank submitted)."""

    name: str
    description: str = ""
    ranks: tuple[int, ...] | None = None
    last: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        return f"{self.name} ({self.description})" if self.description else self.name


@dataclass(frozen=True, slots=True)
class NcclKernel:
    """One channel of the GPU kernel of an NCCL operation.

    start_gpu_ns, stop_gpu_ns: on the GPU's clock. start_seen_ns, stop_seen_ns: when NCCL's proxy noticed, later by an
    unknown time."""

    channel: int
    start_gpu_ns: int
    stop_gpu_ns: int
    start_seen_ns: int
    stop_seen_ns: int


@dataclass(frozen=True, slots=True)
class NcclStep:
    """One message of an NCCL operation, as NCCL's proxy on this rank saw it.

    times_ns: where its states begin and end. Sent: the GPU may fill the buffer, it has, the network has accepted the
    message, it is sent. Received: the receive is requested, the message has arrived, it is flushed, the GPU has emptied
    the buffer. peer: rank in the communicator."""

    sent: bool
    channel: int
    peer: int
    number: int
    bytes: int
    times_ns: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class NcclOperation:
    """A collective, or a send or receive, that NCCL enqueued on one rank, from its profiler's events.

    comm: NCCL's id of the communicator, equal on its ranks; comm_rank, comm_size: this rank in it. bytes: of the whole
    tensor, which an all-gather and a reduce-scatter have in comm_size parts. sequence: calls of this function on the
    communicator before; None for a send or receive, which has a peer instead. tag: the caller's own, 0: none.
    submit_ns: the kernel was launched shortly before. called_ns: begin of the recorded call that enqueued it. step,
    bucket: of the training, where the operation belongs to one. kernel, network: empty where NCCL reported none, as for
    messages between ranks of one host."""

    rank: int
    comm: Word
    comm_rank: int
    comm_size: int
    function: str
    dtype: str
    bytes: int
    submit_ns: int
    algorithm: str | None = None
    protocol: str | None = None
    channels: int = 0
    sequence: int | None = None
    peer: int | None = None
    tag: Word = 0
    called_ns: int | None = None
    step: int | None = None
    bucket: int | None = None
    kernel: tuple[NcclKernel, ...] = ()
    network: tuple[NcclStep, ...] = ()


NAMED_RANKS = 128  # a stall names the missing ranks below this, and counts the others


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault on one rank. kind: "stall", "peer_lost" or "lane_lost"; peers: the missing or lost ranks.

    others: of a stall, how many of the missing ranks it does not name.
    """

    rank: int
    kind: str
    time_ns: int
    peers: tuple[int, ...] = ()
    key: Word = 0
    lane: int | None = None
    waited_ns: int = 0
    code: int = 0
    others: int = 0


@dataclass(frozen=True, slots=True)
class Network:
    """The network of the run. how: a description; link_bps: nominal; verified: the result of a measurement."""

    how: str = ""
    link_bps: float | None = None
    flow_bps: tuple[float, ...] = ()
    verified: Mapping[str, Any] = field(default_factory=dict)

    @property
    def several_links(self) -> bool:
        """True if each host has several links, by the measurement; link_bps is then their sum."""
        return bool(self.verified.get("more_links"))


@dataclass(frozen=True, slots=True)
class Trace:
    """A run. origin: "measured" or "simulated"; epoch_wall_ns: wall clock at time 0.

    recorder: the part of torch that recorded the run; "" for this package. groups: of a flight recorder's dumps alone.
    in_progress: its ranks still run; not part of a file."""

    id: str
    size: int
    arms: tuple[Arm, ...]
    origin: str = "measured"
    command: tuple[str, ...] = ()
    model: str = ""
    started_wall_ns: int = 0
    epoch_wall_ns: int = 0
    notes: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    network: Network | None = None
    ranks: tuple[Rank, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    steps: tuple[Step, ...] = ()
    collectives: tuple[Collective, ...] = ()
    nccl: tuple[NcclOperation, ...] = ()
    faults: tuple[Fault, ...] = ()
    groups: tuple[ProcessGroup, ...] = ()
    in_progress: bool = False
    recorder: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.size <= SIZE_MAX:
            raise ValueError(f"a run of {self.size} ranks: must be from 0 to {SIZE_MAX}")

    @property
    def of_script(self) -> bool:
        """True if this package recorded a script, whose variables say what is recorded.

        A study and a replay have settings of their own, and describe their network.
        """
        return self.origin == "measured" and not self.recorder and self.network is None

    @property
    def incomplete(self) -> list[str]:
        """The notes about records that are damaged or left out."""
        return [note for note in self.notes if note.startswith("rank ") or LEFT_OUT in note]

    @property
    def lacking(self) -> str:
        """The note about what is left out because a rank's file of events is missing; "" if there is none."""
        return next((note for note in self.notes if LEFT_OUT in note and note.endswith(NO_EVENTS)), "")

    def of_rank(self, rank: int) -> Trace:
        """Return the run as one rank recorded it."""
        own: dict[str, Any] = {name: tuple(row for row in getattr(self, name) if row.rank == rank) for name in BY_RANK}
        return replace(self, **own)


def merge(parts: Iterable[Trace]) -> Trace:
    """Merge the ranks' parts of one run. Raises ValueError for no parts, or for parts of different runs."""
    all_parts = list(parts)
    if not all_parts:
        raise ValueError("no trace to merge")
    first = all_parts[0]
    if any((part.id, part.size) != (first.id, first.size) for part in all_parts):
        raise ValueError(f"traces of different runs: {', '.join(sorted({part.id for part in all_parts}))}")
    rows: dict[str, Any] = {name: tuple(row for part in all_parts for row in getattr(part, name)) for name in BY_RANK}
    return replace(first, **rows)


# JSON of frozen dataclasses, by their type hints.


def shallow(value: Any) -> dict[str, Any]:
    """Return one level of a dataclass or mapping as a dictionary; json calls it for nested dataclasses."""
    if isinstance(value, Mapping):
        return dict(value)
    return {item.name: getattr(value, item.name) for item in fields(value)}


def encode(value: Any) -> str:
    """Return a frozen dataclass, or a mapping with such values, as one line of JSON; tuples become lists."""
    return json.dumps(value, separators=(",", ":"), default=shallow)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


_LIMITS: Mapping[Any, int] = types.MappingProxyType({int: 1 << 63, Word: 1 << 64})
_SCALARS: Mapping[Any, tuple[type, ...]] = types.MappingProxyType(
    {int: (int,), Word: (int,), float: (int, float), str: (str,), bool: (bool,)}
)


def _name(kind: Any) -> str:
    """Return the name of a type in a message."""
    return "int" if kind == Word else getattr(kind, "__name__", str(kind))


def _scalar(kind: Any, value: Any) -> Any:
    if type(value) not in _SCALARS[kind]:
        raise TypeError(f"{str(value)[:40]!r} where {_name(kind)} must be")
    limit = _LIMITS.get(kind)
    if limit is not None and not -limit <= value < limit:
        raise TypeError(f"{str(value)[:40]} where a number of 64 bits must be")
    return value


def _tuple(inner: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if inner[-1] is not Ellipsis:
        return tuple(decode(i, v) for i, v in zip(inner, value, strict=True))
    if inner[0] in _SCALARS:
        return tuple(_scalar(inner[0], v) for v in value)
    return tuple(decode(inner[0], v) for v in value)


def _nothing(kind: Any) -> None:
    """Raise TypeError unless the type allows None."""
    if kind is not Any and type(None) not in typing.get_args(kind):
        raise TypeError(f"nothing where {_name(kind)} must be")


def decode(kind: Any, value: Any) -> Any:
    """Convert `value`, as parsed from JSON, to the type `kind`; a dataclass is built by its type hints.

    Unknown keys are ignored. A class derived from str is text in JSON, and is built by its class method `parse`. Raises
    TypeError for a scalar of another type, or for None where a value is required.
    """
    if value is None:
        return _nothing(kind)
    if is_dataclass(kind):
        hints = _hints(typing.cast(type, kind))
        return typing.cast(Any, kind)(**{k: decode(hints[k], v) for k, v in value.items() if k in hints})
    origin = typing.get_origin(kind)
    if origin is tuple:
        return _tuple(typing.get_args(kind), value)
    if origin in (dict, Mapping):
        inner = typing.get_args(kind)[1]
        return {k: decode(inner, v) for k, v in value.items()}
    if origin in (types.UnionType, typing.Union):
        return decode(next(k for k in typing.get_args(kind) if k is not type(None)), value)
    if isinstance(kind, type) and issubclass(kind, str) and kind is not str:
        return typing.cast(Any, kind).parse(_scalar(str, value))
    return _scalar(kind, value) if kind in _SCALARS else value


# Files of traces.

# Each line of the file after the first is one row: {"step": {...}}.
_ROWS: Mapping[str, tuple[str, type]] = types.MappingProxyType(
    {
        "rank": ("ranks", Rank),
        "parameter": ("parameters", Parameter),
        "bucket": ("buckets", Bucket),
        "step": ("steps", Step),
        "collective": ("collectives", Collective),
        "nccl": ("nccl", NcclOperation),
        "fault": ("faults", Fault),
    }
)


def _lines(trace: Trace) -> Iterator[str]:
    left_out = {"in_progress", *(attribute for attribute, _ in _ROWS.values())}
    head = {k: v for k, v in shallow(trace).items() if k not in left_out}
    yield encode({"format": FORMAT, "version": VERSION} | head)
    for kind, (attribute, _) in _ROWS.items():
        for row in getattr(trace, attribute):
            yield encode({kind: row})


def write(trace: Trace, path: Path | str) -> None:
    """Write a trace as gzipped JSON lines, as a whole; equal traces give equal bytes."""
    with whole_file(path) as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
        packed.writelines(line.encode() + b"\n" for line in _lines(trace))


def _renamed(row: Mapping[str, Any], before: str, now: str) -> dict[str, Any]:
    """Return a row of version 1, which named arms by their transport, with the name of version 2."""
    return {now if key == before else key: value for key, value in row.items()}


def read(path: Path | str) -> Trace:
    """Read a trace written by `write`.

    Raises FileNotFoundError, and ValueError naming file and line for another format or version or a damaged file."""
    number = 0
    try:
        with gzip.open(path, "rb") as packed, io.TextIOWrapper(packed, encoding="utf-8") as text:
            head = json.loads(text.readline() or "null")
            if not isinstance(head, dict) or head.get("format") != FORMAT:
                raise ValueError("not a netbottleneck trace")
            version = head.get("version")
            if version not in range(1, VERSION + 1):
                raise ValueError(f"trace version {version!r}; this netbottleneck reads versions 1 to {VERSION}")
            if version == 1:
                head = _renamed(head, "transports", "arms")
            rows: dict[str, list[Any]] = {attribute: [] for attribute, _ in _ROWS.values()}
            for line in text:
                number += 1
                ((kind, value),) = json.loads(line).items()
                if kind in _ROWS:
                    attribute, record = _ROWS[kind]
                    if version == 1 and kind in {"step", "collective"}:
                        value = _renamed(value, "transport", "arm")
                    rows[attribute].append(decode(record, value))
            whole: Trace = replace(decode(Trace, head), **{k: tuple(v) for k, v in rows.items()})
            return whole
    except (ValueError, TypeError, AttributeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}, line {number + 1}: {error}") from error
