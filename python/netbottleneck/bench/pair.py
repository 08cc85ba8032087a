"""Benchmark of two hosts without torch or a launcher: the rate of 1 to 16 network streams between them.

One side listens and prints the command for the other. The listening side decides size and count of each measurement.
Both sides measure the same all-reduces, and both print the results.
"""

from __future__ import annotations

import re
import secrets
import shlex
import socket
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from numpy.typing import NDArray

from netbottleneck.bench.paths import missing
from netbottleneck.config import Settings
from netbottleneck.errors import Error
from netbottleneck.launch import connect as launch
from netbottleneck.trace.transports import NATIVE
from netbottleneck.units import gbit, percent

if TYPE_CHECKING:
    from netbottleneck import _core


# The rate by number of streams between two hosts, and the verdict.

NOTEWORTHY = 1.15  # gain over one plain stream from which the verdict mentions it
NEARLY = 0.95  # part of the best rate from which fewer streams are preferred
RUNS_MIN = 3  # runs of each of two points from which a gain may be claimed


@dataclass(frozen=True)
class Point:
    """The rate of `streams` streams: bits a second, one way, the median of `count` all-reduces of `bytes`.

    low_bits_per_s, high_bits_per_s: of the slowest and of the fastest of them. cpu_s_per_gb: CPU time of all threads of
    both sides per 10^9 bytes of the tensor, as in Samples.row.
    """

    transport: str
    streams: int
    bytes: int
    count: int
    bits_per_s: float
    low_bits_per_s: float
    high_bits_per_s: float
    cpu_s_per_gb: float

    @classmethod
    def of(cls, transport: str, streams: int, nbytes: int, took_s: Sequence[float], cpu_s: float) -> Point:
        """Return the point of all-reduces of `nbytes` each. took_s: of each; cpu_s: of both sides for all of them."""
        median, slowest, fastest = (8 * nbytes / s for s in (statistics.median(took_s), max(took_s), min(took_s)))
        count = len(took_s)
        return cls(transport, streams, nbytes, count, median, slowest, fastest, cpu_s / (count * nbytes / 1e9))

    @property
    def line(self) -> str:
        """The point as a line below HEADING."""
        cells = (
            self.transport,
            str(self.streams),
            f"{self.bytes / 1e6:.0f} MB",
            gbit(self.bits_per_s),
            f"{self.low_bits_per_s / 1e9:.2f}-{self.high_bits_per_s / 1e9:.2f}",
            str(self.count),
            f"{self.cpu_s_per_gb:.2f}",
        )
        return _row(cells)


def _row(cells: Sequence[str]) -> str:
    return " ".join(cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True))


WIDTHS = (10, 8, 10, 16, 16, 5, 11)
HEADING = _row(("transport", "streams", "size", "moved one way", "least-most", "runs", "cpu (s/GB)"))


def verdict(points: Sequence[Point]) -> str:
    """Return the verdict: the fewest streams of each transport compared with the best measurement.

    A stock job has one plain connection: tcp's fewest streams. If tcp was not measured, the best of the other
    transports' fewest streams replaces it. The best of several measurements is partly luck, so a gain is claimed only
    for a point whose slowest run is faster than the plain connection's fastest, of RUNS_MIN runs or more each.
    """
    curves = {p.transport: [other for other in points if other.transport == p.transport] for p in points}
    fewest = [_fewest(curve) for curve in curves.values()]
    top, single = _fastest(points), _fastest(fewest)
    plain = next((point for point in fewest if point.transport == "tcp"), single)
    head = f"Measured: {'; '.join(map(_moved, fewest))}"
    if top.bits_per_s < NOTEWORTHY * plain.bits_per_s:
        return f"{head}; {_small_gain(points, plain)}"
    chosen, lanes = [single], str(single.streams)
    if top.bits_per_s >= NOTEWORTHY * single.bits_per_s:
        chosen, lanes = _nearly(curves[top.transport], top), "auto"
    sure = [point for point in chosen if _surely_faster(point, plain)]
    best = _fewest(sure or chosen)
    moved = "" if best in fewest else f"; {_moved(best)}"
    return f"{head}{moved}: {_gain(best, plain, lanes) if sure else _inconclusive(best, plain)}"


def _gain(best: Point, plain: Point, lanes: str) -> str:
    """Claim the gain of `best` over `plain`, and say how to have it."""
    gain = best.bits_per_s / plain.bits_per_s
    who = "a job with one plain connection for each peer" if _like_stock(plain) else f"a job with {_amount(plain)}"
    return (
        f"{who} leaves a factor of {gain:.1f} of this network unused. "
        f"NETBOTTLENECK_TRANSPORT={best.transport} with NETBOTTLENECK_STREAMS={lanes} uses it."
    )


def _surely_faster(point: Point, plain: Point) -> bool:
    return min(point.count, plain.count) >= RUNS_MIN and point.low_bits_per_s > plain.high_bits_per_s


def _inconclusive(best: Point, plain: Point) -> str:
    """Say why the gain of `best` over `plain` is not claimed, and how to measure it."""
    few = min(best.count, plain.count) < RUNS_MIN
    why = f"a claim needs {RUNS_MIN} runs of each" if few else "their runs overlap"
    how = (
        "a smaller --sizes or fewer --streams"
        if few
        else "fewer --streams, and on hosts and a network without other work"
    )
    return (
        f"inconclusive, as {why}: {_amount(best)} may be {best.bits_per_s / plain.bits_per_s:.1f} times as fast as "
        f"{_amount(plain)}. Measure again with {how}."
    )


def _small_gain(points: Sequence[Point], plain: Point) -> str:
    """Describe the best measurement, whose gain over `plain` is below NOTEWORTHY."""
    top = _fastest(points)
    what = "more streams" + (" and another transport" if len({point.transport for point in points}) > 1 else "")
    gain = top.bits_per_s / plain.bits_per_s - 1
    amount = f"{percent(gain, digits=1)} here, less than {percent(NOTEWORTHY - 1, digits=0)}"
    found = f"{what} gain {amount}" if gain > 0 else f"{what} bring no gain here"
    kept = "Stock is as good: keep one plain connection" if _like_stock(plain) else f"Keep {_amount(plain)}"
    best = f"the best of {len(points)} measurements is {gbit(top.bits_per_s)} {_spread(top)} with {_amount(top)}"
    return f"{best}: {found}. {kept}."


def _nearly(points: Sequence[Point], top: Point) -> list[Point]:
    return [point for point in points if point.bits_per_s >= NEARLY * top.bits_per_s]


def _fewest(points: Sequence[Point]) -> Point:
    return min(points, key=lambda point: point.streams)


def _fastest(points: Sequence[Point]) -> Point:
    return max(points, key=lambda point: point.bits_per_s)


def _like_stock(point: Point) -> bool:
    return (point.transport, point.streams) == ("tcp", 1)


def _amount(point: Point) -> str:
    """Describe a point's streams; 1 of tcp gives "one tcp stream"."""
    return f"one {point.transport} stream" if point.streams == 1 else f"{point.streams} {point.transport} streams"


def _moved(point: Point) -> str:
    verb = "moves" if point.streams == 1 else "move"
    return f"{_amount(point)} {verb} {gbit(point.bits_per_s)} {_spread(point)}"


def _spread(point: Point) -> str:
    """The number of runs behind a rate, and its spread."""
    if point.count == 1:
        return "(one run)"
    return f"({point.count} runs, {point.low_bits_per_s / 1e9:.2f} to {point.high_bits_per_s / 1e9:.2f})"


# The two sides of the measurement.

PORT = 29555
STREAMS = (1, 2, 4, 8, 16)
BYTES = 64 * 10**6
WARM_BYTES = 4 * 10**6
LEAST_BYTES = 10**6
BUDGET_S = 50.0  # for all measurements together
POINT_S = 2.0  # for one measurement of short all-reduces
WAIT_S = 600.0  # time that the listening side waits for the other

Say = Callable[[str], None]


@dataclass
class Pair:
    """One side of the measurement: rank 0 listens, rank 1 connects."""

    settings: Settings
    rank: int
    say: Say
    secret: bytes
    transports: tuple[str, ...]
    streams: tuple[int, ...] = STREAMS
    bytes: int = BYTES
    listener: _core.Listener | None = None
    address: str = ""
    points: list[Point] = field(default_factory=list)

    def run(self) -> list[Point]:
        """Measure. Raises TimeoutError if the other side does not connect, PeerError if it is lost."""
        core = launch.core()
        self._interface = _interface(self.address, self.rank)
        # The first rendezvous may take long; later ones have the usual deadline.
        self._join("tcp", 1, WAIT_S if self.rank == 0 else self.settings.start_timeout_s).close()
        control = self._join("tcp", 1)
        try:
            self._begun = time.monotonic()
            self.say("# the other side is connected")
            usable = self._usable(control)
            memory = core.Arena(max(self.bytes, WARM_BYTES))
            plan = [(transport, lanes) for transport in usable for lanes in self.streams]
            self.say("# measured: the median of the runs, with the slowest and the fastest of them in Gbit/s")
            self.say(HEADING)
            for index, (transport, lanes) in enumerate(plan):
                made = self._join(transport, lanes)
                try:
                    point = self._point(control, made, memory, (transport, lanes), len(plan) - index)
                finally:
                    made.close()
                self.points.append(point)
                self.say(point.line)
            return self.points
        finally:
            control.close()

    def _join(self, transport: str, lanes: int, start_timeout_s: float | None = None) -> _core.Comm:
        door: dict[str, Any] = {"listener": self.listener} if self.rank == 0 else {"address": self.address}
        made: _core.Comm = launch.core().Comm(
            self.rank,
            2,
            secret=self.secret,
            tag="netbottleneck bench between two hosts",
            transport=transport,
            streams=lanes,
            provider=self.settings.provider,
            library=self.settings.library,
            ifname=self._interface,
            ports=self.settings.ports,
            segment_bytes=self.settings.segment_bytes,
            timeout_s=self.settings.timeout_s,
            start_timeout_s=start_timeout_s or self.settings.timeout_s,
            **door,
        )
        return made

    def _usable(self, control: _core.Comm) -> list[str]:
        """Return the transports that both sides have. Raises ValueError if the sides have different arguments."""
        wanted = ",".join([*self.transports, *map(str, self.streams), str(self.bytes)])
        arguments = [text.decode().strip() for text in control.exchange(wanted.encode().ljust(200))]
        if arguments[0] != arguments[1]:
            raise ValueError(f"the two sides have different arguments: {arguments[0]} and {arguments[1]}")
        found = []
        for transport in self.transports:
            why = missing(transport, self.settings)
            both = [text.decode(errors="replace").strip() for text in control.exchange(why.encode()[:200].ljust(200))]
            if any(both):
                sides = zip(("the listening side", "the connecting side"), both, strict=True)
                self.say(f"# {transport} left out: " + "; ".join(f"{side}: {text}" for side, text in sides if text))
            else:
                found.append(transport)
        if not found:
            raise ValueError(f"none of {', '.join(self.transports)} is available on both sides")
        return found

    def _point(
        self, control: _core.Comm, made: _core.Comm, memory: _core.Arena, what: tuple[str, int], left: int
    ) -> Point:
        warm = min(self.bytes, WARM_BYTES)
        made.map(memory)
        self._together(control, made, memory, min(warm, 65536))
        rate = warm / self._together(control, made, memory, warm)[0]
        nbytes, count = self._choose(rate, left)
        nbytes, count = struct.unpack("<qq", control.exchange(struct.pack("<qq", nbytes, count))[0])
        took, spent = zip(*(self._together(control, made, memory, nbytes) for _ in range(count)), strict=True)
        return Point.of(*what, nbytes, took, sum(spent))

    def _choose(self, bytes_per_s: float, left: int) -> tuple[int, int]:
        """Return size and number of the next point's all-reduces, from the time left."""
        seconds = max(0.2, (self._begun + BUDGET_S - time.monotonic()) / left)
        nbytes = self.bytes
        if RUNS_MIN * nbytes / bytes_per_s > 1.3 * seconds:
            each = int(bytes_per_s * seconds / RUNS_MIN)
            nbytes = max(min(nbytes, LEAST_BYTES), each // LEAST_BYTES * LEAST_BYTES)
        possible = int(1.3 * seconds * bytes_per_s / nbytes)
        return nbytes, max(1, min(5, possible, max(RUNS_MIN, int(min(seconds, POINT_S) * bytes_per_s / nbytes))))

    def _together(self, control: _core.Comm, made: _core.Comm, memory: _core.Arena, nbytes: int) -> tuple[float, float]:
        """Run and check one all-reduce; returns the slower side's seconds and the CPU seconds of both sides."""
        core = launch.core()
        nbytes -= nbytes % 4
        buffer: Any = memory
        values: NDArray[np.float32] = np.frombuffer(buffer, np.float32, nbytes // 4)
        values[:] = np.resize(np.arange(1, 1010, dtype=np.float32), len(values)) * (self.rank + 1)
        control.submit("pair.barrier", core.BARRIER, [], core.UINT8).wait()
        cpu = time.process_time_ns()
        start = core.now_ns()
        made.submit("pair", core.ALLREDUCE, [(memory.address, nbytes)], core.FLOAT32, keep=memory).wait()
        taken = core.now_ns() - start
        cpu = time.process_time_ns() - cpu
        values /= 3
        if not np.array_equal(values, np.resize(np.arange(1, 1010, dtype=np.float32), len(values))):
            raise Error(0, f"an all-reduce of {nbytes} bytes returned wrong elements")
        sides = [struct.unpack("<qq", blob) for blob in control.exchange(struct.pack("<qq", taken, cpu))]
        return max(side[0] for side in sides) / 1e9, sum(side[1] for side in sides) / 1e9


def _interface(address: str, rank: int) -> str | None:
    """Return the interface (in the settings' syntax) that has the listening address, or the route to it.

    None for an address of IPv6: the lanes then use the addresses of the first connection, as an interface may have one
    of IPv4, too, which the other host cannot reach.
    """
    host, _, port = address.rpartition(":")
    if host.startswith("["):
        return None
    if rank != 0:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((host, int(port)))
            except OSError as error:
                raise Error(error.errno or 0, f"no route to {host}: {error.strerror or error}") from error
            host = probe.getsockname()[0]
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == host for entry in entries):
            return f"={name}"
    return None


def listen(settings: Settings, port: int | None, say: Say, **options: Any) -> list[Point]:
    """Listen, print the command for the other host, measure. Raises Error for a port in use or a missing interface."""
    core = launch.core()
    chosen = settings.ports if port is None else (port, port)
    if port is None and settings.ports == (0, 0):
        chosen = (PORT, PORT)
    drawn = settings.secret is None
    secret = settings.secret or secrets.token_bytes(16)
    listener: _core.Listener = core.Listener(None, settings.ifname, chosen)
    try:
        key = f" --secret {secret.hex()}" if drawn else ""
        say(
            f"# listening at {listener.address}; on the other host run"
            + ("" if drawn else ", with the same NETBOTTLENECK_SECRET")
        )
        say(f"netbottleneck bench --connect {shlex.quote(listener.address)}{key}{_same(options)}")
        if settings.ports == (0, 0):
            say("# behind a firewall: open a range of ports, and set NETBOTTLENECK_PORTS=LOW-HIGH to it on both")
        pair = Pair(settings, 0, say, secret, listener=listener, address=listener.address, **options)
        points = pair.run()
    finally:
        listener.close()
    say(verdict(points))
    return points


def _same(options: dict[str, Any]) -> str:
    """Return the options that the other side needs too, as far as they differ from the defaults."""
    arguments = []
    if options.get("transports", NATIVE) != NATIVE:
        arguments.append(f" --transports {','.join(options['transports'])}")
    if options.get("streams", STREAMS) != STREAMS:
        arguments.append(f" --streams {','.join(map(str, options['streams']))}")
    if options.get("bytes", BYTES) != BYTES:
        arguments.append(f" --sizes {options['bytes']}")
    return "".join(arguments)


def connect(settings: Settings, address: str, say: Say, **options: Any) -> list[Point]:
    """Connect to a listening host and measure. address: of `target`."""
    assert settings.secret is not None
    points = Pair(settings, 1, say, settings.secret, address=address, **options).run()
    say(verdict(points))
    return points


def target(settings: Settings, address: str) -> str:
    """Return the "HOST:PORT" of --connect, with the host's address. Raises ValueError, also if there is no secret.

    address: "HOST" or "HOST:PORT"; an address of IPv6 may have brackets.
    """
    if settings.secret is None:
        raise ValueError("--connect needs the secret that --listen printed: --secret S, or NETBOTTLENECK_SECRET")
    plain_six = address.count(":") > 1 and not address.startswith("[")
    match = re.fullmatch(r"(\[[^][]+\]|[^][:]+)(?::([0-9]{1,5}))?", f"[{address}]" if plain_six else address)
    port = int(match[2] or PORT) if match else 0
    if match is None or not 1 <= port <= 65535:
        raise ValueError(f"--connect {address}: must be HOST, HOST:PORT or [IPV6]:PORT")
    try:
        return launch.resolved(f"{match[1]}:{port}")
    except ValueError as error:
        raise ValueError(f"--connect {address}: {error}") from error
