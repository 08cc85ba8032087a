"""The launchers that are known, as data: the variables that each sets, and the ways by which its ranks can meet."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Launcher:
    """One launcher; an empty name of a variable: it has none. `ways` are names of rendezvous.WAYS, the best first."""

    name: str
    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""
    cross_rank: str = ""
    cross_size: str = ""
    sign: str = ""  # it counts where this variable is set,
    sign_not: tuple[str, ...] = ()  # and set to none of these
    least: int = 1  # a job of fewer ranks is none of its
    inside: tuple[str, ...] = ()  # launchers that may have started this one, each for a job of its own,
    inside_sign: str = ""  # where this variable is set
    ways: tuple[str, ...] = ()
    mpi: bool = False  # MPI's own

    @property
    def beside(self) -> tuple[str, ...]:
        """The variables that say where a process stands, other than rank and size."""
        return tuple(filter(None, (self.local_rank, self.local_size, self.cross_rank, self.cross_size)))

    def variables(self) -> tuple[str, ...]:
        """Return all that it sets and that is looked at."""
        return tuple(filter(None, (self.rank, self.size, *self.beside, self.sign)))


# Slurm's numbers of steps that srun did not start: interactive, batch, extern, pending.
NO_STEPS = tuple(str(number) for number in range(0xFFFFFFFA, 0xFFFFFFFE))

# In order of precedence. A server of PMIx or PMI serves ranks of others too, where it gives them the same numbers.
# mpirun, mpiexec and horovodrun may reach their other hosts by srun, whose variables their ranks there then have too.
LAUNCHERS = (
    Launcher(
        "horovodrun",
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
        "HOROVOD_CROSS_RANK",
        "HOROVOD_CROSS_SIZE",
        inside=("srun",),
        ways=("http", "torch", "pmix", "pmi"),
    ),
    Launcher(
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        inside=("mpirun", "pmi", "srun"),
        inside_sign="TORCHELASTIC_RUN_ID",
        ways=("torch", "pmix", "pmi"),
    ),
    Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        inside=("srun",),
        ways=("pmix", "torch", "folder"),
        mpi=True,
    ),
    Launcher("pmix", "PMIX_RANK", ""),
    Launcher(
        "pmi",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        inside=("srun",),
        ways=("pmix", "pmi", "torch", "folder", "first host"),
        mpi=True,
    ),
    Launcher(
        "srun",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        cross_rank="SLURM_NODEID",
        cross_size="SLURM_NNODES",
        sign="SLURM_STEP_ID",
        sign_not=NO_STEPS,
        least=2,
        ways=("pmix", "pmi", "torch", "folder", "first host"),
    ),
)
HOROVODRUN = LAUNCHERS[0]
MPI = frozenset(launcher.name for launcher in LAUNCHERS if launcher.mpi)
EXPLICIT = Launcher("explicit", "NETBOTTLENECK_RANK", "NETBOTTLENECK_SIZE", ways=("torch", "pmix", "pmi"))


def named(name: str) -> Launcher:
    """Return the launcher of a Place; ValueError for a name that is none."""
    for launcher in (EXPLICIT, *LAUNCHERS):
        if launcher.name == name:
            return launcher
    raise ValueError(f"no launcher is called {name}")
