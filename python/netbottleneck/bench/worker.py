"""Ranks of a benchmark: a rank measures every size on all paths in turn, round after round; Workers starts all ranks.

python -m netbottleneck.bench.worker REQUEST is one rank: the request as JSON; rank and rendezvous come from the
environment. Rank 0 prints one JSON object per line: {"open": …}, {"left_out": …}, {"row": …}, {"progress": …}. A rank
exits when its standard input is closed, as its parent is then gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path as FilePath
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from netbottleneck import config
from netbottleneck.bench.paths import Context, Native, Opener, Path, missing, open_stock
from netbottleneck.bench.values import DTYPES, SEED, Data, Request, Samples
from netbottleneck.errors import Error
from netbottleneck.lab import Lab, LinkSpec
from netbottleneck.launch import connect
from netbottleneck.launch.topology import with_package, without_job
from netbottleneck.runtime import monitor
from netbottleneck.trace.transports import BENCHED

# Counters of the machine around a measurement: bytes sent by interfaces, busy time of CPUs.

_NET = FilePath("/proc/self/net/dev")
_STAT = FilePath("/proc/stat")
_SENT = 8  # column of the bytes sent, after the interface's name
_BUSY = (0, 1, 2, 5, 6)  # user, nice, system, irq, softirq: neither idle, nor iowait, nor steal


def sent_bytes(interfaces: Collection[str]) -> int:
    """Return the bytes that interfaces of this network namespace have sent; a missing interface counts 0."""
    sent = 0
    for line in _NET.read_text(encoding="ascii").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() in interfaces:
            sent += int(numbers.split()[_SENT])
    return sent


def busy_ns() -> int:
    """Return the busy time of all CPUs of this machine in ns, at the resolution of kernel ticks (usually 10 ms)."""
    with _STAT.open(encoding="ascii") as file:
        numbers = file.readline().split()[1:]
    return sum(int(numbers[column]) for column in _BUSY) * (10**9 // os.sysconf("SC_CLK_TCK"))


def owed_bytes(hosts: int, nbytes: int) -> int:
    """Return the minimum bytes on the wire of an all-reduce of nbytes, over all hosts: 2(n-1) times its size.

    Reduce-scatter and all-gather each send (n-1)/n of it from each of n hosts. A tree sends all of it n-1 times each
    way. Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, section 3.
    """
    return 2 * (hosts - 1) * nbytes


# One rank of the benchmark.

Emit = Callable[[Mapping[str, Any]], None]
FIELDS = ("time_ns", "cpu_ns", "wire_bytes", "payload_bytes", "wrong", "busy_ns")
REASON_BYTES = 200


class Rank:
    """This process's part of a benchmark. Raises what connecting or an all-reduce raises."""

    def __init__(self, request: Request, settings: config.Settings, place: connect.Place, emit: Emit) -> None:
        self.request = request
        self.settings = settings
        self.place = place
        self._emit = emit if place.rank == 0 else _nothing
        self._core = connect.core()
        itemsize = DTYPES[request.dtype].itemsize
        self._bytes = max(request.elements(size) for size in request.sizes) * itemsize
        self.control = connect.connect(settings, place, transport="tcp", streams=1)
        hosts = self.control.exchange(connect.host_digest(settings))
        self.place = connect.with_topology(place, connect.topology(hosts, place.rank))
        self._hosts = len(set(hosts))
        self._interfaces = [str(name) for name, _ in self._core.interfaces(settings.ifname)]
        self.paths: list[Path] = []

    def run(self) -> None:
        """Measure all sizes."""
        memory = self._core.Arena(max(self._bytes, 4096))
        try:
            self._open(memory)
            if not self.paths:
                raise ValueError(f"none of {', '.join(self.request.transports)} can be used here")
            for nbytes in self.request.sizes:
                self._size(nbytes, memory)
        finally:
            for path in self.paths:
                path.close()
            self.control.close()

    def _open(self, memory: Any) -> None:
        context = Context(
            self.settings,
            self.place,
            self.control,
            memory,
            self.request.dtype,
            self.request.op,
            self._interfaces[0],
        )
        openers = self.request.openers()
        for transport in self.request.transports:
            if transport not in BENCHED:
                self._open_other(transport, openers[transport], context)
                continue
            why = self._agree(missing(transport, self.settings))
            if why and self.request.exact and transport != "stock":
                raise ValueError(f"{transport} was requested and cannot be used: {why}")
            if why:
                self._emit({"left_out": f"{transport} left out: {why}"})
            elif transport == "stock":
                self.paths += open_stock(context)
            else:
                for lanes, shm in itertools.product(self.request.streams, self.request.shm or (self.settings.shm,)):
                    chosen = dataclasses.replace(self.settings, shm=shm)
                    comm = connect.connect(chosen, self.place, transport=transport, streams=lanes)
                    self.paths.append(Native(comm, transport, lanes, context))
        self._emit({"open": [[path.name, path.streams] for path in self.paths], "ranks": self.place.size})

    def _open_other(self, name: str, opener: Opener, context: Context) -> None:
        """Open a comparison or a peer. One that is missing or does not start is reported, and is not an error."""
        path: Path | None = None
        why = self._agree(opener.missing(name, context))
        if not why:
            try:
                path = opener.open(name, context)
            except (OSError, RuntimeError) as error:
                why = getattr(error, "strerror", None) or str(error)
            why = self._agree(why)
        if path is not None and not why:
            self.paths.append(path)
            return
        if path is not None:
            path.close()
        self._emit({"left_out": f"{name} left out: {why}"})

    def _agree(self, why: str) -> str:
        """Return the reasons of all ranks that have one; "" if there are none."""
        texts = self.control.exchange(why.encode()[:REASON_BYTES].ljust(REASON_BYTES))
        reasons = {rank: text.decode(errors="replace").strip() for rank, text in enumerate(texts) if text.strip()}
        return (
            "; ".join(f"rank {rank}: {text}" for rank, text in reasons.items())
            if len(set(reasons.values())) > 1
            else (next(iter(reasons.values()), ""))
        )

    def _size(self, nbytes: int, memory: Any) -> None:
        count = self.request.elements(nbytes)
        kind = DTYPES[self.request.dtype]
        data = Data(self.request.dtype, self.request.op, self.place.rank, self.place.size, count)
        buffer: NDArray[Any] = np.frombuffer(memory, dtype=kind.store, count=count)
        rounds = self.request.rounds(nbytes)
        mine = np.zeros((len(self.paths), rounds, len(FIELDS)), np.int64)
        for path in self.paths:
            if path.warms:
                self._once(path, count, data, buffer)
        for turn in range(rounds):
            # A new order each round, equal on all ranks, so that no path benefits from its predecessor.
            for index in np.random.default_rng([SEED, turn]).permutation(len(self.paths)):
                mine[index, turn] = self._once(self.paths[index], count, data, buffer)
            self._emit({"progress": [nbytes, turn]})
        shares = [np.frombuffer(blob, np.int64) for blob in self.control.exchange(mine.tobytes())]
        samples = np.stack(shares).reshape(-1, *mine.shape)
        for index, path in enumerate(self.paths):
            row = Samples(samples[:, index], count, kind.itemsize, self.counts_wire(), self.request.inner).row()
            head = {"transport": path.name, "streams": path.streams or "auto", "op": "allreduce"}
            head |= {"redop": self.request.op, "dtype": self.request.dtype, "ranks": self.place.size}
            wire = {
                "interface": ",".join(self._interfaces),
                "link_bits_per_s": monitor.link_bps(self._interfaces[0]),
            }
            wire["owed_bytes"] = owed_bytes(self._senders(), count * kind.itemsize)
            self._emit({"row": {**head, **row, **path.info(), **wire}})

    def counts_wire(self) -> bool:
        """Return whether wire bytes are those of a host's interface, which is not the loopback."""
        return self._interfaces != ["lo"]

    def _senders(self) -> int:
        """Return the number of senders in the counted bytes: hosts, or ranks on loopback."""
        return self._hosts if self.counts_wire() else self.place.size

    def _together(self) -> None:
        self.control.submit("bench.barrier", self._core.BARRIER, [], self._core.UINT8, awaited=True).wait()

    def _once(self, path: Path, count: int, data: Data, buffer: NDArray[Any]) -> tuple[int, ...]:
        """Run one timed round. Counters are read while no rank moves data: between barriers.

        Ranks may leave a barrier at different times if one slept in it, so two barriers precede the clock.
        """
        now = self._core.now_ns
        names = self._interfaces
        data.fill(buffer)
        path.prepare(count)
        self._together()
        payload, sent, busy = path.payload(), sent_bytes(names), busy_ns()
        self._together()
        self._together()
        cpu = time.process_time_ns()
        start = now()
        path.go(self.request.inner)
        taken = now() - start
        cpu = time.process_time_ns() - cpu
        self._together()
        busy = busy_ns() - busy
        sent = sent_bytes(names) - sent if (self.place.local_rank or 0) == 0 else 0
        moved = -1 if payload is None else (path.payload() or 0) - payload
        own, theirs = path.taken_ns(), path.cpu_ns()
        path.finish()
        wrong = data.wrong(buffer) if path.reduces else 0
        return taken if own is None else own, cpu if theirs is None else theirs, sent, moved, wrong, busy


def _nothing(_: Mapping[str, Any]) -> None:
    """Discard a line, on ranks other than 0."""


def _end_with_parent() -> None:
    """End this process when its standard input is closed."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    """Run this rank; report a failure as one line on stderr."""
    _end_with_parent()
    rank = "?"

    def emit(line: Mapping[str, Any]) -> None:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    try:
        settings = config.settings()
        place = connect.detect(settings)
        rank = str(place.rank)
        Rank(Request.from_json(json.loads(sys.argv[1])), settings, place, emit).run()
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        if os.environ.get("NETBOTTLENECK_LOG_LEVEL", "").lower() in ("debug", "trace"):
            raise
        sys.stderr.write(f"rank {rank}: {getattr(error, 'strerror', None) or error}\n")
        return 1
    return 0


# Processes of the ranks: one for each, in a lab or on loopback. Rank 0's output is read.

UNCAPPED_BPS = 1e8  # for limits of time: less than any network without caps carries
SILENCE_S = 120.0  # limit without output of rank 0, in addition to the time of the slowest all-reduce
GRACE_S = 3.0  # after the first failure, for the other ranks to report theirs
MESSAGES = ("open", "left_out", "row", "progress")  # keys of a rank's messages
# Variables of the caller that the workers must not see: they would act as the caller's ranks.
_NOT_THEIRS = ("NETBOTTLENECK", "NETBOTTLENECK_TRANSPORT", "NETBOTTLENECK_STREAMS")
_INTERFACES = ("NETBOTTLENECK_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def message_of(line: bytes, kinds: Collection[str]) -> dict[str, Any] | None:
    """Return the message in a line of a rank: a JSON object with a key of `kinds`.

    Other output, such as gloo's, is passed to stderr; None is returned.
    """
    with contextlib.suppress(ValueError):
        message = json.loads(line)
        if isinstance(message, dict) and not message.keys().isdisjoint(kinds):
            return message
    sys.stderr.write(line.decode(errors="replace") + "\n")
    return None


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
        result = {name: value for name, value in without_job(os.environ).items() if name not in _NOT_THEIRS}
        if self._lab is None:
            result |= dict.fromkeys(_INTERFACES, "lo") | {"MASTER_ADDR": "127.0.0.1", "NETBOTTLENECK_IFNAME": "=lo"}
        result.setdefault("NETBOTTLENECK_START_TIMEOUT_S", "60")
        result.setdefault("OMP_NUM_THREADS", "1")
        return with_package(result) | {
            "NETBOTTLENECK_RANK": str(rank),
            "NETBOTTLENECK_SIZE": str(self._ranks),
            "NETBOTTLENECK_RENDEZVOUS": self._folder.name,
        }

    def _stderr(self, rank: int) -> FilePath:
        return FilePath(self._folder.name) / f"stderr.{rank}"

    def listen(self, handle: Callable[[Mapping[str, Any]], None], silence_s: float) -> None:
        """Pass every message of rank 0 to `handle` until all ranks have finished.

        Raises Error with the failed rank's message, or after silence_s without output.
        """
        output = self._processes[0].stdout
        if output is None:
            raise ValueError("rank 0 has no output")
        os.set_blocking(output.fileno(), False)
        last_output, last, pending = time.monotonic(), 0.0, b""
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while True:
                codes = [process.poll() for process in self._processes]
                got = output.read() if selector.select(0.2) else None
                if got:
                    last_output = time.monotonic()
                    *lines, pending = (pending + got).split(b"\n")
                    for text in lines:
                        message = message_of(text, MESSAGES)
                        if message is not None:
                            handle(message)
                if any(codes):
                    last = last or time.monotonic() + GRACE_S
                elif None not in codes and not got:
                    return
                self._judge(codes, last, last_output + silence_s)

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
            lines = self._stderr(rank).read_text(encoding="utf-8", errors="replace").strip().splitlines()
            code = codes[rank]
            if code is not None and code < 0:
                parts.append(f"rank {rank} was killed by {signal.Signals(-code).name}")
            elif code or lines:
                parts.extend(lines[-1:] or [f"rank {rank} ended with exit code {code}"])
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
    rate = (spec.slowest_bps if spec is not None else None) or UNCAPPED_BPS
    paths = len(request.transports) * (1 + len(request.streams))
    return SILENCE_S + 2 * paths * 8 * 2 * max(request.sizes) / rate


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip destructors: a communicator that failed on another rank could block the exit.
    os._exit(code)
