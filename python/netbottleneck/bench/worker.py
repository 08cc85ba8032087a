"""One rank of a benchmark: every size, on all paths in turn, round after round. Rank 0 tells what came out.

python -m netbottleneck.bench.worker REQUEST: the request as JSON; rank and meeting place come from the environment.
Rank 0 prints one JSON object a line: {"open": …}, {"left_out": …}, {"row": …}, {"beat": …}. A rank ends when its
standard input is closed: whoever started it is gone.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netbottleneck import config
from netbottleneck.bench.counters import busy_ns, owed_bytes, sent_bytes
from netbottleneck.bench.data import DTYPES, SEED, Data
from netbottleneck.bench.paths import Native, Path, missing, open_stock
from netbottleneck.bench.peers import Ground, open_peer
from netbottleneck.bench.request import PEERS, Request
from netbottleneck.bench.results import Samples
from netbottleneck.launch import connect
from netbottleneck.runtime import monitor

Emit = Callable[[Mapping[str, Any]], None]
FIELDS = ("time_ns", "cpu_ns", "wire_bytes", "payload_bytes", "wrong", "busy_ns")
REASON_BYTES = 200


class Rank:
    """This process's share of a benchmark. Raises what connecting or an all-reduce raises."""

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
        self.place = connect.located(place, connect.topology(hosts, place.rank))
        self.paths: list[Path] = []

    def run(self) -> None:
        """Measure everything."""
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
        what = (self.request.dtype, self.request.op)
        for transport in self.request.transports:
            if transport in PEERS:
                self._open_peer(transport, memory, what)
                continue
            why = self._agree(missing(transport, self.settings))
            if why and self.request.exact and transport != "stock":
                raise ValueError(f"{transport} was asked for and cannot be used: {why}")
            if why:
                self._emit({"left_out": f"{transport} left out: {why}"})
            elif transport == "stock":
                self.paths += open_stock(self.settings, self.place, self.control, memory, what)
            else:
                for lanes, shm in itertools.product(self.request.streams, self.request.shm or (self.settings.shm,)):
                    chosen = dataclasses.replace(self.settings, shm=shm)
                    made = connect.connect(chosen, self.place, transport=transport, streams=lanes)
                    self.paths.append(Native(made, transport, lanes, memory, what))
        self._emit({"open": [[path.name, path.streams] for path in self.paths], "ranks": self.place.size})

    def _open_peer(self, transport: str, memory: Any, what: tuple[str, str]) -> None:
        """Another program that is missing, or does not start, is named, and is no error."""
        ground = Ground(self.settings, self.place, self.control, memory, what, self._interfaces()[0])
        opened = open_peer(transport, ground, self._agree)
        if isinstance(opened, str):
            self._emit({"left_out": f"{transport} left out: {opened}"})
        else:
            self.paths.append(opened)

    def _agree(self, why: str) -> str:
        """Return why this or another rank cannot; "" where all can."""
        said = self.control.exchange(why.encode()[:REASON_BYTES].ljust(REASON_BYTES))
        found = {rank: text.decode(errors="replace").strip() for rank, text in enumerate(said) if text.strip()}
        return (
            "; ".join(f"rank {rank}: {text}" for rank, text in found.items())
            if len(set(found.values())) > 1
            else (next(iter(found.values()), ""))
        )

    def _size(self, nbytes: int, memory: Any) -> None:
        count = self.request.elements(nbytes)
        kind = DTYPES[self.request.dtype]
        data = Data(self.request.dtype, self.request.op, self.place.rank, self.place.size, count)
        buffer: NDArray[Any] = np.frombuffer(memory, dtype=kind.store, count=count)
        rounds = self.request.rounds(nbytes)
        found = np.zeros((len(self.paths), rounds, len(FIELDS)), np.int64)
        for path in self.paths:
            if path.warms:
                self._once(path, count, data, buffer)
        for turn in range(rounds):
            # Drawn anew each round, alike on all ranks, so that no path gains by who is before it.
            for index in np.random.default_rng([SEED, turn]).permutation(len(self.paths)):
                found[index, turn] = self._once(self.paths[index], count, data, buffer)
            self._emit({"beat": [nbytes, turn]})
        shares = [np.frombuffer(blob, np.int64) for blob in self.control.exchange(found.tobytes())]
        samples = np.stack(shares).reshape(-1, *found.shape)
        for index, path in enumerate(self.paths):
            row = Samples(samples[:, index], count, kind.itemsize, self.counts_wire(), self.request.inner).row()
            head = {"transport": path.name, "streams": path.streams or "auto", "op": "allreduce"}
            head |= {"redop": self.request.op, "dtype": self.request.dtype, "ranks": self.place.size}
            first = self._interfaces()[0]
            wire = {"interface": ",".join(self._interfaces()), "link_bits_per_s": monitor.link_bps(first)}
            wire["owed_bytes"] = owed_bytes(self._senders(), count * kind.itemsize)
            self._emit({"row": {**head, **row, **path.info(), **wire}})

    def counts_wire(self) -> bool:
        """Whether this rank reports its host's interface: an interface that is no loopback, one rank a host."""
        return self._interfaces() != ["lo"]

    def _senders(self) -> int:
        """Return between how many the bytes travel that are counted: hosts, or on loopback ranks."""
        return self.place.size // (self.place.local_size or 1) if self.counts_wire() else self.place.size

    def _together(self) -> None:
        self.control.submit("bench.barrier", self._core.BARRIER, [], self._core.UINT8, awaited=True).wait()

    def _once(self, path: Path, count: int, data: Data, buffer: NDArray[Any]) -> tuple[int, ...]:
        """One timed round. Counters are read while no rank moves anything: between two barriers, and after another.

        Ranks leave a barrier apart where one of them slept in it: before the clock starts there are two in a row.
        """
        now = self._core.now_ns
        names = self._interfaces()
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

    def _interfaces(self) -> list[str]:
        spec = (self.settings.ifname or "").lstrip("=")
        return spec.split(",") if spec else [str(self._core.interfaces(None)[0][0])]


def _nothing(_: Mapping[str, Any]) -> None:
    """What ranks other than 0 tell."""


def _end_with_parent() -> None:
    """End this process when its standard input is closed."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    """Run this rank; a failure is one line on stderr."""
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


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A communicator that another one failed beside must not hold this process.
    os._exit(code)
