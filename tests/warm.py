"""Rank processes that are forked from one that has loaded torch. Loading it takes each rank seconds of processor time.

In such a rank torch is loaded before the first line of the script, so the order of imports is not tested. netbottleneck
is not loaded. Each rank has its own environment, and ends as any interpreter does. Even and odd ranks come from two
processes: hash seeds and addresses differ between them, as they do between ranks that are started.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SERVER = Path(__file__).with_name("warm_server.py")
START_LIMIT_S = 120.0
# Variables that a process reads before the first line of a script: a rank that changes one is started, not forked.
READ_EARLY = (
    *("PYTHON", "LD_", "OMP_", "OPENBLAS_", "MKL_", "KMP_", "MALLOC_", "GLIBC_"),
    *("TORCH", "PYTORCH", "ATEN_", "CUDA_"),
)


def read_early(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that cannot be changed in a running process."""
    return {name: value for name, value in environ.items() if name.startswith(READ_EARLY) and name != "PYTHONPATH"}


class Warm:
    """A process that forks ranks. It ends with the tests, and its ranks with it.

    modules: what it loads, instead of torch and the rest of warm_server.LOADED.
    """

    def __init__(self, environ: Mapping[str, str], modules: Sequence[str] = ()) -> None:
        self._early = read_early(environ)
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(SERVER), *modules], stdin=theirs, env=dict(environ), start_new_session=True
            )
        self._line = ours
        self._text = b""
        self._ended: dict[int, int] = {}  # exit codes by the number of the process: ids come again
        self._told: list[dict[str, Any]] = []
        self._ready = False

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def suits(self, environ: Mapping[str, str]) -> bool:
        """Tell whether a rank with this environment may come from here."""
        return read_early(environ) == self._early

    def _receive(self, limit_s: float) -> None:
        """Read what the server says, for as long as limit_s. Raises RuntimeError if the server has ended."""
        while select.select([self._line], [], [], limit_s)[0]:
            got = self._line.recv(1 << 16)
            if not got:
                raise RuntimeError("warm_server.py has ended")
            *lines, self._text = (self._text + got).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "code" in message:
                    self._ended[message["number"]] = message["code"]
                else:
                    self._told.append(message)
            limit_s = 0.0

    def _answer(self) -> dict[str, Any]:
        deadline = time.monotonic() + START_LIMIT_S
        while not self._told:
            if time.monotonic() > deadline:
                raise RuntimeError(f"warm_server.py did not answer in {START_LIMIT_S:g} s")
            self._receive(0.1)
        return self._told.pop(0)

    def start(self, command: Sequence[str], environ: Mapping[str, str], cwd: Path, out: Path, err: Path) -> WarmProcess:
        """Fork a process that runs `script ARGUMENT…` or `-m module ARGUMENT…`; out and err are files that exist."""
        if not self._ready:
            threads = self._answer()["threads"]
            if threads != 1:
                raise RuntimeError(f"warm_server.py has {threads} threads and must have one where it forks")
            self._ready = True
        request = {"command": list(command), "env": dict(environ), "cwd": str(cwd), "out": str(out), "err": str(err)}
        self._line.sendall(json.dumps(request).encode() + b"\n")
        answer = self._answer()
        return WarmProcess(self, answer["started"], answer["number"])

    def code(self, number: int, limit_s: float) -> int | None:
        """Return how a process ended, None where it has not within this time."""
        if number not in self._ended:
            self._receive(limit_s)
        return self._ended.get(number)

    def close(self) -> None:
        """End the server."""
        self._line.close()
        self._process.wait(START_LIMIT_S)


@dataclass
class WarmProcess:
    """A process that was forked: what Ranks use of subprocess.Popen."""

    warm: Warm
    pid: int
    number: int  # of those that this server has forked
    returncode: int | None = field(default=None)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self.warm.code(self.number, 0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = 1.0 if deadline is None else deadline - time.monotonic()
            self.returncode = self.warm.code(self.number, max(0.0, min(left, 1.0)))
            if self.returncode is None and left <= 0:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


@dataclass
class WarmPair:
    """The two servers, started when the first rank asks for one. environ: theirs."""

    environ: Mapping[str, str]
    servers: list[Warm] = field(default_factory=list)

    def of(self, rank: int, environ: Mapping[str, str]) -> Warm | None:
        """Return the server that forks this rank; None where its environment asks for a process of its own."""
        if not self.servers:
            self.servers = [Warm({**self.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}) for _ in range(2)]
        server = self.servers[rank % 2]
        return server if server.suits(environ) else None

    def close(self) -> None:
        """End both."""
        for server in self.servers:
            with contextlib.suppress(OSError):
                server.close()
        self.servers.clear()
