"""Data files of a run: summary.json (described by summary.schema.json), layers.csv, collectives.csv, trace.json.gz.

Units are in the keys and headers.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from netbottleneck.analysis.arrivals import Lateness
from netbottleneck.analysis.bandwidth import Achievable, Achieved, bus_factor
from netbottleneck.analysis.comparisons import Costs, Paired
from netbottleneck.analysis.findings import Findings, Parts
from netbottleneck.analysis.intervals import WARMUP_STEPS, backward_spans, host_count, last_entries
from netbottleneck.analysis.rule_facts import RuleResult, handicap_sentence
from netbottleneck.analysis.traffic import ArmLink
from netbottleneck.analysis.usage import NO_CONNECTIONS, Connected, ConnectionUse, HostUse
from netbottleneck.analysis.verdict import Verdict
from netbottleneck.report.text import sentences
from netbottleneck.trace.files import whole_file
from netbottleneck.trace.model import Collective, Step, Trace
from netbottleneck.trace.transports import Arm

# summary.json: plain values.

VERSION = 1


def _s(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e9


def _evidence(one: RuleResult) -> dict[str, Any]:
    return {
        "cause": one.cause,
        "code": one.code,
        "applies": one.applies,
        "fired": one.fired,
        "uncertain": one.uncertain,
        "saving_s": None if one.saving is None else one.saving.as_dict(1e-9),
        "at_most": one.at_most,
        "margin": one.margin if one.margin is not None and math.isfinite(one.margin) else None,
        "source": one.source,
        "rests": one.rests,
        "why": one.why,
        "next": one.next,
    }


def _pair(pair: Paired | None, withheld: bool = False) -> dict[str, Any] | None:
    """A comparison; without its result if gains are withheld."""
    if pair is None:
        return None
    return {
        "base": pair.base,
        "other": pair.other,
        "pairs": pair.pairs,
        "steps": pair.steps,
        "enough": pair.enough,
        "difference_s": None if withheld else pair.difference_ns.as_dict(1e-9),
        "ratio": None if withheld else pair.ratio.as_dict(),
        "gain": None if withheld else pair.gain.as_dict(),
    }


def _split(parts: Parts) -> dict[str, Any]:
    return {
        "step_s": _s(parts.step_ns),
        "compute_s": _s(parts.compute_ns),
        "communication_s": _s(parts.communication_ns),
        "hidden_communication_s": _s(parts.hidden_ns),
        "exposed_communication_s": _s(parts.exposed_ns),
        "wait_s": _s(parts.wait_ns),
        "other_s": _s(parts.other_ns),
        "input_s": _s(parts.input_ns),
        "optimizer_s": _s(parts.optimizer_ns),
        "evaluation_s": _s(parts.evaluation_ns),
        "checkpoint_s": _s(parts.checkpoint_ns),
        "skew_s": _s(parts.skew_ns),
        "own_s": _s(parts.own_ns),
        "tensor_bytes": None if parts.unsized else parts.tensor_bytes,
        "operations": parts.operations,
        "steps": parts.steps,
    }


def _bandwidth(achieved: Achieved, link: ArmLink | None) -> dict[str, Any]:
    active, average = (None, None) if link is None else link.used(achieved)
    return {
        "active_bits_per_s": achieved.active_bps,
        "average_bits_per_s": achieved.average_bps,
        "active_p10_bits_per_s": achieved.p10_bps,
        "active_p90_bits_per_s": achieved.p90_bps,
        "wire_bits_per_s": achieved.wire_bps,
        "active_utilization": active,
        "average_utilization": average,
        "steps": achieved.steps,
    }


def _network(trace: Trace) -> dict[str, Any] | None:
    if trace.network is None:
        return None
    return {
        "how": trace.network.how,
        "link_bits_per_s": trace.network.link_bps,
        "flow_bits_per_s": list(trace.network.flow_bps),
        "verified": dict(trace.network.verified),
    }


def _probe(achievable: Achievable | None) -> dict[str, Any] | None:
    if achievable is None:
        return None
    points = [{"streams": count, "bits_per_s": rate} for count, rate in achievable.points]
    best = {"streams": achievable.best[0], "bits_per_s": achievable.best[1]}
    return {"transport": achievable.transport, "points": points, "best": best}


def _ranks(trace: Trace) -> list[dict[str, Any]]:
    return [
        {
            "rank": rank.rank,
            "hostname": rank.hostname,
            "host_id": rank.host_id,
            "finished": rank.finished,
            "error": rank.error,
            "clock": {
                "method": rank.clock.method,
                "offset_ns": rank.clock.offset_ns,
                "error_ns": rank.clock.error_ns,
                "device_error_ns": rank.device_error_ns,
            },
            "steps_unfinished": rank.steps_unfinished,
            "events_dropped": rank.events_dropped,
            "run_steps": [
                {
                    "first": one.first,
                    "count": one.count,
                    "mean_s": _s(one.total_ns / one.count),
                    "longest_s": _s(one.longest_ns),
                    "mean_waiting_s": _s(one.waited_ns / one.count),
                }
                for one in rank.run_steps
                if one.count
            ],
            "stock_variables": rank.stock_variables,
            "transports": [
                {
                    "name": info.name,
                    "provider": info.provider,
                    "streams_open": info.streams_open,
                    "streams_used": info.streams_used,
                    "bytes_out": info.bytes_out,
                    "bytes_in": info.bytes_in,
                    "streams_asked": info.streams_asked,
                    "interface": info.interface,
                    "link_bits_per_s": info.link_bps,
                    "mtu_bytes": info.mtu_bytes,
                    "shm": info.shm,
                    "cpu": info.cpu,
                }
                for info in rank.transports
            ],
        }
        for rank in trace.ranks
    ]


def _host(host: HostUse) -> dict[str, Any]:
    cores = host.cores
    return {
        "rank": host.rank,
        "hostname": host.hostname,
        "transport": host.arm,
        "measured_s": host.seconds,
        "active_s": host.active_s,
        "samples_per_s": host.hz,
        "interfaces": [
            {
                "name": use.interface,
                "way": use.way,
                "average_bits_per_s": use.average_bps,
                "active_bits_per_s": use.active_bps,
                "bytes": use.bytes,
                "packets": use.packets,
            }
            for use in host.interfaces
        ],
        "cores": None
        if cores is None
        else {
            "mean_shares": dict(cores.mean),
            "busiest": cores.busiest,
            "busiest_share": cores.busiest_share,
            "softirq_most": cores.softirq_most,
        },
        "tcp_sent_segments": host.sent_segments,
        "tcp_retransmitted_segments": host.retransmitted_segments,
    }


def _connection(end: ConnectionUse) -> dict[str, Any]:
    return {
        "rank": end.rank,
        "peer": end.peer,
        "transport": end.arm,
        "local": list(end.local),
        "remote": list(end.remote),
        "communication_s": end.seconds,
        "sent_bytes": end.sent_bytes,
        "segments": end.segments,
        "resent_segments": end.resent_segments,
        "round_trip_s": end.rtt_s,
        "least_round_trip_s": end.least_rtt_s,
        "delivery_bits_per_s": end.delivery_bps,
        "congestion_window_bytes": end.window_bytes,
        "busy_s": end.busy_s,
        "receive_window_limited_s": end.receiver_s,
        "send_buffer_limited_s": end.buffer_s,
        "network_share_of_busy": end.network_share,
        "reader_late": end.reader_late,
    }


def _layers(findings: Findings) -> list[dict[str, Any]]:
    return [
        {
            "name": layer.name,
            "parameters": layer.parameters,
            "bytes": layer.bytes,
            "buckets": list(layer.buckets),
            "forward_s": _s(layer.forward_ns),
            "backward_s": _s(layer.backward_ns),
            "exposed_communication_s": _s(layer.exposed_ns),
        }
        for layer in findings.layers
    ]


def _nccl(findings: Findings) -> list[dict[str, Any]]:
    return [
        {
            "name": mean.name,
            "transport": mean.arm,
            "operations": mean.operations,
            "bytes": mean.bytes,
            "kernel_s": _s(mean.kernel_ns),
            "network_s": _s(mean.network_ns),
            "wire_s": _s(mean.wire_ns),
            "peer_wait_s": _s(mean.peer_wait_ns),
            "gpu_wait_s": _s(mean.gpu_wait_ns),
            "not_split_s": _s(mean.unknown_ns),
        }
        for mean in findings.nccl
    ]


def _joins(findings: Findings) -> list[dict[str, Any]]:
    return [
        {
            "group": one.group.name,
            "group_description": one.group.description,
            "number": one.number,
            "name": one.name,
            "kind": one.kind,
            "bytes": one.bytes,
            "states": {str(rank): state for rank, state in one.states.items()},
            "not_joined": list(one.missing),
            "unknown": list(one.unknown),
            "differs": one.differs,
            "spread_s": _s(one.last_ns - one.first_ns),
        }
        for one in findings.joins
    ]


def _faults(trace: Trace) -> list[dict[str, Any]]:
    return [
        {
            "rank": f.rank,
            "kind": f.kind,
            "time_ns": f.time_ns,
            "peers": list(f.peers),
            "other_peers": f.others,
            "waited_s": f.waited_ns / 1e9,
        }
        for f in trace.faults
    ]


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "code": verdict.code,
        "why": verdict.why,
        "next": verdict.next,
        "secondary": [one.code for one in verdict.secondary],
        "evidence": [_evidence(one) for one in verdict.evidence],
    }


def _straggler(late: Lateness | None) -> dict[str, Any] | None:
    """The rank or host that arrives last persistently; None if there is none, or it is not known."""
    if late is None or late.straggler is None:
        return None
    who = {"rank": late.straggler, "ranks": list(late.ranks)}
    return {**who, "others_wait_s": late.persistent_ns.as_dict(1e-9), "chance": late.chance}


def _costs(found: Costs) -> dict[str, Any]:
    return {
        "step_s": _s(found.step_ns),
        "byte_s": _s(found.byte_ns),
        "added_byte_s": _s(found.added_ns),
        "two_level_s": _s(found.levels_ns),
        "two_level_byte_s": _s(found.levels_byte_ns),
    }


def _steps(findings: Findings) -> dict[str, Any]:
    return {
        name: {
            "median_s": time.median_ns / 1e9,
            "p10_s": time.p10_ns / 1e9,
            "p90_s": time.p90_ns / 1e9,
            "steps": time.steps,
            "blocks": time.blocks,
        }
        for name, time in findings.times.items()
    }


def summary(
    findings: Findings,
    verdict: Verdict,
    hosts: Sequence[HostUse] = (),
    connected: Connected = NO_CONNECTIONS,
) -> dict[str, Any]:
    """The summary as JSON values."""
    trace = findings.trace
    withheld = findings.handicapped
    return {
        "version": VERSION,
        "id": trace.id,
        "origin": trace.origin,
        "model": trace.model,
        "command": list(trace.command),
        "started_wall_ns": trace.started_wall_ns,
        "size": trace.size,
        "transports": list(trace.arms),
        "base": findings.base,
        "warmup_steps": WARMUP_STEPS,
        "sentence": " ".join(sentences(findings, verdict)),
        "verdict": _verdict(verdict),
        "network": _network(trace),
        "steps": _steps(findings),
        "split": {name: _split(parts) for name, parts in findings.parts.items()},
        "bandwidth": {name: _bandwidth(found, findings.links.get(name)) for name, found in findings.achieved.items()},
        "probe": _probe(findings.achievable),
        "costs": {name: _costs(found) for name, found in findings.costs.items()},
        "algorithms": {
            name: [{**asdict(one), "kind": "allreduce"} for one in found] for name, found in findings.travels.items()
        },
        "comparisons": [_pair(pair, withheld) for pair in findings.comparisons],
        "handicap": _pair(findings.handicap),
        "gain_withheld": handicap_sentence(findings),
        "headroom": _pair(findings.headroom),
        "scaling": {
            name: {"factor": s.factor, "t1_s": s.t1_ns / 1e9, "tn_s": s.tn_ns / 1e9, "how": s.how}
            for name, s in findings.scaling.items()
        },
        "straggler": _straggler(findings.lateness),
        "late": [{"rank": rank, "others_wait_s": ns / 1e9} for rank, ns in findings.late_ns.items()],
        "predicted": None
        if verdict.full_use is None
        else {"full_use_step_s": verdict.full_use.step_ns / 1e9, "how": verdict.full_use.how},
        "latency_share": None if findings.latency_share is None else findings.latency_share.value,
        "cores_busy": findings.cores_busy,
        "layers": _layers(findings),
        "nccl": _nccl(findings),
        "joins": _joins(findings),
        "ranks": _ranks(trace),
        "hosts": [_host(host) for host in hosts],
        "connections": [_connection(end) for end in connected.ends],
        "connections_left_out": connected.left_out,
        "faults": _faults(trace),
        "notes": list(trace.notes),
    }


def schema() -> Mapping[str, Any]:
    """The JSON schema in the package."""
    text = resources.files("netbottleneck.report").joinpath("summary.schema.json").read_text(encoding="utf-8")
    loaded: Mapping[str, Any] = json.loads(text)
    return loaded


# layers.csv and collectives.csv: an unknown value is an empty cell.

LAYER_COLUMNS = (
    "layer",
    "parameters",
    "gradient_bytes",
    "buckets",
    "forward_ns",
    "backward_ns",
    "exposed_ns_attributed_by_bytes",
)
COLLECTIVE_COLUMNS = (
    "rank",
    "step",
    "transport",
    "name",
    "key",
    "round",
    "comm",
    "ranks",
    "kind",
    "dtype",
    "priority",
    "part",
    "parts",
    "phase",
    "bucket",
    "device",
    "algorithm",
    "tensor_bytes",
    "wire_bytes",
    "submit_ns",
    "agreed_ns",
    "start_ns",
    "first_byte_ns",
    "done_ns",
    "error",
    "state",
    "start_seen_ns",
    "done_seen_ns",
    "lane_bytes_sent",
)


def _csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(["" if cell is None else cell for cell in row] for row in rows)
    return buffer.getvalue()


def layers_csv(findings: Findings) -> str:
    """Per-step means of each layer under the base transport."""
    return _csv(
        LAYER_COLUMNS,
        (
            (
                layer.name,
                layer.parameters,
                layer.bytes,
                " ".join(map(str, layer.buckets)),
                None if layer.forward_ns is None else round(layer.forward_ns),
                round(layer.backward_ns),
                round(layer.exposed_ns),
            )
            for layer in findings.layers
        ),
    )


def collective_cells(operation: Collective) -> list[Any]:
    """The cells of COLLECTIVE_COLUMNS for one operation; lane_bytes_sent: lane:bytes pairs. None: not known."""
    known = {column: getattr(operation, column) for column in COLLECTIVE_COLUMNS[:-1] if column != "transport"}
    known = {"rank": operation.rank, "step": operation.step, "transport": operation.arm} | known
    known["key"] = f"{operation.key:016x}"
    lanes = None if operation.lanes is None else " ".join(f"{lane}:{sent}" for lane, sent, _ in operation.lanes)
    return [*known.values(), lanes]


def collectives_csv(trace: Trace) -> str:
    """Every operation of every rank."""
    return _csv(COLLECTIVE_COLUMNS, map(collective_cells, trace.collectives))


# trace.json.gz: the run in the JSON object form of the Chrome trace format, readable by Perfetto.
#
# One process for each rank, and one lane for each kind of event that can overlap others; ts and dur in microseconds.
# Complete events on a lane never overlap: overlapping ones get lanes of their own.

CHROME_SCHEMA_VERSION = 1
# Events above this number are cut, by whole steps with their operations from the end, with a note.
EVENTS_MAX = 500_000
# The most events of one operation: _operation_events, and its begin and end in _in_flight.
OPERATION_EVENTS = 7

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
        "cat": "user_annotation",  # a category of torch's: readers of its traces skip events without one
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
        "n_ranks": c.ranks or trace.size,
        "bucket": c.bucket,
        "transport": c.arm,
        "algorithm": c.algorithm,
        "bytes_by_lane": {str(number): sent for number, sent, _ in c.lanes} if c.lanes else None,
    }
    if last_ns is not None:
        last_ns = min(last_ns, done_ns)  # the root of a broadcast may end before all ranks have begun
        args["wait_us"] = (last_ns - c.submit_ns) / 1e3
        args["transfer_us"] = (done_ns - max(last_ns, start_ns)) / 1e3
    if done_ns > start_ns and c.tensor_bytes is not None:
        args["algbw_gbs"] = c.tensor_bytes / (done_ns - start_ns)
        factor = bus_factor(c.kind, c.ranks or trace.size, c.algorithm, host_count(trace))
        args["busbw_gbs"] = c.tensor_bytes * factor / (done_ns - start_ns)
    yield _span(c.rank, lane, c.name, start_ns, done_ns, **args)
    yield {**common, "ph": "b", "id": number, "name": c.name, "ts": c.submit_ns / 1e3}
    yield {**common, "ph": "e", "id": number, "name": c.name, "ts": done_ns / 1e3}
    if c.step is not None and c.bucket is not None:
        flow = {**common, "cat": "ready", "id": number, "name": "gradients ready"}
        yield {**flow, "ph": "s", "tid": BACKWARD, "ts": c.submit_ns / 1e3}
        yield {**flow, "ph": "f", "bp": "e", "ts": start_ns / 1e3}


def _in_flight(rank: int, operations: Iterable[Collective]) -> Iterator[Event]:
    changes = [(c.start_ns or 0, c.known_bytes) for c in operations]
    changes += [(c.done_ns or 0, -c.known_bytes) for c in operations]
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


def _steps_events(
    trace: Trace, rank: int, submits_ns: Sequence[int], events_max: int
) -> tuple[list[Event], int, float]:
    """The events of one rank's steps, the number of steps that were cut, and when the first of those began.

    submits_ns: of the rank's operations, ascending. Those before a step take room, too.
    """
    modules = Lanes(MODULES, TRANSFERS - MODULES)
    events: list[Event] = []
    cut, cut_from_ns = 0, math.inf
    for step in sorted((s for s in trace.steps if s.rank == rank), key=lambda s: s.begin_ns):
        if len(events) + OPERATION_EVENTS * bisect_left(submits_ns, step.begin_ns) >= events_max:
            cut += 1
            cut_from_ns = min(cut_from_ns, step.begin_ns)
        else:
            events += _step_events(trace, step, modules)
    return events, cut, cut_from_ns


def _rank_events(
    trace: Trace, rank: int, last: Mapping[Match, tuple[int, int]], events_max: int
) -> tuple[list[Event], int]:
    """One rank's events, and the number of its steps that were cut."""
    transfers = Lanes(TRANSFERS)
    finished = [c for c in trace.collectives if c.rank == rank and c.finished]
    events, cut, cut_from_ns = _steps_events(trace, rank, sorted(c.submit_ns for c in finished), events_max)
    own = [c for c in finished if c.submit_ns < cut_from_ns]
    own.sort(key=lambda c: c.start_ns or 0)
    for operation in own:
        lane = transfers.take(operation.start_ns or 0, operation.done_ns or 0)
        entry = last.get(operation.match)
        events += _operation_events(trace, operation, lane or TRANSFERS, entry[0] if entry else None)
    events += _in_flight(rank, own)
    return events, cut


def chrome_trace(trace: Trace, events_max: int = EVENTS_MAX) -> dict[str, Any]:
    """The trace as one JSON object; times in microseconds of rank 0's monotonic clock."""
    last = last_entries(trace)
    ranks = sorted({step.rank for step in trace.steps} | {c.rank for c in trace.collectives})
    parts = [_rank_events(trace, rank, last, events_max // max(len(ranks), 1)) for rank in ranks]
    events = [event for part, _ in parts for event in part]
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    return {
        "schemaVersion": CHROME_SCHEMA_VERSION,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": trace.epoch_wall_ns,
        "distributedInfo": {"backend": ",".join(trace.arms), "rank": 0, "world_size": trace.size},
        "host_name": trace.ranks[0].hostname if trace.ranks else "",
        "steps_cut": sum(cut for _, cut in parts),  # near the begin, where an importer knows this file by it
        "clocks": {str(r.rank): {"method": r.clock.method, "error_ns": r.clock.error_ns} for r in trace.ranks},
        "traceEvents": [*_names(trace, used), *events],
    }


def write_chrome_trace(trace: Trace, path: Path | str) -> None:
    """Write trace.json.gz as a whole; the same trace gives the same bytes."""
    with whole_file(path) as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
        packed.write(json.dumps(chrome_trace(trace), separators=(",", ":")).encode())
