"""The wire limit as a path: iperf3 with a number of flows, both ways at once, between the hosts of the two ranks."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Generator, Mapping
from typing import Any

from netbottleneck.bench.paths import Context, Path
from netbottleneck.errors import Error
from netbottleneck.launch import connect

FLOWS = (1, 2, 4, 8, 16)
IPERF = tuple(f"iperf3-{flows}" for flows in FLOWS)
SECONDS = 2
OMIT_S = 1
DEADLINE_S = 20.0  # in addition to the measurement
TRIES = 3
_ADDRESS_BYTES = 64


def missing(_name: str, context: Context) -> str:
    """Return why iperf3 cannot be used in this process; "" if it can."""
    if context.place.size != 2:
        return f"iperf3 joins 2 ranks, not {context.place.size}"
    return "" if shutil.which("iperf3") else "iperf3 is not installed"


class Iperf(Path):
    """iperf3 -P flows --bidir. The reported time is the memory's transfer time at the measured rate.

    The rate is the mean of both directions at the receivers, without the first second. Rank 1 is the server.
    """

    reduces = False
    warms = False

    def __init__(self, name: str, context: Context) -> None:
        self.name = name
        self.streams = int(name.partition("-")[2])
        self.rate_bps = 0.0
        self.busy = 0.0
        self._rank = context.place.rank
        self._tool = shutil.which("iperf3") or "iperf3"
        self._itemsize = connect.core().dtype_size(getattr(connect.core(), context.dtype.upper()))
        self._bytes = 0
        self._server: subprocess.Popen[str] | None = None
        self._control = context.control
        self._host = connect.core().interfaces(f"={context.interface}")[0][1]
        self._port = 0

    def prepare(self, count: int) -> None:
        """Start the server on rank 1 and send its address to rank 0."""
        self._bytes = count * self._itemsize
        if self._rank == 1:
            self._server = self._serve()
        addresses = self._control.exchange(f"{self._host} {self._port}".encode().ljust(_ADDRESS_BYTES))
        host, port = addresses[1].decode().split()
        self._host, self._port = (host, int(port)) if self._rank == 0 else (self._host, 0)

    def _serve(self) -> subprocess.Popen[str]:
        """Start a server on a free port; retry if another process takes the port first."""
        reason = ""
        for _ in range(TRIES):
            with socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET) as probe:
                probe.bind((self._host, 0))
                self._port = int(probe.getsockname()[1])
            server = _start([self._tool, "-s", "-1", "-B", self._host, "-p", str(self._port), "--forceflush"])
            printed = []
            with _deadline(server):
                for line in server.stdout or ():
                    printed.append(line.strip())
                    if "listening" in line:
                        return server
            server.wait()
            reason = " ".join(printed)[:200] or "did not start"
        raise Error(0, f"iperf3 -s: {reason}")

    def go(self, times: int) -> None:
        if self._server is not None:
            with _deadline(self._server):
                self._server.communicate()
            self._server = None
        elif self._rank == 0:
            self._call()

    def _call(self) -> None:
        command = [self._tool, "-c", self._host, "-p", str(self._port), "-P", str(self.streams), "--bidir", "-J"]
        client = _start([*command, "-t", str(SECONDS), "--omit", str(OMIT_S)])
        with _deadline(client):
            output, _ = client.communicate()
        self.rate_bps, self.busy = mean_received(output), processors(output)

    def taken_ns(self) -> int | None:
        return round(8e9 * self._bytes / self.rate_bps) if self.rate_bps else 0

    def cpu_ns(self) -> int | None:
        """Return the CPU time of client and server together, on rank 0; the other rank has no rate and returns 0."""
        return round((self.taken_ns() or 0) * self.busy)

    def info(self) -> dict[str, Any]:
        return {"provider": "iperf3", "streams_used": self.streams, "wire_bits_per_s": None}

    def close(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.communicate()
            self._server = None


def mean_received(text: str) -> float:
    """Return the received bits a second from iperf3's JSON, the mean of both directions. Raises Error."""
    try:
        report: Mapping[str, Any] = json.loads(text)
    except ValueError:
        raise Error(0, f"iperf3: {text.strip()[:200] or 'printed nothing'}") from None
    if report.get("error"):
        raise Error(0, f"iperf3: {report['error']}")
    rates = [report["end"][key]["bits_per_second"] for key in ("sum_received", "sum_received_bidir_reverse")]
    return float(sum(rates)) / len(rates)


def processors(text: str) -> float:
    """Return the number of CPUs that both ends kept busy, from iperf3's JSON."""
    used = json.loads(text)["end"]["cpu_utilization_percent"]
    return float(used["host_total"] + used["remote_total"]) / 100


def _start(command: list[str]) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, **pipes)


@contextlib.contextmanager
def _deadline(process: subprocess.Popen[str]) -> Generator[None, None, None]:
    """Kill a process that exceeds the time limit."""
    timer = threading.Timer(DEADLINE_S + SECONDS + OMIT_S, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
