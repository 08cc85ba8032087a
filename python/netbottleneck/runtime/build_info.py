"""What Horovod's questions about its own build are answered with: by what a script asks them for."""

from netbottleneck.launch import launchers
from netbottleneck.runtime import job

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def gloo_built(verbose: bool = False) -> bool:
    """Return True: there is a TCP path that needs no MPI."""
    return True


def gloo_enabled() -> bool:
    """Return True: tensors never travel by MPI."""
    return True


def mpi_built(verbose: bool = False) -> bool:
    """Return True: what mpirun and mpiexec start is one job, and what Horovod has with MPI only, Adasum, is there."""
    return True


def mpi_enabled() -> bool:
    """Return whether one of MPI's launchers has started the job that runs, as it is with Horovod."""
    return job.is_started() and job.current().place.launcher in launchers.MPI


def mpi_threads_supported() -> bool:
    """Return True: no thread of this package calls MPI, so a script may, beside it.

    Raises ValueError before init(), and where no launcher of MPI's has started the job.
    """
    job.current()
    if not mpi_enabled():
        raise ValueError("Horovod MPI is not enabled; this job was not started by mpirun or mpiexec.")
    return True


def nccl_built(verbose: bool = False) -> int:
    """Return 0: there is no NCCL in here."""
    return 0


def ddl_built(verbose: bool = False) -> bool:
    """Return False."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """Return False."""
    return False


def cuda_built() -> bool:
    """Return False: tensors travel from host memory."""
    return False


def rocm_built() -> bool:
    """Return False."""
    return False
