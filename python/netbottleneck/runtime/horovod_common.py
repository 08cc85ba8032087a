"""Names of horovod.common: of its basics (start, end, ranks and sizes), exceptions and util.

They serve this package's API, and scripts where it replaces Horovod. Only gpu_available imports torch.
"""

import importlib.util
import logging
import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import cache as _cache
from itertools import pairwise
from typing import Any, TypeVar

from netbottleneck.config import settings, without_effect
from netbottleneck.errors import HorovodInternalError, HostsUpdatedInterrupt
from netbottleneck.launch import connect
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

logger = logging.getLogger("netbottleneck")

__all__ = [
    "HorovodBasics",
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "_cache",
    "ccl_built",
    "check_extension",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "env",
    "extension_available",
    "get_version_mismatch_message",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "init",
    "is_homogeneous",
    "is_initialized",
    "is_iterable",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "num_rank_is_power_2",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "split_list",
    "start_timeline",
    "stop_timeline",
]

# horovod.common.basics.


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Start this process's job with all ranks of its launcher; no effect if it is already running.

    process_sets: sets to register, the same on all ranks, or "dynamic": sets can be added later. comm: a list of all
    ranks, an MPI communicator in which each process has the launcher's rank, or None or []. Raises ValueError for an
    invalid environment, for invalid sets, and if comm has other ranks; TimeoutError naming the missing ranks.
    """
    if isinstance(process_sets, str) and process_sets != DYNAMIC:
        raise ValueError(f'process_sets={process_sets!r}: a list of ProcessSet, or "{DYNAMIC}", is required')
    if job.is_started():
        return
    dynamic = process_sets == DYNAMIC
    wanted = settings({"dynamic_process_sets": "1" if dynamic else None})
    if comm is not None:
        _check_comm(comm, connect.detect(wanted))
    timeline.watch()
    started = job.start(wanted)
    if started.place.rank == 0:
        for line in without_effect():
            logger.warning("%s", line)
    try:
        if process_sets and not dynamic:
            register(process_sets)
    except BaseException:
        job.stop()
        raise


def _check_comm(comm: Any, place: connect.Place) -> None:
    """Raise ValueError if `comm` does not have all ranks of the launcher's job."""
    if hasattr(comm, "Get_size"):
        rank, size = int(comm.Get_rank()), int(comm.Get_size())
        if (rank, size) != (place.rank, place.size):
            raise ValueError(
                f"init(comm): rank {rank} of {size} in the communicator is rank {place.rank} of {place.size} in the "
                "job, which has all ranks of its launcher: use process sets for a part of them"
            )
    elif list(comm) and sorted(comm) != list(range(place.size)):
        raise ValueError(f"init(comm={list(comm)}): a job has all {place.size} ranks: use process sets")


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

    ccl_built = staticmethod(ccl_built)
    cross_rank = staticmethod(cross_rank)
    cross_size = staticmethod(cross_size)
    cuda_built = staticmethod(cuda_built)
    ddl_built = staticmethod(ddl_built)
    gloo_built = staticmethod(gloo_built)
    gloo_enabled = staticmethod(gloo_enabled)
    init = staticmethod(init)
    is_homogeneous = staticmethod(is_homogeneous)
    is_initialized = staticmethod(is_initialized)
    local_rank = staticmethod(local_rank)
    local_size = staticmethod(local_size)
    mpi_built = staticmethod(mpi_built)
    mpi_enabled = staticmethod(mpi_enabled)
    mpi_threads_supported = staticmethod(mpi_threads_supported)
    nccl_built = staticmethod(nccl_built)
    rank = staticmethod(rank)
    rocm_built = staticmethod(rocm_built)
    shutdown = staticmethod(shutdown)
    size = staticmethod(size)
    start_timeline = staticmethod(start_timeline)
    stop_timeline = staticmethod(stop_timeline)


# horovod.common.exceptions.


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return the error message for a framework whose version differs from the one that Horovod was built for."""
    return f"Horovod was built for {name} {version}, and {installed_version} is installed"


class HorovodVersionMismatchError(ImportError):
    """A framework's version differs from the one Horovod was built for. This package never raises it."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version


# horovod.common.util.

T = TypeVar("T")


@contextmanager
def env(**values: str | None) -> Generator[None, None, None]:
    """Set environment variables inside the context and restore them after it. None leaves a variable unchanged."""
    wanted = {name: value for name, value in values.items() if value is not None}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework can be used: only torch, if it is installed."""
    return ext_base_name == "torch" and importlib.util.find_spec("torch") is not None


def check_extension(ext_name: str, *_built_with: Any) -> None:
    """Raise ImportError for any extension except horovod.torch."""
    if ext_name != "horovod.torch":
        raise ImportError(f"{ext_name}: netbottleneck stands in for horovod.torch only", name=ext_name)


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework has a GPU for tensors: only torch, if it is installed and CUDA is available."""
    if not extension_available(ext_base_name):
        return False
    import torch

    return torch.cuda.is_available()


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number is a power of two."""
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Return the items in `parts` consecutive slices; the first ones are longer by one if the division has a rest."""
    least, more = divmod(len(items), parts)
    starts = [part * least + min(part, more) for part in range(parts + 1)]
    return [items[start:end] for start, end in pairwise(starts)]


def is_iterable(value: Any) -> bool:
    """Return whether a value is iterable."""
    return isinstance(value, Iterable)
