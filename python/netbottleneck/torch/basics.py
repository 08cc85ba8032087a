"""Start, stop, and who is who: what a Horovod script asks before it asks for anything else."""

from collections.abc import Sequence
from typing import Any

from netbottleneck import job
from netbottleneck.ops import rank, shutdown, size

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

    Raises ValueError for an environment that makes no sense, TimeoutError naming the ranks that did not come.
    """
    if comm is not None or process_sets:
        raise NotImplementedError("init() of a part of the ranks, and process sets, are not there yet")
    job.start()


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
