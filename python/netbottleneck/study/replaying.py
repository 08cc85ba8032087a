"""`netbottleneck replay`: replay a backward pass, or a model's tensors, over real transports and simulated links."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from netbottleneck.analysis.intervals import WARMUP_STEPS
from netbottleneck.bench import models
from netbottleneck.lab import Lab, LabError, LinkSpec, parse_lab
from netbottleneck.report import Run
from netbottleneck.study.evidence.facts import Sent, sent
from netbottleneck.study.ranks import JobError, Reporter, described_network, run_in_lab
from netbottleneck.study.spec import MOST_RANKS
from netbottleneck.study.task import PLAY, Task, write_schedule
from netbottleneck.trace import layer_log
from netbottleneck.trace import model as tr
from netbottleneck.trace.files import check_folder, write_text
from netbottleneck.trace.transports import STUDIED
from netbottleneck.units import gbit, ms, percent
from netbottleneck.whatif.plan import BUCKET_BYTES, FIRST_BYTES, Plan, ReplaySchedule, replay_schedule

FINE, FAILED, USAGE = 0, 1, 2
VERSION = 1
LAYER_LOGS = (".log", ".csv", ".txt")
SENT_UNKNOWN = "not known: no counter, or blocks short for its readings"
LEAST_BLOCK = WARMUP_STEPS + 1


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"netbottleneck replay: {message}\n")


def load_trace(name: str, compute_ms: Sequence[float] | None) -> tr.Trace:
    """Return the trace to replay: from a run folder, a trace, a layer log, or a model by name (which needs torch).

    Raises ValueError for an unknown or invalid input, FileNotFoundError for a missing file.
    """
    path = Path(name)
    if name in models.NAMES and not path.exists():
        if not compute_ms:
            raise ValueError(f"{name} needs its compute times: pass --compute-ms FORWARD BACKWARD")
        from netbottleneck.bench.models import passes

        return passes.modelled(name, *compute_ms)
    if compute_ms:
        raise ValueError("--compute-ms applies only to a model by name: use --stretch to scale recorded times")
    if path.is_file() and path.suffix in LAYER_LOGS:
        return layer_log.to_trace(layer_log.read(path))
    if not path.exists():
        raise ValueError(f"{name} is not a run, a trace, a layer log or a model ({', '.join(models.NAMES)})")
    return Run(path).trace


def chosen_plan(trace: tr.Trace, args: argparse.Namespace) -> Plan:
    """Return the plan that the command line requests. Raises ValueError if the trace does not record its own."""
    return Plan.of(trace) if args.plan == "recorded" else Plan.ddp(args.bucket_bytes, args.first_bytes)


def main(argv: Sequence[str]) -> int:
    """Run the command line. Exit codes: 0 success, 1 a rank failed or no lab, 2 bad input (nothing is written)."""
    args = _arguments().parse_args(argv)
    args.command = list(argv)
    folder = Path(args.directory).absolute()
    try:
        if folder.exists():
            raise ValueError(f"{folder} already exists: pass a new folder as --directory")
        check_folder("--directory", folder)
        link = parse_lab(args.link)
        trace = load_trace(args.input, args.compute_ms)
        schedule = replay_schedule(trace, chosen_plan(trace, args), scale=args.scale, stretch=args.stretch)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"netbottleneck replay: {error}\n")
        return USAGE
    reporter = Reporter()
    try:
        return _replay(args, folder, link, schedule, reporter)
    except (JobError, LabError) as error:
        reporter.done()
        sys.stderr.write(f"netbottleneck replay: {error}\n")
        return FAILED


def _replay(
    args: argparse.Namespace, folder: Path, link: LinkSpec, schedule: ReplaySchedule, reporter: Reporter
) -> int:
    file = folder / "schedule.json"
    write_schedule(file, schedule)
    reporter.message(
        f"{schedule.name}: {len(schedule.tensors)} gradients, {schedule.bytes / 1e6:.1f} MB in {len(schedule.buckets)} "
        f"operations; compute is a {args.compute} of {ms(schedule.compute_ns)} ({schedule.note})"
    )
    with Lab(args.ranks, link) as lab:
        with reporter.progress(f"{link}: measuring the actual rates"):
            seen = lab.verify(0.5)
        network = described_network(lab.how, lab.caps, seen)
        unlike = [f"{lab.how}: {lab.why}"] if lab.why else []
        unlike += [] if seen["ok"] else [f"{link}: the measured rates are not the requested ones: see run/run.json"]
        for why in unlike:
            reporter.message(f"{why}.")
        task = Task(
            PLAY,
            args.transport,
            str(folder / "run"),
            block_steps=args.block_steps,
            rounds=args.rounds,
            alone=0,
            compute=args.compute,
            model=f"{schedule.name}, replayed",
            network=network,
            notes=(f"replayed: compute is a {args.compute}; {schedule.note}", *unlike),
            schedule=str(file),
        )
        with reporter.progress(f"{link}: starting {lab.size} ranks") as on_progress:
            # The ranks meet in a folder: a launcher's variables would select torch's store.
            meet = {"NETBOTTLENECK_RENDEZVOUS": str(folder / "meeting")}
            (outcome,) = run_in_lab(lab, [task], on_progress, env=meet)
    run = Run(outcome.folder)
    run.write_all()
    bytes_sent = sent(run)
    for line in lines(run, bytes_sent, str(link)):
        reporter.message(line)
    document = {
        "version": VERSION,
        "command": ["netbottleneck", "replay", *args.command],
        "folder": outcome.folder,
        "equal_on_all_ranks": outcome.equal,
        "steps": run.summary["steps"],
        "split": run.summary["split"],
        "sent": [{**asdict(one), "interface_over_model": one.ratio} for one in bytes_sent],
    }
    write_text(folder / "replay.json", json.dumps(document, indent=1) + "\n")
    reporter.message(f"Written: {folder / 'replay.json'}, and a report in {outcome.folder}")
    if outcome.equal is None:
        reporter.message("The sums of the ranks were not compared: no arm reduces them.")
    if outcome.equal is False:
        sys.stderr.write("netbottleneck replay: the ranks hold different sums\n")
        return FAILED
    return FINE


def lines(run: Run, bytes_sent: Sequence[Sent], link: str) -> list[str]:
    """Return the result as text: for each transport, the lines of rank 0."""
    output = []
    for one in bytes_sent:
        if one.rank:
            continue
        time = run.findings.times[one.transport]
        parts = run.findings.parts.get(one.transport)
        achieved = run.findings.achieved.get(one.transport)
        moved = (
            f", moved at {gbit(achieved.active_bps)} in transfer ({gbit(achieved.p10_bps)} to "
            f"{gbit(achieved.p90_bps)}), {gbit(achieved.average_bps)} over the step ({achieved.steps} steps)"
            if achieved
            else ""
        )
        exposed = f", {ms(parts.exposed_ns)} of it exposed (mean of {parts.steps} steps)" if parts else ""
        output.append(
            f"{link}, {one.transport}: step {ms(time.median_ns)}, {ms(time.p10_ns)} to {ms(time.p90_ns)} in "
            f"{time.steps} steps{exposed}{moved} (measured)"
        )
        if one.model is not None:
            by = ", ".join(one.algorithms)
            seen = [f"{what} {value / 1e6:.2f}" for what, value in (("engine", one.engine),) if value is not None]
            if one.interface is not None and one.ratio is not None:
                seen.append(f"interface {one.interface / 1e6:.2f}, {percent(one.ratio - 1, digits=2, signed=True)}")
            output.append(
                f"  sent by rank 0, MB: model ({by}) {one.model / 1e6:.2f}; {'; '.join(seen) or SENT_UNKNOWN}"
            )
    return output


def _factor(text: str) -> float:
    """Parse a number, or a fraction such as 1/8."""
    above, _, below = text.partition("/")
    try:
        return float(above) / float(below or 1)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number or a fraction") from None


def _listed(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if len(set(names)) != len(names) or not set(names) <= set(STUDIED):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a list of names from {', '.join(STUDIED)}, each once")
    return names


def _above_0(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if not 0 < value < 1 << 40:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number above 0")
    return value


def _ranks(text: str) -> int:
    value = _above_0(text)
    if value > MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r}: must be at most {MOST_RANKS}")
    return value


def _block(text: str) -> int:
    value = _above_0(text)
    if value < LEAST_BLOCK:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be at least {LEAST_BLOCK}: a block's first step is not counted"
        )
    return value


def _arguments() -> argparse.ArgumentParser:
    parser = _Parser(prog="netbottleneck replay", description=__doc__)
    add = parser.add_argument
    add("input", metavar="INPUT", help="a run folder, a trace (*.jsonl.gz), a layer log (*.bk.log), or a model's name")
    add("--transport", type=_listed, default=("stock", "tcp"), help="arms that take turns; default: stock,tcp")
    add("--ranks", type=_ranks, default=2, help="ranks, each on its own simulated host (2)")
    add(
        "--link", default="2gbit/500mbit", help="caps of the simulated links, LINK[/FLOW]; none: no cap (2gbit/500mbit)"
    )
    add("--plan", choices=("ddp", "recorded"), default="ddp", help="how gradients are fused (ddp)")
    add("--bucket-bytes", type=_above_0, default=BUCKET_BYTES, help="bucket size of --plan ddp")
    add("--first-bytes", type=_above_0, default=FIRST_BYTES, help="size of the first bucket of --plan ddp")
    add("--scale", type=_factor, default=1.0, help="factor on bytes, such as 1/8")
    add("--stretch", type=_factor, default=1.0, help="factor on compute times")
    add("--compute", choices=("sleep", "spin"), default="sleep", help="how a rank spends its compute time")
    add("--compute-ms", type=float, nargs=2, metavar=("FORWARD", "BACKWARD"), help="compute times of a model by name")
    add("--block-steps", type=_block, default=5, help="steps per block (5)")
    add("--rounds", type=_above_0, default=3, help="blocks per arm (3)")
    add("--directory", default=f"replay-{time.strftime('%Y%m%d-%H%M%S')}", help="output folder, which must be new")
    return parser
