"""Operations of the backend: the moves of each collective, their progress, and the engine's communicator."""

import contextlib
import errno
import functools
import logging
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import Work

from netbottleneck.errors import FAILURES, DeadlineError, HorovodInternalError
from netbottleneck.runtime import job
from netbottleneck.torch.gradients import dtype_code, is_reachable
from netbottleneck.torch.handles import DeviceStream, memory_of

if TYPE_CHECKING:
    from netbottleneck import _core


# Pending operations: their waiters, and progress of those with several rounds.

NOTICE_S = 5.0
# Time that the thread that completes futures waits for the oldest one before it checks the others.
SLICE_S = 0.005
UNSET = timedelta(0)

# An engine operation: its name, and the number of its group.
Named = tuple[str, int]
# Generator of what an operation waits for in each round: engine works, or earlier operations.
Steps = Generator[Sequence[Any], None, None]


class Operation:
    """A generator that yields what it waits for. Any thread that waits for the operation makes progress on it."""

    __slots__ = ("_lock", "_stage", "_steps", "driven", "failure", "inference", "is_over")
    devices: Sequence[torch.device] = ()  # those of its memory, without the host

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stage: Sequence[Any] = ()
        self._steps: Steps | None = None
        self.driven = False  # other ranks wait for the next round: it needs progress even if nobody waits here
        self.failure: BaseException | None = None
        self.inference = torch.is_inference_mode_enabled()  # its rounds need it, on any thread
        self.is_over = False

    def run(self, steps: Steps) -> None:
        """Start the operation. Raises what the first round raises."""
        with self._lock:
            self._steps = steps
            self._go_on()
        if self.is_over and self.failure is not None:
            raise self.failure

    def over(self, limit_s: float) -> bool:
        """Wait for at most limit_s; return True if it has completed or failed. 0: do not wait."""
        deadline = time.monotonic() + limit_s
        waits = [self]  # each for the next one; a loop, because their number has no limit
        while waits:
            last = waits[-1]
            before = last._earlier()
            if last.is_over:
                waits.pop()
            elif before is None:
                if not last._round(max(0.0, deadline - time.monotonic()) if limit_s else 0.0):
                    return False
            elif limit_s:
                waits.append(before)
            elif not before.is_past():
                return False
        return True

    def is_past(self) -> bool:
        """Return True if it is over. One that the thread of Progress makes progress on is only looked at."""
        return self.is_over or (not self.driven and self.over(0.0))

    def _earlier(self) -> "Operation | None":
        """Return a pending operation that it waits for."""
        return next((item for item in self._stage if isinstance(item, Operation) and not item.is_over), None)

    def _round(self, limit_s: float) -> bool:
        """Wait for the engine works of the current round, and begin the next round; False: they are pending."""
        stage = self._stage
        if not all(self._settled(item, limit_s) for item in stage):
            return False
        with self._lock:
            if stage is self._stage and not self.is_over:
                self._go_on()
        return True

    def _settled(self, item: Any, limit_s: float) -> bool:
        if isinstance(item, Operation):
            return item.is_over
        try:
            return bool(item.wait(limit_s) if limit_s else item.test())
        except (*FAILURES, HorovodInternalError) as error:
            self.failure = self.failure or error
            return True

    def _go_on(self) -> None:
        """Begin the next round, if there is one. The caller holds the lock."""
        steps = self._steps
        try:
            if self.failure is None and steps is not None:
                with torch.inference_mode() if self.inference else contextlib.nullcontext():
                    self._stage = next(steps)
                return
        except StopIteration:
            pass
        except Exception as error:
            self.failure = error
        self._end()

    def _end(self) -> None:
        self._steps, self._stage, self.is_over = None, (), True

    def fail(self, error: BaseException) -> None:
        """End the operation with a failure."""
        with self._lock:
            self.failure = self.failure or error
            if not self.is_over:
                Operation._end(self)

    def on_device(self) -> Any:
        """Return a context in which the device of its memory is the current one."""
        return contextlib.nullcontext()

    def follow(self) -> None:
        """Make the device's current stream wait for the results, once it is over."""

    def reached(self) -> bool:
        """Return True if the results are in memory, once it is over."""
        return True


class DeviceOperation(Operation):
    """An operation on device memory. All that it does there is on the stream that was current when it began.

    It is over when its last copy is under way on that stream.
    """

    __slots__ = ("_stream", "devices")

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.devices = (device,)
        self._stream = DeviceStream(device)

    def _round(self, limit_s: float) -> bool:
        with self._stream.entered():
            return super()._round(limit_s)

    def _end(self) -> None:
        try:
            self._stream.end()
        except RuntimeError as error:
            self.failure = self.failure or error
        super()._end()

    def on_device(self) -> Any:
        return self._stream.on_device()

    def follow(self) -> None:
        self._stream.follow()

    def reached(self) -> bool:
        return self.failure is not None or self._stream.reached()


def _advance(operation: Operation, limit_s: float) -> bool:
    """Return operation.over(limit_s). A failure of the device is the operation's: its future completes with it."""
    try:
        return operation.over(limit_s)
    except Exception as error:
        operation.fail(error)
        return True


@dataclass(slots=True)
class _Awaited:
    """An operation under way. After deadline_s, on the monotonic clock, `late` takes the place of `then`."""

    operation: Operation
    then: Callable[[], None] | None
    late: Callable[[], None] | None
    deadline_s: float

    def ended(self) -> Callable[[], None] | None:
        """Make progress; return what is to be called once it is over or late, None while it is neither."""
        if _advance(self.operation, 0.0):
            return self.then or _nothing
        return self.late if self.late is not None and time.monotonic() >= self.deadline_s else None


def _nothing() -> None:
    pass


class Progress:
    """Threads that make progress on operations and complete futures. The first one starts with the first operation.

    One of them makes progress at a time. While it completes a future, another one takes over: a callback of the future
    may wait for any other future.
    """

    def __init__(self) -> None:
        self._waiting: list[_Awaited] = []
        self._over: deque[tuple[Operation, Callable[[], None]]] = deque()  # their futures are not complete yet
        self._changed = threading.Condition()
        self._turn = threading.Lock()  # held by the thread that makes progress
        self._threads: list[threading.Thread] = []
        self._free = 0  # threads that complete no future
        self._closed = False

    def add(
        self,
        operation: Operation,
        then: Callable[[], None] | None = None,
        late: Callable[[], None] | None = None,
        limit_s: float = math.inf,
    ) -> None:
        """Make progress on an operation. Call `then` once it is over, or `late` if it is not over after limit_s."""
        with self._changed:
            self._waiting.append(_Awaited(operation, then, late, time.monotonic() + limit_s))
            self._provide_thread()
            self._changed.notify()

    def close(self) -> None:
        """Stop once all operations are over. Their communicator is closed."""
        with self._changed:
            self._closed = True
            threads = [thread for thread in self._threads if thread is not threading.current_thread()]
            self._changed.notify()
        for thread in threads:
            thread.join(NOTICE_S)

    def _provide_thread(self) -> None:
        """Start a thread if there is work and no thread is free. The caller holds the lock of `_changed`."""
        if self._free == 0 and (self._waiting or self._over):
            thread = threading.Thread(target=self._run, name="netbottleneck futures", daemon=True)
            self._threads.append(thread)
            self._free += 1
            thread.start()

    def _run(self) -> None:
        while True:
            with self._turn:
                found = self._next_over()
            if found is None:
                return
            operation, then = found
            with operation.on_device():
                then()
            with self._changed:
                self._free += 1

    def _next_over(self) -> tuple[Operation, Callable[[], None]] | None:
        """Make progress until an operation with a future is over; None: closed. The thread is then no longer free."""
        while True:
            with self._changed:
                while not self._waiting and not self._over:
                    if self._closed:
                        return None
                    self._changed.wait()
                if self._over:
                    found = self._over.popleft()
                    self._free -= 1
                    self._provide_thread()
                    return found
                first = self._waiting[0].operation
            _advance(first, SLICE_S)
            with self._changed:
                pending = []
                for one in self._waiting:
                    call = one.ended()
                    if call is None:
                        pending.append(one)
                    elif call is not _nothing:
                        self._over.append((one.operation, call))
                self._waiting = pending


class BackendWork(Work):
    """The Work object that torch.distributed returns for an operation."""

    def __init__(self, operation: Operation, outputs: list[Any], about: "About", source: int = -1) -> None:
        super().__init__()
        self._operation = operation
        self._outputs = outputs
        self._about = about
        self._source = source
        self._future: torch.futures.Future[Any] | None = None
        self._late: DeadlineError | None = None  # of the future

    def wait(self, timeout: timedelta = UNSET) -> bool:
        """Wait up to `timeout`, else the group's. Raises DeadlineError on timeout, and the operation's failure.

        Results in device memory are there for what the current stream gets from now on.
        """
        about = self._about
        limit_s = timeout.total_seconds() if timeout > UNSET else about.limit_s
        deadline = time.monotonic() + limit_s
        while not self._operation.over(max(0.001, min(NOTICE_S, deadline - time.monotonic()))):
            about.link.log_notices()
            if time.monotonic() >= deadline:
                raise about.late(limit_s)
        self._settle()
        return True

    def _settle(self) -> None:
        """Raise the failure, or make the current stream wait for the results."""
        if self._operation.failure is not None:
            raise self._operation.failure
        self._operation.follow()

    def synchronize(self) -> None:
        """Same as wait."""
        self.wait()

    def block_current_stream(self) -> None:
        """Same as wait: the host waits too."""
        self.wait()

    def is_completed(self) -> bool:
        """Return True if it has failed, or if its results are in memory."""
        return self._operation.over(0.0) and self._operation.reached()

    def is_success(self) -> bool:
        """Return True if it has completed without failure."""
        return self.is_completed() and self._operation.failure is None

    def exception(self) -> BaseException | None:
        """Return its failure, or None."""
        return self._operation.failure if self._operation.over(0.0) else None

    def result(self) -> list[Any]:
        """Return the output tensors."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """Return the sender of a received tensor: a rank of the group."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the output tensors. It fails with DeadlineError after the time that `wait` allows."""
        if self._future is None:
            over: torch.futures.Future[Any] = torch.futures.Future(devices=list(self._operation.devices))
            # A callback, so that C++ also sees a failure as a failure. It runs on a stream of its own.
            self._future = over.then(lambda _: self._value())
            if self._operation.over(0.0):
                over.set_result(None)
            else:
                about = self._about
                about.link.progress.add(
                    self._operation, lambda: over.set_result(None), lambda: self._give_up(over), about.limit_s
                )
        return self._future

    def _give_up(self, over: torch.futures.Future[Any]) -> None:
        self._late = self._about.late(self._about.limit_s)
        over.set_result(None)

    def _value(self) -> list[Any]:
        if self._late is not None:
            raise self._late
        self._settle()
        return self._outputs


class About:
    """Description of an operation for its timeout error."""

    __slots__ = ("limit_s", "link", "names", "ranks", "what")

    def __init__(self, link: "Link", what: str, ranks: Sequence[int], limit_s: float) -> None:
        self.link = link
        self.what = what
        self.ranks = ranks
        self.limit_s = limit_s
        self.names: list[Named] = []

    def late(self, limit_s: float) -> DeadlineError:
        """Return the error for a wait of limit_s; it names the missing ranks if they are known."""
        missing, all_known = self.link.missing(self.names)
        text = f"{self.what} of ranks {list(self.ranks)} is not complete after {limit_s:g} s"
        error = DeadlineError(
            errno.ETIMEDOUT,
            f"{text}; missing: {'' if all_known else 'at least '}rank {', '.join(map(str, missing))}"
            if missing
            else text,
        )
        error.peer = missing[0] if missing else -1
        return error


# Moves of each collective: tensors as engine operations, with the work before and after them.
#
# A collective is a generator: it yields the operations of one round after the other, and resumes once they are over.

Rounds = Generator[list["Move"], None, None]
Memory = tuple[int, int] | torch.Tensor  # address and bytes in host memory, or a tensor in device memory

SEGMENTS_MAX = 512  # segments of one engine operation


@dataclass(slots=True)
class Move:
    """One engine operation in the group with this number; `members` are its ranks in the job.

    way: the direction (source and target) if only some ranks of the process group take part.
    """

    kind: str
    memory: list[Memory]
    code: int
    op: int = 0
    root: int = 0
    factor: float = 1.0  # applied to the result
    keep: Any = None
    group: int = 0
    members: Sequence[int] = ()
    way: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of its memory."""
        return sum(piece[1] if isinstance(piece, tuple) else piece.nbytes for piece in self.memory)

    def signature(self) -> Hashable:
        """Return a value that is equal for operations of equal shape."""
        return (self.kind, self.nbytes, self.code, self.op, self.root, self.factor)


class Touched:
    """The tensors of one collective; of one that is not contiguous, or a negated or conjugated view, a copy is sent."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor to send."""
        if tensor.layout is not torch.strided or not is_reachable(tensor.device):
            raise ValueError(
                f"a {tensor.layout} tensor on {tensor.device} is not supported here: dense tensors travel, from host "
                'and CUDA memory; for other devices name their backend too, as in "cpu:nb,xpu:xccl"'
            )
        plain = (tensor.detach() if tensor.requires_grad else tensor).resolve_conj().resolve_neg()
        return plain if plain.is_contiguous() else plain.contiguous()

    def written(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor to receive into. ValueError for an expanded one, whose elements share memory."""
        found = self.read(tensor)
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ValueError(f"a tensor of shape {list(tensor.shape)} with expanded dimensions cannot be received into")
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            self._copies.append((tensor.detach(), found))
        return found

    def settle(self) -> None:
        """Copy received data to the tensors that were copied."""
        for tensor, copy in self._copies:
            tensor.copy_(copy)


@functools.cache
def kind_code(kind: str) -> int:
    """Return the engine's number for a kind of operation."""
    return int(getattr(job.core(), kind))


@functools.cache
def bytes_code() -> int:
    """Return the engine's type for data that is moved without interpretation."""
    return int(job.core().UINT8)


def one_for_each(what: str, tensors: Sequence[torch.Tensor], size: int) -> None:
    """Raise ValueError unless there is a tensor for each of `size` ranks."""
    if len(tensors) != size:
        raise ValueError(f"{what}: {len(tensors)} tensors for {size} ranks: one for each is required")


def equal_sizes(what: str, tensors: Sequence[torch.Tensor], size: int, *others: torch.Tensor) -> None:
    """Raise ValueError unless there is a tensor for each of `size` ranks, and these and others are alike.

    They are alike if they have one size and type.
    """
    one_for_each(what, tensors, size)
    first = tensors[0]
    for tensor in (*tensors, *others):
        if tensor.numel() != first.numel() or tensor.dtype != first.dtype:
            raise ValueError(
                f"{what}: tensors of one size and type are required, not {list(first.shape)} {first.dtype} and "
                f"{list(tensor.shape)} {tensor.dtype}"
            )


def parts_of(what: str, whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
    """Raise ValueError unless `whole` has `size` times the elements of `part`."""
    if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
        raise ValueError(
            f"{what}: {whole.numel()} elements of {whole.dtype} are not {size} times {part.numel()} of {part.dtype}"
        )


def check_root(what: str, root: int, size: int) -> None:
    """Raise ValueError unless `root` is a rank of a process group of this size."""
    if not 0 <= root < size:
        raise ValueError(f"{what}: {root} is not a rank of a group of {size}")


@dataclass(frozen=True)
class Ranks:
    """The ranks of a process group, and their order in the engine's group.

    order: ranks of the process group, in the order of the engine's group, which is ascending by rank of the job.
    """

    number: int
    jobs: Sequence[int]  # of the job, by rank of the process group
    rank: int
    order: Sequence[int]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.jobs)

    @functools.cached_property
    def members(self) -> Sequence[int]:
        """Their ranks in the job, ascending."""
        return [self.jobs[rank] for rank in self.order]

    def line(self, parts: Sequence[torch.Tensor]) -> list[Memory]:
        """Return the memory of parts, one for each rank of the process group, in the engine's order."""
        return [memory_of(parts[rank]) for rank in self.order]

    def move(self, kind: str, memory: list[Memory], code: int, **more: Any) -> Move:
        """Return an operation of all these ranks."""
        return Move(kind, memory, code, group=self.number, members=self.members, **more)


def gathered(ranks: Ranks, parts: Sequence[torch.Tensor], keep: Any) -> Move:
    """Return the all-gather of parts, one for each rank; this rank's part is already in place."""
    return ranks.move("ALLGATHER", ranks.line(parts), bytes_code(), keep=keep)


def exchanged(ranks: Ranks, out: Sequence[torch.Tensor], into: Sequence[torch.Tensor], keep: Any) -> Move:
    """Return the all-to-all with one part for each rank."""
    return ranks.move("ALLTOALL", [*ranks.line(out), *ranks.line(into)], bytes_code(), keep=keep)


def engine_reduces(dtype: torch.dtype) -> bool:
    """True if the engine can reduce elements of this type."""
    try:
        dtype_code(dtype)
    except ValueError:
        return False
    return True


def nonempty(moves: list[Move]) -> list[Move]:
    """Drop moves without bytes; all their ranks drop them."""
    return [move for move in moves if move.nbytes > 0]


# Link: one engine communicator, shared by process groups.

# Time that rank 0, the coordinator, waits at the end for ranks that have not left.
LEAVE_S = 5.0

logger = logging.getLogger("netbottleneck")


class Link:
    """A communicator of `size` ranks, and the store of their rendezvous. nonce: of this link alone, on all ranks."""

    def __init__(self, comm: "_core.Comm", store: Any, nonce: bytes) -> None:
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self.store = store
        self._nonce = nonce.hex()
        self._created: Counter[tuple[int, ...]] = Counter()  # process groups by their ranks
        self.progress = Progress()
        self.closed = False
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._groups: set[int] = set()

    def submit(self, move: Move, name: str, awaited: bool) -> Any:
        """Submit an engine operation. Raises the failure that ended the job."""
        if move.group and move.group not in self._groups:
            self.group(move.group, move.members)
        return self.comm.submit(
            name,
            kind_code(move.kind),
            move.memory,
            move.code,
            op=move.op,
            root=move.root,
            postscale=move.factor,
            keep=move.keep,
            awaited=awaited,
            group=move.group,
        )

    def group(self, number: int, ranks: Sequence[int]) -> None:
        """Create an engine group of these ranks."""
        with self._lock:
            if number not in self._groups:
                self.comm.group(number, ranks)
                self._groups.add(number)

    def pair(self, one: int, other: int) -> int:
        """Return the number of a two-rank group, the same on both ranks; 0 if the job has no other ranks."""
        return 0 if self.size == 2 else self._pair_number(*sorted((one, other)))

    def _pair_number(self, low: int, high: int) -> int:
        return 1 + low * self.size + high

    def fresh_number(self) -> int:
        """Return an unused group number; one rank of the group calls it."""
        return self.size * (self.size + 1) + int(self.store.add("netbottleneck/groups", 1))

    def number_key(self, ranks: Sequence[int]) -> str:
        """Return the key for the number of a new group of these ranks: the same on all of them, and unused.

        torch may give a new group the name, and so the keys, of a group that was destroyed.
        """
        self._created[tuple(ranks)] += 1
        return f"netbottleneck/number.{self._nonce}.{self._created[tuple(ranks)]}"

    def log_notices(self) -> None:
        """Log the communicator's notices: stalled ranks, lost lanes."""
        for notice in self.comm.notices():
            logger.warning("%s", notice)

    def missing(self, names: Sequence[Named]) -> tuple[list[int], bool]:
        """Return the ranks known not to have submitted one of these operations; False: there may be more of them."""
        if self.closed:
            return [], False
        self.log_notices()
        known = [(name, group) for name, group in names if group == 0 or group in self._groups]
        found = [self.comm.missing(name, group) for name, group in known]
        all_known = all(len(ranks) < job.core().MISSING_MAX for ranks in found)
        return sorted({rank for ranks in found for rank in ranks}), all_known

    @property
    def is_here(self) -> bool:
        """True in the process that opened it, not in a forked child."""
        return os.getpid() == self._process

    def abort(self, why: str) -> None:
        """Fail pending operations, on all ranks."""
        if not self.closed:
            self.comm.abort(why)
            self.close()

    def close(self) -> None:
        """Leave the job and close; this rank's pending operations fail. A second call has no effect."""
        with self._lock:
            closed, self.closed = self.closed, True
        if closed:
            return
        try:
            self._leave()
        finally:
            self.comm.close()
            self.progress.close()

    def _leave(self) -> None:
        """Make rank 0 leave last, within LEAVE_S: without the coordinator the others cannot negotiate."""
        if self.size == 1 or not self._is_healthy():
            return
        with contextlib.suppress(RuntimeError):  # the store may be gone
            if self.rank:
                self.store.add("netbottleneck/left", 1)
                return
            deadline = time.monotonic() + (0.0 if job.uncaught() is not None else LEAVE_S)
            pause_s = 0.001
            while self.store.add("netbottleneck/left", 0) < self.size - 1 and self._is_healthy():
                if time.monotonic() >= deadline:
                    return
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.05)

    def _is_healthy(self) -> bool:
        """True if no rank was lost, so that this rank can still begin an operation."""
        number = self._pair_number(self.rank, self.rank)
        alone = Move("BARRIER", [], 0, group=number, members=(self.rank,))
        try:
            return bool(self.submit(alone, "netbottleneck/alone", False).wait())
        except (*FAILURES, HorovodInternalError):
            return False
