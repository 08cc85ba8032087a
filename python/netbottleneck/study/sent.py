"""What the ranks of a run sent: by the formula of what ran, by the engine's account, by the kernel's counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from netbottleneck import samples, usage
from netbottleneck.replay import sent_bytes
from netbottleneck.report import Run
from netbottleneck.samples import Counters
from netbottleneck.scaling import Intervals, counted, intervals
from netbottleneck.trace import Collective, Trace

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
    trace = run.trace
    alone = len({rank.host_id for rank in trace.ranks}) == len(trace.ranks)
    recorded = {found.rank: found for found in samples.of_run(run.path)} if alone and run.path.is_dir() else {}
    clocks = {rank.rank: rank.clock.offset_ns for rank in trace.ranks}
    found = []
    for rank, transport in sorted({(step.rank, step.transport) for step in trace.steps}):
        steps = {s.index for s in counted(trace) if (s.rank, s.transport) == (rank, transport)}
        mine = [c for c in trace.collectives if c.rank == rank and c.finished]
        own = [c for c in mine if c.transport == transport and c.step in steps]
        moved = [sent_bytes(c.algorithm, trace.size, c.tensor_bytes) for c in own]
        wire = [c.wire_bytes for c in own]
        sample = recorded.get(rank)
        net = sample.on_clock(clocks.get(rank, 0)).net if sample is not None else None
        found.append(
            Sent(
                rank,
                transport,
                tuple(sorted({c.algorithm or "gloo's ring" for c in own})),
                sum(m for m in moved if m is not None) if moved and None not in moved else None,
                sum(w for w in wire if w is not None) if wire and None not in wire else None,
                _counted(net, quiet_spans(trace, rank, own, mine)) if net is not None and own else None,
            )
        )
    return found


def quiet_spans(trace: Trace, rank: int, own: Sequence[Collective], all_of_rank: Sequence[Collective]) -> Intervals:
    """The time of some operations of a rank, by block, from amid the silence before them to amid that after them.

    So a reading of the counters that comes late divides nothing: it would have to be late by half of that silence.
    """
    block = {step.index: step.block for step in trace.steps if step.rank == rank}
    spans = []
    for number in {block[c.step] for c in own if c.step is not None}:
        inside = [c for c in own if c.step is not None and block[c.step] == number]
        first, last = min(c.submit_ns for c in inside), max(c.done_ns or 0 for c in inside)
        before = max((c.done_ns or 0 for c in all_of_rank if (c.done_ns or 0) <= first), default=first)
        after = min((c.submit_ns for c in all_of_rank if c.submit_ns >= last), default=2 * last - first)
        spans.append(((before + first) // 2, (last + after) // 2))
    return intervals(spans)


def _counted(net: Counters, spans: Intervals) -> float | None:
    """Payload that the busiest interface sent; None where that is the loopback, which all hosts here share."""
    uses = [usage.interface(net, name, "tx", spans, spans[:0]) for name in net.owners("tx_bytes")]
    busiest = max(uses, key=lambda use: use.bytes, default=None)
    if busiest is None or busiest.interface == "lo" or not busiest.bytes:
        return None
    return busiest.bytes - HEADER_BYTES * busiest.packets
