"""`netbottleneck what-if`: reads arguments and input, runs the what-if engine, and writes the answers."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

from netbottleneck.analysis.comparisons import changed_at
from netbottleneck.analysis.findings import Findings, between_hosts_bps, find, link_rate
from netbottleneck.report import Run
from netbottleneck.report import what_if as report
from netbottleneck.trace import kineto
from netbottleneck.trace import layer_log as layerlog
from netbottleneck.trace import model as tr
from netbottleneck.trace.files import check_file, write_text
from netbottleneck.trace.layer_log import LONGEST_NS, MOST_BYTES, LayerLog, VecTable
from netbottleneck.trace.model import Collective, Parameter, Step, Trace
from netbottleneck.trace.transports import Arm
from netbottleneck.units import gbit
from netbottleneck.whatif import compat2020, questions, sweeps
from netbottleneck.whatif.cost import ALGORITHMS, Cost, Link, Table
from netbottleneck.whatif.fit import copy_cost_from_table
from netbottleneck.whatif.plan import Plan
from netbottleneck.whatif.questions import Answer, Job, LeastValue
from netbottleneck.whatif.sweeps import Answers, Codec

# The input as values: a run folder, a trace or a layer log.


@dataclass(frozen=True)
class Source:
    """The recorded input: a trace or a layer log."""

    path: Path
    trace: Trace | None = None
    log: LayerLog | None = None

    @cached_property
    def findings(self) -> Findings | None:
        """The findings of a run; None for a layer log."""
        return None if self.trace is None else find(self.trace)


def _check_times(where: str, times: Iterable[int]) -> None:
    """Raise ValueError for an implausible time."""
    if bad := next((at for at in times if abs(at) > LONGEST_NS), None):
        raise ValueError(f"{where}: {bad} ns is out of range for a time of this run")


def _check_step(where: str, trace: Trace, step: Step) -> None:
    spans = ((begin, end) for _, begin, end in (*step.waits, *step.modules))
    parts = ((step.begin_ns, step.end_ns), *step.forward, *step.optimizer, *step.evaluation, *step.checkpoints, *spans)
    for begin_ns, end_ns in parts:
        if end_ns < begin_ns:
            raise ValueError(f"{where}, or a part of it, ends {begin_ns - end_ns} ns before it begins")
    _check_times(where, [at for pair in parts for at in pair] + [at for _, at in step.grad_ready])
    _check_indices(f"{where} has a gradient", trace.parameters, (index for index, _ in step.grad_ready))
    _check_indices(f"{where} has a module", trace.modules, (index for index, _, _ in step.modules))


def _check_indices(where: str, known: Sequence[object], indices: Iterable[int]) -> None:
    """Raise ValueError for an index out of range."""
    for index in indices:
        if not 0 <= index < len(known):
            raise ValueError(f"{where} {index}; there are {len(known)}")


def _check_operation(where: str, operation: Collective) -> None:
    if not 0 <= operation.known_bytes <= MOST_BYTES:
        raise ValueError(f"{where}: its size is {operation.known_bytes} bytes: must be from 0 to {MOST_BYTES}")
    if (operation.bucket or 0) < 0:
        raise ValueError(f"{where}: its bucket is below 0")
    times = (operation.submit_ns, operation.agreed_ns, operation.start_ns, operation.done_ns)
    _check_times(where, (at for at in times if at is not None))


def _checked(path: Path, trace: Trace) -> Trace:
    """Return the trace if its rows are consistent. Raises ValueError naming the first that is not."""
    if trace.size < 1:
        raise ValueError(f"{path}: a run of {trace.size} ranks: must be 1 or more")
    if not trace.parameters and any(step.grad_ready for step in trace.steps):
        why = "a profile has none without record_shapes=True, or if they do not agree with the all-reduces"
        raise ValueError(f"{path}: the sizes of the gradients are not known: {why}")
    for step in trace.steps:
        _check_step(f"{path}: step {step.index} of rank {step.rank}", trace, step)
    for parameter in trace.parameters:
        if not 0 <= parameter.bytes <= MOST_BYTES:
            raise ValueError(
                f"{path}: parameter {parameter.name} has {parameter.bytes} bytes: must be from 0 to {MOST_BYTES}"
            )
    if (total := sum(parameter.bytes for parameter in trace.parameters)) > MOST_BYTES:
        raise ValueError(f"{path}: the parameters have {total} bytes together: must be at most {MOST_BYTES}")
    for one in trace.collectives:
        _check_operation(f"{path}: operation {one.name or one.key} of rank {one.rank}", one)
    return trace


def load(path: Path) -> Source:
    """Read a run folder, a trace, a file of torch.profiler or a layer log.

    Raises OSError, and ValueError naming file and line of damage.
    """
    if path.is_dir():
        return Source(path, trace=_checked(path, Run(path).trace))
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    if kineto.is_kineto(path):
        return Source(path, trace=_checked(path, Run(path).trace))
    if packed or path.name.endswith(".gz"):
        return Source(path, trace=_checked(path, tr.read(path)))
    return Source(path, log=layerlog.read(path))


def _alone_s(findings: Findings) -> float | None:
    """Return a single device's step: measured alone, else the step without communication and waiting."""
    if findings.trace.size < 2 and findings.base is not None:
        alone = findings.parts[findings.base]
        return (alone.step_ns - alone.exposed_ns - alone.wait_ns) / 1e9
    known = (findings.base and findings.scaling.get(findings.base)) or next(iter(findings.scaling.values()), None)
    return None if known is None else known.t1_ns / 1e9


def layer_log(source: Source, step_s: float | None) -> LayerLog:
    """Return the input as a layer log with its step. Raises ValueError if neither the input nor step_s gives it."""
    if source.log is not None:
        log, known = source.log, source.log.batch_s
    elif source.trace is not None and source.findings is not None:
        log, known = layerlog.of_trace(source.trace), _alone_s(source.findings)
    else:
        raise ValueError(f"{source.path}: neither a run nor a layer log")
    step = step_s or known
    if step is None:
        raise ValueError(f"{source.path} does not record the step of a single device: pass its seconds as --step-s")
    return LayerLog(log.name, log.tensors, step, log.others)


def as_cost(table: VecTable) -> Table:
    """Return a table of additions for the engine, which extrapolates beyond the last row by the last slope."""
    return Table(tuple(map(float, table.bytes)), tuple(1e9 * seconds for seconds in table.seconds))


# Arguments and their checks.

PAPER = "paper2020"
BAD_INPUT = 2
WORKERS_MAX = 10_000_000
PLANS = ("recorded", "ddp", "horovod", PAPER)


class _Parser(argparse.ArgumentParser):
    """Reports a bad argument in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"netbottleneck what-if: {message}; see netbottleneck what-if --help\n")


def _number(word: str, low: float, high: float, integer: bool = False) -> float:
    try:
        value: float = int(word) if integer else float(word)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        kind = f"a whole number from {low:.0f} to {high:.0f}" if integer else f"a number from {low:g} to {high:g}"
        raise argparse.ArgumentTypeError(f"{word.strip()[:40]!r}: must be {kind}")
    return value


def _number_parser(low: float, high: float) -> Callable[[str], float]:
    return lambda text: _number(text, low, high)


def _list_parser(low: float, high: float, integer: bool = False) -> Callable[[str], tuple[float, ...]]:
    """Return a parser of a list of numbers that removes duplicates."""
    return lambda text: tuple(dict.fromkeys(_number(word, low, high, integer) for word in text.split(",")))


def _sweeps(arguments: argparse.ArgumentParser) -> None:
    many = arguments.add_argument_group("sweeps; without any of these options, each value is swept in turn")
    many.add_argument("--workers", type=_list_parser(1, WORKERS_MAX, True), metavar="LIST", help="such as 16,32,64")
    many.add_argument(
        "--link-gbps", type=_list_parser(1e-6, 1e6), metavar="LIST", help="Gbit/s (10^9), such as 1,10,25,100"
    )
    many.add_argument(
        "--compression", type=_list_parser(1e-3, 1e9), metavar="LIST", help="ratios of bytes, such as 1,2,5,10"
    )
    many.add_argument(
        "--ranks-per-host", type=_list_parser(1, 1024, True), metavar="LIST", help="ranks per host, such as 1,4,8"
    )
    many.add_argument(
        "--fusion-mib", type=_list_parser(1e-3, 1e6), metavar="LIST", help="DDP's buckets, MiB, such as 5,25,100"
    )
    many.add_argument(
        "--cycle-ms", type=_list_parser(1e-3, 1e5), metavar="LIST", help="Horovod's cycle, such as 1,5,20"
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    arguments = _Parser(
        prog="netbottleneck what-if",
        description="Predict the recorded job with another link, more workers or compression. Every number is labelled "
        "measured or predicted; predictions have intervals.",
    )
    arguments.add_argument(
        "input", metavar="INPUT", help="a run folder, a trace (*.jsonl.gz), or a layer log (*.bk.log)"
    )
    _sweeps(arguments)
    arguments.add_argument(
        "--target-scaling",
        type=_number_parser(0.001, 0.9999),
        metavar="X",
        help="find the least link, compression and streams for this scaling factor",
    )
    arguments.add_argument("--json", metavar="FILE", help="write the answers to this file")
    known = arguments.add_argument_group("values that the run lacks, or that replace its own")
    known.add_argument("--transport", metavar="NAME", help="transport to fit the cost to (stock, else the first)")
    known.add_argument(
        "--this-link-gbps", type=_number_parser(1e-6, 1e6), metavar="X", help="nominal link of the run, Gbit/s"
    )
    known.add_argument("--plan", choices=PLANS, help="how gradients are fused (as recorded; for a layer log: horovod)")
    known.add_argument("--algorithm", choices=ALGORITHMS, help="all-reduce algorithm (as recorded, else ring)")
    known.add_argument(
        "--codec-gbytes", type=_number_parser(1e-6, 1e6), metavar="X", help="GB/s of encoding and of decoding"
    )
    known.add_argument(
        "--step-s", type=_number_parser(1e-9, 1e9), metavar="X", help="seconds of a layer log's step on one device"
    )
    known.add_argument("--add-table", metavar="FILE", help="file with a line bytes,seconds for each vector addition")
    known.add_argument(
        "--copy-table", metavar="FILE", help="file with a line bytes,seconds for each copy into a fusion buffer"
    )
    older = arguments.add_argument_group("the simulator of the 2020 paper")
    older.add_argument("--compat", choices=[PAPER], help="apply exactly its formulas")
    older.add_argument(
        "--slowdown",
        type=_number_parser(1e-3, 1e9),
        metavar="X",
        help="factor by which it stretches time (10); it skips short waits",
    )
    return arguments


# What-if questions from the arguments, and their rows.

LINKS = (1.0, 2.5, 5.0, 10.0, 25.0, 40.0, 50.0, 100.0, 200.0, 400.0)
WORKERS = (2, 4, 8, 16, 32, 64, 256, 1000, 10_000, 100_000)
RATIOS = (1.0, 2.0, 4.0, 10.0, 50.0, 100.0)
RANKS_PER_HOST = (1, 2, 4, 8)
FUSIONS_MIB = (1.0, 5.0, 25.0, 64.0, 128.0)
CYCLES_MS = (1.0, 5.0, 20.0)
# Defaults for a layer log: the workers and links of the paper.
LOG_WORKERS, LOG_LINKS = (16, 32, 64), (1.0, 10.0, 25.0, 40.0, 100.0)
SWEEPS = ("workers", "link_gbps", "compression", "ranks_per_host", "fusion_mib", "cycle_ms")

AnswerTable = tuple[str, tuple[Answer, ...]]


def _plan(word: str | None) -> Plan | None:
    return {"ddp": Plan.ddp(), "horovod": Plan.horovod(), PAPER: Plan.paper2020()}.get(word or "")


def _recorded(args: argparse.Namespace, one: Trace) -> Plan | None:
    """Return the buckets of a run of one rank; None if it has none. Raises ValueError if they were requested."""
    try:
        return Plan.of(one)
    except ValueError as error:
        if args.plan == "recorded":
            raise ValueError(f"--plan recorded: {error}") from error
        return None


def _copy_byte_ns(args: argparse.Namespace, tensors: Sequence[Parameter]) -> float | None:
    """Return the ns per copied byte of these tensors, from the given table; None without a table."""
    if args.copy_table is None:
        return None
    return copy_cost_from_table(as_cost(layerlog.read_table(args.copy_table)), [tensor.bytes for tensor in tensors])


def _alone(args: argparse.Namespace, one: Trace, table: Table | None) -> Job:
    """Return a run of one rank: its costs are those of the arguments."""
    copies = _copy_byte_ns(args, one.parameters)
    cost = Cost(algorithm=args.algorithm or "ring", add=0.0 if table is None else table, copy_byte_ns=copies or 0.0)
    return questions.job(one, plan=_plan(args.plan) or _recorded(args, one) or Plan.horovod(), cost=cost)


# Options about what a run of several ranks records.
OF_A_RUN = ("transport", "this_link_gbps")


def _check_of_a_run(args: argparse.Namespace, source: Source) -> None:
    """Raise ValueError for an option without a meaning for this input."""
    if args.step_s is not None and source.trace is not None:
        raise ValueError(f"--step-s: {source.path} is a run and has its own step: the option is for a layer log")
    if source.trace is not None and source.trace.size > 1:
        return
    for name in OF_A_RUN:
        if getattr(args, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option}: {source.path} records no network: the option is for a run of several ranks")


def make_job(args: argparse.Namespace, source: Source) -> Job:
    """Return the run as recorded, or the log as a run of one rank, ready for questions."""
    _check_of_a_run(args, source)
    if source.trace is None or source.findings is None or source.trace.size == 1:
        table = None if args.add_table is None else as_cost(layerlog.read_table(args.add_table))
        return _alone(args, source.trace or layerlog.to_trace(layer_log(source, args.step_s)), table)
    transport, copies = args.transport or source.findings.base, _copy_byte_ns(args, source.trace.parameters)
    try:
        return questions.job(source.findings.trace, transport, copy_byte_ns=copies)
    except ValueError as error:
        raise ValueError(f"{source.path}: {error}") from error


def with_choices(args: argparse.Namespace, recorded: Job) -> tuple[Job, str]:
    """Return a run with the plan, the algorithm and the additions of the arguments, and their names; "": none."""
    made, names = recorded, []
    plan = _plan(args.plan)
    if plan is not None:
        made = replace(made, plan=replace(plan, in_flight=recorded.plan.in_flight))
        names.append(f"the plan {args.plan}")
    if args.algorithm is not None and args.algorithm != made.cost.algorithm:
        note = f"a cost fitted to {made.cost.algorithm} is used for {args.algorithm}"
        made = replace(made, cost=replace(made.cost, algorithm=args.algorithm), notes=(*made.notes, note))
        names.append(f"the algorithm {args.algorithm}")
    if args.add_table is not None:
        add = as_cost(layerlog.read_table(args.add_table))
        made = replace(made, cost=replace(made.cost, add=add))
        names.append("additions from the table")
    return made, " and ".join(names)


def link_bps(args: argparse.Namespace, source: Source, job: Job) -> float | None:
    """Return the speed of the link that the job's transport uses; None if it is not known, or disproved by the run."""
    if args.this_link_gbps is not None:
        return float(args.this_link_gbps) * 1e9
    if job.fit is None or source.findings is None or source.findings.link_disproved:
        return None
    found = source.findings
    return link_rate(found.trace, job.fit.transport, found.achieved.get(job.fit.transport))[0]


def codec(args: argparse.Namespace) -> Codec:
    """Return the cost per byte of encoding and decoding."""
    return Codec() if args.codec_gbytes is None else Codec(1 / args.codec_gbytes, 1 / args.codec_gbytes)


def _this_job(recorded: Job, job: Job, choices: str, nominal: float | None) -> AnswerTable:
    as_it_was = questions.answer(recorded, sweeps.now(recorded))
    chosen = [questions.answer(job, sweeps.chosen(job, choices))] if choices else []
    settings = [*sweeps.achievable(job), *([sweeps.full_use(job, nominal)] if nominal else [])]
    return "This job", (
        as_it_was,
        *chosen,
        *sweeps.answers(job, settings),
        sweeps.ideal_overlap(job, [as_it_was, *chosen][-1]),
        questions.answer(job, sweeps.free(job)),
    )


def _grid(args: argparse.Namespace, job: Job) -> Iterator[AnswerTable]:
    """Yield the product of workers, links and ratios: one axis, or all those named."""
    log = job.fit is None
    counts = [int(count) for count in args.workers or (LOG_WORKERS if log else (job.workers,))]
    ratios = args.compression or (1.0,)
    speeds = args.link_gbps or (LOG_LINKS if log else ())
    hosts = f", {sweeps.per_host(job.cost)}" if job.cost.ranks_per_host > 1 else ""
    if speeds:
        bps = [gbps * 1e9 for gbps in speeds]
        title = f"Workers, link fully used, compression ratio{hosts}"
        yield title, sweeps.answers(job, sweeps.grid(job, counts, bps, ratios, codec(args)))
        return
    for ratio in ratios:
        at = replace(job, cost=sweeps.compressed(job.cost, ratio, codec(args)))
        title = f"Workers, link at the achieved rate{hosts}" + (f", compression {ratio:g}x" if ratio != 1 else "")
        yield title, sweeps.answers(at, sweeps.workers(at, counts))


def _settings(args: argparse.Namespace, job: Job) -> Iterator[tuple[str, Job]]:
    """Yield the job at each combination of the named workers, links, ratios and ranks per host, and its title.

    Raises ValueError for a layer log without workers or link: it has none of its own.
    """
    if job.fit is None and not (args.workers and args.link_gbps):
        raise ValueError("--fusion-mib and --cycle-ms of a layer log need --workers and --link-gbps")
    named = [getattr(args, name) or (None,) for name in ("workers", "link_gbps", "compression", "ranks_per_host")]
    for count, gbps, ratio, ranks in product(*named):
        at, words = job, []
        if count is not None:
            at = replace(at, workers=int(count))
            words.append(f"{at.workers} workers")
        if gbps is not None:
            at = replace(at, cost=sweeps.with_link(at.cost, gbps * 1e9))
            words.append(f"{gbps:g} Gbit/s")
        if ratio is not None:
            at = replace(at, cost=sweeps.compressed(at.cost, ratio, codec(args)))
            words.append(f"compression {ratio:g}x")
        if ranks is not None:
            at = sweeps.with_ranks_per_host(at, int(ranks), args.algorithm)
            words.append(sweeps.per_host(at.cost))
        yield "".join(f", {word}" for word in words), at


def _fitted_sweeps(args: argparse.Namespace, job: Job) -> Iterator[AnswerTable]:
    """Yield a run's default sweeps of links, workers and ratios, one at a time."""
    yield "Other links, fully used", sweeps.answers(job, sweeps.links(job, [gbps * 1e9 for gbps in LINKS]))
    yield "Other numbers of workers, link at the achieved rate", sweeps.answers(job, sweeps.workers(job, WORKERS))
    yield "Compression, link at the achieved rate", sweeps.answers(job, sweeps.compression(job, RATIOS, codec(args)))


def _hosts(job: Job, counts: Sequence[float], algorithm: str | None) -> Iterator[AnswerTable]:
    if counts and max(job.workers, *counts) > 1:
        many = replace(job, workers=max(job.workers, int(max(counts))))
        title = f"Ranks per host, {many.workers} workers"
        yield title, sweeps.answers(many, sweeps.ranks_per_host(many, [int(count) for count in counts], algorithm))


def _fusion(job: Job, sizes_mib: Sequence[float], cycles_ms: Sequence[float], where: str = "") -> Iterator[AnswerTable]:
    if sizes_mib:
        sizes = [round(mib * (1 << 20)) for mib in sizes_mib]
        yield f"DDP bucket size{where}", sweeps.answers(job, sweeps.fusions(job, sizes))
    if cycles_ms:
        cycles = [round(cycle_ms * 1e6) for cycle_ms in cycles_ms]
        yield f"Horovod cycle, 64 MiB fusion buffer{where}", sweeps.answers(job, sweeps.cycles(job, cycles))


def _others(args: argparse.Namespace, job: Job) -> Iterator[AnswerTable]:
    """Yield the requested sweeps of single values; for a run without requests, all of them."""
    if job.fit is not None and not any(getattr(args, name) for name in SWEEPS):
        yield from _fitted_sweeps(args, job)
        yield from _hosts(job, RANKS_PER_HOST, args.algorithm)
        yield from _fusion(job, FUSIONS_MIB, CYCLES_MS)
        return
    if not _wants_grid(args, job):
        yield from _hosts(job, args.ranks_per_host or (), args.algorithm)
    if args.fusion_mib or args.cycle_ms:
        for where, at in _settings(args, job):
            yield from _fusion(at, args.fusion_mib or (), args.cycle_ms or (), where)


def _wants_grid(args: argparse.Namespace, job: Job) -> bool:
    """Return whether the product of workers, links and ratios is requested; for a layer log always."""
    return job.fit is None or any(getattr(args, name) for name in ("workers", "link_gbps", "compression"))


def _least_values(args: argparse.Namespace, recorded: Job, job: Job, nominal: float | None) -> Iterator[LeastValue]:
    counts = args.workers or ((job.workers,) if job.fit is not None else LOG_WORKERS)
    for count in counts:
        at = replace(job, workers=int(count))
        if at.workers < 2:
            continue
        yield sweeps.enough_link(at)
        if args.target_scaling is None:
            continue
        link = sweeps.least_link(at, args.target_scaling)
        if job.fit is not None:
            lanes = sweeps.least_lanes(at, args.target_scaling, nominal)
            if at == recorded:
                link, lanes = (sweeps.or_as_recorded(at, one, args.target_scaling, nominal) for one in (link, lanes))
            yield from (link, sweeps.least_compression(at, args.target_scaling, codec(args)), lanes)
            continue
        yield link
        for gbps in args.link_gbps or LOG_LINKS:
            with_link = replace(at, cost=replace(at.cost, link=Link(gbps * 1e9)))
            yield replace(sweeps.least_compression(with_link, args.target_scaling, codec(args)), link_bps=gbps * 1e9)


def _too_slow(args: argparse.Namespace, source: Source, transport: Arm, nominal: float | None) -> list[str]:
    """Return a line if the run moved more than the speed of the link."""
    moved = source.findings.achieved.get(transport) if source.findings is not None else None
    if moved is None or nominal is None or source.findings is None:
        return []
    given, active_bps = args.this_link_gbps, between_hosts_bps(source.findings.trace, moved)
    if given is not None and nominal < moved.average_bps:
        return [
            f"--this-link-gbps {given:g}: the run moved {gbit(moved.average_bps)} over the mean step, more than that"
        ]
    if active_bps <= nominal:
        return []
    name = f"this link, {gbit(nominal)}" if given is None else f"--this-link-gbps {given:g}"
    return [
        f"{name}: the run moved {gbit(active_bps)} in transfer, more than that, such as in bursts after a pause: the "
        "answers at full use of the link assume its rate alone"
    ]


def answer_all(args: argparse.Namespace, source: Source) -> Answers:
    """Return all requested answers. Raises OSError, and ValueError for an impossible question."""
    recorded = make_job(args, source)
    job, choices = with_choices(args, recorded) if recorded.fit is not None else (recorded, "")
    nominal = link_bps(args, source, job)
    missing = []
    tables: list[AnswerTable] = []
    changed = changed_at(source.findings.trace) if source.findings is not None else None
    if changed is not None:
        missing.append(f"{changed.words}: the answers are about a mixture of both states")
    if job.fit is not None:
        tables.append(_this_job(recorded, job, choices, nominal))
        if nominal is None:
            missing.append("the speed of this link is not known: pass --this-link-gbps X to predict its full use")
        missing += _too_slow(args, source, job.fit.transport, nominal)
    if args.target_scaling is not None and args.codec_gbytes is None:
        missing.append("encoding and decoding are assumed to take no time: pass --codec-gbytes X to include them")
    jobs = [job]
    if _wants_grid(args, job):
        if args.ranks_per_host:
            jobs = [sweeps.with_ranks_per_host(job, int(count), args.algorithm) for count in args.ranks_per_host]
        tables += [table for one in jobs for table in _grid(args, one)]
    tables += _others(args, job)
    least_values = [one for at in jobs for one in _least_values(args, recorded, at, nominal)]
    return Answers(job, tuple(tables), tuple(least_values), tuple(missing))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _model(answers: Answers) -> str:
    return answers.job.trace.model or answers.job.trace.id


def _measured_row(answers: Answers) -> Iterator[dict[str, Any]]:
    """Yield the row of the measured step."""
    was = answers.job.measured_ns
    if was is not None:
        ends = {"step_s": was.value / 1e9, "step_low_s": was.low / 1e9, "step_high_s": was.high / 1e9}
        labels = {
            "model": _model(answers),
            "workers": answers.job.workers,
            "question": "measured",
            "label": questions.MEASURED,
        }
        yield labels | ends | {"transport": answers.job.transport}


def _row(answers: Answers, answer: Answer) -> dict[str, Any]:
    setting = answer.setting
    extra = {
        "question": setting.question,
        "setting": setting.title,
        "label": answer.label,
        "ranks_per_host": setting.cost.ranks_per_host,
        "lanes": setting.cost.link.lanes,
        "algorithm": setting.cost.algorithm,
        "plan": setting.plan.rule,
        "notes": list(answer.notes),
    }
    if answer.step_s is None or answer.scaling is None:
        return {"model": _model(answers), "workers": setting.workers, "refused": answer.refused, **extra}
    core = questions.prediction(answers.job, answer)
    ends = {
        "step_low_s": answer.step_s.low if answer.interval else None,
        "step_high_s": answer.step_s.high if answer.interval else None,
        "scaling_low": answer.scaling.low if answer.interval else None,
        "scaling_high": answer.scaling.high if answer.interval else None,
    }
    return asdict(core) | {"link_bps": _finite(core.link_bps)} | ends | extra


def _least_row(answers: Answers, one: LeastValue) -> dict[str, Any]:
    known = None if one.value is None else one.value
    return {
        "model": _model(answers),
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


def rows(answers: Answers) -> list[dict[str, Any]]:
    """Return all answers as rows for JSON; an unknown end of an interval is null."""
    answered = [_row(answers, one) for _, own in answers.tables for one in own]
    return [*_measured_row(answers), *answered, *(_least_row(answers, one) for one in answers.least_values)]


# The command, and the answers of the 2020 simulator.

SUCCESS = 0
# Defaults of the paper's own three programs.
PAPER_WORKERS, PAPER_LINKS_GBPS = (16, 32, 64), (1.0, 10.0, 25.0, 40.0, 100.0)
PAPER_RATIOS = (1.0, 2.0, 5.0, 10.0, 50.0, 100.0)
# Arguments that the 2020 simulator does not have.
NOT_IN_COMPAT = (
    "target_scaling",
    "ranks_per_host",
    "fusion_mib",
    "cycle_ms",
    "plan",
    "algorithm",
    "codec_gbytes",
    "copy_table",
    *OF_A_RUN,
)


def _compat(args: argparse.Namespace, source: Source) -> tuple[compat2020.Prediction, ...]:
    if args.add_table is None:
        raise ValueError(f"--compat {PAPER} needs --add-table FILE: a line bytes,seconds for each vector addition")
    for name in NOT_IN_COMPAT:
        if getattr(args, name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} cannot be combined with --compat: the 2020 simulator does not have it"
            )
    table = layerlog.read_table(args.add_table)
    log = layer_log(source, args.step_s)
    grid = compat2020.Grid(
        tuple(int(count) for count in args.workers or PAPER_WORKERS),
        tuple(gbps * 1e9 for gbps in args.link_gbps or PAPER_LINKS_GBPS),
        args.compression or PAPER_RATIOS,
        args.slowdown or compat2020.SLOWDOWN,
    )
    return compat2020.sweep(log, table, log.batch_s or 0.0, grid)


def _put(path: Path | None, rows: Sequence[dict[str, Any]], show: Callable[[], None]) -> None:
    """Write all rows atomically, if to a file, and show the answers."""
    if path is not None:
        write_text(path, "[\n" + ",\n".join(json.dumps(row, allow_nan=False) for row in rows) + "\n]\n")
    show()


def _answer(args: argparse.Namespace) -> Callable[[], None]:
    """Return what writes and shows the answers. Raises OSError and ValueError for bad input."""
    target = None
    if args.json is not None:
        tables = (table for table in (args.add_table, args.copy_table) if table)
        target = check_file("--json", args.json, (args.input, *tables))
    source = load(Path(args.input))
    if args.compat is not None:
        cells = _compat(args, source)
        lines = [asdict(cell) for cell in cells]
        return lambda: _put(target, lines, lambda: report.show_grid(cells, "the 2020 paper's simulator"))
    if args.slowdown is not None:
        raise ValueError(f"--slowdown {args.slowdown:g} needs --compat {PAPER}")
    answers = answer_all(args, source)
    return lambda: _put(target, rows(answers), lambda: report.show(answers))


def main(argv: Sequence[str]) -> int:
    """Run the command; returns 2 for bad input, and then writes nothing. Raises OSError if the output fails."""
    args = parser().parse_args(argv)
    try:
        put = _answer(args)
    except FileNotFoundError as error:
        message = f"no such file or folder: {error.filename}" if error.filename else str(error)
        sys.stderr.write(f"netbottleneck what-if: {message}\n")
    except IsADirectoryError as error:
        sys.stderr.write(f"netbottleneck what-if: is a folder, not a file: {error.filename}\n")
    except OSError as error:
        sys.stderr.write(f"netbottleneck what-if: {error.strerror or error}: {error.filename or args.input}\n")
    except ValueError as error:
        sys.stderr.write(f"netbottleneck what-if: {' '.join(str(error).split())}\n")
    else:
        put()
        return SUCCESS
    return BAD_INPUT
