"""`netbottleneck replay`: a recorded backward pass, or a model's tensors, over real transports on links made here."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from netbottleneck.bench import models
from netbottleneck.bench.replay import Score, score
from netbottleneck.config import TRANSPORTS
from netbottleneck.lab import Lab, LabError, LinkSpec, parse_lab
from netbottleneck.report import Run
from netbottleneck.study import playing
from netbottleneck.study.evidence.sent import Sent, sent
from netbottleneck.study.ranks import JobError, run_in_lab
from netbottleneck.study.task import PLAY, Task
from netbottleneck.study.tell import Teller
from netbottleneck.trace import layer_log
from netbottleneck.trace import model as tr
from netbottleneck.units import gbit, ms
from netbottleneck.whatif.plan import BUCKET_BYTES, FIRST_BYTES, Plan

FINE, FAILED, USAGE = 0, 1, 2
VERSION = 1
LAYER_LOGS = (".log", ".csv", ".txt")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"netbottleneck replay: {message}\n")


def source(words: str, compute_ms: Sequence[float] | None) -> tr.Trace:
    """Return what is to be played: of a run folder, a trace, a layer log, or a model by name (which needs torch).

    Raises ValueError for what is none of these, FileNotFoundError for what is not there.
    """
    path = Path(words)
    if words in models.NAMES and not path.exists():
        if not compute_ms:
            raise ValueError(f"how long does {words} compute? --compute-ms FORWARD BACKWARD says it")
        from netbottleneck.bench.models import passes

        return passes.modelled(words, *compute_ms)
    if compute_ms:
        raise ValueError("--compute-ms is for a model's name; --stretch changes the times that were recorded")
    if path.is_file() and path.suffix in LAYER_LOGS:
        return layer_log.to_trace(layer_log.read(path))
    if not path.exists():
        raise ValueError(f"{words} is no run, trace or layer log, and no model: {', '.join(models.NAMES)}")
    return Run(path).trace


def chosen_plan(trace: tr.Trace, args: argparse.Namespace) -> Plan:
    """Return the plan that the command line asks for. Raises ValueError where the trace does not know its own."""
    return Plan.of(trace) if args.plan == "recorded" else Plan.ddp(args.bucket_bytes, args.first_bytes)


def main(argv: Sequence[str]) -> int:
    """Run the command line. Exit codes: 0 fine, 1 a rank failed or there is no lab, 2 bad input: nothing written."""
    args = _arguments().parse_args(argv)
    args.words = list(argv)
    folder = Path(args.directory).absolute()
    try:
        if folder.exists():
            raise ValueError(f"{folder} is there already: name a new folder by --directory")
        link = parse_lab(args.link)
        trace = source(args.input, args.compute_ms)
        played = score(trace, chosen_plan(trace, args), scale=args.scale, stretch=args.stretch)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"netbottleneck replay: {error}\n")
        return USAGE
    teller = Teller()
    try:
        return _replay(args, folder, link, played, teller)
    except (JobError, LabError) as error:
        teller.done()
        sys.stderr.write(f"netbottleneck replay: {error}\n")
        return FAILED


def _replay(args: argparse.Namespace, folder: Path, link: LinkSpec, played: Score, teller: Teller) -> int:
    file = folder / "score.json"
    playing.write(file, played)
    teller.say(
        f"{played.name}: {len(played.tensors)} gradients, {played.bytes / 1e6:.1f} MB in {len(played.buckets)} "
        f"operations; compute is a {args.compute} of {ms(played.ready[-1][1] + played.tail_ns)} ({played.note})"
    )
    with Lab(args.ranks, link) as lab:
        with teller.working(f"{link}: measuring what is in force"):
            seen = lab.verify(0.5)
        network = {"how": lab.how, "link_bps": link.link_bps, "flow_bps": list(link.flow_bps), "verified": seen}
        task = Task(
            PLAY,
            args.transport,
            str(folder / "run"),
            block_steps=args.block_steps,
            rounds=args.rounds,
            alone=0,
            compute=args.compute,
            model=f"{played.name}, replayed",
            network=network,
            notes=(f"replayed: compute is a {args.compute}; {played.note}",),
            score=str(file),
        )
        with teller.working(f"{link}: starting {lab.size} ranks") as follow:
            # Their meeting place is a folder: a launcher's variables would lead to torch's store.
            meet = {"NETBOTTLENECK_RENDEZVOUS": str(folder / "meeting")}
            (outcome,) = run_in_lab(lab, [task], follow, env=meet)
    run = Run(outcome.folder)
    run.write_all()
    bytes_sent = sent(run)
    for line in lines(run, bytes_sent, str(link)):
        teller.say(line)
    told = {
        "version": VERSION,
        "command": ["netbottleneck", "replay", *args.words],
        "folder": outcome.folder,
        "equal_on_all_ranks": outcome.equal,
        "steps": run.summary["steps"],
        "split": run.summary["split"],
        "sent": [{**asdict(one), "interface_over_model": one.ratio} for one in bytes_sent],
    }
    (folder / "replay.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    teller.say(f"Written: {folder / 'replay.json'}, and a report in {outcome.folder}")
    if not outcome.equal:
        sys.stderr.write("netbottleneck replay: ranks hold different sums\n")
    return FINE if outcome.equal else FAILED


def lines(run: Run, bytes_sent: Sequence[Sent], link: str) -> list[str]:
    """Return what a person wants to know, a line a transport and rank 0."""
    said = []
    for one in bytes_sent:
        if one.rank:
            continue
        time = run.findings.times[one.transport]
        parts = run.findings.parts.get(one.transport)
        did = run.findings.achieved.get(one.transport)
        moved = f", moved at {gbit(did.active_bps)} in transfer, {gbit(did.average_bps)} over the step" if did else ""
        exposed = f", {ms(parts.exposed_ns)} of it exposed" if parts else ""
        said.append(f"{link}, {one.transport}: step {ms(time.median_ns)}{exposed}{moved} (measured)")
        if one.model is not None:
            by = ", ".join(one.algorithms)
            seen = [f"{what} {value / 1e6:.2f}" for what, value in (("engine", one.engine),) if value is not None]
            if one.interface is not None and one.ratio is not None:
                seen.append(f"interface {one.interface / 1e6:.2f}, {100 * (one.ratio - 1):+.2f} %")
            said.append(f"  sent by rank 0, MB: model ({by}) {one.model / 1e6:.2f}; {'; '.join(seen) or 'not counted'}")
    return said


def _factor(text: str) -> float:
    """A number, or a fraction such as 1/8."""
    above, _, below = text.partition("/")
    try:
        return float(above) / float(below or 1)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{text!r} is no number and no fraction") from None


def _listed(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if len(set(names)) != len(names) or not set(names) <= set(TRANSPORTS):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of {', '.join(TRANSPORTS)}")
    return names


def _above_0(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if not 0 < value < 1 << 40:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number above 0")
    return value


def _arguments() -> argparse.ArgumentParser:
    parser = _Parser(prog="netbottleneck replay", description=__doc__)
    add = parser.add_argument
    add("input", metavar="INPUT", help="a run folder, a trace (*.jsonl.gz), a layer log (*.bk.log), or a model's name")
    add("--transport", type=_listed, default=("stock", "tcp"), help="arms that take turns; default: stock,tcp")
    add("--ranks", type=_above_0, default=2, help="ranks, each on a simulated host of its own (2)")
    add("--link", default="2gbit/500mbit", help="LINK[/FLOW] of the links made here; none: no cap (2gbit/500mbit)")
    add("--plan", choices=("ddp", "recorded"), default="ddp", help="which gradients travel together (ddp)")
    add("--bucket-bytes", type=_above_0, default=BUCKET_BYTES, help="of ddp's buckets")
    add("--first-bytes", type=_above_0, default=FIRST_BYTES, help="of ddp's first bucket")
    add("--scale", type=_factor, default=1.0, help="bytes are multiplied with this: 1/8")
    add("--stretch", type=_factor, default=1.0, help="times of compute are multiplied with this")
    add("--compute", choices=("sleep", "spin"), default="sleep", help="what compute is")
    add("--compute-ms", type=float, nargs=2, metavar=("FORWARD", "BACKWARD"), help="of a model by name")
    add("--block-steps", type=_above_0, default=5, help="steps of a block (5)")
    add("--rounds", type=_above_0, default=3, help="how often each arm has its turn (3)")
    add("--directory", default=f"replay-{time.strftime('%Y%m%d-%H%M%S')}", help="where all files go: a new folder")
    return parser
