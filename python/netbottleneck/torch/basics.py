"""Start, stop, and who is who: what a Horovod script asks before it asks for anything else."""

from collections.abc import Sequence
from typing import Any

from netbottleneck import job
from netbottleneck.env import settings
from netbottleneck.ops import rank, shutdown, size
from netbottleneck.process_sets import DYNAMIC, register

__all__ = [
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
]


def init(comm: Sequence[int] | None = None, process_sets: Any = None) -> None:
    """Start this process's job with all ranks of its launcher; a second call changes nothing.

    process_sets: the sets to register, the same on all ranks, or "dynamic": they will be added later. comm: all ranks,
    or None. Raises ValueError for an environment that makes no sense, for sets that cannot be, and for a part of the
    ranks; TimeoutError naming the ranks that did not come.
    """
    if isinstance(process_sets, str) and process_sets != DYNAMIC:
        raise ValueError(f'process_sets={process_sets!r}: a list of ProcessSet, or "{DYNAMIC}", is required')
    if job.is_started():
        return
    dynamic = process_sets == DYNAMIC
    started = job.start(settings({"dynamic_process_sets": "1" if dynamic else None}))
    try:
        if comm is not None and sorted(comm) != list(range(started.place.size)):
            raise ValueError(f"init(comm={list(comm)}): a job is of all {started.place.size} ranks: use process sets")
        if process_sets and not dynamic:
            register(process_sets)
    except BaseException:
        job.stop()
        raise


def is_initialized() -> bool:
    """Return whether init() was called, and shutdown() was not since."""
    return job.is_started()


def local_size() -> int:
    """Return the number of ranks on this host."""
    return _known(job.current().place.local_size)


def local_rank() -> int:
    """Return this process's number on its host."""
    return _known(job.current().place.local_rank)


def cross_size() -> int:
    """Return the number of hosts that have a rank of this local rank."""
    return _known(job.current().place.cross_size)


def cross_rank() -> int:
    """Return this host's number among those."""
    return _known(job.current().place.cross_rank)


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of ranks."""
    return job.current().homogeneous


def _known(value: int | None) -> int:
    assert value is not None, "a started job knows its place"
    return value


def nccl_built() -> int:
    """Return 0: there is no NCCL in here."""
    return 0


def gloo_built() -> bool:
    """Return True: there is a TCP path that needs no MPI, which is what scripts ask this for."""
    return True


def gloo_enabled() -> bool:
    """Return True, as gloo_built."""
    return True


def mpi_built() -> bool:
    """Return False."""
    return False


def mpi_enabled() -> bool:
    """Return False."""
    return False


def mpi_threads_supported() -> bool:
    """Raise ValueError: MPI is not used."""
    job.current()
    raise ValueError("Horovod MPI is not enabled; this is netbottleneck, which does not use MPI.")


def ddl_built() -> bool:
    """Return False."""
    return False


def ccl_built() -> bool:
    """Return False."""
    return False


def cuda_built() -> bool:
    """Return False: tensors travel from host memory."""
    return False


def rocm_built() -> bool:
    """Return False."""
    return False
