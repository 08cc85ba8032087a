"""Part `events` of gpu_check.py: NCCL's calls of its profiler plugin, and what our plugin makes of them.

tests/nccl/recorder.c stands between NCCL and our plugin, and records the calls. tests/nccl/replay.c makes recorded
calls to our plugin again, without a GPU.
"""

from __future__ import annotations

import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import nccl_programs
from gpu_timing import Rows, row

from netbottleneck import _core
from netbottleneck.analysis.nccl import NcclSplit, splits
from netbottleneck.trace import nccl_events, ring_file
from netbottleneck.trace.events import Event
from netbottleneck.trace.model import NcclOperation, Trace

ROOT = Path(__file__).resolve().parents[1]
# Kept where it is: a machine without a C compiler can be given one that another machine has compiled.
RECORDER = ROOT / "build" / "gpu_check_recorder" / "libnccl-profiler-recorder.so"
PLUGIN = Path(_core.__file__).with_name("libnccl-profiler-netbottleneck.so")
# What gpu_rank.events calls: so many operations of each function, by its name in NCCL, and so many messages, which have
# one end on each rank.
CALLED = {"AllReduce": 6, "AllGather": 2, "ReduceScatter": 2, "Broadcast": 2}
MESSAGES = 2
MOST_CALLS = 20_000  # that the recorder writes
PARTS = ("wire", "peer_wait", "unknown", "gpu_wait", "idle")


def recorder() -> Path:
    """Compile the recorder, or return the one that is there. Raises Error with the compiler's message."""
    if not nccl_programs.compiler() and RECORDER.exists():
        return RECORDER
    return nccl_programs.compiled("recorder.c", RECORDER, *nccl_programs.LIBRARY)


def variables(folder: Path, rank: int) -> dict[str, Any]:
    """Return a rank's variables: NCCL loads the recorder, which loads our plugin."""
    return {
        "NCCL_PROFILER_PLUGIN": RECORDER,
        "RECORDED_PROFILER": PLUGIN,
        "RECORDING": folder / f"calls.{rank}.txt",
        "NETBOTTLENECK_NCCL_EVENTS": folder / f"events.{rank}.ring",
    }


def operations(path: Path, rank: int = 0) -> tuple[NcclOperation, ...]:
    """Return NCCL's operations of a ring that belongs to no training. Raises RuntimeError if events were dropped."""
    ring = ring_file.read_ring(path)
    if ring.dropped:
        raise RuntimeError(f"{path.name}: {ring.dropped} events were dropped")
    rows = ring.events[["kind", "time_ns", "step", "key", "a", "b", "c", "d", "e"]].tolist()
    names = {number: name for name, number in ring_file.EVENTS.items()}
    events = [Event(names[kind], *rest) for kind, *rest in rows]
    return nccl_events.nccl_operations(events, rank, lambda _: None, (), ())


def rows(folder: Path) -> Rows:
    """Return the rows of a run of gpu_rank.events. broken: what our plugin did not record.

    The last row has rank 0's calls, as text. Raises RuntimeError for a ring that is not whole.
    """
    found = []
    rings = sorted(folder.glob("events.*.ring"))
    by_rank = [operations(ring, rank) for rank, ring in enumerate(rings)]
    for rank, own in enumerate(by_rank):
        found.append(_count(rank, own))
    all_of = splits(Trace("events", len(by_rank), (), nccl=tuple(each for own in by_rank for each in own)))
    for function in CALLED:
        found += _means(function, [each for each in all_of if each.operation.function == function])
    calls = (folder / "calls.0.txt").read_text(encoding="utf-8")
    count = len(calls.splitlines())
    recording = {"condition": "NCCL's calls of its profiler, rank 0", "value": count, "calls": calls}
    return [*found, {**recording, **({"broken": "the recording is not whole"} if count >= MOST_CALLS else {})}]


def _count(rank: int, own: tuple[NcclOperation, ...]) -> dict[str, Any]:
    counted = Counter(each.function for each in own)
    messages = sum(count for name, count in counted.items() if name in nccl_events.POINT_TO_POINT)
    found = {"condition": f"operations recorded by rank {rank}", "value": len(own), "functions": dict(counted)}
    missing = [f"{counted[name]} {name} of {count}" for name, count in CALLED.items() if counted[name] < count]
    missing += [f"{messages} messages of {MESSAGES}"] if messages < MESSAGES else []
    missing += [f"no {what}" for what in ("kernel", "network") if not any(getattr(each, what) for each in own)]
    return {**found, **({"broken": f"rank {rank} recorded {', '.join(missing)}"} if missing else {})}


def _means(function: str, own: list[NcclSplit]) -> Rows:
    """Return rows with the kernel's time and the parts of the network's time, of the function's largest operations."""
    if not own:
        return []
    size = max(each.operation.bytes for each in own)
    largest = [each for each in own if each.operation.bytes == size]
    what = f"{function} of {size / 1e6:.3g} MB"
    parts = {part: [getattr(each, f"{part}_ns") for each in largest] for part in PARTS}
    kernels = [each.kernel_ns for each in largest if each.kernel_ns is not None]
    network = statistics.median(each.network_ns for each in largest)
    return [
        *([row(f"{what}, kernel", kernels, 1e-3, "us")] if kernels else []),
        *(row(f"{what}, {part}, of {network / 1e3:.4g} us of network", ns, 1e-3, "us") for part, ns in parts.items()),
    ]
