"""After the run, or beside it in another process: ring files become a Trace, on one clock.

Tolerates ranks that were killed: what they had finished is kept, what they had
not is counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netbottleneck.trace import events as ev
from netbottleneck.trace import model as tr
from netbottleneck.trace.ring_files import EVENT, Ring, read_ring

# Name of each event kind, as in csrc/trace/event.h without NB_EV_.
EVENTS: Mapping[str, int] = MappingProxyType(
    {
        "NONE": 0,
        "STEP_BEGIN": 1,
        "STEP_END": 2,
        "FORWARD_BEGIN": 3,
        "FORWARD_END": 4,
        "GRAD_READY": 5,
        "OPTIMIZER_BEGIN": 6,
        "OPTIMIZER_END": 7,
        "WAIT_BEGIN": 8,
        "WAIT_END": 9,
        "OP_SUBMIT": 10,
        "OP_AGREED": 11,
        "OP_START": 12,
        "OP_FIRST_BYTE": 13,
        "OP_DONE": 14,
        "OP_LANE": 15,
        "CLOCK": 16,
        "PROBE": 17,
        "STALL": 18,
        "PEER_LOST": 19,
        "LANE_LOST": 20,
        "COSTS": 21,
        "OP_NAME": 22,
        "OP_READY": 23,
        "OP_PACK": 24,
    }
)
_NAMES = MappingProxyType({number: name for name, number in EVENTS.items()})
# What only Horovod's timeline needs, timeline_events.py: rank 0 has one for each rank and operation.
_LEFT_OUT = tuple(EVENTS[name] for name in ("OP_NAME", "OP_READY", "OP_PACK"))

# Monotonic clocks whose wall anchors agree this well are the same clock: two hosts do not boot within it.
SAME_CLOCK_NS = 20_000_000
# Heartbeats whose round trip is above this multiple of the best are not used.
ROUND_TRIP_FACTOR = 2
# From so many good heartbeats on, drift is fitted with a straight line.
DRIFT_SAMPLES = 8

TRAIN = "train"
_RING_NAME = re.compile(r"(\d+)\.(.+)\.ring")


@dataclass(frozen=True, slots=True)
class _RankFiles:
    rank: int
    meta: Mapping[str, Any]
    rings: Mapping[str, Ring]
    notes: tuple[str, ...]

    def events(self) -> NDArray[Any]:
        return np.concatenate([ring.events for ring in self.rings.values()] or [np.empty(0, EVENT)])

    def anchor_ns(self) -> int | None:
        """Wall minus monotonic clock."""
        return next((r.opened_wall_ns - r.opened_mono_ns for r in self.rings.values()), None)


def _clock_line(files: _RankFiles, reference_ns: int | None) -> tuple[tr.Clock, NDArray[np.float64]]:
    """How this rank's clock was laid on rank 0's, and the drift (slope, at) around clock.offset_ns."""
    still = np.zeros(2)
    if files.rank == 0:
        return tr.Clock("rank 0", 0, 0), still
    events = files.events()
    beats = events[events["kind"] == EVENTS["CLOCK"]]
    if len(beats):
        offset, trip = beats["a"].astype("i8"), beats["b"]
        good = trip <= ROUND_TRIP_FACTOR * trip.min()
        best = int(np.argmin(trip))
        clock = tr.Clock("heartbeat", int(offset[best]), int(trip[best]) // 2)
        if good.sum() >= DRIFT_SAMPLES:
            at = float(beats["time_ns"][best])
            slope, _ = np.polyfit(beats["time_ns"][good] - at, (offset[good] - offset[best]).astype(float), 1)
            return clock, np.array([slope, at])
        return clock, still
    known = [t["clock_offset_ns"] for t in files.meta.get("transports", {}).values() if t.get("clock_offset_ns")]
    if known:
        return tr.Clock("heartbeat", int(known[0]), None), still
    anchor = files.anchor_ns()
    if anchor is None or reference_ns is None:
        return tr.Clock(), still
    offset_ns = reference_ns - anchor
    if abs(offset_ns) <= SAME_CLOCK_NS:
        return tr.Clock("same clock", 0, 0), still
    return tr.Clock("wall", offset_ns, None), still


def _on_rank_0(ring: Ring, clock: tr.Clock, drift: NDArray[np.float64]) -> NDArray[Any]:
    events = ring.events.copy()
    moved = np.rint(drift[0] * (events["time_ns"] - drift[1])).astype("i8") if drift[0] else 0
    events["time_ns"] -= clock.offset_ns + moved
    return events


def _named_events(ring: Ring, clock: tr.Clock, drift: NDArray[np.float64]) -> list[ev.Event]:
    rows = _on_rank_0(ring, clock, drift)
    rows = rows[~np.isin(rows["kind"], _LEFT_OUT)]
    return [
        ev.Event(_NAMES.get(kind, str(kind)), *rest)
        for kind, *rest in rows[["kind", "time_ns", "step", "key", "a", "b", "c", "d", "e"]].tolist()
    ]


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(found, dict) or found.get("version") != 1:
        raise ValueError(f"{path}: not a run record of version 1")
    return found


def _rank_files(folder: Path, rank: int) -> _RankFiles:
    """What a rank left; what cannot be read becomes a note."""
    notes: list[str] = []
    meta: Mapping[str, Any] = {}
    try:
        meta = _read_json(folder / f"{rank}.meta.json")
    except FileNotFoundError:
        notes.append(f"rank {rank} left no description of itself")
    except ValueError as error:
        notes.append(str(error))
    rings: dict[str, Ring] = {}
    for path in sorted(folder.glob(f"{rank}.*.ring")):
        try:
            rings[path.name.split(".", 1)[1].removesuffix(".ring")] = read_ring(path)
        except ValueError as error:
            notes.append(f"left out: {error}")
    return _RankFiles(rank, meta, rings, tuple(notes))


_OF_TRANSPORT = (
    "provider",
    "streams_open",
    "streams_used",
    "bytes_out",
    "bytes_in",
    "streams_asked",
    "interface",
    "link_bps",
    "shm",
    "cpu",
)


def _transport(name: str, info: Mapping[str, Any], events: Sequence[ev.Event]) -> tr.TransportInfo:
    known = {k: info.get(k) for k in _OF_TRANSPORT}
    told = tuple(tr.Probe(*map(int, point)) for point in info.get("probe") or ())
    return tr.TransportInfo(name, **known, probe=told or ev.probes(events), costs=ev.costs(events))


def _transports(told: Mapping[str, Any], named: Mapping[str, list[ev.Event]]) -> tuple[tr.TransportInfo, ...]:
    names = dict.fromkeys([*told, *(name for name in named if name != TRAIN)])
    return tuple(_transport(name, told.get(name) or {}, named.get(name, ())) for name in names)


def _key(value: int | str) -> int:
    return (int(value, 0) if isinstance(value, str) else value) & (1 << 64) - 1


def _rank_trace(
    run: tr.Trace, files: _RankFiles, clock: tr.Clock, named: Mapping[str, list[ev.Event]], plan: str | None
) -> tr.Trace:
    train = named.get(TRAIN, [])
    steps, unfinished, still_open = ev.steps(train, files.rank, run.transports, plan)
    index, buckets = ev.StepIndex(steps), ev.BucketIndex(run.buckets)
    # The training thread's own stamps count where the transport has no ring.
    found = [c for c in ev.collectives(train, files.rank, None, index, buckets) if c.transport not in named]
    for name, events in named.items():
        if name != TRAIN:
            found += ev.collectives(events, files.rank, name, index, buckets)
    ended_well = bool(files.meta.get("finished")) and not files.meta.get("error")
    rank = tr.Rank(
        files.rank,
        hostname=files.meta.get("hostname", ""),
        host_id=str(files.meta.get("host_id", "")),
        pid=next((ring.pid for ring in files.rings.values()), files.meta.get("pid", 0)),
        finished=bool(files.meta.get("finished", False)),
        error=files.meta.get("error"),
        clock=clock,
        # In good order, the loop ends within the step that its last step began.
        steps_unfinished=unfinished + (still_open and not ended_well),
        events_dropped=sum(ring.dropped for ring in files.rings.values()),
        cores=tuple(files.meta.get("cores") or ()),
        transports=_transports(files.meta.get("transports") or {}, named),
    )
    return replace(
        run,
        ranks=(rank,),
        steps=tuple(steps),
        collectives=tuple(sorted(found, key=lambda c: c.submit_ns)),
        faults=tuple(f for events in named.values() for f in ev.faults(events, files.rank, run.size)),
    )


def _network(told: Mapping[str, Any] | None) -> tr.Network | None:
    if not told:
        return None
    flows = tuple(told.get("flow_bps") or ())
    return tr.Network(told.get("how") or "", told.get("link_bps"), flows, told.get("verified") or {})


def _head(run: Mapping[str, Any], ranks: Sequence[_RankFiles]) -> tr.Trace:
    """The part of a trace that all ranks share."""
    described = next((files.meta for files in ranks if files.meta.get("parameters")), {})
    return tr.Trace(
        id=str(run.get("id", "")),
        size=int(run["size"]),
        transports=tuple(run["transports"]),
        command=tuple(run.get("command") or ()),
        model=run.get("model") or "",
        started_wall_ns=int(run.get("started_wall_ns") or 0),
        notes=(*(run.get("notes") or ()), *(note for files in ranks for note in files.notes)),
        modules=tuple(described.get("modules") or ()),
        network=_network(run.get("network")),
        parameters=tuple(
            tr.Parameter(p["name"], p["bytes"], p["dtype"], p.get("bucket")) for p in described.get("parameters", ())
        ),
        buckets=tuple(
            tr.Bucket(b["name"], _key(b["key"]), b["bytes"], b["dtype"], tuple(b["parameters"]))
            for b in described.get("buckets", ())
        ),
    )


def _from_rings(run: Mapping[str, Any], folder: Path, ranks: list[int]) -> tr.Trace:
    everyone = [_rank_files(folder, rank) for rank in ranks]
    head = _head(run, everyone)
    reference = next((files.anchor_ns() for files in everyone if files.rank == 0), None)
    parts = []
    for files in everyone:
        clock, drift = _clock_line(files, reference)
        named = {name: _named_events(ring, clock, drift) for name, ring in files.rings.items()}
        parts.append(_rank_trace(head, files, clock, named, run.get("plan")))
    return replace(tr.merge(parts), epoch_wall_ns=reference or 0)


def load(run_dir: Path | str) -> tr.Trace:
    """The trace of a run folder: from its rings, or where there are none from ranks/<rank>.jsonl.gz. Writes nothing.

    Raises FileNotFoundError for a folder that holds no run; ValueError naming the file for an unknown version."""
    folder = Path(run_dir)
    if not (folder / "run.json").exists():
        raise FileNotFoundError(f"{folder}: no run.json here; give the folder of a run")
    run = _read_json(folder / "run.json")
    ranks_dir = folder / "ranks"
    matches = [_RING_NAME.fullmatch(path.name) for path in ranks_dir.glob("*.ring")]
    ranks = sorted({int(match[1]) for match in matches if match})
    if ranks:
        return _from_rings(run, ranks_dir, ranks)
    written = sorted(ranks_dir.glob("*.jsonl.gz"), key=lambda path: int(path.name.split(".")[0]))
    if not written:
        raise FileNotFoundError(f"{ranks_dir}: no rank has left a record")
    return tr.merge(tr.read(path) for path in written)


def convert(run_dir: Path | str) -> tr.Trace:
    """Loads a run folder and writes ranks/<rank>.jsonl.gz beside the rings."""
    trace = load(run_dir)
    for rank in trace.ranks:
        tr.write(trace.of_rank(rank.rank), Path(run_dir) / "ranks" / f"{rank.rank}.jsonl.gz")
    return trace
