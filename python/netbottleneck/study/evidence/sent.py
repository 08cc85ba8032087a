"""What the ranks of a run sent: by the formula of what ran, by the engine's account, by the kernel's counters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from netbottleneck.analysis import usage
from netbottleneck.analysis.scaling import Intervals, counted, intervals
from netbottleneck.bench.replay import sent_bytes
from netbottleneck.report import Run
from netbottleneck.trace import samples
from netbottleneck.trace.model import Collective, Trace
from netbottleneck.trace.samples import Counters

# Ethernet, IPv4, TCP with time stamps: what the counters of an interface have beside payload, a packet.
HEADER_BYTES = 14 + 20 + 32


@dataclass(frozen=True, slots=True)
class Sent:
    """What one rank sent in the counted steps of a transport, in bytes of payload.

    model: by the formula of the algorithm that ran; engine: by its own account; interface: by the kernel's counters of
    that host's interface, headers taken off. None where it is not known.
    """

    rank: int
    transport: str
    algorithms: tuple[str, ...]
    model: float | None
    engine: int | None
    interface: float | None

    @property
    def ratio(self) -> float | None:
        """Interface over model."""
        return self.interface / self.model if self.interface is not None and self.model else None


def sent(run: Run) -> list[Sent]:
    """Return what each rank sent, beside the model; the interface's counters count where a host has one rank."""
    nets = _nets(run)
    pairs = sorted({(step.rank, step.transport) for step in run.trace.steps})
    return [_of(run.trace, rank, transport, nets.get(rank)) for rank, transport in pairs]


def _of(trace: Trace, rank: int, transport: str, net: Counters | None) -> Sent:
    mine = [c for c in trace.collectives if c.rank == rank and c.finished]
    steps = {step.index for step in counted(trace.of_rank(rank)) if step.transport == transport}
    own = [c for c in mine if c.transport == transport and c.step in steps]
    engine = _sum([c.wire_bytes for c in own])
    return Sent(
        rank,
        transport,
        _algorithms(own),
        _sum([sent_bytes(c.algorithm, trace.size, c.tensor_bytes) for c in own]),
        None if engine is None else int(engine),
        _counted(net, quiet_spans(trace, rank, own, mine)) if net is not None and own else None,
    )


def _algorithms(operations: Sequence[Collective]) -> tuple[str, ...]:
    return tuple(sorted({c.algorithm or "gloo's ring" for c in operations}))


def _nets(run: Run) -> dict[int, Counters]:
    """The interfaces' counters by rank, on rank 0's clock, where each rank has a host of its own."""
    trace = run.trace
    if len({rank.host_id for rank in trace.ranks}) < len(trace.ranks) or not run.path.is_dir():
        return {}
    clocks = {rank.rank: rank.clock.offset_ns for rank in trace.ranks}
    found = {sample.rank: sample.on_clock(clocks.get(sample.rank, 0)).net for sample in samples.of_run(run.path)}
    return {rank: net for rank, net in found.items() if net is not None}


def _sum(values: Sequence[float | None]) -> float | None:
    """None where one is not known, or there are none."""
    known = [value for value in values if value is not None]
    return sum(known) if values and len(known) == len(values) else None


def quiet_spans(trace: Trace, rank: int, own: Sequence[Collective], all_of_rank: Sequence[Collective]) -> Intervals:
    """The time of some operations of a rank, by block, from amid the silence before them to amid that after them.

    So a reading of the counters that comes late divides nothing: it would have to be late by half of that silence.
    """
    block = {step.index: step.block for step in trace.steps if step.rank == rank}
    blocks: dict[int, list[Collective]] = defaultdict(list)
    for operation in own:
        if operation.step is not None:
            blocks[block[operation.step]].append(operation)
    return intervals(_quiet(inside, all_of_rank) for inside in blocks.values())


def _quiet(inside: Sequence[Collective], others: Sequence[Collective]) -> tuple[int, int]:
    first, last = min(c.submit_ns for c in inside), max(c.done_ns or 0 for c in inside)
    ends = [c.done_ns or 0 for c in others]
    before = max((end for end in ends if end <= first), default=first)
    after = min((c.submit_ns for c in others if c.submit_ns >= last), default=2 * last - first)
    return (before + first) // 2, (last + after) // 2


def _counted(net: Counters, spans: Intervals) -> float | None:
    """Payload that the busiest interface sent; None where that is the loopback, which all hosts here share."""
    uses = [usage.interface(net, name, "tx", spans, spans[:0]) for name in net.owners("tx_bytes")]
    busiest = max(uses, key=lambda use: use.bytes, default=None)
    if busiest is None or busiest.interface == "lo" or not busiest.bytes:
        return None
    return busiest.bytes - HEADER_BYTES * busiest.packets
