"""A data-parallel job as numbers, and the trace that it records: steps, buckets and waits, event by event."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from netbottleneck.analysis.usage import NO_CONNECTIONS, Connected, ConnectionUse
from netbottleneck.trace.counter_files import Counters, Samples
from netbottleneck.trace.model import (
    Bucket,
    Clock,
    Collective,
    Network,
    Parameter,
    Probe,
    Rank,
    Step,
    Trace,
    TransportInfo,
)
from netbottleneck.trace.transports import BARE, NULL, STOCK, Arm

MS = 1_000_000
MIB = 1 << 20
READINGS = 600  # of a host's counters
RESEND_MS = 200.0  # the least timeout of Linux


@dataclass(frozen=True)
class Job:
    """The causes of a job's step. Times in ms, rates in bits a second.

    buckets: bytes of each, in order of readiness; the backward is divided evenly among them. tensors: of a bucket,
    equally large and ready one after the other. flow_bps: cap of one flow; stock has one, every other arm
    `streams`. latency_ms: of an operation. slower: by rank, factor of its compute. sleeps_ms, input_of_ms,
    saves_ms: by rank, within the backward, before the forward, and in checkpoints, in every `every`-th step.
    jitter: deviation of a rank's compute from step to step, as a part of it; input_jitter: the same of its input;
    noise: the same, of all ranks of a block together. contention: compute takes this many times as long beside
    traffic. hooks: factor of every recorded step's forward. clock_ms: by rank, how far its clock is ahead. busy:
    cores that a rank keeps busy, of two of its own, or of the shared_cores of its host. other_share: part of the
    interface's bytes that is not recorded, while operations are in flight; None: no counters. other_bps,
    loopback_bps: rates of bytes that are not recorded, of the interface and of the loopback, all the time. headers:
    of an operation, on the interface. lost: part of the operations that wait RESEND_MS until a lost packet is sent
    again. hostname: of all hosts; "": of each. host_bps: by host, the rate of its link; {}: link_bps, and no
    connections are recorded. mtus: of the hosts' interfaces in turn, bytes.
    """

    ranks: int = 2
    arms: tuple[str, ...] = ("stock",)
    blocks: int = 2
    block_steps: int = 14
    forward_ms: float = 30.0
    backward_ms: float = 60.0
    optimizer_ms: float = 2.0
    input_ms: float = 0.5
    buckets: tuple[int, ...] = (2 * MIB, 4 * MIB, 4 * MIB, 1 * MIB)
    tensors: int = 1
    link_bps: float = 1e10
    flow_bps: float = 1e10
    streams: int = 8
    latency_ms: float = 0.1
    slower: Mapping[int, float] = field(default_factory=dict)
    sleeps_ms: Mapping[int, float] = field(default_factory=dict)
    input_of_ms: Mapping[int, float] = field(default_factory=dict)
    saves_ms: Mapping[int, float] = field(default_factory=dict)
    every: int = 1
    jitter: float = 0.0
    input_jitter: float = 0.0
    noise: float = 0.002
    contention: float = 1.0
    hooks: float = 1.0
    clock_ms: Mapping[int, float] = field(default_factory=dict)
    link_known: bool = True
    probe: bool = False
    busy: float | None = None
    shared_cores: int = 0
    other_share: float | None = None
    providers: tuple[str, ...] = ("gloo",)
    interfaces: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    mtus: tuple[int, ...] = ()
    algorithm: str | None = None
    ranks_per_host: int = 1
    lost: float = 0.0
    kind: str = "allreduce"
    other_bps: float = 0.0
    loopback_bps: float = 0.0
    headers: int = 0
    hostname: str = ""
    host_bps: Mapping[int, float] = field(default_factory=dict)

    def rate_bps(self, arm: str) -> float:
        """Rate of an arm's flows together."""
        return min(
            self.link_bps, *self.host_bps.values(), self.flow_bps * (1 if arm in ("stock", "bare") else self.streams)
        )

    def bus_bytes(self, nbytes: int) -> float:
        """Bytes of an operation that cross the link of a host, one way."""
        count = self.ranks
        if self.kind == "alltoall":
            return self.ranks_per_host * (count - self.ranks_per_host) / count * nbytes
        if self.algorithm and "two_level" in self.algorithm:
            count = self.ranks // self.ranks_per_host
        return 2 * (count - 1) / count * nbytes if count > 1 else 0.0

    def sent_bytes(self, nbytes: int) -> float:
        """Bytes of an operation that a rank counts as sent."""
        return 0.0 if self.algorithm and "shared memory" in self.algorithm else self.bus_bytes(nbytes)


class Clockwork:
    """Runs a job step by step. `now` is when each rank begins its next step, in ms.

    spent: by (step, rank), the ms that it spends for each reason, counted as the clock advances: `input`; `slowed`,
    more compute because of traffic; `wire`, gradients between the ranks; `exposed`, the part of it in which the
    rank is blocked; `waiting`, blocked before the last rank has its last gradient.
    """

    def __init__(self, job: Job, seed: int) -> None:
        self.job, self.random = job, np.random.default_rng(seed)
        self.now = np.zeros(job.ranks)
        self.steps: list[Step] = []
        self.collectives: list[Collective] = []
        self.index = 0
        self.spent: dict[tuple[int, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def run(self) -> None:
        """Run all blocks; the arms' order is mirrored from round to round, as in a session."""
        arms = self.job.arms
        for block in range(self.job.blocks * len(arms)):
            round_, place = divmod(block, len(arms))
            arm = arms[place if round_ % 2 == 0 else len(arms) - 1 - place]
            level = 1 + self.job.noise * self.random.standard_normal()
            self.now[:] = self.now.max()
            for _ in range(self.job.block_steps):
                self.step(Arm(arm), block, level)

    def advance(self, rank: int, begin: float, work: float, busy: Sequence[tuple[float, float]]) -> float:
        """End of a rank's `work` ms of compute from `begin`, slower while one of the `busy` spans runs."""
        for low, high in busy:
            if work <= 0:
                break
            free = max(0.0, min(low - begin, work))
            begin, work = begin + free, work - free
            if work > 0 and begin < high:
                beside = min(work, (high - begin) / self.job.contention)
                begin, work = begin + beside * self.job.contention, work - beside
                self.spent[self.index, rank]["slowed"] += beside * (self.job.contention - 1)
        return begin + max(work, 0.0)

    def now_and_then(self, ms_of_rank: Mapping[int, float], rank: int) -> float:
        """Ms of what a rank does in every `every`-th step."""
        return ms_of_rank.get(rank, 0.0) if (self.index + 1) % self.job.every == 0 else 0.0

    def input(self) -> NDArray[np.float64]:
        """Ms that each rank waits for its input."""
        late = np.array([self.job.input_ms + self.now_and_then(self.job.input_of_ms, r) for r in range(self.job.ranks)])
        if self.job.input_jitter:
            late *= np.maximum(1 + self.job.input_jitter * self.random.standard_normal(self.job.ranks), 0.1)
        return late

    def step(self, arm: Arm, block: int, level: float) -> None:
        """Run one step of all ranks."""
        job, ranks = self.job, range(self.job.ranks)
        jitter = np.maximum(1 + job.jitter * self.random.standard_normal(job.ranks), 0.2)
        factor = [level * jitter[rank] * job.slower.get(rank, 1.0) for rank in ranks]
        hooks = 1.0 if arm == BARE else job.hooks
        begin = self.now.copy()
        saved = begin + [self.now_and_then(job.saves_ms, rank) for rank in ranks]
        forward = saved + self.input()
        forward_end = np.array([forward[r] + job.forward_ms * factor[r] * hooks for r in ranks])
        at = forward_end.copy()
        sent: list[tuple[np.ndarray, float, float]] = []
        busy: list[tuple[float, float]] = []
        for place, nbytes in enumerate(job.buckets):
            for r in ranks:
                work = job.backward_ms * factor[r] / len(job.buckets)
                work += self.now_and_then(job.sleeps_ms, r) * (place == len(job.buckets) // 2)
                at[r] = self.advance(r, at[r], work, busy)
            if arm == NULL:
                sent.append((at.copy(), 0.0, 0.0))
                continue
            start = max(float(at.max()), busy[-1][1] if busy else 0.0)
            done = start + job.latency_ms + 8e3 * job.bus_bytes(nbytes) / job.rate_bps(arm)
            if job.lost and self.random.random() < job.lost:
                done += RESEND_MS
            busy.append((start, done))
            sent.append((at.copy(), start, done))
        resumed = np.maximum(at, busy[-1][1] if busy else 0.0)
        end = resumed + job.optimizer_ms
        for r in ranks:
            spent = self.spent[self.index, r]
            spent["input"] += forward[r] - saved[r]
            spent["wire"] += sum(done - start for start, done in busy)
            spent["exposed"] += sum(max(0.0, done - max(start, at.max())) for start, done in busy)
            spent["waiting"] += at.max() - at[r] if busy else 0.0
            marks = (begin[r], saved[r], forward[r], forward_end[r], at[r], resumed[r], end[r])
            self.record(arm, block, r, marks, sent)
        self.now, self.index = end, self.index + 1

    def tensors_at(
        self, rank: int, forward_end: float, sent: Sequence[tuple[np.ndarray, float, float]]
    ) -> Iterator[float]:
        """Yield when each tensor of a rank is ready: the last one of a bucket with the bucket."""
        begin = forward_end
        for at, _, _ in sent:
            for number in range(1, self.job.tensors + 1):
                yield begin + (at[rank] - begin) * number / self.job.tensors
            begin = at[rank]

    def record(
        self,
        arm: Arm,
        block: int,
        rank: int,
        marks: Sequence[float],
        sent: Sequence[tuple[np.ndarray, float, float]],
    ) -> None:
        """Write down a rank's step as a recorder would, on the rank's own clock."""

        def ns(ms: float) -> int:
            return round((ms + self.job.clock_ms.get(rank, 0.0) + 1000) * MS)

        begin, saved, forward, forward_end, ready, resumed, end = (ns(mark) for mark in marks)
        row = Step(rank, self.index, block, arm, begin, end)
        if arm != BARE:
            cpu = None if self.job.busy is None else round(self.job.busy * (end - begin))
            row = replace(
                row,
                forward=((forward, forward_end),),
                checkpoints=((begin, saved),) if saved > begin else (),
                optimizer=((resumed, end),),
                grad_ready=tuple((n, ns(at)) for n, at in enumerate(self.tensors_at(rank, marks[3], sent))),
                waits=((0, ready, resumed),) if resumed > ready else (),
                cpu_ns=cpu,
            )
        self.steps.append(row)
        for place, (at, start, done) in enumerate(sent):
            if arm in (BARE, NULL):
                continue
            native = arm != "stock"
            self.collectives.append(
                Collective(
                    rank=rank,
                    arm=arm,
                    key=place + 1,
                    round=self.index,
                    submit_ns=ns(at[rank]),
                    tensor_bytes=self.job.buckets[place],
                    name=f"ddp/{place}",
                    step=self.index,
                    bucket=place,
                    start_ns=ns(start) if native else ns(at[rank]),
                    agreed_ns=ns(start) if native else None,
                    done_ns=ns(done),
                    wire_bytes=round(self.job.sent_bytes(self.job.buckets[place])) if native else None,
                    kind=self.job.kind,
                    algorithm=self.job.algorithm,
                )
            )


def _transport(job: Job, rank: int, name: str) -> TransportInfo:
    interface, bps = job.interfaces.get(name, (None, None))
    provider = job.providers[rank % len(job.providers)] if name == "stock" else name
    probe: tuple[Probe, ...] = ()
    if job.probe and name != "stock":
        rates = {count: min(job.link_bps, count * job.flow_bps) for count in (1, job.streams)}
        probe = tuple(Probe(count, round(bps / 80), 100 * MS) for count, bps in rates.items())
    used = None if name == "stock" else job.streams
    return TransportInfo(
        name,
        provider,
        streams_open=used,
        streams_used=used,
        interface=interface,
        link_bps=None if bps is None else int(bps),
        mtu_bytes=job.mtus[rank // job.ranks_per_host % len(job.mtus)] if job.mtus else None,
        probe=probe,
    )


def _rank(job: Job, rank: int) -> Rank:
    names = [name for name in (*job.arms, *(("tcp",) if job.probe else ())) if name in ("stock", "tcp", "ofi")]
    clock = (
        Clock("rank 0", 0, 0) if rank == 0 else Clock("wall", 0, None) if job.clock_ms else Clock("same clock", 0, 0)
    )
    host = rank // job.ranks_per_host
    return Rank(
        rank,
        job.hostname or f"host{host}",
        f"h{host}",
        finished=True,
        clock=clock,
        cores=tuple(range(job.shared_cores)) or (2 * rank, 2 * rank + 1),
        transports=tuple(_transport(job, rank, name) for name in dict.fromkeys(names)),
    )


def work_of(job: Job, seed: int = 0) -> tuple[Clockwork, Trace]:
    """A run of the job: its clockwork, and the trace that it records. The same seed gives the same noise."""
    work = Clockwork(job, seed)
    work.run()
    return work, Trace(
        id="scenario",
        size=job.ranks,
        arms=tuple(map(Arm, job.arms)),
        network=Network("a scenario", job.link_bps) if job.link_known else None,
        ranks=tuple(_rank(job, rank) for rank in range(job.ranks)),
        parameters=tuple(
            Parameter(f"layer{n}.weight", job.buckets[n // job.tensors] // job.tensors, "float32", n)
            for n in range(len(job.buckets) * job.tensors)
        ),
        buckets=tuple(
            Bucket(f"ddp/{n}", n + 1, size, "float32", tuple(range(n * job.tensors, (n + 1) * job.tensors)))
            for n, size in enumerate(job.buckets)
        ),
        steps=tuple(work.steps),
        collectives=tuple(work.collectives),
    )


def trace_of(job: Job, seed: int = 0) -> Trace:
    """The trace of a run of the job."""
    return work_of(job, seed)[1]


def connected_of(job: Job) -> Connected:
    """The connection of each rank to the next one over stock, of which some segments were sent again."""
    if not job.lost and not job.host_bps:
        return NO_CONNECTIONS
    ends = [(f"10.0.0.{rank + 1}", 40000 + rank) for rank in range(job.ranks)]
    hosts = [rank // job.ranks_per_host for rank in range(job.ranks)]
    rates = [
        min(job.host_bps.get(host, job.link_bps) for host in (one, two))
        for one, two in zip(hosts, hosts[1:] + hosts[:1], strict=True)
    ]
    return Connected(
        tuple(
            ConnectionUse(
                rank=rank,
                peer=(rank + 1) % job.ranks,
                arm=STOCK,
                local=ends[rank],
                remote=ends[(rank + 1) % job.ranks],
                seconds=1.0,
                sent_bytes=min(rates) / 8,
                busy_s=min(rates) / rates[rank],
                receiver_s=0.0,
                buffer_s=0.0,
                segments=700_000.0,
                resent_segments=700_000 * job.lost / 4,
            )
            for rank in range(job.ranks)
        )
    )


def samples_of(job: Job, trace: Trace) -> tuple[Samples, ...]:
    """The counters of each host's interfaces: the recorded bytes while operations are in flight, and the others."""
    if job.other_share is None:
        return ()
    low, high = min(s.begin_ns for s in trace.steps), max(s.end_ns for s in trace.steps)
    times = np.linspace(low, high, READINGS).astype(np.int64)
    found = []
    for rank in trace.ranks[:: job.ranks_per_host]:
        eth0 = (times - low) / 8e9 * job.other_bps
        for one in (c for c in trace.collectives if c.rank == rank.rank):
            moved = job.sent_bytes(one.known_bytes) / (1 - job.other_share) + job.headers
            eth0 += np.interp(times, [one.start_ns or 0, one.done_ns or 0], [0, moved])
        columns, values = [], []
        for name, moved in (("eth0", eth0), ("lo", (times - low) / 8e9 * job.loopback_bps)):
            columns += [f"{name}:{way}_{what}" for way in ("rx", "tx") for what in ("bytes", "packets")]
            values += 2 * [moved, moved // 1500]
        table = np.stack(values, axis=1).astype(np.int64)
        net = Counters(rank.hostname, rank.host_id, rank.rank, 50, 100, tuple(columns), times, table)
        found.append(Samples(rank.rank, net))
    return tuple(found)
