"""trace.json.gz: the run in the JSON object form of the Chrome trace format, readable by Perfetto.

One process for each rank, and one lane for each kind of event that can overlap others; ts and dur in microseconds.
Complete events on a lane never overlap: overlapping ones get lanes of their own.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from netbottleneck.analysis.intervals import backward_spans, bus_factor, host_count, last_entries
from netbottleneck.trace.model import Collective, Step, Trace
from netbottleneck.trace.transports import Arm

SCHEMA_VERSION = 1
# Events above this number are cut, by whole steps from the end, with a note.
EVENTS_MAX = 500_000

STEP, FORWARD, BACKWARD, OPTIMIZER, WAIT = 1, 2, 3, 4, 5
LANE_NAMES = {STEP: "step", FORWARD: "forward", BACKWARD: "backward", OPTIMIZER: "optimizer", WAIT: "blocked"}
# First lanes of module forwards and of transfers.
MODULES, TRANSFERS = 10, 30

Event = dict[str, Any]
Match = tuple[Arm, int, int, int]


class Lanes:
    """Assigns spans, in order of their begin, to the first free lane."""

    def __init__(self, first: int, limit: int | None = None) -> None:
        self._first = first
        self._limit = limit
        self._free: list[int] = []

    def take(self, begin_ns: int, end_ns: int) -> int | None:
        """Lane number of the span; None if all `limit` lanes are busy."""
        for slot, free_ns in enumerate(self._free):
            if free_ns <= begin_ns:
                self._free[slot] = end_ns
                return self._first + slot
        if self._limit is not None and len(self._free) >= self._limit:
            return None
        self._free.append(end_ns)
        return self._first + len(self._free) - 1


def _span(rank: int, lane: int, name: str, begin_ns: int, end_ns: int, **args: object) -> Event:
    return {
        "ph": "X",
        "pid": rank,
        "tid": lane,
        "name": name,
        "ts": begin_ns / 1e3,
        "dur": (end_ns - begin_ns) / 1e3,
        "args": args,
    }


def _step_events(trace: Trace, step: Step, modules: Lanes) -> Iterator[Event]:
    def span(lane: int, name: str, begin_ns: int, end_ns: int, **args: object) -> Event:
        return _span(step.rank, lane, name, begin_ns, end_ns, **args)

    about = {"block": step.block, "transport": step.arm, "plan": step.plan, "sampled": step.sampled}
    yield span(STEP, f"step {step.index} ({step.arm})", step.begin_ns, step.end_ns, **about)
    for begin, end in step.forward:
        yield span(FORWARD, "forward", begin, end)
    for begin, end in step.evaluation:
        yield span(FORWARD, "evaluation", begin, end)
    for begin, end in step.optimizer:
        yield span(OPTIMIZER, "optimizer", begin, end)
    reached = step.begin_ns
    for _, begin, end in sorted(step.waits, key=lambda wait: wait[1]):
        if end > max(begin, reached):
            yield span(WAIT, "blocked", max(begin, reached), end)
            reached = end
    for index, begin, end in backward_spans(step):
        name = trace.parameters[index].name if index < len(trace.parameters) else f"parameter {index}"
        yield span(BACKWARD, name, begin, end)
    for index, begin, end in sorted(step.modules, key=lambda module: module[1]):
        lane = modules.take(begin, end)
        if lane is not None:
            yield span(lane, trace.modules[index] if index < len(trace.modules) else f"module {index}", begin, end)


def _operation_events(trace: Trace, c: Collective, lane: int, last_ns: int | None) -> Iterator[Event]:
    start_ns, done_ns = c.start_ns or c.submit_ns, c.done_ns or c.submit_ns
    number = f"{c.rank}/{c.arm}/{c.key:016x}/{c.round}"
    common = {"pid": c.rank, "tid": lane, "cat": "collective"}
    args: dict[str, object] = {
        "op": c.kind,
        "seq": c.round,
        "bytes": c.tensor_bytes,
        "wire_bytes": c.wire_bytes,
        "dtype": c.dtype,
        "n_ranks": trace.size,
        "bucket": c.bucket,
        "transport": c.arm,
        "algorithm": c.algorithm,
        "bytes_by_lane": {str(number): sent for number, sent, _ in c.lanes} if c.lanes else None,
    }
    if last_ns is not None:
        args["wait_us"] = (last_ns - c.submit_ns) / 1e3
        args["transfer_us"] = (done_ns - max(last_ns, start_ns)) / 1e3
    if done_ns > start_ns:
        args["algbw_gbs"] = c.tensor_bytes / (done_ns - start_ns)
        factor = bus_factor(c.kind, trace.size, c.algorithm, host_count(trace))
        args["busbw_gbs"] = c.tensor_bytes * factor / (done_ns - start_ns)
    yield _span(c.rank, lane, c.name, start_ns, done_ns, **args)
    yield {**common, "ph": "b", "id": number, "name": c.name, "ts": c.submit_ns / 1e3}
    yield {**common, "ph": "e", "id": number, "name": c.name, "ts": done_ns / 1e3}
    if c.step is not None and c.bucket is not None:
        flow = {**common, "cat": "ready", "id": number, "name": "gradients ready"}
        yield {**flow, "ph": "s", "tid": BACKWARD, "ts": c.submit_ns / 1e3}
        yield {**flow, "ph": "f", "bp": "e", "ts": start_ns / 1e3}


def _in_flight(rank: int, operations: Iterable[Collective]) -> Iterator[Event]:
    changes = [(c.start_ns or 0, c.tensor_bytes) for c in operations]
    changes += [(c.done_ns or 0, -c.tensor_bytes) for c in operations]
    in_flight_bytes = 0
    for at, change in sorted(changes):
        in_flight_bytes += change
        yield {"ph": "C", "pid": rank, "name": "inflight_bytes", "ts": at / 1e3, "args": {"bytes": in_flight_bytes}}


def _names(trace: Trace, lanes: Iterable[tuple[int, int]]) -> Iterator[Event]:
    hosts = {rank.rank: rank.hostname for rank in trace.ranks}
    for rank in sorted({rank for rank, _ in lanes}):
        name = f"rank {rank}" + (f" on {hosts[rank]}" if hosts.get(rank) else "")
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    for rank, lane in sorted(lanes):
        name = LANE_NAMES.get(lane) or (
            f"transfer {lane - TRANSFERS}" if lane >= TRANSFERS else f"modules {lane - MODULES}"
        )
        yield {"ph": "M", "pid": rank, "tid": lane, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": rank, "tid": lane, "name": "thread_sort_index", "args": {"sort_index": lane}}


def _rank_events(
    trace: Trace, rank: int, last: Mapping[Match, tuple[int, int]], events_max: int
) -> tuple[list[Event], int]:
    """One rank's events, and the number of its steps that were cut."""
    modules, transfers = Lanes(MODULES, TRANSFERS - MODULES), Lanes(TRANSFERS)
    events: list[Event] = []
    cut_from_ns: float = math.inf
    cut = 0
    for step in sorted((s for s in trace.steps if s.rank == rank), key=lambda s: s.begin_ns):
        if len(events) >= events_max:
            cut += 1
            cut_from_ns = min(cut_from_ns, step.begin_ns)
        else:
            events += _step_events(trace, step, modules)
    own = [c for c in trace.collectives if c.rank == rank and c.finished and c.submit_ns < cut_from_ns]
    own.sort(key=lambda c: c.start_ns or 0)
    for operation in own:
        lane = transfers.take(operation.start_ns or 0, operation.done_ns or 0)
        entry = last.get(operation.match)
        events += _operation_events(trace, operation, lane or TRANSFERS, entry[0] if entry else None)
    events += _in_flight(rank, own)
    return events, cut


def chrome(trace: Trace, events_max: int = EVENTS_MAX) -> dict[str, Any]:
    """The trace as one JSON object; times in microseconds of rank 0's monotonic clock."""
    last = last_entries(trace)
    ranks = sorted({step.rank for step in trace.steps} | {c.rank for c in trace.collectives})
    parts = [_rank_events(trace, rank, last, events_max // max(len(ranks), 1)) for rank in ranks]
    events = [event for part, _ in parts for event in part]
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    return {
        "schemaVersion": SCHEMA_VERSION,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": trace.epoch_wall_ns,
        "distributedInfo": {"backend": ",".join(trace.arms), "rank": 0, "world_size": trace.size},
        "host_name": trace.ranks[0].hostname if trace.ranks else "",
        "clocks": {str(r.rank): {"method": r.clock.method, "error_ns": r.clock.error_ns} for r in trace.ranks},
        "steps_cut": sum(cut for _, cut in parts),
        "traceEvents": [*_names(trace, used), *events],
    }


def write(trace: Trace, path: Path | str) -> None:
    """Write trace.json.gz; the same trace gives the same bytes."""
    with open(path, "wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
        packed.write(json.dumps(chrome(trace), separators=(",", ":")).encode())
