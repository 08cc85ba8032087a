"""`netbottleneck study`: two ranks train over stock and over many streams, on networks made here, one after another."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from netbottleneck import env, launch
from netbottleneck.lab import Lab, LabError, LinkSpec, parse_lab
from netbottleneck.report import Run
from netbottleneck.study import report
from netbottleneck.study.ranks import JobError, run_in_lab
from netbottleneck.study.report import Found, Study
from netbottleneck.study.task import AS_BEFORE, JOBS, Outcome, Task
from netbottleneck.study.tell import Teller
from netbottleneck.values import TRANSPORTS

NETWORKS = "2gbit/500mbit,2gbit,none"
QUICK = "2gbit/500mbit"
TUNED_STEPS = 10
HOOKED = ("NETBOTTLENECK", "NETBOTTLENECK_TRANSPORT")
FINE, FAILED, USAGE, INCONCLUSIVE = 0, 1, 2, 4
OWN = (
    "To look at a network of your own: `netbottleneck bench --listen` on one host and `netbottleneck bench --connect "
    "HOST` on the other; or `import netbottleneck` in your own training script."
)
MADE = "The links of this study are made here, on this machine"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 fine, 1 failure, 2 usage, 4 inconclusive (with --strict)."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = parsed(words)
        place = launch.detect(env.settings())
        wanted = [parse_lab(text) for text in args.networks]
        missing = _missing(args)
    except ValueError as error:
        sys.stderr.write(f"netbottleneck study: {error}\n")
        return USAGE
    except SystemExit as end:
        return int(end.code or 0)
    if missing:
        sys.stderr.write(f"netbottleneck study: {missing}\n")
        return FAILED
    if place.size > 1:
        _without_hooks(words)
        from netbottleneck.study import here

        return here.main(args, words)
    before = signal.signal(signal.SIGTERM, _terminated)
    study = Study(Path(args.directory).absolute(), time.time_ns(), ["netbottleneck", "study", *words])
    teller = Teller()
    try:
        return _study(study, wanted, args, teller)
    except KeyboardInterrupt as signalled:
        teller.done()
        study.failure = "interrupted"
        teller.say(f"interrupted; what was recorded until then is in {study.folder}")
        study.write()
        return 128 + (signalled.args[0] if signalled.args else signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)


def _without_hooks(words: Sequence[str]) -> None:
    """Begin again without the variables that put hooks into this process: they would measure the study's own models."""
    if any(os.environ.get(name) for name in HOOKED):
        kept = {name: value for name, value in os.environ.items() if name not in HOOKED}
        os.execve(sys.executable, [sys.executable, "-m", "netbottleneck.study", *words], kept)


def _terminated(signum: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt(signum)


def _study(study: Study, networks: Sequence[LinkSpec], args: argparse.Namespace, teller: Teller) -> int:
    teller.say(f"{MADE}, and capped as named. {OWN}")
    same = next((spec for spec in networks if not spec.capped), networks[-1])
    try:
        for spec in networks:
            with Lab(args.ranks, spec) as lab:
                _network(study, lab, args, teller, check=spec == same)
    except (JobError, LabError) as error:
        teller.done()
        study.failure = str(error)
        study.write()
        sys.stderr.write(f"netbottleneck study: {error}\n")
        return FAILED
    path = study.write()
    report.show(study, teller.console)
    teller.say(f"Written: {path}, and a report in each run's folder beside it.")
    return verdict_code(study, args.strict)


def verdict_code(study: Study, strict: bool) -> int:
    """Return the exit code for what was found: weights that differ are a failure."""
    if any(not found.outcome.equal or found.same_as_stock is False for found in study.found):
        return FAILED
    unsure = any(found.run.verdict.code == "INCONCLUSIVE" for found in study.found)
    return INCONCLUSIVE if strict and unsure else FINE


def _network(study: Study, lab: Lab, args: argparse.Namespace, teller: Teller, *, check: bool) -> None:
    """Run all jobs on one network."""
    text = str(lab.spec)
    with teller.working(f"{text}: measuring what is in force"):
        seen = lab.verify(0.5 if args.quick else 1.0)
    teller.say(report.measured_line(text, seen))
    if lab.way == "loopback":
        teller.say(f"No namespaces here: {lab.why}.")
    network = {"how": lab.how, "link_bps": lab.spec.link_bps, "flow_bps": list(lab.spec.flow_bps), "verified": seen}
    study.networks[text] = network
    tasks = [make_task(job, args, lab.spec, study.folder / slug(text), network) for job in args.jobs]
    alone = _over_stock_alone(tasks[0]) if check and tasks[0].job == "digits" else None
    asked = [tasks[0], *([alone] if alone else []), *tasks[1:]]
    outcomes = {task.folder: outcome for task, outcome in zip(asked, _followed(lab, asked, teller), strict=True)}
    tuned = _tuned(lab, tasks, args, teller)
    for task in tasks:
        run = Run(outcomes[task.folder].folder)
        run.write_all()
        found = Found(text, task.job, run, outcomes[task.folder])
        found.again = outcomes[alone.folder] if alone and task is tasks[0] else None
        found.tuned = tuned if task.job == "replay" else None
        study.found.append(found)
        for line in report.answer(found):
            teller.say(f"{text}, {task.job}: {line}.")
    study.write()


def _followed(lab: Lab, tasks: Sequence[Task], teller: Teller, extra: Mapping[str, str] | None = None) -> list[Outcome]:
    with teller.working(f"{lab.spec}: starting {lab.size} ranks") as follow:
        return run_in_lab(lab, tasks, follow, env=extra)


def _over_stock_alone(task: Task) -> Task:
    """The same training over stock, for as many steps."""
    return replace(task, arms=("stock",), folder=f"{task.folder}-stock", alone=0, exact_steps=AS_BEFORE)


def _tuned(lab: Lab, tasks: Sequence[Task], args: argparse.Namespace, teller: Teller) -> Run | None:
    """Stock as a user may tune it: four connections by naming the interface four times. Not paired with the rest."""
    task = next((task for task in tasks if task.job == "replay" and "stock" in task.arms), None)
    if task is None or not lab.spec.flow_bps or args.quick:
        return None
    alone = replace(task, arms=("stock",), folder=f"{task.folder}-stock-x4", alone=0, exact_steps=TUNED_STEPS)
    (outcome,) = _followed(lab, [alone], teller, {"GLOO_SOCKET_IFNAME": ",".join([lab.interface] * 4)})
    run = Run(outcome.folder)
    run.write_all()
    return run


def slug(text: str) -> str:
    """Return a network's name as part of a path: "2gbit/500mbit" is 2gbit-500mbit."""
    return text.replace("/", "-").replace(",", "-")


def make_task(job: str, args: argparse.Namespace, spec: LinkSpec, folder: Path, network: dict[str, Any] | None) -> Task:
    """Return a job for one network: as many steps as fit into its share of the ten minutes."""
    if job == "digits":
        steps, rounds, alone = 10, 3 if args.quick else 6, 10
    else:
        steps, rounds, alone = (3 if spec.flow_bps else 4), 5, 6
        if args.quick:
            steps, rounds, alone = 4, 2, 3
    return Task(
        job,
        ("bare", *args.transports),
        str(folder / job),
        block_steps=args.block_steps or steps,
        rounds=args.rounds or rounds,
        alone=alone,
        compute=args.compute,
        compute_ms=tuple(args.compute_ms),
        model=args.model,
        provider=args.provider,
        network=network,
        notes=tuple(args.notes),
    )


def _missing(args: argparse.Namespace) -> str:
    """Say what is not there that the jobs need; leave ofi for tcp where there is no libfabric and nobody named it."""
    needs = {"torch": "torch", "sklearn": "scikit-learn"} if "digits" in args.jobs else {"torch": "torch"}
    absent = [package for module, package in needs.items() if importlib.util.find_spec(module) is None]
    if absent:
        return f"{' and '.join(absent)} not installed: pip install 'netbottleneck[study]'"
    if args.transports is None:
        args.transports = ("stock", "ofi")
        why = _no_ofi(args)
        if why:
            args.transports = ("stock", "tcp")
            args.notes = [f"tcp in ofi's place: {why}"]
    return ""


def _no_ofi(args: argparse.Namespace) -> str:
    core = launch.core()
    if not core.HAVE_OFI:
        return "ofi was left out of this build (install libfabric-dev)"
    try:
        core.libfabric(env.settings({"provider": args.provider}).library)
    except OSError as error:
        return str(error)
    return ""


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="netbottleneck study", description=__doc__, epilog=OWN)
    add = parser.add_argument
    add("--quick", action="store_true", help="one network, fewer steps: about a minute")
    add("--ranks", type=int, default=2, help="ranks, each on a simulated host of its own")
    add("--networks", type=lambda text: text.split(","), help=f"LINK[/FLOW], comma-separated; default: {NETWORKS}")
    add("--transports", type=_listed(TRANSPORTS), help="arms beside the untouched script; default: stock,ofi")
    add("--jobs", type=_listed(JOBS), default=JOBS, help=f"some of {','.join(JOBS)}")
    add("--compute", choices=("sleep", "spin"), default="sleep", help="how the replayed model computes")
    add("--compute-ms", type=float, nargs=2, default=(133.0, 267.0), metavar=("FORWARD", "BACKWARD"))
    add("--model", default="resnet50", help="the model whose gradients are replayed")
    add("--block-steps", type=int, default=0, help="steps of a block; default: by job and network")
    add("--rounds", type=int, default=0, help="how often each arm has its turn; default: by job and network")
    add("--directory", default=f"study-{time.strftime('%Y%m%d-%H%M%S')}", help="where run folders go")
    add("--provider", help="libfabric provider; default: the best there is")
    add("--strict", action="store_true", help="exit code 4 where a verdict is INCONCLUSIVE")
    return parser


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a command line. Raises SystemExit as argparse does."""
    args = _arguments().parse_args(words)
    args.networks = args.networks or (QUICK if args.quick else NETWORKS).split(",")
    args.notes = []
    return args


def _listed(allowed: Sequence[str]) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(","))
        if len(set(names)) != len(names) or not set(names) <= set(allowed):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of {', '.join(allowed)}")
        return names

    return parse


if __name__ == "__main__":
    sys.exit(main())
