"""One rank of the fault tests. Prints the lines that the tests wait for; times are time.monotonic()."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import netbottleneck as nb
from netbottleneck.runtime import job, session

# A rank that is still there shows where it waits, before the test kills it after 100 s.
faulthandler.dump_traceback_later(80)
# Rank 0's report does not wait as long for the record of a rank that is dead.
session.FAILED_FINISH_S = 0.5


def report_failure(call: Callable[[], object], *, swallow: bool = True) -> None:
    """Repeat a collective until it fails; print the lost rank, and when the last call began and raised.

    swallow: go on after that; otherwise end with the error, as scripts do.
    """
    began = time.monotonic()
    try:
        while True:
            began = time.monotonic()
            call()
    except nb.HorovodInternalError as error:
        raised = time.monotonic()
        print(f"failed {type(error).__name__} {getattr(error, 'peer', None)} {began} {raised} {error}", flush=True)
        if not swallow:
            raise


def reduce() -> None:
    """Reduce large tensors without end."""
    big = np.ones(4 << 20, np.float32)
    nb.allreduce_(big, name="big")
    print("reducing", flush=True)
    report_failure(lambda: nb.allreduce_(big, name="big"))


def repeat_steps(model: Any, optimizer: Any, given: Any) -> None:
    """Train without end."""
    count = 0

    def step() -> None:
        nonlocal count
        optimizer.zero_grad()
        model(given).sum().backward()
        optimizer.step()
        count += 1
        if count == 8:
            print("reducing", flush=True)

    report_failure(step, swallow=False)


def train() -> None:
    """A DDP script that trains until an error ends it."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1 << 18, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    repeat_steps(model, optimizer, torch.ones(1, 1 << 18))


def optimize() -> None:
    """A script with Horovod's optimizer that trains until an error ends it."""
    import torch

    import netbottleneck.torch as hvd

    torch.set_num_threads(1)
    model = torch.nn.Linear(1 << 18, 8)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())
    repeat_steps(model, optimizer, torch.ones(1, 1 << 18))


def busy() -> None:
    """Rank 0 is busy until the stall report on the other ranks names it."""
    this = job.current()
    stop = os.environ["STALLED"]
    if this.place.rank == 0:
        deadline = time.monotonic() + 100
        while not os.path.exists(stop) and time.monotonic() < deadline:
            time.sleep(0.02)
    else:

        class Heard(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                print("logged", record.getMessage(), flush=True)
                with open(stop, "w"):
                    pass

        logging.getLogger("netbottleneck").addHandler(Heard())
    print(nb.allreduce(np.ones(3), name="evaluation"), flush=True)


def interrupted() -> None:
    """Rank 0 waits for the others, which submit only after it was interrupted."""
    if job.current().place.rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            print("waiting", flush=True)
            nb.allreduce(np.ones(3), name="never")
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            raise
    else:
        report_failure(lambda: nb.allreduce(np.ones(3), name="other"))


def rounds() -> None:
    """Run twenty jobs in sequence."""
    for number in range(20):
        job.stop()
        job.start()
        assert nb.allreduce(np.full(5, job.current().place.rank + number, np.float64)).tolist() == [number + 0.5] * 5
    print("twenty")


def refused() -> None:
    """Unsupported values are refused before anything is sent, and the job continues."""
    import pytest

    this = job.current()
    square = np.ones((4, 4), np.float32)
    for call, message in (
        (lambda: nb.allreduce_(square.T[1:]), "contiguous"),
        (lambda: nb.allreduce_(square[:, ::2]), "contiguous"),
        (lambda: nb.allreduce(np.ones(3, np.complex64)), "complex64"),
        (lambda: nb.allreduce(np.ones(3, np.bool_)), "bool"),
        (lambda: nb.allreduce(np.ones(3), op=17), "17"),
        (lambda: nb.broadcast(np.ones(3), root_rank=5), "root_rank=5"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            call()
    assert nb.allreduce(np.ones(3)).tolist() == [1.0] * 3, this
    print("refused")


def main() -> None:
    mode = sys.argv[1]
    if mode != "train":
        job.start()
    {
        "reduce": reduce,
        "train": train,
        "optimize": optimize,
        "busy": busy,
        "interrupted": interrupted,
        "rounds": rounds,
        "refused": refused,
        "nothing": lambda: print("no error"),
    }[mode]()
    job.stop()


if __name__ == "__main__":
    main()
