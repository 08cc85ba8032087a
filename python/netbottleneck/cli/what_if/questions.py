"""Which questions are asked of a job, by the words of the command line, and their rows."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from netbottleneck.cli.what_if.source import Source, as_cost, layer_log
from netbottleneck.cli.what_if.words import PAPER
from netbottleneck.trace import layer_log as layerlog
from netbottleneck.trace.model import Parameter
from netbottleneck.whatif import questions, sweeps
from netbottleneck.whatif.copies import by_table
from netbottleneck.whatif.cost import Cost, Link
from netbottleneck.whatif.inverse import Least
from netbottleneck.whatif.plan import Plan
from netbottleneck.whatif.questions import Answer, Job
from netbottleneck.whatif.sweeps import Codec, Told

LINKS = (1.0, 2.5, 5.0, 10.0, 25.0, 40.0, 50.0, 100.0, 200.0, 400.0)
WORKERS = (2, 4, 8, 16, 32, 64, 256, 1000, 10_000, 100_000)
RATIOS = (1.0, 2.0, 4.0, 10.0, 50.0, 100.0)
RANKS_PER_HOST = (1, 2, 4, 8)
FUSIONS_MIB = (1.0, 5.0, 25.0, 64.0, 128.0)
CYCLES_MS = (1.0, 5.0, 20.0)
# Of a layer log: how many workers and which links, as the paper asks.
LOG_WORKERS, LOG_LINKS = (16, 32, 64), (1.0, 10.0, 25.0, 40.0, 100.0)
SWEEPS = ("workers", "link_gbps", "compression", "ranks_per_host", "fusion_mib", "cycle_ms")

Table = tuple[str, tuple[Answer, ...]]


def _plan(word: str | None) -> Plan | None:
    return {"ddp": Plan.ddp(), "horovod": Plan.horovod(), PAPER: Plan.paper2020()}.get(word or "")


def _copy_byte_ns(args: argparse.Namespace, tensors: Sequence[Parameter]) -> float | None:
    """Ns of a byte copied, by a table that was given, of these tensors."""
    if args.copy_table is None:
        return None
    return by_table(as_cost(layerlog.read_table(args.copy_table)), [tensor.bytes for tensor in tensors])


def make_job(args: argparse.Namespace, source: Source) -> Job:
    """Return the run, or the log as a run of one rank, ready for questions."""
    table = None if args.add_table is None else as_cost(layerlog.read_table(args.add_table))
    if source.trace is None or source.findings is None or source.trace.size == 1:
        one = source.trace or layerlog.to_trace(layer_log(source, args.step_s))
        copies = _copy_byte_ns(args, one.parameters)
        cost = Cost(algorithm=args.algorithm or "ring", add=0.0 if table is None else table, copy_byte_ns=copies or 0.0)
        return questions.job(one, plan=_plan(args.plan) or Plan.horovod(), cost=cost)
    transport, copies = args.transport or source.findings.base, _copy_byte_ns(args, source.trace.parameters)
    try:
        made = questions.job(source.trace, transport, plan=_plan(args.plan), copy_byte_ns=copies)
    except ValueError as error:
        raise ValueError(f"{source.path}: {error}") from error
    if args.algorithm is not None and args.algorithm != made.cost.algorithm:
        note = f"a cost fitted to {made.cost.algorithm} is used for {args.algorithm}"
        made = replace(made, cost=replace(made.cost, algorithm=args.algorithm), notes=(*made.notes, note))
    return made if table is None else replace(made, cost=replace(made.cost, add=table))


def link_bps(args: argparse.Namespace, source: Source, job: Job) -> float | None:
    """Return the nominal speed of the link that the run had; None where nobody knows."""
    if args.this_link_gbps is not None:
        return float(args.this_link_gbps) * 1e9
    if job.fit is not None and job.fit.nominal is not None:
        return job.fit.nominal.bps
    return None if source.findings is None else source.findings.link_bps


def codec(args: argparse.Namespace) -> Codec:
    """Return what a byte costs to encode and to decode."""
    return Codec() if args.codec_gbytes is None else Codec(1 / args.codec_gbytes, 1 / args.codec_gbytes)


def _this_job(job: Job, nominal: float | None) -> Table:
    as_it_was = questions.answer(job, sweeps.now(job))
    asked = [*sweeps.attainable(job), *([sweeps.full_use(job, nominal)] if nominal else [])]
    return "This job", (
        as_it_was,
        *sweeps.answers(job, asked),
        sweeps.ideal_overlap(job, as_it_was),
        questions.answer(job, sweeps.free(job)),
    )


def _grid(args: argparse.Namespace, job: Job) -> Iterator[Table]:
    """The product of what was asked of workers, links and ratios: one axis, or all that were named."""
    log = job.fit is None
    counts = [int(count) for count in args.workers or (LOG_WORKERS if log else (job.workers,))]
    ratios = args.compression or (1.0,)
    speeds = args.link_gbps or (LOG_LINKS if log else ())
    hosts = f", {job.cost.ranks_per_host} ranks on a host" if job.cost.ranks_per_host > 1 else ""
    if speeds:
        bps = [gbps * 1e9 for gbps in speeds]
        title = f"Workers, link fully used, compression ratio{hosts}"
        yield title, sweeps.answers(job, sweeps.grid(job, counts, bps, ratios, codec(args)))
        return
    for ratio in ratios:
        at = replace(job, cost=sweeps.compressed(job.cost, ratio, codec(args)))
        title = f"Workers, the link as it was used{hosts}" + (f", {ratio:g}x fewer bytes" if ratio != 1 else "")
        yield title, sweeps.answers(at, sweeps.workers(at, counts))


def _of_one(args: argparse.Namespace, job: Job) -> Job:
    """A layer log at the one number of workers and the one link that were named. Raises ValueError for others."""
    if job.fit is not None:
        return job
    if len(args.workers or ()) != 1 or len(args.link_gbps or ()) != 1:
        raise ValueError("--fusion-mib and --cycle-ms of a layer log need one --workers N and one --link-gbps X")
    return replace(job, workers=int(args.workers[0]), cost=sweeps.over(job.cost, args.link_gbps[0] * 1e9))


def _fitted_sweeps(args: argparse.Namespace, job: Job) -> Iterator[Table]:
    """What a run is asked where nothing was named: links, workers, ratios, each alone."""
    yield "Another link, fully used", sweeps.answers(job, sweeps.links(job, [gbps * 1e9 for gbps in LINKS]))
    yield "More workers, the link as it was used", sweeps.answers(job, sweeps.workers(job, WORKERS))
    yield "Compression, the link as it was used", sweeps.answers(job, sweeps.compression(job, RATIOS, codec(args)))


def _hosts(job: Job, counts: Sequence[float]) -> Iterator[Table]:
    if counts and max(job.workers, *counts) > 1:
        many = replace(job, workers=max(job.workers, int(max(counts))))
        title = f"Ranks on a host, of {many.workers} workers"
        yield title, sweeps.answers(many, sweeps.ranks_per_host(many, [int(count) for count in counts]))


def _fusion(job: Job, sizes_mib: Sequence[float], cycles_ms: Sequence[float]) -> Iterator[Table]:
    if sizes_mib:
        sizes = [round(mib * (1 << 20)) for mib in sizes_mib]
        yield "Buckets of DDP", sweeps.answers(job, sweeps.fusions(job, sizes))
    if cycles_ms:
        cycles = [round(cycle_ms * 1e6) for cycle_ms in cycles_ms]
        yield "Fusion of Horovod, 64 MiB", sweeps.answers(job, sweeps.cycles(job, cycles))


def _others(args: argparse.Namespace, job: Job) -> Iterator[Table]:
    """Sweeps of one thing, whichever was asked for; of a run all, where none was."""
    if job.fit is not None and not any(getattr(args, name) for name in SWEEPS):
        yield from _fitted_sweeps(args, job)
        yield from _hosts(job, RANKS_PER_HOST)
        yield from _fusion(job, FUSIONS_MIB, CYCLES_MS)
        return
    if not _whole(args, job):
        yield from _hosts(job, args.ranks_per_host or ())
    if args.fusion_mib or args.cycle_ms:
        yield from _fusion(_of_one(args, job), args.fusion_mib or (), args.cycle_ms or ())


def _whole(args: argparse.Namespace, job: Job) -> bool:
    """Whether a product is asked: of a layer log always."""
    return job.fit is None or any(getattr(args, name) for name in ("workers", "link_gbps", "compression"))


def _least(args: argparse.Namespace, job: Job, nominal: float | None) -> Iterator[Least]:
    counts = args.workers or ((job.workers,) if job.fit is not None else LOG_WORKERS)
    for count in counts:
        at = replace(job, workers=int(count))
        if at.workers < 2:
            continue
        yield sweeps.enough_link(at)
        if args.target_scaling is None:
            continue
        yield sweeps.least_link(at, args.target_scaling)
        if job.fit is not None:
            yield sweeps.least_compression(at, args.target_scaling, codec(args))
            yield sweeps.least_lanes(at, args.target_scaling, nominal)
            continue
        for gbps in args.link_gbps or LOG_LINKS:
            over = replace(at, cost=replace(at.cost, link=Link(gbps * 1e9)))
            yield replace(sweeps.least_compression(over, args.target_scaling, codec(args)), link_bps=gbps * 1e9)


def ask(args: argparse.Namespace, source: Source) -> Told:
    """Return all that was asked of the input. Raises OSError, ValueError for what cannot be asked."""
    job = make_job(args, source)
    nominal = link_bps(args, source, job)
    missing = []
    tables: list[Table] = []
    if job.fit is not None:
        tables.append(_this_job(job, nominal))
        if nominal is None:
            missing.append("the run does not know its link: --this-link-gbps X asks for its full use")
    if args.target_scaling is not None and args.codec_gbytes is None:
        missing.append("encoding and decoding take no time in these answers: --codec-gbytes X counts them")
    jobs = [job]
    if _whole(args, job):
        jobs = [sweeps.on_hosts(job, int(count)) for count in args.ranks_per_host or (job.cost.ranks_per_host,)]
        tables += [table for one in jobs for table in _grid(args, one)]
    tables += _others(args, job)
    leasts = [one for at in jobs for one in _least(args, at, nominal)]
    return Told(job, tuple(tables), tuple(leasts), tuple(missing))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _model(told: Told) -> str:
    return told.job.trace.model or told.job.trace.id


def _measured_row(told: Told) -> Iterator[dict[str, Any]]:
    """The step as it was recorded."""
    was = told.job.measured_ns
    if was is not None:
        ends = {"step_s": was.value / 1e9, "step_low_s": was.low / 1e9, "step_high_s": was.high / 1e9}
        place = {
            "model": _model(told),
            "workers": told.job.workers,
            "question": "measured",
            "label": questions.MEASURED,
        }
        yield place | ends | {"transport": told.job.transport}


def _row(told: Told, answer: Answer) -> dict[str, Any]:
    setting = answer.setting
    extra = {
        "question": setting.question,
        "setting": setting.words,
        "label": answer.label,
        "ranks_per_host": setting.cost.ranks_per_host,
        "lanes": setting.cost.link.lanes,
        "algorithm": setting.cost.algorithm,
        "plan": setting.plan.rule,
        "notes": list(answer.notes),
    }
    if answer.step_s is None or answer.scaling is None:
        return {"model": _model(told), "workers": setting.workers, "refused": answer.refused, **extra}
    core = questions.prediction(told.job, answer)
    ends = {
        "step_low_s": answer.step_s.low if answer.interval else None,
        "step_high_s": answer.step_s.high if answer.interval else None,
        "scaling_low": answer.scaling.low if answer.interval else None,
        "scaling_high": answer.scaling.high if answer.interval else None,
    }
    return asdict(core) | {"link_bps": _finite(core.link_bps)} | ends | extra


def _least_row(told: Told, one: Least) -> dict[str, Any]:
    known = None if one.value is None else one.value
    return {
        "model": _model(told),
        "workers": one.workers,
        "ranks_per_host": one.ranks_per_host,
        "link_bps": one.link_bps,
        "question": one.question,
        "aim": one.aim,
        "label": one.label,
        "value": None if known is None else known.value,
        "low": known.low if known is not None and one.interval else None,
        "high": _finite(known.high) if known is not None and one.interval else None,
        "reason": one.reason,
    }


def rows(told: Told) -> list[dict[str, Any]]:
    """Return every answer as JSON has it; an end of an interval that is not known is null."""
    found = [_row(told, one) for _, own in told.tables for one in own]
    return [*_measured_row(told), *found, *(_least_row(told, one) for one in told.leasts)]
