"""Worker processes of a benchmark: starts one per rank, in a lab or on loopback, and reads rank 0's output."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from netbottleneck.bench.request import Request
from netbottleneck.errors import Error
from netbottleneck.lab import Lab, LinkSpec

SILENCE_S = 120.0  # limit without output of rank 0, in addition to the time of the slowest all-reduce
GRACE_S = 3.0  # after the first failure, for the other ranks to report theirs
PACKAGE = Path(__file__).resolve().parents[2]
# Variables of the caller that the workers must not see: they would act as the caller's ranks.
_NOT_THEIRS = ("NETBOTTLENECK", "NETBOTTLENECK_TRANSPORT", "NETBOTTLENECK_STREAMS", "NETBOTTLENECK_MASTER")
_INTERFACES = ("NETBOTTLENECK_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Workers:
    """The processes of one benchmark; leaving the context ends all of them."""

    def __init__(self, request: Request, ranks: int, lab: Lab | None) -> None:
        self._request = request
        self._ranks = ranks
        self._lab = lab
        self._folder = tempfile.TemporaryDirectory(prefix="netbottleneck-bench-")
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            for rank in range(self._ranks):
                self._processes.append(self._start(rank))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "netbottleneck.bench.worker", json.dumps(self._request.to_json())]
        with self._stderr(rank).open("wb") as errors:
            options: dict[str, Any] = {
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                "stderr": errors,
                "start_new_session": True,
            }
            variables = self._variables(rank)
            if self._lab is not None:
                return self._lab.popen(rank, command, variables, **options)
            return subprocess.Popen(command, env=variables, **options)

    def _variables(self, rank: int) -> dict[str, str]:
        left = set(_NOT_THEIRS) | set(_INTERFACES)
        result = {name: value for name, value in os.environ.items() if name not in left}
        if self._lab is None:
            result |= dict.fromkeys(_INTERFACES, "lo") | {"MASTER_ADDR": "127.0.0.1", "NETBOTTLENECK_IFNAME": "=lo"}
        result.setdefault("NETBOTTLENECK_START_TIMEOUT_S", "60")
        result.setdefault("OMP_NUM_THREADS", "1")
        path = [str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])]
        return result | {
            "NETBOTTLENECK_RANK": str(rank),
            "NETBOTTLENECK_SIZE": str(self._ranks),
            "NETBOTTLENECK_RENDEZVOUS": self._folder.name,
            "PYTHONPATH": os.pathsep.join(path),
        }

    def _stderr(self, rank: int) -> Path:
        return Path(self._folder.name) / f"stderr.{rank}"

    def listen(self, handle: Callable[[Mapping[str, Any]], None], silence_s: float) -> None:
        """Pass every line of rank 0 to `handle` until all ranks have finished.

        Raises Error with the failed rank's message, or after silence_s without output.
        """
        output = self._processes[0].stdout
        if output is None:
            raise ValueError("rank 0 has no output")
        os.set_blocking(output.fileno(), False)
        heard, last, pending = time.monotonic(), 0.0, b""
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while True:
                codes = [process.poll() for process in self._processes]
                got = output.read() if selector.select(0.2) else None
                if got:
                    heard = time.monotonic()
                    *lines, pending = (pending + got).split(b"\n")
                    for text in lines:
                        handle(json.loads(text))
                if any(codes):
                    last = last or time.monotonic() + GRACE_S
                elif None not in codes and not got:
                    return
                self._judge(codes, last, heard + silence_s)

    def _judge(self, codes: Sequence[int | None], last: float, silent: float) -> None:
        """Raise Error if a rank failed and all ended or `last` has passed, or if there was no output by `silent`."""
        now = time.monotonic()
        if last and (None not in codes or now > last):
            raise Error(0, self._why(codes))
        if not last and now > silent:
            raise Error(0, f"the benchmark's ranks printed nothing for too long and were killed. {self._why(codes)}")

    def _why(self, codes: Sequence[int | None]) -> str:
        """Return the messages of the failed ranks; a killed rank comes first."""
        parts = []
        order = sorted(range(self._ranks), key=lambda rank: (codes[rank] is None, (codes[rank] or 0) >= 0))
        for rank in order:
            words = self._stderr(rank).read_text(encoding="utf-8", errors="replace").strip().splitlines()
            code = codes[rank]
            if code is not None and code < 0:
                parts.append(f"rank {rank} was killed by {signal.Signals(-code).name}")
            elif code or words:
                parts.extend(words[-1:] or [f"rank {rank} ended with exit code {code}"])
        return "; ".join(dict.fromkeys(parts)) or "no rank gave a reason"

    def close(self) -> None:
        """Kill the processes that still run, by process group, and wait for them."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        self._folder.cleanup()


def patience_s(request: Request, spec: LinkSpec | None) -> float:
    """Return the allowed silence of rank 0: SILENCE_S and twice a round of the largest size on all paths.

    The round is estimated at the slowest rate of the network."""
    rate = 1e8
    if spec is not None and spec.capped:
        rate = min([float(spec.link_bps or 1e12), *map(float, spec.flow_bps)])
    paths = len(request.transports) * (1 + len(request.streams))
    return SILENCE_S + 2 * paths * 8 * 2 * max(request.sizes) / rate
