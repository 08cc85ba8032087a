"""pytest plugin for each rank of horovod_suite.py: writes each test's outcome at once, as a line of JSON.

HOROVOD_SUITE_OUT: output folder, one file per process. HOROVOD_SUITE_RUNNER: the folder `horovod/runner` of a checkout,
from which the tests' helpers import a module; set if this package replaces Horovod. HOROVOD_SUITE_BUT: names of tests
to leave out.
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


def provide_runner(folder: Path) -> None:
    """Provide `horovod.runner.util.threads`, which is not part of horovod.torch."""
    for name in (RUNNER, UTIL):
        sys.modules[name] = types.ModuleType(name)
    spec = importlib.util.spec_from_file_location(THREADS, folder / "util" / "threads.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder}: no util/threads.py")
    sys.modules[THREADS] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[THREADS])


def pytest_configure() -> None:
    """Let this process end with its launcher, and provide Horovod's runner module if requested."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    folder = os.environ.get("HOROVOD_SUITE_RUNNER")
    if folder:
        provide_runner(Path(folder))
    write(began=True)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave out tests that an earlier run began."""
    but = json.loads(os.environ.get("HOROVOD_SUITE_BUT", "[]"))
    items[:] = [item for item in items if item.name not in but]


def pytest_collectreport(report: Any) -> None:
    """Report a file that cannot be imported as a failed test."""
    if report.failed:
        write(test="(import)", outcome="failed", why=last_line(report))


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write the outcome "unfinished", which counts if no later line replaces it."""
    write(test=nodeid.rpartition("::")[2], outcome="unfinished", why="did not end")


def pytest_runtest_logreport(report: Any) -> None:
    """Write a test's outcome; for its setup and teardown, only failures and skips."""
    if report.when == "call" or report.outcome != "passed":
        why = "" if report.outcome == "passed" else last_line(report)
        write(test=report.nodeid.rpartition("::")[2], outcome=report.outcome, why=why)


def pytest_sessionfinish(session: Any) -> None:
    """Write which Horovod ran, and that all tests have ended. Exits with 0: a launcher would kill the other ranks."""
    session.exitstatus = 0
    module = sys.modules.get("horovod.torch")
    write(ended=True, horovod=getattr(getattr(module, "allreduce", None), "__module__", "") or "")


def last_line(report: Any) -> str:
    """Return the message of an exception or a skip as one line."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message).strip().partition("\n")[0][:200]
    text = str(report.longrepr).strip().splitlines()
    return next((line for line in reversed(text) if line.startswith("E ")), text[0] if text else "")[:200]
