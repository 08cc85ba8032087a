"""The command line: `netbottleneck COMMAND …`. Each command's modules are imported when it is used.

Exit codes: 0 fine, 1 failure, 2 usage, 3 a gate failed, 4 inconclusive (with --strict)."""

from __future__ import annotations

import argparse
import builtins
import contextlib
import importlib.machinery
import json
import os
import runpy
import sys
import traceback
import types
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from netbottleneck._version import __version__

FINE, FAILURE, USAGE, GATE, INCONCLUSIVE = range(5)


def _study(argv: Sequence[str]) -> int:
    from netbottleneck import study

    return int(study.main(list(argv)))


def _bench(argv: Sequence[str]) -> int:
    from netbottleneck.bench import command

    return command.main(argv)


def _replay(argv: Sequence[str]) -> int:
    from netbottleneck.study import replaying

    return replaying.main(argv)


def _profile(argv: Sequence[str]) -> int:
    from netbottleneck.cli import profiling

    return profiling.main(argv)


def _doctor(argv: Sequence[str]) -> int:
    from netbottleneck.cli import doctor

    return doctor.main(argv)


def _report(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="netbottleneck report", description="The answer of a recorded run, or study.")
    parser.add_argument(
        "run", metavar="RUN", help="a run folder, a single trace (*.jsonl.gz), a study's folder, or its evidence.json"
    )
    parser.add_argument("--html", metavar="FILE", help="write the report as one HTML file")
    parser.add_argument("--json", action="store_true", help="print summary.json instead of the report")
    parser.add_argument("--write", metavar="DIR", help="write every file of the report into this folder")
    parser.add_argument("--strict", action="store_true", help="exit code 4 where the verdict is INCONCLUSIVE")
    args = parser.parse_args(argv)
    path = Path(args.run)
    if path.suffix == ".json" or any((path / name).exists() for name in ("evidence.json", "cells")):
        return _study_report(path, args)
    from netbottleneck.report import Run, html

    run = Run(args.run)
    if args.json:
        print(json.dumps(run.summary, indent=1))
    else:
        run.show()
    if args.html:
        Path(args.html).write_text(html.page(run.findings, run.verdict), encoding="utf-8")
    if args.write:
        run.write_all(args.write)
    return INCONCLUSIVE if args.strict and run.verdict.code == "INCONCLUSIVE" else FINE


def _study_report(path: Path, args: argparse.Namespace) -> int:
    """The same of a study: its facts are enough. There is no verdict that could be unsure of itself."""
    from netbottleneck.study.evidence import Evidence

    found = Evidence.read(path)
    if args.json:
        print(found.to_json(), end="")
    else:
        found.show()
    if args.html:
        Path(args.html).write_text(found.html, encoding="utf-8")
    if args.write:
        found.write(args.write)
    return FINE


def _what_if(argv: Sequence[str]) -> int:
    from netbottleneck.cli import what_if

    return what_if.main(argv)


def _run(argv: Sequence[str]) -> int:
    words = list(argv)
    if not words or words[0] in ("-h", "--help"):
        print("usage: netbottleneck run SCRIPT [ARGS…]\n       netbottleneck run -m MODULE [ARGS…]\n")
        print("Runs a DDP or Horovod script, measured, as `python SCRIPT` would run it: NETBOTTLENECK=1 is set.")
        return FINE if words else USAGE
    module = words[0] == "-m"
    if module:
        words.pop(0)
    if words and words[0] == "--":
        words.pop(0)
    if not words or words[0].startswith("-"):
        print("netbottleneck run: a script, or -m and a module, must follow", file=sys.stderr)
        return USAGE
    if not module and not Path(words[0]).exists():
        raise FileNotFoundError(f"no such script: {words[0]}")
    _measure_from_now_on()
    _run_as_main(module, words)
    return FINE


def _measure_from_now_on() -> None:
    """Set NETBOTTLENECK=1 where it is not set, and do what importing the package with it does."""
    os.environ.setdefault("NETBOTTLENECK", "1")
    from netbottleneck import config

    if config.settings().enabled:
        from netbottleneck.hooks import imports

        imports.install()


def _hand_on_place() -> None:
    """Where this package stands in for Horovod, set the variables that Horovod's launcher would set."""
    from netbottleneck import config
    from netbottleneck.hooks import imports
    from netbottleneck.launch import connect

    if imports.stands_in():
        with contextlib.suppress(ValueError):  # raised where a job is started, if the script starts one
            connect.hand_on(config.settings(), os.environ)


def _run_as_main(module: bool, words: Sequence[str]) -> None:
    """Run a script or a module as Python itself would. What it raises is its own, shown as Python shows it."""
    sys.argv = list(words)
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if module else str(Path(words[0]).resolve().parent)
    _hand_on_place()
    # For good, as under Python itself: threads and what runs at exit still find the script's classes there.
    _mains.append(sys.modules["__main__"])  # whose functions may still be called
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        if module:
            runpy._run_module_as_main(words[0])  # type: ignore[attr-defined]
        elif Path(words[0]).is_file() and not zipfile.is_zipfile(words[0]):
            _run_file(words[0])
        else:
            runpy.run_path(words[0], run_name="__main__")
    except Exception as error:
        # The frames of this file and of runpy are no part of the script.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error.with_traceback(trace), trace
        sys.excepthook(type(error), error, trace)
        raise SystemExit(FAILURE) from error


_mains: list[types.ModuleType] = []


def _run_file(path: str) -> None:
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main = sys.modules["__main__"].__dict__
    main.update(__file__=path, __loader__=loader, __builtins__=builtins, __cached__=None)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, main)


def _env(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="netbottleneck env", description="Every variable, and what is in force.")
    parser.add_argument("--json", action="store_true", help="for programs")
    args = parser.parse_args(argv)
    from dataclasses import asdict

    from netbottleneck import config

    rows = config.describe()
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return FINE
    for row in rows:
        origin = row.source if row.source in ("default", row.name) else f"from {row.source}"
        origin = "" if origin == row.name else f"  ({origin})"
        print(f"{row.name}={row.value}{origin}")
        print(f"    {row.text}: {row.allowed}" + (f"; else {', '.join(row.instead)}" if row.instead else ""))
    return FINE


def _version(argv: Sequence[str]) -> int:
    argparse.ArgumentParser(prog="netbottleneck version", description="The version.").parse_args(argv)
    print(f"netbottleneck {__version__}")
    return FINE


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "study": (_study, "the chain of evidence, from one file: on networks made here, or on your hosts"),
    "run": (_run, "run a DDP or Horovod script, measured, no line changed"),
    "report": (_report, "the answer of a recorded run"),
    "what-if": (_what_if, "what other links, more workers or compression would do to a recorded run"),
    "bench": (_bench, "all-reduce over stock, tcp and ofi; or between two hosts (--listen, --connect)"),
    "profile": (_profile, "a model's gradients on one rank, and what this host's memory costs, for what-if"),
    "replay": (_replay, "a recorded backward pass played over real transports, with no model"),
    "doctor": (_doctor, "what is in force on this machine, and what stands in the way"),
    "env": (_env, "every variable, and what is in force"),
    "version": (_version, "the version"),
}


def usage() -> str:
    """Return the commands, a line each."""
    lines = [f"  {name:<9} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: netbottleneck COMMAND [ARGS…]",
            "",
            "Is the network the bottleneck of this training job, and how fast could it go?",
            "",
            *lines,
            "",
            "netbottleneck COMMAND --help says more. Exit codes: 0 fine, 1 failure, 2 usage, 3 gate failed,",
            "4 inconclusive (with --strict).",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; a failure is one line on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        print(usage(), file=sys.stderr)
        return USAGE
    if words[0] in ("-h", "--help", "help"):
        print(usage())
        return FINE
    if words[0] == "--version":
        words[0] = "version"
    if words[0] not in COMMANDS:
        print(f"netbottleneck: no command {words[0]!r}; there is: {', '.join(COMMANDS)}", file=sys.stderr)
        return USAGE
    try:
        return COMMANDS[words[0]][0](words[1:])
    except BrokenPipeError:
        # Who read our output has gone; nothing may be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        return _failed(error)
    except KeyboardInterrupt:
        print("netbottleneck: interrupted", file=sys.stderr)
        return 130


def _failed(error: Exception) -> int:
    if os.environ.get("NETBOTTLENECK_LOG_LEVEL", "").lower() in ("debug", "trace"):
        traceback.print_exception(error)
    print(f"netbottleneck: {_words(error)}", file=sys.stderr)
    return FAILURE


def _words(error: Exception) -> str:
    """Return an exception in one line."""
    name = getattr(error, "filename", None)
    reason = getattr(error, "strerror", None)
    text = f"{reason}: {name}" if name is not None and reason else reason or str(error) or type(error).__name__
    return " ".join(str(text).split())
