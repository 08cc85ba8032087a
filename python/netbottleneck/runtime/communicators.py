"""Communicators: one interface over the stock path, our own engine, and no communication.

`target` sets the destination of complete buckets; the rest is `barrier`, `info`, `close` and `wire`. All of them move
the same buckets in the same order and write the same records.
"""

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from netbottleneck.config import Settings
from netbottleneck.errors import PeerError
from netbottleneck.launch import connect, rendezvous
from netbottleneck.trace.ring_file import EVENTS

if TYPE_CHECKING:
    from netbottleneck import _core

CLOSE_S = 1.0  # time that the end of a stock path gives to the operations in flight

logger = logging.getLogger("netbottleneck")


def native_refusal(transport: str, settings: Settings) -> str:
    """Return the reason not to use a native transport in this process; "" if it can be used."""
    core = connect.core()
    if transport not in core.transports():
        return "not in this build: install libfabric's headers and build again"
    if transport != "ofi":
        return ""
    try:
        providers = [name for name, _ in core.providers(settings.library)]
    except OSError as error:
        return str(error)
    if not providers or settings.provider not in (None, *providers):
        return f"no libfabric provider {settings.provider or 'that lanes can use'}"
    return ""


class Bucket(Protocol):
    """Gradients that are sent together."""

    @property
    def name(self) -> str:
        """The operation's name, the same on all ranks."""

    @property
    def nbytes(self) -> int:
        """Its bytes."""

    @property
    def parameters(self) -> Sequence[int]:
        """The indices of its gradients."""

    @property
    def dtype(self) -> Any:
        """The type of its elements."""


class Buckets(Protocol):
    """Buckets of gradients in flight: a GradientSink of `torch`, or those of a replay."""

    @property
    def buckets(self) -> Sequence[Bucket]:
        """All of them, by index."""

    @property
    def version(self) -> int:
        """Increases when a bucket changes or moves."""

    @property
    def factors(self) -> tuple[bool, float, int | None]:
        """Arithmetic given to `target`: (average, predivide, op)."""

    def target(self, destination: Any, average: bool = True, *, predivide: float = 1.0, op: int | None = None) -> None:
        """Set the destination of complete buckets, as GradientSink.target does."""


class FlatBuckets(Buckets, Protocol):
    """Buckets that are available as one tensor each."""

    def flat(self, index: int) -> Any:
        """Return bucket `index` as one flat tensor over its memory."""


class Communicator(Protocol):
    """Communication of gradients in one arm of a run."""

    name: str

    def target(self, gradients: Any) -> None:
        """Send complete buckets here from now on, with their current arithmetic. Between steps only."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def info(self) -> dict[str, Any]:
        """Return the record of this transport."""

    def wire(self) -> int | None:
        """Return payload bytes sent by this rank; None if the path does not count them."""

    def close(self) -> None:
        """Close the connections."""


class Native:
    """Our own lanes: tcp or ofi."""

    def __init__(self, name: str, comm: "_core.Comm", ring: "_core.Recorder | None") -> None:
        self.name = name
        self.comm = comm
        self._ring = ring

    def target(self, gradients: Buckets) -> None:
        average, predivide, op = gradients.factors
        gradients.target(self.comm, average, predivide=predivide, op=op)

    def barrier(self) -> None:
        core = connect.core()
        self.comm.submit("netbottleneck.barrier", core.BARRIER, [], core.UINT8, awaited=True).wait()

    def info(self) -> dict[str, Any]:
        return dict(self.comm.info())

    def wire(self) -> int | None:
        return int(self.comm.info()["bytes_out"])

    def close(self) -> None:
        for notice in self.comm.notices():
            logger.warning("%s: %s", self.name, notice)
        self.comm.close()
        if self._ring is not None:
            self._ring.close()


class Null:
    """Moves nothing: the cost of training if communication were free. Gradients stay those of one rank."""

    name = "null"

    def target(self, gradients: Buckets) -> None:
        average, predivide, op = gradients.factors
        gradients.target(None, average, predivide=predivide, op=op)

    def barrier(self) -> None:
        return

    def info(self) -> dict[str, Any]:
        return {"provider": "none: nothing moves, the result of training is not valid"}

    def wire(self) -> int | None:
        return 0

    def close(self) -> None:
        return


def scales(factors: tuple[bool, float, int | None], ranks: int) -> tuple[float, float]:
    """Return the factors before and after a sum over so many ranks, of the arithmetic given to `target`."""
    average, predivide, _ = factors
    return 1.0 / predivide, predivide / (ranks if average else 1)


def _scale(flat: Any, factor: float) -> None:
    """Multiply a tensor in place, with the bits of the core's kernels: integers in float64, and truncated."""
    if factor != 1 and flat.is_floating_point():
        flat.mul_(factor)
    elif factor != 1:
        flat.copy_(flat.double().mul_(factor))


class _StockWork:
    """A bucket in flight over torch.distributed. after: factor of its sum. over: stamps its end."""

    def __init__(self, work: Any, name: str, flat: Any, after: float, over: "_core.Stamper | None") -> None:
        self._work = work
        self._over = over
        self._name = name
        self._flat = flat
        self._after = after

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise PeerError(0, f"{self._name} over torch.distributed: {error}") from error
        if self._over is not None:
            self._over()  # its callback may still wait for the GIL
        _scale(self._flat, self._after)
        self._after = 1.0


class Stock:
    """gloo, as torch.distributed has it.

    Records submit, start and done by the engine's clock. Gloo does not report first byte, lanes and wire bytes, so they
    are left out. instead: called with the index of each bucket, and with a function that sends it here and returns the
    work; returns a work of the bucket.
    """

    name = "stock"
    instead: Callable[[int, Callable[[], Any]], Any] | None = None

    def __init__(self, group: Any, size: int, recorder: "_core.Recorder | None") -> None:
        """group: a stock_group."""
        self._group = group
        self._size = size
        self._recorder = recorder
        self._rounds: dict[str, int] = {}
        self._works: list[Any] = []  # torch's, of operations that may be in flight, oldest first
        self._info = {"provider": "gloo", "interfaces": os.environ.get("GLOO_SOCKET_IFNAME", "")}

    def target(self, gradients: FlatBuckets) -> None:
        average, predivide, op = gradients.factors
        before, after = scales(gradients.factors, self._size)
        gradients.target(self._sink(gradients, before, after, op), average, predivide=predivide, op=op)

    def barrier(self) -> None:
        quietly(self._group.barrier).wait()

    def info(self) -> dict[str, Any]:
        return self._info

    def wire(self) -> int | None:
        return None

    def close(self) -> None:
        """Let the group go.

        Its end waits for operations in flight, up to their time limit. If one waits for a rank that is lost, the group
        stays for the rest of the process.
        """
        group, self._group = self._group, None
        until = time.monotonic() + CLOSE_S
        while self._in_flight() and time.monotonic() < until:
            time.sleep(0.01)
        self._works = [work for work in self._works if not work.is_completed()]  # they keep their connections open
        if group is not None and self._works:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    def _in_flight(self) -> bool:
        return any(not work.is_completed() for work in self._works)

    def reduce(self, tensor: Any, op: int | None = None) -> Any:
        """Start an all-reduce in place, which is not recorded, and return torch's work. op: see GradientSink.target."""
        import torch.distributed as dist

        core = connect.core()
        names = {None: "SUM", core.SUM: "SUM", core.MIN: "MIN", core.MAX: "MAX", core.PRODUCT: "PRODUCT"}
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, names[op])
        work = quietly(self._group.allreduce, [tensor], options)
        self._works.append(work)
        if self._works[0].is_completed():  # one for one: no more of them stay than are in flight at once
            del self._works[0]
        return work

    def _sink(self, gradients: FlatBuckets, before: float, after: float, op: int | None) -> Callable[[int], Any]:
        made: list[tuple[int, list[Any]]] = []

        def send_here(index: int) -> Any:
            if not made or made[0][0] != gradients.version:
                made[:] = [(gradients.version, [gradients.flat(i) for i in range(len(gradients.buckets))])]
            bucket, flat = gradients.buckets[index], made[0][1][index]
            started = self._submitted(bucket.name, index, bucket.nbytes)
            _scale(flat, before)
            work = self.reduce(flat, op)
            return _StockWork(work, bucket.name, flat, after, None if started is None else started(work))

        def send(index: int) -> Any:
            here = partial(send_here, index)
            return here() if self.instead is None else self.instead(index, here)

        return send

    def _submitted(self, name: str, index: int, nbytes: int) -> "Callable[[Any], _core.Stamper] | None":
        """Stamp the submit; return a function that stamps the start, and the end once the work completes.

        It returns what stamps the end if that has not been stamped.
        """
        recorder = self._recorder
        if recorder is None:
            return None
        allreduce = connect.core().ALLREDUCE
        key, turn = key_of(name), self._rounds.get(name, 0)
        self._rounds[name] = turn + 1
        recorder.put(EVENTS["OP_SUBMIT"], key, turn, nbytes, index + 1, 0, allreduce)
        called_ns = time.monotonic_ns()

        def started(work: Any) -> "_core.Stamper":
            recorder.put(EVENTS["OP_START"], key, turn, time.monotonic_ns() - called_ns)
            done = recorder.stamper(EVENTS["OP_DONE"], key, turn, awaited=True)
            work.get_future().then(done)
            return done.twin()

        return started


def tensor_over(memory: Any) -> Any:
    """Return a flat float32 tensor over memory with the buffer protocol."""
    import torch

    return torch.frombuffer(memory, dtype=torch.float32)


class _Apart(threading.local):
    """inside: this thread is in a call that its caller records."""

    inside = False


APART = _Apart()


def quietly(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function whose use of torch.distributed the caller records, if anyone does."""
    inside, APART.inside = APART.inside, True
    try:
        return call(*args, **kwargs)
    finally:
        APART.inside = inside


def key_of(name: str) -> int:
    """Return the engine's key of a name."""
    return int(connect.core().name_key(name))


REASON_BYTES = 512  # of a reason that ranks exchange
REASONS_MOST = 3  # that an error names


def voted(exchange: Callable[[bytes], list[bytes]], call: Callable[[], Any]) -> Any:
    """Return what a call returns. If it fails on a rank, raises ValueError with the reasons, on all ranks.

    exchange: all-gather of equal-length bytes.
    """
    made: Any = None
    mine = ""
    try:
        made = call()
    except Exception as error:
        mine = str(error) or type(error).__name__
    votes = exchange(mine.encode()[:REASON_BYTES].ljust(REASON_BYTES))
    reasons = dict.fromkeys(vote.decode(errors="replace").strip() for vote in votes if vote.strip())
    if reasons:
        if hasattr(made, "abort"):
            made.abort()
        raise ValueError("; ".join(list(reasons)[:REASONS_MOST]))
    return made


def stock_group(settings: Settings, place: connect.Place, exchange: Callable[[bytes], list[bytes]]) -> Any:
    """Return a gloo group of all ranks, of which torch.distributed knows nothing: it stays as the script has it.

    An operation waits as long as in torch's own groups, or NETBOTTLENECK_TIMEOUT_S if that is set. exchange: all-gather
    of equal-length bytes over another communicator, used for the rendezvous. Raises ValueError, on all ranks, if ranks
    do not reach each other within NETBOTTLENECK_START_TIMEOUT_S. The group's threads end with the last reference to it.
    One that still needs Python while the interpreter shuts down would abort the process.
    """
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.constants import default_pg_timeout
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    # Half of the time, as a rank that is done waits for the others no longer than the whole.
    start = timedelta(seconds=settings.start_timeout_s / 2)
    store = gloo_store(settings, place, exchange, start)

    def group(name: str, limit: timedelta) -> Any:
        try:
            return ProcessGroupGloo(PrefixStore(name, store), place.rank, place.size, limit)
        except RuntimeError as error:
            raise ValueError(f"rank {place.rank}: no gloo group of all ranks: {_first_line(error)}") from error

    # gloo connects under the time limit of the operations. A group with a short one shows first that it can.
    voted(exchange, partial(group, "trial", start))
    limit = timedelta(seconds=settings.timeout_s) if "timeout_s" in settings.sources else default_pg_timeout
    return voted(exchange, partial(group, "stock", limit))


def _first_line(error: Exception) -> str:
    """Return an error's text without the C++ stack that torch adds."""
    return str(error).partition("\n")[0]


WHERE_BYTES = 320  # of HOST:PORT; a host's name has up to 253


def gloo_store(
    settings: Settings, place: connect.Place, exchange: Callable[[bytes], list[bytes]], limit: timedelta
) -> Any:
    """Return a store for a gloo group of all ranks. Every rank calls it. limit: of a wait for a value.

    Rank 0 has it at MASTER_ADDR, else at an address of its own: other hosts may not know the name of its host, and a
    loopback leads them to themselves. Raises ValueError, on all ranks, if a rank does not reach it.
    """
    from torch._C._distributed_c10d import HashStore, TCPStore

    if place.size == 1:
        return HashStore()
    one_host = len(set(exchange(connect.machine_digest()))) == 1

    def serve() -> Any:
        host = os.environ.get("MASTER_ADDR", "")
        if not host or (not one_host and rendezvous.is_loopback(host, one_host=True)):
            host = connect.host_of_rank_0(settings, place)
        return TCPStore(host, 0, place.size, is_master=True, timeout=limit, wait_for_workers=False)

    def reach(host: str, port: int) -> Any:
        try:
            return TCPStore(host, port, place.size, is_master=False, timeout=limit, wait_for_workers=False)
        except RuntimeError as error:
            raise ValueError(f"rank {place.rank}: rank 0's store: {_first_line(error)}") from error

    store = voted(exchange, serve if place.rank == 0 else bool)
    here = f"{store.host}:{store.port}" if place.rank == 0 else ""
    where = exchange(here.encode().ljust(WHERE_BYTES))[0].decode().strip()
    host, _, port = where.rpartition(":")
    return voted(exchange, (lambda: store) if place.rank == 0 else partial(reach, host, int(port)))
