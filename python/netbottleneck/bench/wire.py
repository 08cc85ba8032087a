"""The wire's limit as a path: iperf3 with a number of flows, both ways at once, between the two ranks' hosts."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

from netbottleneck.bench.paths import Path
from netbottleneck.errors import Error
from netbottleneck.launch import connect

if TYPE_CHECKING:
    from netbottleneck.bench.peers import Ground

SECONDS = 2
OMIT_S = 1
PATIENCE_S = 20.0
TRIES = 3
_ADDRESS_BYTES = 64


class Iperf(Path):
    """iperf3 -P flows --bidir. What it takes is how long the memory would travel at the rate that it measured.

    The rate is the receivers', the mean of both directions, without the first second. Rank 1 serves, rank 0 calls.
    """

    reduces = False
    warms = False

    def __init__(self, flows: int, ground: Ground) -> None:
        self.name = f"iperf3-{flows}"
        self.streams = flows
        self.rate_bps = 0.0
        self.busy = 0.0
        self._rank = ground.place.rank
        self._tool = shutil.which("iperf3") or "iperf3"
        self._itemsize = connect.core().dtype_size(getattr(connect.core(), ground.what[0].upper()))
        self._bytes = 0
        self._server: subprocess.Popen[str] | None = None
        self._ground = ground
        self._host = connect.core().interfaces(f"={ground.interface}")[0][1]
        self._port = 0

    def prepare(self, count: int) -> None:
        """Rank 1 serves where a port is free, and says where."""
        self._bytes = count * self._itemsize
        if self._rank == 1:
            self._server = self._serve()
        said = self._ground.control.exchange(f"{self._host} {self._port}".encode().ljust(_ADDRESS_BYTES))
        host, port = said[1].decode().split()
        self._host, self._port = (host, int(port)) if self._rank == 0 else (self._host, 0)

    def _serve(self) -> subprocess.Popen[str]:
        """Start a server; once more where somebody else took the port that was free a moment ago."""
        words = ""
        for _ in range(TRIES):
            with socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET) as probe:
                probe.bind((self._host, 0))
                self._port = int(probe.getsockname()[1])
            server = _start([self._tool, "-s", "-1", "-B", self._host, "-p", str(self._port), "--forceflush"])
            said = []
            with _deadline(server):
                for line in server.stdout or ():
                    said.append(line.strip())
                    if "listening" in line:
                        return server
            server.wait()
            words = " ".join(said)[:200] or "did not start"
        raise Error(0, f"iperf3 -s: {words}")

    def go(self, times: int) -> None:
        if self._server is not None:
            with _deadline(self._server):
                self._server.communicate()
            self._server = None
        elif self._rank == 0:
            self._call()

    def _call(self) -> None:
        words = [self._tool, "-c", self._host, "-p", str(self._port), "-P", str(self.streams), "--bidir", "-J"]
        words += ["-t", str(SECONDS), "--omit", str(OMIT_S)]
        client = _start(words)
        with _deadline(client):
            said, _ = client.communicate()
        self.rate_bps, self.busy = mean_received(said), processors(said)

    def taken_ns(self) -> int | None:
        return round(8e9 * self._bytes / self.rate_bps) if self.rate_bps else 0

    def cpu_ns(self) -> int | None:
        """Of client and server together, which rank 0 tells: the other rank has no rate."""
        return round((self.taken_ns() or 0) * self.busy)

    def info(self) -> dict[str, Any]:
        return {"provider": "iperf3", "streams_used": self.streams, "wire_bits_per_s": None}

    def close(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.communicate()
            self._server = None


def mean_received(text: str) -> float:
    """Return bits a second that arrived, the mean of both directions, of iperf3's JSON. Raises Error with its words."""
    try:
        said: Mapping[str, Any] = json.loads(text)
    except ValueError:
        raise Error(0, f"iperf3: {text.strip()[:200] or 'said nothing'}") from None
    if said.get("error"):
        raise Error(0, f"iperf3: {said['error']}")
    ways = [said["end"][key]["bits_per_second"] for key in ("sum_received", "sum_received_bidir_reverse")]
    return float(sum(ways)) / len(ways)


def processors(text: str) -> float:
    """Return how many processors both ends kept busy, of iperf3's JSON."""
    used = json.loads(text)["end"]["cpu_utilization_percent"]
    return float(used["host_total"] + used["remote_total"]) / 100


def _start(words: list[str]) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, **pipes)


@contextlib.contextmanager
def _deadline(process: subprocess.Popen[str]) -> Generator[None, None, None]:
    """End a process that takes too long."""
    timer = threading.Timer(PATIENCE_S + SECONDS + OMIT_S, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
