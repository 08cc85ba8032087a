"""Operations of the backend under way: who waits for them, and who goes on with those that take several rounds."""

import threading
import time
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import Work

from netbottleneck.errors import DeadlineError, HorovodInternalError

if TYPE_CHECKING:
    from netbottleneck.torch.backend.link import Link

NOTICE_S = 5.0
# How long the thread that completes futures stays with the oldest one before it looks at the others.
SLICE_S = 0.005
UNSET = timedelta(0)

# An operation of the engine: its name, and the number of the group that it is of.
Named = tuple[str, int]
# What an operation waits for, round after round: works of the engine, or operations before it.
Steps = Generator[Sequence[Any], None, None]


class Operation:
    """A generator that yields what it waits for; any thread that waits for the operation goes on with it."""

    __slots__ = ("_lock", "_stage", "_steps", "driven", "failure", "is_over")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stage: Sequence[Any] = ()
        self._steps: Steps | None = None
        self.driven = False  # others wait for what follows: it must go on though nobody here waits for it
        self.failure: BaseException | None = None
        self.is_over = False

    def run(self, steps: Steps) -> None:
        """Begin. Raises what the first round raises."""
        with self._lock:
            self._steps = steps
            self._go_on()
        if self.is_over and self.failure is not None:
            raise self.failure

    def over(self, limit_s: float) -> bool:
        """Wait for limit_s at most; return whether it is over, well or with a failure. 0: does not wait."""
        deadline = time.monotonic() + limit_s
        while not self.is_over:
            stage = self._stage
            for item in stage:
                if not self._settled(item, max(0.0, deadline - time.monotonic()) if limit_s else 0.0):
                    return False
            with self._lock:
                if stage is self._stage and not self.is_over:
                    self._go_on()
        return True

    def _settled(self, item: Any, limit_s: float) -> bool:
        if isinstance(item, Operation):
            return item.over(limit_s)
        try:
            return bool(item.wait(limit_s) if limit_s else item.test())
        except (OSError, HorovodInternalError) as error:
            self.failure = self.failure or error
            return True

    def _go_on(self) -> None:
        """With the lock: begin the next round, if there is one."""
        steps = self._steps
        try:
            if self.failure is None and steps is not None:
                self._stage = next(steps)
                return
        except StopIteration:
            pass
        except Exception as error:
            self.failure = error
        self._steps, self._stage, self.is_over = None, (), True


class Progress:
    """A thread that goes on with operations, and completes futures. It exists once there is one to complete.

    A callback of a future that waits for another future has that one completed by a thread behind this one.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Operation, Callable[[], None] | None]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._behind: Progress | None = None
        self._closed = False

    def add(self, operation: Operation, then: Callable[[], None] | None = None) -> None:
        """Have an operation gone on with, and `then` called once it is over."""
        with self._changed:
            if threading.current_thread() is not self._thread:
                self._waiting.append((operation, then))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="netbottleneck futures", daemon=True)
                    self._thread.start()
                self._changed.notify()
                return
            behind = self._behind = self._behind or Progress()
        behind.add(operation, then)

    def close(self) -> None:
        """Let it end, once all operations that it has are over: their communicator is closed."""
        with self._changed:
            self._closed = True
            thread, behind = self._thread, self._behind
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join(NOTICE_S)
        if behind is not None:
            behind.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closed:
                        return
                    self._changed.wait()
                first = self._waiting[0][0]
            first.over(SLICE_S)
            with self._changed:
                ended = [pair for pair in self._waiting if pair[0].over(0.0)]
                self._waiting = [pair for pair in self._waiting if pair not in ended]
            for _, then in ended:
                if then is not None:
                    then()


class BackendWork(Work):
    """What torch.distributed gives back for an operation."""

    def __init__(self, operation: Operation, outputs: list[Any], about: "About", source: int = -1) -> None:
        super().__init__()
        self._operation = operation
        self._outputs = outputs
        self._about = about
        self._source = source
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = UNSET) -> bool:
        """Wait, for as long as `timeout`, else the group's says. Raises DeadlineError then, and what it failed with."""
        about = self._about
        limit_s = timeout.total_seconds() if timeout > UNSET else about.limit_s
        deadline = time.monotonic() + limit_s
        while not self._operation.over(max(0.001, min(NOTICE_S, deadline - time.monotonic()))):
            about.link.tell()
            if time.monotonic() >= deadline:
                raise about.late(limit_s)
        if self._operation.failure is not None:
            raise self._operation.failure
        return True

    def synchronize(self) -> None:
        """As wait: tensors are in host memory."""
        self.wait()

    def block_current_stream(self) -> None:
        """As wait: tensors are in host memory."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether wait would return, or raise, at once."""
        return self._operation.over(0.0)

    def is_success(self) -> bool:
        """Return whether it is over, and did not fail."""
        return self._operation.over(0.0) and self._operation.failure is None

    def exception(self) -> BaseException | None:
        """Return what it failed with."""
        return self._operation.failure if self._operation.over(0.0) else None

    def result(self) -> list[Any]:
        """Return the tensors that it wrote."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """Return where what was received came from: a rank of the group."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors that it writes."""
        if self._future is None:
            over: torch.futures.Future[Any] = torch.futures.Future()
            # A callback, so that C++ too sees a failure as one.
            self._future = over.then(lambda _: self._value())
            if self._operation.over(0.0):
                over.set_result(None)
            else:
                self._about.link.progress.add(self._operation, lambda: over.set_result(None))
        return self._future

    def _value(self) -> list[Any]:
        if self._operation.failure is not None:
            raise self._operation.failure
        return self._outputs


class About:
    """What is said of an operation that is late."""

    __slots__ = ("limit_s", "link", "names", "ranks", "what")

    def __init__(self, link: "Link", what: str, ranks: Sequence[int], limit_s: float) -> None:
        self.link = link
        self.what = what
        self.ranks = ranks
        self.limit_s = limit_s
        self.names: list[Named] = []

    def late(self, limit_s: float) -> DeadlineError:
        """Return the error of a wait that took limit_s: it names the ranks that are missing, where they are known."""
        missing = self.link.missing(self.names)
        text = f"{self.what} of ranks {list(self.ranks)} is not over after {limit_s:g} s"
        error = DeadlineError(0, f"{text}; missing: rank {', '.join(map(str, missing))}" if missing else text)
        error.peer = missing[0] if missing else -1
        return error
