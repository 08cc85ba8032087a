"""Benchmark paths: our transports, gloo, and paths to compare them with. Every path all-reduces the same memory."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from netbottleneck.config import Settings
from netbottleneck.launch import connect
from netbottleneck.runtime import communicators

if TYPE_CHECKING:
    from netbottleneck import _core


TUNED = 4  # number of times that the tuned stock names its interface


class Path:
    """One way to all-reduce, or a limit of wire or memory for comparison. The clock runs during `go` only.

    reduces: the memory holds the result afterwards. warms: the first round is slower and is not counted.
    """

    name: str
    streams: int
    reduces: bool = True
    warms: bool = True

    def prepare(self, count: int) -> None:
        """Prepare for `count` elements from the beginning of the memory."""

    def go(self, times: int) -> None:
        """All-reduce in place, `times` times in sequence, and wait for the last."""
        raise NotImplementedError

    def finish(self) -> None:
        """Copy the result to the checked memory, outside the clock; most paths need no copy."""

    def taken_ns(self) -> int | None:
        """Return the duration of `go` by the path's own clock; None: use the caller's clock."""
        return None

    def cpu_ns(self) -> int | None:
        """Return the CPU time of `go` in the path's own processes; None: it ran in this process."""
        return None

    def payload(self) -> int | None:
        """Return the payload bytes that this rank has sent so far; None if not known."""
        return None

    def info(self) -> dict[str, Any]:
        """Return further columns of the path's row."""
        raise NotImplementedError

    def close(self) -> None:
        """Release all resources."""


@dataclass(frozen=True)
class Context:
    """What a path is opened with, on one rank. interface: the ranks' rendezvous interface."""

    settings: Settings
    place: connect.Place
    control: _core.Comm
    memory: _core.Arena
    dtype: str
    op: str
    interface: str


class Native(Path):
    """Lanes of our transports."""

    def __init__(self, comm: _core.Comm, name: str, streams: int, context: Context, *, mapped: bool = True) -> None:
        module = connect.core()
        self.name = name
        self.streams = streams
        self._comm = comm
        self._memory = context.memory
        self._core = module
        self._dtype = getattr(module, context.dtype.upper())
        self._op = getattr(module, context.op.upper())
        self._bytes = 0
        if mapped and comm.size > 1:
            comm.map(context.memory)

    def prepare(self, count: int) -> None:
        self._bytes = count * self._core.dtype_size(self._dtype)

    def region(self) -> tuple[int, Any]:
        """Return the address of the memory to reduce, and the object that keeps it alive."""
        return self._memory.address, self._memory

    def go(self, times: int) -> None:
        address, keep = self.region()
        memory = [(address, self._bytes)] if self._bytes else []
        for _ in range(times):
            self._comm.submit(
                "bench", self._core.ALLREDUCE, memory, self._dtype, op=self._op, keep=keep, awaited=True
            ).wait()

    def payload(self) -> int | None:
        return int(self._comm.info()["bytes_out"])

    def info(self) -> dict[str, Any]:
        found = self._comm.info()
        curve = [[int(x) for x in point] for point in found["probe"]]
        auto = {"probe": curve} if self.streams == 0 else {}
        shared = {"shm": str(found["shm"])} if self._comm.size > 1 else {}
        return {"provider": str(found["provider"]), "streams_used": int(found["streams_used"]), **shared, **auto}

    def close(self) -> None:
        self._comm.close()


class Gloo(Path):
    """torch.distributed's gloo, with its interface named once or several times."""

    def __init__(self, group: Any, name: str, streams: int, context: Context) -> None:
        self._torch = importlib.import_module("torch")
        distributed = importlib.import_module("torch.distributed")
        self.name = name
        self.streams = streams
        self._group = group
        self._memory = context.memory
        self._dtype = getattr(self._torch, context.dtype)
        self._options = distributed.AllreduceOptions()
        self._options.reduceOp = getattr(distributed.ReduceOp, context.op.upper())
        self._tensor: Any = None

    def prepare(self, count: int) -> None:
        empty = self._torch.empty(0, dtype=self._dtype)
        self._tensor = self._torch.frombuffer(self._memory, dtype=self._dtype, count=count) if count else empty

    def go(self, times: int) -> None:
        for _ in range(times):
            self._group.allreduce([self._tensor], self._options).wait()

    def info(self) -> dict[str, Any]:
        return {"provider": f"gloo (torch {self._torch.__version__})", "streams_used": self.streams}

    def close(self) -> None:
        self._tensor = self._group = None


def missing(transport: str, settings: Settings) -> str:
    """Return why a transport cannot be used in this process; "" if it can."""
    if transport == "stock":
        return "" if importlib.util.find_spec("torch") else "torch is not installed"
    module = connect.core()
    if transport not in module.transports():
        return "built without it: install libfabric-dev and build again"
    if transport == "ofi":
        try:
            return "" if module.providers(settings.library) else "libfabric has no provider that works here"
        except OSError as error:
            return str(error.strerror or error)
    return ""


def open_stock(context: Context) -> list[Path]:
    """Return gloo with its defaults, and gloo with its interface named four times."""
    settings, before = context.settings, os.environ.get("GLOO_SOCKET_IFNAME")
    interface = (before or "").split(",")[0] or connect.core().interfaces(settings.ifname)[0][0]
    opened: list[Path] = []
    try:
        # gloo reads the variable when it creates a group.
        for name, times in (("stock", 1), (f"stock x{TUNED}", TUNED)):
            os.environ["GLOO_SOCKET_IFNAME"] = ",".join([interface] * times)
            group = communicators.stock_group(settings, context.place, context.control.exchange)
            opened.append(Gloo(group, name, times, context))
    finally:
        if before is None:
            del os.environ["GLOO_SOCKET_IFNAME"]
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = before
    return opened


# Paths to compare with, by name: those of this file, and those of a table of peers.

FROM_A_CHECKOUT = (
    "MPI, oneCCL, Horovod and iperf3 are measured from a checkout of the netbottleneck repository: "
    'add --peers benchmarks/peers there (in Python: peers="benchmarks/peers")'
)


@dataclass(frozen=True)
class Opener:
    """How a path is opened. Every rank calls `missing`, then `open`, in the same order.

    missing: returns why the path cannot be used in this process; "" if it can be tried. open: returns the path, and
    raises OSError or RuntimeError if it does not start.
    """

    missing: Callable[[str, Context], str]
    open: Callable[[str, Context], Path]


@functools.cache
def load_peers(place: str) -> Mapping[str, Opener]:
    """Return the table PEERS of a Python file or of a package's folder, by path name. Raises ValueError."""
    path = FilePath(place).resolve()
    file = path / "__init__.py" if path.is_dir() else path
    spec = importlib.util.spec_from_file_location(f"netbottleneck_peers_{path.stem}", file)
    if not place or not file.is_file() or spec is None or spec.loader is None:
        raise ValueError(f"peers {place or '(no path)'}: not a Python file or package. {FROM_A_CHECKOUT}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for the package's own relative imports
    spec.loader.exec_module(module)
    table = getattr(module, "PEERS", None)
    if not isinstance(table, Mapping):
        raise ValueError(f"peers {place}: it defines no table PEERS")
    return table


# Memory as a path: our lanes on memory from outside the core, and the limits of memory itself.
#
# The limits use private memory, on all ranks at once, as an all-reduce between ranks of one host does.


class Heap(Native):
    """Lanes of our transports, on memory that the user allocated."""

    def __init__(self, name: str, context: Context) -> None:
        settings = context.settings
        comm = connect.connect(settings, context.place, transport=name.removesuffix("-heap"))
        super().__init__(comm, name, settings.streams, context, mapped=False)
        whole: Any = context.memory
        self._checked: NDArray[np.uint8] = np.frombuffer(whole, np.uint8)
        self._own = np.zeros(context.memory.nbytes, np.uint8)

    @staticmethod
    def missing(name: str, context: Context) -> str:
        """Return why the transport cannot be used in this process; "" if it can."""
        return missing(name.removesuffix("-heap"), context.settings)

    def prepare(self, count: int) -> None:
        super().prepare(count)
        self._own[: self._bytes] = self._checked[: self._bytes]

    def region(self) -> tuple[int, Any]:
        return int(self._own.ctypes.data), self._own

    def finish(self) -> None:
        self._checked[: self._bytes] = self._own[: self._bytes]


class Limit(Path):
    """A limit of memory: `go` moves `count` float32 of private memory. It reduces nothing."""

    reduces = False
    arrays = 2
    provider = ""

    def __init__(self, name: str, context: Context) -> None:
        self.name = name
        self.streams = 1
        self._core = connect.core()
        self._all = [np.ones(context.memory.nbytes // 4, np.float32) for _ in range(self.arrays)]
        self._used = self._all

    @staticmethod
    def missing(_name: str, context: Context) -> str:
        """Return why a limit of memory says nothing about this reduction; "" if it does."""
        return "" if (context.dtype, context.op) == ("float32", "sum") else "memory's limits are sums of float32"

    def prepare(self, count: int) -> None:
        self._used = [array[:count] for array in self._all]

    def go(self, times: int) -> None:
        for _ in range(times):
            self.work(*self._used)

    def work(self, *arrays: NDArray[np.float32]) -> None:
        """Process the memory once."""
        raise NotImplementedError

    def info(self) -> dict[str, Any]:
        return {"provider": self.provider, "streams_used": 1, "wire_bits_per_s": None}

    def close(self) -> None:
        self._all, self._used = [], []


class Copy(Limit):
    """A memcpy: one array read, one written."""

    provider = "NumPy's copy"

    def work(self, *arrays: NDArray[np.float32]) -> None:
        np.copyto(arrays[0], arrays[1])


class Add(Limit):
    """A vector addition by the core's kernel: two arrays read, one written."""

    provider = "the core's kernel"

    def work(self, *arrays: NDArray[np.float32]) -> None:
        self._core.reduce(arrays[0], arrays[1], self._core.FLOAT32, self._core.SUM)


class Pair(Limit):
    """The least work of a two-rank all-reduce in shared memory: the sum of half the elements, written to both."""

    provider = "the core's kernel for two"

    def prepare(self, count: int) -> None:
        self._used = [array[: (count + 1) // 2] for array in self._all]

    def work(self, *arrays: NDArray[np.float32]) -> None:
        self._core.reduce_pair(arrays[0], arrays[1], self._core.FLOAT32, self._core.SUM)


HEAP = {name: Opener(Heap.missing, Heap) for name in ("tcp-heap", "ofi-heap")}
MEMORY = {name: Opener(Limit.missing, limit) for name, limit in (("memcpy", Copy), ("add", Add), ("pair", Pair))}
COMPARISONS: Mapping[str, Opener] = HEAP | MEMORY
