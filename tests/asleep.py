"""Signals to a thread that sleeps in a call: one that came before the call would not test the call."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

LOOKS, PAUSE_S = 10, 0.01  # a thread that only waits for a lock is found running by one of these looks
SENDER = """
import asleep, os, sys
sys.stdin.read(1)
asleep.wait_for(int(sys.argv[1]), float(sys.argv[2]))
os.kill(int(sys.argv[1]), int(sys.argv[3]))
"""


def sleeps(pid: int) -> bool:
    """Return True if the main thread of a process sleeps. Raises OSError if there is no such process."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "S"


def wait_for(pid: int, limit_s: float) -> None:
    """Wait until the main thread of a process sleeps at each of several looks. Raises TimeoutError."""
    until, seen = time.monotonic() + limit_s, 0
    while seen < LOOKS:
        if time.monotonic() > until:
            raise TimeoutError(f"process {pid} does not sleep")
        seen = seen + 1 if sleeps(pid) else 0
        time.sleep(PAUSE_S)


@contextlib.contextmanager
def signalled(signum: int, limit_s: float) -> Generator[Callable[[], None], None, None]:
    """Provide a function: another process signals this one once its main thread sleeps after a call of it.

    The other process does not compete for this one's interpreter, as a thread would.
    """
    argv = [sys.executable, "-c", SENDER, *map(str, (os.getpid(), limit_s, signum))]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, env=environ) as sender:
        assert sender.stdin is not None
        stdin = sender.stdin

        def begin() -> None:
            stdin.write(b".")
            stdin.flush()

        try:
            yield begin
        finally:
            sender.kill()
