"""What a benchmark measures: one all-reduce of the same memory by gloo or by lanes of our own."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

from netbottleneck.config import Settings
from netbottleneck.launch import connect
from netbottleneck.runtime import communicators

if TYPE_CHECKING:
    from netbottleneck import _core

TUNED = 4  # how often the tuned stock names its interface


class Path:
    """One way to all-reduce, or a limit of wire or memory to hold beside. `prepare` is outside the clock, `go` inside.

    reduces: the memory holds the result afterwards. warms: the first round is slower, and does not count.
    """

    name: str
    streams: int
    reduces: bool = True
    warms: bool = True

    def prepare(self, count: int) -> None:
        """Get ready for `count` elements from the beginning of the memory."""

    def go(self, times: int) -> None:
        """All-reduce in place, one after another, and wait for the last."""
        raise NotImplementedError

    def finish(self) -> None:
        """Put the result where it is checked, outside the clock; most have it there."""

    def taken_ns(self) -> int | None:
        """Return what `go` took by a clock of the path's own; None: by the caller's."""
        return None

    def cpu_ns(self) -> int | None:
        """Return processor time of `go` in processes of the path's own; None: in this one."""
        return None

    def payload(self) -> int | None:
        """Return payload bytes this rank has sent so far; None where the path does not tell."""
        return None

    def info(self) -> dict[str, Any]:
        """Return what a row says of this path beside its numbers."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave in good order."""


class Native(Path):
    """Lanes of our own."""

    def __init__(
        self,
        made: _core.Comm,
        name: str,
        streams: int,
        memory: _core.Arena,
        what: tuple[str, str],
        *,
        mapped: bool = True,
    ) -> None:
        module = connect.core()
        self.name = name
        self.streams = streams
        self._comm = made
        self._memory = memory
        self._core = module
        self._dtype = getattr(module, what[0].upper())
        self._op = getattr(module, what[1].upper())
        self._bytes = 0
        if mapped and made.size > 1:
            made.map(memory)

    def prepare(self, count: int) -> None:
        self._bytes = count * self._core.dtype_size(self._dtype)

    def region(self) -> tuple[int, Any]:
        """Return the address of the memory that is reduced, and what keeps it."""
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

    def __init__(self, group: Any, name: str, streams: int, memory: _core.Arena, what: tuple[str, str]) -> None:
        self._torch = importlib.import_module("torch")
        distributed = importlib.import_module("torch.distributed")
        self.name = name
        self.streams = streams
        self._group = group
        self._memory = memory
        self._dtype = getattr(self._torch, what[0])
        self._options = distributed.AllreduceOptions()
        self._options.reduceOp = getattr(distributed.ReduceOp, what[1].upper())
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
        self._tensor = None
        group, self._group = self._group, None
        communicators.leave_group(group)


def missing(transport: str, settings: Settings) -> str:
    """Return why a transport cannot be used in this process; "" where it can."""
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


def open_stock(
    settings: Settings, place: connect.Place, control: _core.Comm, memory: _core.Arena, what: Any
) -> list[Path]:
    """Return gloo as it comes, and gloo with its interface named four times."""
    one = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0] or connect.core().interfaces(settings.ifname)[0][0]
    made: list[Path] = []
    kept = os.environ.get("GLOO_SOCKET_IFNAME")
    try:
        # gloo reads the variable when a group is made.
        for name, times in (("stock", 1), (f"stock x{TUNED}", TUNED)):
            os.environ["GLOO_SOCKET_IFNAME"] = ",".join([one] * times)
            made.append(Gloo(communicators.stock_group(settings, place, control.exchange), name, times, memory, what))
    finally:
        if kept is None:
            del os.environ["GLOO_SOCKET_IFNAME"]
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = kept
    return made
