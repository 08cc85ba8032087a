"""Parts `timing` and `arms` of gpu_check.py: what the record of a measured run says.

`timing` compares it with torch.profiler's record of the same steps.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from netbottleneck.analysis.comparisons import compare
from netbottleneck.analysis.intervals import backward_intervals, device_error_ns, split_steps, total
from netbottleneck.analysis.intervals import intervals as as_set
from netbottleneck.report import Run
from netbottleneck.trace.model import Step, Trace
from netbottleneck.trace.transports import BARE, STOCK, Arm

Rows = list[dict[str, Any]]
Event = Mapping[str, Any]
Profile = dict[int, dict[str, int]]

BAR = 0.03  # largest distance of a ratio from 1
# The bar holds for times from here on. Each of the two marks around a range is assumed to take up to 4 us of its
# stream, so both take up to 2.7 % of this time.
LEAST_NS = 300_000
LEAST_BYTES = 1 << 16  # that an arm sends: more than what opens its connections
FORWARD, BACKWARD, MODULE = "forward", "backward", "module "
NODE = "autograd::engine::evaluate_function"
LAUNCHES = ("cuda_runtime", "cuda_driver")


def row(condition: str, times: Sequence[float], scale: float = 1.0, unit: str = "s") -> dict[str, Any]:
    """Return a row with the median, the extremes and the number of runs."""
    scaled = sorted(scale * each for each in times)
    figures = {"value": statistics.median(scaled), "low": scaled[0], "high": scaled[-1]}
    return {"condition": condition, **{name: float(f"{each:.4g}") for name, each in figures.items()}} | {
        "unit": unit,
        "runs": len(times),
    }


def annotation(step: int, what: str) -> str:
    """Return the name of a range that the profiler records; `profiled` reads it."""
    return f"{step}|{what}"


class _Kernels:
    """The kernels of a trace by the time at which the host launched them. NCCL's kernels are left out."""

    def __init__(self, events: Iterable[Event]) -> None:
        launched = {}
        found = []
        for event in events:
            category = event.get("cat")
            if category in LAUNCHES:
                launched[event.get("args", {}).get("correlation")] = event["ts"]
            elif category == "kernel" and "nccl" not in event["name"].lower():
                found.append(event)
        rows = ((launched.get(e.get("args", {}).get("correlation")), e["ts"], e["ts"] + e["dur"]) for e in found)
        self.rows = [each for each in rows if each[0] is not None]

    def span(self, begin: float, end: float) -> tuple[float, float] | None:
        """Return begin and end, on the GPU, of what the host launched in an interval; None: nothing."""
        inside = [(first, last) for at, first, last in self.rows if begin <= at < end]
        return (min(first for first, _ in inside), max(last for _, last in inside)) if inside else None


def profiled(events: Sequence[Event], on_gpu: bool) -> Profile:
    """Return ns by step and range from the events of a trace of torch.profiler, whose times are us.

    Ranges are modules, by MODULE and their name, and BACKWARD, from the last kernel of the forward pass to the last one
    that a node of autograd launched. on_gpu False: times of the host.
    """
    kernels = _Kernels(events)
    nodes = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("ph") == "X" and e.get("name", "").startswith(NODE)]
    found: Profile = {}
    for number, own in _ranges(events).items():
        begin, end = own[BACKWARD]
        last = max(at for _, at in nodes if begin <= at <= end)
        host = {**own, BACKWARD: (begin, last)}
        spans = {what: kernels.span(*each) if on_gpu else each for what, each in host.items()}
        forward, backward = spans.pop(FORWARD), spans.pop(BACKWARD)
        times = {what: round(1e3 * (span[1] - span[0])) for what, span in spans.items() if span is not None}
        if forward is not None and backward is not None:
            times[BACKWARD] = round(1e3 * (backward[1] - forward[1]))
        found[number] = times
    return found


def _ranges(events: Iterable[Event]) -> dict[int, dict[str, tuple[float, float]]]:
    """Return begin and end on the host, in us, of the ranges of `annotation`, by step."""
    found: dict[int, dict[str, tuple[float, float]]] = defaultdict(dict)
    for event in events:
        step, bar, what = event.get("name", "").partition("|")
        if event.get("cat") == "user_annotation" and bar and step.isdecimal():
            found[int(step)][what] = event["ts"], event["ts"] + event["dur"]
    return found


def measured(trace: Trace, step: Step) -> dict[str, int]:
    """Return our ns of a sampled step, by the names of `profiled`."""
    times = {MODULE + trace.modules[index]: end - begin for index, begin, end in step.modules}
    return {**times, BACKWARD: total(as_set(backward_intervals(step)))}


def _pairs(trace: Trace, profiles: Mapping[int, Profile]) -> tuple[dict[str, list[tuple[int, int]]], int]:
    """Return (our ns, the profiler's ns) of each range, over the ranks' sampled steps; and the steps without a module.

    Those are sampled steps for whose modules the profiler has no time.
    """
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    empty = 0
    for step in trace.steps:
        theirs = profiles[step.rank].get(step.index)
        if not step.sampled or not step.modules or theirs is None:
            continue
        ours = measured(trace, step)
        both = [(what, ns, theirs[what]) for what, ns in ours.items() if theirs.get(what)]
        for what, ns, other in both:
            found[what].append((ns, other))
        modules = [(ns, other) for what, ns, other in both if what.startswith(MODULE)]
        if modules:
            found["forward of all modules"].append((sum(ns for ns, _ in modules), sum(other for _, other in modules)))
        empty += not modules
    return found, empty


def compared(trace: Trace, profiles: Mapping[int, Profile], on_gpu: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each range. broken: why it fails, for long ones on a GPU.

    Raises RuntimeError where the profiler has no time of a sampled step.
    """
    found, empty = _pairs(trace, profiles)
    if not found:
        raise RuntimeError(f"the profiler has no time of {empty} sampled steps")
    for what, pairs in found.items():
        theirs = statistics.median(other for _, other in pairs)
        ratios = row(
            f"ours over the profiler's, {what} of {theirs / 1e3:.4g} us", [a / b for a, b in pairs], unit="ratio"
        )
        if on_gpu and theirs >= LEAST_NS and abs(ratios["value"] - 1) > BAR:
            ratios["broken"] = f"{what}: {ratios['value']} of the profiler's time, bar {BAR:.0%}"
        yield ratios
    if empty:
        yield {"condition": "sampled steps for whose modules the profiler has no time", "value": empty, "unit": "steps"}


def _overhead(trace: Trace, before: int) -> dict[str, Any]:
    """Return the step with measuring over the step without, by pairs of blocks, from steps before the profiled ones."""
    steps = tuple(step for step in trace.steps if step.index < before)
    paired = compare(replace(trace, steps=steps), BARE, STOCK)
    if paired is None:
        raise RuntimeError("the run has no pair of measured and untouched blocks")
    ratio = paired.ratio
    figures = {"value": ratio.value, "low": ratio.low, "high": ratio.high}
    return {
        "condition": "step with measuring over step without, with its 95 % interval",
        **{name: float(f"{each:.5g}") for name, each in figures.items()},
        "unit": "ratio",
        "runs": paired.pairs,
    }


def rows(folder: Path, on_gpu: bool) -> Rows:
    """Return the rows of a run of gpu_rank.timing. Raises RuntimeError for a record that is not whole."""
    trace = Run(folder / "run").trace
    profiles = {}
    for rank in trace.ranks:
        document = json.loads((folder / f"profile.{rank.rank}.json").read_text(encoding="utf-8"))
        profiles[rank.rank] = profiled(document["traceEvents"], on_gpu)
    if device_error_ns(trace) is None:
        raise RuntimeError(f"the run has no times of the device's clock: {'; '.join(trace.notes)}")
    found = list(compared(trace, profiles, on_gpu))
    splits = [split for _, split, _ in split_steps(trace)]
    wrong = [split for split in splits if sum(split.phases().values()) != split.step_ns]
    wrong += [split for split in splits if min(split.phases().values()) < 0]
    if wrong:
        raise RuntimeError(f"the parts of {len(wrong)} steps are not the step: {wrong[0]}")
    return [
        *found,
        row("error of the device's clock, as the run states it, by rank", _errors(trace), 1e-3, "us"),
        _overhead(trace, min(step for profile in profiles.values() for step in profile)),
        row(
            "part of a step outside of compute and exposed communication", [_rest(split) for split in splits], 1e2, "%"
        ),
    ]


def arms(folder: Path) -> Rows:
    """Return the rows of a run whose arms are NCCL's own network and ours. broken: NCCL did not use ours in an arm."""
    trace = Run(folder / "run").trace
    found = []
    for arm in trace.arms:
        steps = [step for step in trace.steps if step.arm == arm and step.rank == 0]
        if not steps:
            raise RuntimeError(f"no step over {arm}: {'; '.join(trace.notes)}")
        found.append(row(f"step over {arm}", [step.end_ns - step.begin_ns for step in steps], 1e-6, "ms"))
        paired = None if arm == STOCK else compare(trace, STOCK, arm)
        if paired is not None:
            ratio = paired.ratio
            figures = {"value": ratio.value, "low": ratio.low, "high": ratio.high}
            rounded = {name: float(f"{each:.5g}") for name, each in figures.items()}
            condition = f"step over {arm} over step over stock, with its 95 % interval"
            found.append({"condition": condition, **rounded, "unit": "ratio", "runs": paired.pairs})
        if arm.over_nccl:
            found.append(_sent(trace, arm))
    return found


def sharded(folder: Path) -> Rows:
    """Return the rows of a run of an FSDP2 model. Raises RuntimeError for a record that is not whole."""
    trace = Run(folder / "run").trace
    splits = [split for _, split, _ in split_steps(trace)]
    error_ns = device_error_ns(trace)
    if error_ns is None or not splits:
        raise RuntimeError(f"the run has no times of the device's clock: {'; '.join(trace.notes)}")
    found = [row("step", [split.step_ns for split in splits], 1e-6, "ms")]
    for kind, phase in (("allgather", "forward"), ("allgather", "backward"), ("reducescatter", "backward")):
        took = _took(trace, kind, phase)
        if not took:
            raise RuntimeError(f"no {kind} in {phase} is in the record")
        found.append(row(f"{kind} in {phase}, on its stream", took, 1e-6, "ms"))
    parts = [
        ("communication", [split.communication_ns for split in splits]),
        ("communication that is hidden", [split.hidden_ns for split in splits]),
        ("exposed", [split.phases()["exposed"] for split in splits]),
    ]
    found += [row(f"{name}, of a step", values, 1e-6, "ms") for name, values in parts]
    return [*found, row("part of a step that is in no phase", [_rest(split) for split in splits], 1e2, "%")]


def _took(trace: Trace, kind: str, phase: str) -> list[int]:
    """Return the ns of each collective of a kind that began in a phase of its step."""
    done = [c for c in trace.collectives if (c.kind, c.phase) == (kind, phase) and c.finished]
    return [(c.done_ns or 0) - (c.start_ns or 0) for c in done]


def _sent(trace: Trace, arm: Arm) -> dict[str, Any]:
    """Return a row with the bytes that each rank sent over our network in an arm."""
    entries = [entry for rank in trace.ranks for entry in rank.transports if entry.name == arm.transport]
    sent = [entry.bytes_out or 0 for entry in entries]
    found = row(f"sent by a rank over {arm}, {entries[0].provider}", sent, 1e-6, "MB")
    if min(sent) < LEAST_BYTES:
        found["broken"] = f"{arm}: NCCL sent {min(sent)} bytes over our network"
    return found


def _errors(trace: Trace) -> list[float]:
    return [float(rank.device_error_ns) for rank in trace.ranks if rank.device_error_ns is not None]


def _rest(split: Any) -> float:
    return float(split.phases()["other"] / split.step_ns)
