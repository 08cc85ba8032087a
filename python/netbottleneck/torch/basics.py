"""Initialisation, shutdown, ranks and sizes of Horovod's API."""

import os
from collections.abc import Sequence
from typing import Any

from netbottleneck.config import settings
from netbottleneck.runtime import job, timeline
from netbottleneck.runtime.collectives import DYNAMIC, register
from netbottleneck.runtime.job import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from netbottleneck.runtime.ops import rank, shutdown, size

__all__ = [
    "HorovodBasics",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def init(comm: Sequence[int] | None = None, process_sets: Any = None) -> None:
    """Start this process's job with all ranks of its launcher; no effect if it is already running.

    process_sets: sets to register, the same on all ranks, or "dynamic": sets can be added later. comm: all ranks, or
    None. Raises ValueError for an invalid environment, for invalid sets, and if comm lacks ranks; TimeoutError
    naming the missing ranks.
    """
    if isinstance(process_sets, str) and process_sets != DYNAMIC:
        raise ValueError(f'process_sets={process_sets!r}: a list of ProcessSet, or "{DYNAMIC}", is required')
    if job.is_started():
        return
    dynamic = process_sets == DYNAMIC
    timeline.watch()
    started = job.start(settings({"dynamic_process_sets": "1" if dynamic else None}))
    try:
        if comm is not None and sorted(comm) != list(range(started.place.size)):
            raise ValueError(f"init(comm={list(comm)}): a job has all {started.place.size} ranks: use process sets")
        if process_sets and not dynamic:
            register(process_sets)
    except BaseException:
        job.stop()
        raise


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Write Horovod's timeline from now on, one file for each rank: rank 0 writes file_path, see timeline.path_of.

    Ends a file that is being written. Raises ValueError before init(), and if HOROVOD_TIMELINE was not set at init().
    """
    _timeline().start(os.fspath(file_path), bool(mark_cycles))


def stop_timeline() -> None:
    """End and complete the timeline file, if there is one. ValueError before init()."""
    running = timeline.running(job.current())
    if running is not None:
        running.stop()


def _timeline() -> timeline.Timeline:
    running = timeline.running(job.current())
    if running is None:
        raise ValueError("Set HOROVOD_TIMELINE=DYNAMIC to enable dynamic timeline usage.")
    return running


def is_initialized() -> bool:
    """Return True between init() and shutdown()."""
    return job.is_started()


def local_size() -> int:
    """Return the number of ranks on this host."""
    return _known(job.current().place.local_size)


def local_rank() -> int:
    """Return this process's local rank."""
    return _known(job.current().place.local_rank)


def cross_size() -> int:
    """Return the number of hosts that have this local rank."""
    return _known(job.current().place.cross_size)


def cross_rank() -> int:
    """Return this host's index among those."""
    return _known(job.current().place.cross_rank)


def is_homogeneous() -> bool:
    """Return True if all hosts have the same number of ranks."""
    return job.current().homogeneous


def _known(value: int | None) -> int:
    assert value is not None, "a started job has a complete place"
    return value


class HorovodBasics:
    """Horovod's basic queries as methods; the same for every framework."""

    def __init__(self, *library: Any) -> None:
        pass


for _name in __all__:
    if _name != "HorovodBasics":
        setattr(HorovodBasics, _name, staticmethod(globals()[_name]))
