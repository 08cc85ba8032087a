"""In each rank's pytest under horovod_suite.py: writes down how a test ended as soon as it did, a JSON line each.

HOROVOD_SUITE_OUT: the folder, where each process has a file. HOROVOD_SUITE_RUNNER: the folder `horovod/runner` of a
checkout, of which the tests' own helpers want a module; set where this package stands in for Horovod.
HOROVOD_SUITE_BUT: names of tests to leave out.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import sys
import types
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
RUNNER, UTIL, THREADS = "horovod.runner", "horovod.runner.util", "horovod.runner.util.threads"


def write(**what: Any) -> None:
    """Append a line."""
    with (Path(os.environ["HOROVOD_SUITE_OUT"]) / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as out:
        out.write(json.dumps(what) + "\n")


def lend_runner(folder: Path) -> None:
    """Have `horovod.runner.util.threads` found, which no part of horovod.torch is."""
    for name in (RUNNER, UTIL):
        sys.modules[name] = types.ModuleType(name)
    spec = importlib.util.spec_from_file_location(THREADS, folder / "util" / "threads.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder}: no util/threads.py")
    sys.modules[THREADS] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[THREADS])


def pytest_configure() -> None:
    """End with the launcher, and lend what is to be lent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    folder = os.environ.get("HOROVOD_SUITE_RUNNER")
    if folder:
        lend_runner(Path(folder))
    write(began=True)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave out what an earlier run began."""
    but = json.loads(os.environ.get("HOROVOD_SUITE_BUT", "[]"))
    items[:] = [item for item in items if item.name not in but]


def pytest_collectreport(report: Any) -> None:
    """A file that cannot be imported is a failed test."""
    if report.failed:
        write(test="(import)", outcome="failed", why=last_line(report))


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test that says no more than this did not end."""
    write(test=nodeid.rpartition("::")[2], outcome="unfinished", why="did not end")


def pytest_runtest_logreport(report: Any) -> None:
    """Write down a test's call; of its beginning and end what went wrong, or why it is skipped."""
    if report.when == "call" or report.outcome != "passed":
        why = "" if report.outcome == "passed" else last_line(report)
        write(test=report.nodeid.rpartition("::")[2], outcome=report.outcome, why=why)


def pytest_sessionfinish(session: Any) -> None:
    """Say whose Horovod it was, and that all tests are over. A launcher would end the others where this one fails."""
    session.exitstatus = 0
    module = sys.modules.get("horovod.torch")
    write(ended=True, horovod=getattr(getattr(module, "allreduce", None), "__module__", "") or "")


def last_line(report: Any) -> str:
    """Return what an exception, or a skip, said in one line."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message).strip().partition("\n")[0][:200]
    text = str(report.longrepr).strip().splitlines()
    return next((line for line in reversed(text) if line.startswith("E ")), text[0] if text else "")[:200]
