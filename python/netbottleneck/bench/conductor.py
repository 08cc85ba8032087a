"""Starts one worker process a rank, in a lab or on loopback, and listens to rank 0 until all are done."""

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

SILENCE_S = 120.0  # how long rank 0 may say nothing, beside what the slowest all-reduce may take
GRACE_S = 3.0  # how long others may still say why, after the first has failed
PACKAGE = Path(__file__).resolve().parents[2]
# Of the caller's environment, what would speak to the workers as if they were its own ranks.
_NOT_THEIRS = ("NETBOTTLENECK", "NETBOTTLENECK_TRANSPORT", "NETBOTTLENECK_STREAMS", "NETBOTTLENECK_MASTER")
_INTERFACES = ("NETBOTTLENECK_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Workers:
    """The processes of one benchmark; none outlives the context."""

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
        with self._said(rank).open("wb") as errors:
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

    def _said(self, rank: int) -> Path:
        return Path(self._folder.name) / f"stderr.{rank}"

    def listen(self, tell: Callable[[Mapping[str, Any]], None], silence_s: float) -> None:
        """Hand every line of rank 0 to `tell`, until all ranks are done.

        Raises Error with the words of the rank that failed, or when nothing was heard for silence_s.
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
                    for said in lines:
                        tell(json.loads(said))
                if any(codes):
                    last = last or time.monotonic() + GRACE_S
                elif None not in codes and not got:
                    return
                self._judge(codes, last, heard + silence_s)

    def _judge(self, codes: Sequence[int | None], last: float, silent: float) -> None:
        """Raise where a rank has failed and the others had until `last` to say why, or nobody spoke until `silent`."""
        now = time.monotonic()
        if last and (None not in codes or now > last):
            raise Error(0, self._why(codes))
        if not last and now > silent:
            raise Error(0, f"the benchmark's ranks said nothing for too long, and were ended. {self._why(codes)}")

    def _why(self, codes: Sequence[int | None]) -> str:
        """Return the failing ranks' own words; a rank that was killed comes first, what others say of it after."""
        parts = []
        order = sorted(range(self._ranks), key=lambda rank: (codes[rank] is None, (codes[rank] or 0) >= 0))
        for rank in order:
            words = self._said(rank).read_text(encoding="utf-8", errors="replace").strip().splitlines()
            code = codes[rank]
            if code is not None and code < 0:
                parts.append(f"rank {rank} was ended by {signal.Signals(-code).name}")
            elif code or words:
                parts.extend(words[-1:] or [f"rank {rank} ended with exit code {code}"])
        return "; ".join(dict.fromkeys(parts)) or "no rank said why"

    def close(self) -> None:
        """Kill what still runs, by process group, and wait for it."""
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
    """Return how long rank 0 may be silent: a round of the largest size on every path at the slowest rate, doubled."""
    rate = 1e8
    if spec is not None and spec.capped:
        rate = min([float(spec.link_bps or 1e12), *map(float, spec.flow_bps)])
    paths = len(request.transports) * (1 + len(request.streams))
    return SILENCE_S + 2 * paths * 8 * 2 * max(request.sizes) / rate
