"""Joins: hvd.join() in a measured run of this package's Horovod API. Ranks may then make different numbers of steps.

A rank joins on each of our communicators, and the engine contributes its zeros to the other ranks' all-reduces.
torch.distributed cannot do that. Over stock, a rank that joins takes part in one more pass, with zeros, and each pass
begins with a count of the ranks that have not joined. So the other ranks learn of the join from that pass. From then on
they use one of our communicators, until the end of the run. Before the first pass of a kind, a rank that joins does not
know which buckets the others will send: they send none before they wait for the pass, and then wait for the count
first, and no zeros are sent. A hook waits for no other rank: the script may do so between a backward pass and its step.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from netbottleneck.errors import FAILURES, HorovodInternalError, PeerError
from netbottleneck.hooks.measured_model import Measured
from netbottleneck.launch import connect
from netbottleneck.runtime import job
from netbottleneck.runtime.collectives import shape_key
from netbottleneck.runtime.communicators import Native, Stock
from netbottleneck.runtime.session import Session
from netbottleneck.torch.gradients import Gradients, dtype_code
from netbottleneck.torch.handles import memory_of
from netbottleneck.torch.python_hooks import PerParameter
from netbottleneck.trace.transports import Arm

if TYPE_CHECKING:
    from netbottleneck import _core

WHY = "a rank has joined (hvd.join()), and the others make more steps"
STEP_BYTES = 8  # of a step's number, as ranks exchange it


class _Jobs(Native):
    """The job's own communicator as an arm. The job closes it."""

    def close(self) -> None:
        return


class _Late:
    """A bucket of a pass that begins once this rank waits for it. begin: starts all of them."""

    def __init__(self, index: int, here: Callable[[], Any], begin: Callable[[], None]) -> None:
        self.index = index
        self.here = here
        self.work: Any = None
        self._begin = begin

    def wait(self) -> None:
        if self.work is None:
            self._begin()
        self.work.wait()


class Joins:
    """Keeps the arms of one run the same on all ranks while ranks join.

    measured: set once the run has begun.
    """

    measured: Measured

    def __init__(self, session: Session, gradients: Gradients | PerParameter) -> None:
        self._session = session
        self._gradients = gradients
        self._size = session.place.size
        self._ours: Native | None = None  # what all further steps use, since a rank has joined
        self._order: list[int] = []  # buckets of the last pass over stock, as they were sent
        self._version = -1  # of these buckets
        self._late: list[_Late] | None = None  # buckets of a pass that has not begun
        self._complete = True  # the next bucket over stock begins a pass
        self._count: tuple[Any, torch.Tensor] | None = None  # work and sum of the last pass's count of ranks
        self._zeros: list[Any] = []  # works of this rank's pass with zeros
        self._stock = next((one for one in session.arms.values() if isinstance(one, Stock)), None)
        if self._stock is not None and self._size > 1:
            self._stock.instead = self._send
        session.on_close.append(self._close)

    def forget(self) -> None:
        """Keep no parameter: a finalizer of the optimizer calls it. This rank can still send its zeros."""
        gradients = self._gradients
        self._gradients = cast(
            Gradients,
            SimpleNamespace(
                parameters=[SimpleNamespace(device=parameter.device) for parameter in gradients.parameters],
                buckets=tuple(gradients.buckets),
                version=gradients.version,
                factors=gradients.factors,
                pending=0,
            ),
        )

    def agree(self) -> bool:
        """Return True if the next arm may begin; called before the arm changes. See Measured."""
        if self._ours is not None:
            return True
        if self._somebody_joined():
            self._leave()
            return True
        return self._session.agree() if self._session.decides else True

    def begin(self) -> "list[_core.Comm]":
        """Take part in the next pass over stock if it is the current arm; return our arms' communicators."""
        session = self._session
        if session.closed:
            return []
        if self._ours is None and self._count_lacks_ranks():
            self._leave()
        if self._ours is None and session.arms[session.arm] is self._stock:
            self._send_zeros()
        native = dict.fromkeys(one for one in session.arms.values() if isinstance(one, Native))
        return [one.comm for one in native if not isinstance(one, _Jobs)]

    def end(self, last: int) -> int:
        """Continue at the same step on all ranks, and over our arm if a rank already uses it.

        last: the last rank to join on the job's communicator. Returns a rank with the most steps, `last` if it is one:
        a rank may make its last steps before the others' joins arrive on that communicator.
        """
        session = self._session
        if session.closed:
            return last
        mine = session.step.to_bytes(STEP_BYTES, "little") + bytes([self._ours is not None])
        found = session.control.exchange(mine)
        if self._ours is None and any(values[STEP_BYTES] for values in found):
            self._leave()
        if self._ours is None:  # every rank has sent zeros, or none
            for work in self._zeros:
                work.wait()
            self._count = None
        self._zeros.clear()
        steps = [int.from_bytes(values[:STEP_BYTES], "little") for values in found]
        self.measured.resume(max(steps))
        return last if steps[last] == max(steps) else steps.index(max(steps))

    def _close(self) -> None:
        """Keep nothing of the group of stock, which ends."""
        self._count = None
        self._zeros.clear()

    def _somebody_joined(self) -> bool:
        """Return True if a rank has joined. The ranks that have not joined call it at the same time."""
        this, core = job.current(), job.core()
        present = np.ones(1, np.int32)
        work = this.comm.submit("netbottleneck.present", core.ALLREDUCE, present, core.INT32, keep=present)
        while True:
            try:
                this.wait([work])
                return int(present[0]) < self._size
            except (*FAILURES, HorovodInternalError):
                raise
            except BaseException as error:  # of a signal handler: see Session.agree
                self._session.raised.append(error)

    def _leave(self) -> None:
        """Use one of our arms in all further steps; the job's own communicator if the run has none."""
        session = self._session
        arm = next((arm for arm in session.arms if arm.native), None)
        if arm is None:
            arm = Arm(connect.native(session.settings))
            session.arms = {**session.arms, arm: _Jobs(arm.transport, job.current().comm, None)}
        ours = session.arms[arm]
        assert isinstance(ours, Native)
        self._ours = ours
        session.why_stays = WHY
        session.stay(arm)

    def _send(self, index: int, here: Callable[[], Any]) -> Any:
        """Start a bucket over stock (here), or on our communicator if a rank has joined; return the work."""
        if self._ours is None and self._begins_pass(index):
            known = self._knows_pass()
            if self._count_lacks_ranks():
                self._leave()
            else:
                self._begin_count(1)
                self._order, self._complete = [], False
                self._late = None if known else []
        if self._ours is not None:
            return self._submit(self._ours.comm, index)
        self._order.append(index)
        self._version = self._gradients.version
        if self._late is None:
            return here()
        self._late.append(_Late(index, here, self._send_late))
        return self._late[-1]

    def _send_late(self) -> None:
        late, self._late = self._late or [], None
        if self._count_lacks_ranks():
            self._leave()
        for bucket in late:
            bucket.work = bucket.here() if self._ours is None else self._submit(self._ours.comm, bucket.index)

    def _knows_pass(self) -> bool:
        """Return True if the next pass sends the buckets of the last one over stock. The same on all ranks."""
        return self._version == self._gradients.version

    def _begins_pass(self, index: int) -> bool:
        rebuilt = self._version != self._gradients.version and not self._gradients.pending
        return self._complete or rebuilt or index in self._order

    def _begin_count(self, mine: int) -> None:
        assert self._stock is not None
        count = torch.tensor([mine], dtype=torch.int32, device="cpu")
        self._count = self._stock.reduce(count), count

    def _count_lacks_ranks(self) -> bool:
        """Return True if a rank sent zeros in the last pass over stock."""
        if self._count is None:
            return False
        work, count = self._count
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerError(0, f"count of the ranks that have not joined, over torch.distributed: {error}") from error
        return int(count[0]) < self._size

    def _send_zeros(self) -> None:
        assert self._stock is not None
        gradients = self._gradients
        self._begin_count(0)
        for bucket in [gradients.buckets[index] for index in self._order if self._knows_pass()]:
            device = gradients.parameters[bucket.parameters[0]].device
            zeros = torch.zeros(bucket.nbytes // bucket.dtype.itemsize, dtype=bucket.dtype, device=device)
            self._zeros.append(self._stock.reduce(zeros, gradients.factors[2]))
        self._complete = True

    def _submit(self, comm: "_core.Comm", index: int) -> "_core.Work":
        core, gradients = job.core(), self._gradients
        bucket, op, flat = gradients.buckets[index], gradients.factors[2], gradients.flat(index)
        before, after = gradients.scales(comm.size)
        return comm.submit(
            bucket.name,
            core.ALLREDUCE,
            memory_of(flat),
            dtype_code(bucket.dtype),
            op=core.SUM if op is None else op,
            prescale=before,
            postscale=after,
            bucket=index + 1,
            shape=shape_key((tuple(flat.shape),)),
            keep=flat,
        )
