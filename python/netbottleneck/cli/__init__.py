"""The command line: `netbottleneck COMMAND …`. Each command imports its modules when it runs.

Exit codes: 0 success, 1 failure, 2 usage (also a run that does not exist or cannot be read), 3 a gate failed, 4
inconclusive (with --strict) or not judged (compare), 130 interrupted by Ctrl-C, 143 a study that was ended by SIGTERM.
`run` ends as its script does under Python."""

from __future__ import annotations

import argparse
import builtins
import contextlib
import importlib.machinery
import json
import math
import os
import runpy
import select
import signal
import sys
import time
import traceback
import types
import zipfile
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from netbottleneck._version import __version__

if TYPE_CHECKING:
    from rich.console import RenderableType

    from netbottleneck.report import Following
    from netbottleneck.report.compare import Comparison

SUCCESS, FAILURE, USAGE, GATE, INCONCLUSIVE = range(5)
INTERRUPTED = 130  # a shell's code for SIGINT


class _BadInput(ValueError):
    """An argument names a file or folder that does not exist, or that is no run or study: a usage error."""


@contextlib.contextmanager
def _as_input() -> Generator[None]:
    """Raise _BadInput for what cannot be read of an input."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise _BadInput(_one_line(error)) from error


def _study(argv: Sequence[str]) -> int:
    from netbottleneck import study

    return int(study.main(list(argv)))


def _bench(argv: Sequence[str]) -> int:
    from netbottleneck.bench import command

    return command.main(argv)


def _replay(argv: Sequence[str]) -> int:
    from netbottleneck.study import replaying

    return replaying.main(argv)


def _calibrate(argv: Sequence[str]) -> int:
    from netbottleneck.cli import calibrate

    return calibrate.main(argv)


def _doctor(argv: Sequence[str]) -> int:
    from netbottleneck.cli import doctor

    return doctor.main(argv)


def _report(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="netbottleneck report", description="Print the report of a recorded run or a study."
    )
    parser.add_argument(
        "run",
        metavar="RUN",
        help="a run folder, a single trace (*.jsonl.gz), a folder with torch.profiler's trace of each rank, a folder "
        "or prefix of the dumps of torch's flight recorder, a study's folder, or its evidence.json",
    )
    parser.add_argument("--html", metavar="FILE", help="write the report as one HTML file")
    parser.add_argument("--json", action="store_true", help="print summary.json instead of the report")
    parser.add_argument("--write", metavar="DIR", help="write every file of the report into this folder")
    parser.add_argument(
        "--export",
        metavar="NAME[=PLACE]",
        action="append",
        default=[],
        help="send the numbers to prometheus (a text file), tensorboard, mlflow, wandb or opentelemetry, or the tables "
        "to parquet (a file for each); PLACE: a file, folder, experiment, project or endpoint",
    )
    parser.add_argument("--strict", action="store_true", help="exit with code 4 if a run's verdict is INCONCLUSIVE")
    args = parser.parse_args(argv)
    _check_targets(parser, (args.run,), args.html, args.write, args.export)
    path = Path(args.run)
    if _is_study(path):
        if args.export:
            parser.error(f"--export {args.export[0]}: takes a run; a study's are in {path}/cells/CELL/run or run/N")
        if args.strict:
            parser.error("--strict: takes a run; netbottleneck study --strict judges the cells of a study")
        return _study_report(path, args)
    from netbottleneck.report import Run
    from netbottleneck.trace.files import write_text

    with _as_input():
        run = Run(args.run)
    if args.json:
        print(json.dumps(run.summary, indent=1))
    else:
        run.show()
    if args.html:
        write_text(args.html, run.html)
    if args.write:
        run.write_all(args.write)
    for name, _, place in (one.partition("=") for one in args.export):
        print(f"Exported to {name}: {run.export(name, place)}", file=sys.stderr)
    return INCONCLUSIVE if args.strict and run.verdict.code == "INCONCLUSIVE" else SUCCESS


def _is_study(path: Path) -> bool:
    """True if a path is a study's folder or facts, False for a run. Raises _BadInput if it does not exist."""
    from netbottleneck.trace import flight_recorder, kineto

    dumps = flight_recorder.dumps(path)
    if not path.exists() and not dumps:
        raise _BadInput(f"{path}: no such file or folder")
    if path.suffix == ".json":
        return not (kineto.is_kineto(path) or dumps)
    return any((path / name).exists() for name in ("evidence.json", "cells"))


def _check_targets(
    parser: argparse.ArgumentParser,
    inputs: Sequence[str],
    html: str | None = None,
    folder: str | None = None,
    exports: Sequence[str] = (),
) -> None:
    """End with a usage error, before any work, if a result could not be written where the options say."""
    from netbottleneck.trace.files import check_file, check_folder, check_no_other_run

    if exports:
        from netbottleneck.report.exporters import EXPORTERS, check_packages

        for name in (one.partition("=")[0] for one in exports):
            if name not in EXPORTERS:
                parser.error(f"--export {name}: name one of {', '.join(EXPORTERS)}")
            check_packages(name)
    try:
        if html:
            check_file("--html", html, inputs)
        if folder:
            check_folder("--write", folder)
            check_no_other_run("--write", folder, inputs[0])
        for name, _, place in (one.partition("=") for one in exports):
            if name == "prometheus" and place:
                check_file(f"--export {name}", place, inputs)
            if name in ("parquet", "tensorboard") and place:
                check_folder(f"--export {name}", place)
    except ValueError as error:
        parser.error(str(error))


def _top(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="netbottleneck top",
        description="Follow a run in progress from its folder, in any process that sees the folder, or show one that "
        "has ended: split of the step, waiting by rank, bandwidth, and the present verdict.",
    )
    parser.add_argument("run", metavar="RUN", help="a run folder (NETBOTTLENECK_DIR)")
    parser.add_argument("--once", action="store_true", help="print one frame and exit")
    parser.add_argument("--refresh", metavar="S", type=float, default=2.0, help="seconds between two frames (2)")
    parser.add_argument(
        "--window", metavar="N", type=int, help="number of last steps that are shown and judged (500); 0: all of them"
    )
    parser.add_argument("--line", action="store_true", help="print one line instead of a frame")
    parser.add_argument(
        "--export",
        metavar="NAME[=PLACE]",
        action="append",
        default=[],
        help="also send the numbers of each frame to prometheus (a text file) or opentelemetry",
    )
    parser.add_argument("--of", metavar="PID", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    from netbottleneck.config import MOST_S

    if not 0 < args.refresh <= MOST_S:
        parser.error(f"--refresh {args.refresh:g}: must be more than 0 and at most {MOST_S} seconds")
    if args.window is not None and args.window < 0:
        parser.error(f"--window {args.window}: must be at least 0")
    for name, _, _ in (one.partition("=") for one in args.export):
        from netbottleneck.report.exporters import EXPORTERS

        live = [name for name, exporter in EXPORTERS.items() if exporter.live]
        if name not in live:
            parser.error(f"--export {name}: name one of {', '.join(live)}; the others take a run that has ended")
    _check_targets(parser, (args.run,), exports=args.export)
    from netbottleneck.report import WINDOW_STEPS, Following

    if not Path(args.run).is_dir():
        raise _BadInput(f"{args.run}: no such folder; give the run folder (NETBOTTLENECK_DIR)")
    if not args.of:
        _check_may_be_followed(Path(args.run))
    following = Following(args.run, WINDOW_STEPS if args.window is None else args.window)
    if args.of:
        return _beside_a_rank(following, args.of, args.refresh)
    return _once(following, args) if args.once else _follow(following, args)


def _check_may_be_followed(folder: Path) -> None:
    """Raise _BadInput for a folder that holds records of another kind than a run's."""
    from netbottleneck.trace import flight_recorder, kineto

    if (folder / "run.json").exists():
        return
    if _is_study(folder):
        raise _BadInput(f"{folder}: a study; give the folder of one of its runs: {folder}/cells/CELL/run or run/N")
    if kineto.files(folder) or flight_recorder.dumps(folder):
        raise _BadInput(f"{folder}: traces or dumps of torch, and no run: use netbottleneck report {folder}")


WAITING = "waiting: "


def _drawn(following: Following, args: argparse.Namespace, exported: set[str]) -> tuple[RenderableType, bool]:
    """Look once and export; return what to show, and True if nothing more will come.

    exported: exporters that have succeeded. If one of them fails later, a line says so; a first failure is raised.
    """
    from rich.text import Text

    from netbottleneck.report import exporters, progress
    from netbottleneck.trace.files import printable

    with _as_input():
        try:
            run = following.look()
        except FileNotFoundError as error:
            if args.once:
                raise
            return Text(f"{WAITING}{error}"), False  # the ranks have not begun
    state = following.about(run)
    if state[0] != "in progress":  # perhaps since the rings were read: their last steps may be missing
        run = following.look()
        state = following.about(run)
    change, ended = following.judge(run), state[0] != "in progress"
    for name, _, place in (one.partition("=") for one in args.export):
        about = {**run.summary, "cause_change": following.changed and following.changed.as_dict()}
        try:
            exporters.export(exporters.numbers(about, run.trace), name, place)
            exported.add(name)
        except RuntimeError as error:
            if name not in exported:
                raise
            state.append(str(error))
    if args.line:
        line = progress.line(run.findings, run.verdict, following.steps, ended)
        told = map(printable, [*([str(change)] if change else []), "; ".join([line, *state[1:]])])
        shown: RenderableType = Text("\n".join(told))
    else:
        lines = [*state, *([str(following.changed)] if following.changed else [])]
        shown = progress.frame(run.findings, run.verdict, run.hosts, lines, following.steps)
    return shown, ended


def _once(following: Following, args: argparse.Namespace) -> int:
    from netbottleneck.report import text

    text.screen().print(_drawn(following, args, set())[0], soft_wrap=args.line)
    return SUCCESS


def _follow(following: Following, args: argparse.Namespace) -> int:
    """Show a frame every `refresh` seconds until the run ends or Ctrl-C: in place on a terminal, else line by line."""
    from rich.live import Live

    from netbottleneck.report import text

    screen = text.screen()
    live = Live(console=screen, screen=True, auto_refresh=False) if screen.is_terminal and not args.line else None
    shown: RenderableType = ""
    waiting = ""
    with live or contextlib.nullcontext(), contextlib.suppress(KeyboardInterrupt):
        ended, exported = False, set[str]()
        while not ended:
            shown, ended = _drawn(following, args, exported)
            if live is not None:
                live.update(shown, refresh=True)
            elif not waiting or str(shown) != waiting:
                screen.print(shown, *([] if args.line else [""]), soft_wrap=args.line)
            waiting = str(shown) if str(shown).startswith(WAITING) else ""  # such a line comes once
            if not ended:
                time.sleep(args.refresh)
    if live is not None:
        screen.print(shown)
    return SUCCESS


# A refresh beside a rank is followed by a pause of at least REST times its processor time. The step time and the packet
# loss are looked at every PEEK_S. For SOON_S after a change, refreshes come as often as that pause allows; once in
# HASTE_EVERY_S, it is HASTY_REST times the processor time then.
REST, HASTY_REST = 20, 5
PEEK_S, SOON_S, HASTE_EVERY_S = 1.0, 30.0, 300.0


def _beside_a_rank(following: Following, rank: int, refresh_s: float) -> int:
    """Print a JSON line for each refresh until stdin closes or the process `rank` ends: see Progress of the session.

    It runs only on cores that nothing else uses: for at most 1 / (REST + 1) of the time, and 1 / (HASTY_REST + 1) for
    SOON_S in HASTE_EVERY_S, after a change of the step time or the packet loss.
    """
    from netbottleneck.report import progress

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    spent_s, shown_s, soon_s, haste_s = time.process_time(), -refresh_s, -SOON_S, -HASTE_EVERY_S
    ends = changed = False
    while os.getppid() == rank and not ends:
        with contextlib.suppress(FileNotFoundError):  # the ranks have not begun
            run = following.look()
            if following.grown and run.trace.steps:
                change, now_s = following.judge(run), time.monotonic()
                if change or now_s - shown_s >= refresh_s:
                    line = progress.line(run.findings, run.verdict, following.steps)
                    took_s, shown_s = time.process_time() - spent_s, now_s
                    print(json.dumps({"line": line, "alarm": str(change or ""), "processor_s": took_s}), flush=True)
        now_s = time.monotonic()
        if changed or not following.settled:
            soon_s = now_s
            haste_s = now_s if now_s - haste_s >= HASTE_EVERY_S else haste_s
        rest_s = (HASTY_REST if now_s - haste_s < SOON_S else REST) * (time.process_time() - spent_s)
        spent_s = time.process_time()  # peeks count in the next rest
        ends, changed = _rest(following, max(rest_s, PEEK_S if now_s - soon_s < SOON_S else refresh_s))
    return SUCCESS


def _rest(following: Following, pause_s: float) -> tuple[bool, bool]:
    """Wait until stdin closes, the run changes (see peek), or for pause_s; return which of the first two it was."""
    until_s = time.monotonic() + pause_s
    while (left_s := until_s - time.monotonic()) > 0:
        if select.select([0], [], [], min(left_s, PEEK_S))[0]:
            return True, False
        if following.peek():
            return False, True
    return False, False


def _study_report(path: Path, args: argparse.Namespace) -> int:
    """Report a study from its facts."""
    from netbottleneck.study.evidence import Evidence
    from netbottleneck.trace.files import write_text

    with _as_input():
        evidence = Evidence.read(path)
    if args.json:
        print(evidence.to_json(), end="")
    else:
        evidence.show()
    if args.html:
        write_text(args.html, evidence.html)
    if args.write:
        evidence.write(args.write)
    return SUCCESS


def _compare(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="netbottleneck compare",
        description="Compare the steps of two runs, or of the same study twice, arm by arm and part by part.",
    )
    what = "a run folder, a single trace (*.jsonl.gz), or a study's folder"
    parser.add_argument("before", metavar="A", help=what)
    parser.add_argument("after", metavar="B", help="the same, to compare with A")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", metavar="FILE", help="write the comparison as one HTML file with pictures")
    parser.add_argument(
        "--max-step-time-regression-pct",
        metavar="X",
        type=float,
        help="exit with code 3 if a step of B is more than X %% longer than in A, and surely longer; else with code 4 "
        "if a transport or cell of A could not be judged, as B does not have it, has too few counted steps, differs in "
        "ranks, hosts, model, gradients or link, or if a run is still in progress",
    )
    args = parser.parse_args(argv)
    percent = args.max_step_time_regression_pct
    if percent is not None and not 0 <= percent < math.inf:
        parser.error(f"--max-step-time-regression-pct {percent:g}: must be at least 0, and finite")
    _check_targets(parser, (args.before, args.after), args.html)
    for name in (args.before, args.after):
        if not Path(name).exists():
            raise _BadInput(f"{name}: no such file or folder")
    from netbottleneck.report import compare
    from netbottleneck.trace.files import write_text

    with _as_input():
        found = compare.compare(args.before, args.after)
    if args.json:
        print(json.dumps(found.as_dict(), indent=1))
    else:
        compare.show(found)
    limit = None if percent is None else percent / 100
    if args.html:
        write_text(args.html, compare.page(found, (args.before, args.after), limit))
    return SUCCESS if limit is None else _gate(found, limit)


def _gate(found: Comparison, limit: float) -> int:
    """Return the exit code of a gate, and name on stderr what it could not judge."""
    unjudged = found.not_judged(limit)
    if unjudged:
        print(f"netbottleneck compare: not judged: {'; '.join(unjudged)}", file=sys.stderr)
    if found.regressions(limit):
        return GATE
    return INCONCLUSIVE if unjudged else SUCCESS


def _what_if(argv: Sequence[str]) -> int:
    from netbottleneck.cli import what_if

    return what_if.main(argv)


def _run(argv: Sequence[str]) -> int:
    arguments = list(argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: netbottleneck run SCRIPT [ARGS…]\n       netbottleneck run -m MODULE [ARGS…]\n")
        print("Run a DDP or Horovod script as `python SCRIPT` does, and measure it: NETBOTTLENECK=1 is set.")
        return SUCCESS if arguments else USAGE
    module = arguments[0] == "-m"
    if module:
        arguments.pop(0)
    if arguments and arguments[0] == "--":
        arguments.pop(0)
    if not arguments or arguments[0].startswith("-"):
        print("netbottleneck run: name a script, or -m and a module", file=sys.stderr)
        return USAGE
    if not module and not Path(arguments[0]).exists():
        raise _BadInput(f"no such script: {arguments[0]}")
    _enable_measurement()
    _run_as_main(module, arguments)
    return SUCCESS


def _enable_measurement() -> None:
    """Set NETBOTTLENECK=1 if it is unset or empty, and install the import hooks as `import netbottleneck` does.

    Children of multiprocessing install them too, as a script that is not changed does not import netbottleneck there.
    """
    if not os.environ.get("NETBOTTLENECK"):
        os.environ["NETBOTTLENECK"] = "1"
    from netbottleneck import config

    if config.settings().enabled:
        from netbottleneck.hooks import imports

        imports.install()
        imports.pass_on()


def _export_place() -> None:
    """Set the variables of Horovod's launcher, if this package replaces Horovod."""
    from netbottleneck import config
    from netbottleneck.hooks import imports
    from netbottleneck.launch import connect

    if imports.stands_in():
        with contextlib.suppress(ValueError):  # raised again when the script starts a job
            connect.export_place(config.settings(), os.environ)


def _run_as_main(module: bool, argv: Sequence[str]) -> None:
    """Run a script or a module as Python would. Its exceptions are shown as Python shows them."""
    from netbottleneck.runtime import job

    sys.argv = list(argv)
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if module else str(Path(argv[0]).resolve().parent)
    _export_place()
    # Never restored, as under Python: threads and exit handlers still need the script's classes.
    _main_modules.append(sys.modules["__main__"])  # keeps the old module alive, as its functions may still be called
    sys.modules["__main__"] = types.ModuleType("__main__")
    uncaught: BaseException | None = None
    try:
        if module:
            runpy._run_module_as_main(argv[0])  # type: ignore[attr-defined]
        elif Path(argv[0]).is_file() and not zipfile.is_zipfile(argv[0]):
            _run_file(argv[0])
        else:
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as error:
        job.leaves(error)
        raise
    except BaseException as error:
        uncaught = error
    if uncaught is not None:  # outside the handler, as under Python: sys.exc_info() is empty in the hook
        _show_uncaught(uncaught)
        if isinstance(uncaught, KeyboardInterrupt):
            # Python runs the exit handlers, then dies by SIGINT. A shell or a launcher ends what it runs only then.
            sys.excepthook = _ignore_shown
            raise uncaught
        raise SystemExit(FAILURE)


def _ignore_shown(*_: object) -> None:
    """Show nothing: an exception that is shown already ends the process."""


def _show_uncaught(error: BaseException) -> None:
    """Call sys.excepthook as Python does, without our frames and runpy's. If it raises, both exceptions are shown."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error.with_traceback(trace), trace
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit:
        raise
    except BaseException as failure:
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exception(failure.with_traceback(failure.__traceback__ and failure.__traceback__.tb_next))
        print("\nOriginal exception was:", file=sys.stderr)
        traceback.print_exception(type(error), error, trace)


_main_modules: list[types.ModuleType] = []


def _run_file(path: str) -> None:
    path = os.path.abspath(path)
    main = sys.modules["__main__"].__dict__
    loader: importlib.machinery.SourcelessFileLoader | importlib.machinery.SourceFileLoader
    if path.endswith(".pyc"):
        loader = importlib.machinery.SourcelessFileLoader("__main__", path)
        code = loader.get_code("__main__")
    else:
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    main.update(__file__=path, __loader__=loader, __builtins__=builtins, __cached__=None)
    exec(cast("types.CodeType", code), main)


def _env(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="netbottleneck env", description="Print every variable with its value and its source."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    from dataclasses import asdict

    from netbottleneck import config

    rows = config.describe()
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return SUCCESS
    for row in rows:
        origin = row.source if row.source in ("default", row.name) else f"from {row.source}"
        origin = "" if origin == row.name else f"  ({origin})"
        print(f"{row.name}={row.value}{origin}")
        print(f"    {row.text}: {row.allowed}" + (f"; else {', '.join(row.instead)}" if row.instead else ""))
    return SUCCESS


def _version(argv: Sequence[str]) -> int:
    argparse.ArgumentParser(prog="netbottleneck version", description="Print the version.").parse_args(argv)
    print(f"netbottleneck {__version__}")
    return SUCCESS


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "study": (_study, "run a study from one file, on simulated networks or on your hosts"),
    "run": (_run, "run an unchanged DDP or Horovod script and measure it"),
    "report": (_report, "print the report of a recorded run or a study"),
    "top": (_top, "follow a run in progress: split of the step, waiting by rank, and the verdict so far"),
    "compare": (_compare, "compare the steps of two runs, or of the same study twice; a gate for CI"),
    "what-if": (_what_if, "predict a recorded run with another link, more workers or compression"),
    "bench": (_bench, "measure all-reduce over stock, tcp and ofi, or between two hosts (--listen, --connect)"),
    "calibrate": (_calibrate, "measure a model's gradients on one rank, and memory costs of this host, for what-if"),
    "replay": (_replay, "replay a recorded backward pass over real transports, without the model"),
    "doctor": (_doctor, "print the settings and capabilities of this machine"),
    "env": (_env, "print every variable with its value"),
    "version": (_version, "print the version"),
}


FORMER_NAMES = {"profile": "calibrate"}  # kept for one release


def usage() -> str:
    """Return the usage text, one line per command."""
    lines = [f"  {name:<9} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: netbottleneck COMMAND [ARGS…]",
            "",
            "Measure whether the network is the bottleneck of a training job, and predict its gain.",
            "",
            *lines,
            "",
            "netbottleneck COMMAND --help describes a command. Exit codes: 0 success, 1 failure, 2 usage,",
            "3 a gate failed, 4 inconclusive (with --strict) or not judged (compare), 130 Ctrl-C,",
            "143 a study ended by SIGTERM.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; report a failure as one line on stderr."""
    command = list(sys.argv[1:] if argv is None else argv)
    try:
        if command[:1] == ["run"]:  # the streams are the script's
            return _run(command[1:])
        return _with_streams(command)
    except BrokenPipeError:
        _discard_output()
        return FAILURE
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        return _report_error(error)
    except KeyboardInterrupt:
        if sys.excepthook is _ignore_shown:
            raise
        print("netbottleneck: interrupted", file=sys.stderr)
        return INTERRUPTED


def _discard_output() -> None:
    """Send what stdout cannot take to nowhere: Python flushes it again at exit, and would end with code 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _with_streams(command: list[str]) -> int:
    """Run a command whose standard streams may be closed, and flush its output here, where a closed pipe is handled.

    A character that their encoding does not have is replaced.
    """
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open to the end
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # our texts have characters that not every encoding has
    try:
        code = _dispatched(command)
        sys.stdout.flush()
    except SystemExit:  # of argparse, after --help
        sys.stdout.flush()
        raise
    except BrokenPipeError:
        raise
    except OSError:
        try:
            sys.stdout.flush()
        except OSError:
            _discard_output()
        raise
    return code


def _dispatched(command: list[str]) -> int:
    if not command:
        print(usage(), file=sys.stderr)
        return USAGE
    if command[0] in ("-h", "--help", "help"):
        print(usage())
        return SUCCESS
    if command[0] == "--version":
        command[0] = "version"
    if command[0] in FORMER_NAMES:
        print(f"netbottleneck {command[0]} is now netbottleneck {FORMER_NAMES[command[0]]}", file=sys.stderr)
        command[0] = FORMER_NAMES[command[0]]
    if command[0] not in COMMANDS:
        print(f"netbottleneck: unknown command {command[0]!r}: name one of {', '.join(COMMANDS)}", file=sys.stderr)
        return USAGE
    return COMMANDS[command[0]][0](command[1:])


def _report_error(error: Exception) -> int:
    if os.environ.get("NETBOTTLENECK_LOG_LEVEL", "").lower() in ("debug", "trace"):
        traceback.print_exception(error)
    print(f"netbottleneck: {_one_line(error)}", file=sys.stderr)
    return USAGE if isinstance(error, _BadInput) else FAILURE


def _one_line(error: Exception) -> str:
    """Return an exception's text in one line."""
    name = getattr(error, "filename", None)
    reason = getattr(error, "strerror", None)
    text = f"{reason}: {name}" if name is not None and reason else reason or str(error) or type(error).__name__
    return " ".join(str(text).split())
