"""Place of this process under each launcher: rank, local rank, size and host."""

import hashlib
import os
import site
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from netbottleneck.config import RANKS_MAX, Settings
from netbottleneck.trace.machine import boot_id

# The known launchers as data: the variables that each sets, and the methods of rendezvous of its ranks.


@dataclass(frozen=True)
class Launcher:
    """One launcher; "": it has no such variable. `methods`: names of rendezvous.METHODS, best first."""

    name: str
    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""
    cross_rank: str = ""
    cross_size: str = ""
    marker: str = ""  # the launcher is considered if this variable is set,
    marker_excludes: tuple[str, ...] = ()  # to none of these values
    min_ranks: int = 1  # the smallest job that it starts, in ranks
    may_run_inside: tuple[str, ...] = ()  # launchers that may have started this one, each with a job of its own,
    inside_marker: str = ""  # if this variable is set
    methods: tuple[str, ...] = ()
    mpi: bool = False  # part of an MPI

    @property
    def place_variables(self) -> tuple[str, ...]:
        """The variables of a process's place other than rank and size."""
        return tuple(filter(None, (self.local_rank, self.local_size, self.cross_rank, self.cross_size)))

    def variables(self) -> tuple[str, ...]:
        """Return all of its variables that this module reads."""
        return tuple(filter(None, (self.rank, self.size, *self.place_variables, self.marker)))


# Slurm's ids of steps that srun did not start: interactive, batch, extern, pending.
NO_STEPS = tuple(str(number) for number in range(0xFFFFFFFA, 0xFFFFFFFE))

# In order of precedence. A PMIx or PMI server also serves ranks of another launcher that gives them the same numbers.
# mpirun, mpiexec and horovodrun may start ranks on other hosts through srun; those ranks then have srun's variables.
LAUNCHERS = (
    Launcher(
        "horovodrun",
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
        "HOROVOD_CROSS_RANK",
        "HOROVOD_CROSS_SIZE",
        may_run_inside=("srun",),
        methods=("http", "torch", "pmix", "pmi"),
    ),
    Launcher(
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        may_run_inside=("mpirun", "pmi", "srun"),
        inside_marker="TORCHELASTIC_RUN_ID",
        methods=("torch", "pmix", "pmi"),
    ),
    Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        may_run_inside=("srun",),
        methods=("pmix", "torch", "folder"),
        mpi=True,
    ),
    Launcher("pmix", "PMIX_RANK", ""),
    Launcher(
        "pmi",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        may_run_inside=("srun",),
        methods=("pmix", "pmi", "torch", "folder", "first host"),
        mpi=True,
    ),
    Launcher(
        "srun",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        cross_rank="SLURM_NODEID",
        cross_size="SLURM_NNODES",
        marker="SLURM_STEP_ID",
        marker_excludes=NO_STEPS,
        min_ranks=2,
        methods=("pmix", "pmi", "torch", "folder", "first host"),
    ),
)
HOROVODRUN = LAUNCHERS[0]
MPI = frozenset(launcher.name for launcher in LAUNCHERS if launcher.mpi)
EXPLICIT = Launcher("explicit", "NETBOTTLENECK_RANK", "NETBOTTLENECK_SIZE", methods=("torch", "pmix", "pmi"))
# Variables of a job apart from the places of its ranks: how they meet, and the interfaces that they use.
JOB_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_")
JOB_VARIABLES = frozenset(
    {
        *(name for launcher in (EXPLICIT, *LAUNCHERS) for name in launcher.variables()),
        *("MASTER_ADDR", "MASTER_PORT", "NETBOTTLENECK_MASTER", "NETBOTTLENECK_RENDEZVOUS"),
        *("NETBOTTLENECK_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
    }
)


def without_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of a job, for ranks of another job that this process starts."""
    return {
        name: value
        for name, value in environ.items()
        if name not in JOB_VARIABLES and not name.startswith(JOB_PREFIXES)
    }


PACKAGES = Path(__file__).resolve().parents[2]  # the folder that contains this package


def with_package(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a process that this one starts finds this package.

    site-packages is found anyway. On PYTHONPATH it would precede the standard library, and an old backport in it would
    replace a module of Python's own.
    """
    given = environ.get("PYTHONPATH", "")
    own = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    found = [*given.split(os.pathsep), *site.getsitepackages(), *own]
    if any(entry and Path(entry).resolve() == PACKAGES for entry in found):
        return dict(environ)
    return {**environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(PACKAGES), given]))}


def launcher_named(name: str) -> Launcher:
    """Return the launcher with the name in a Place. Raises ValueError for an unknown name."""
    for launcher in (EXPLICIT, *LAUNCHERS):
        if launcher.name == name:
            return launcher
    raise ValueError(f"unknown launcher {name}")


# Place of this process: rank and size under its launcher, and the ranks on its host.

# Lists the Horovod variables that `export_place` has written, as NAME=value; they are not from a launcher.
EXPORTED = "_NETBOTTLENECK_HANDED_ON"


@dataclass(frozen=True)
class Place:
    """A process in its job. local_*: on its host; cross_*: among the ranks of equal local rank, one per host.

    None: not set by the launcher; `with_topology` sets these fields once the hosts of all ranks are known.
    """

    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    cross_rank: int | None = None
    cross_size: int | None = None
    launcher: str = "none"

    @property
    def complete(self) -> bool:
        """True if the launcher sets all fields."""
        return None not in (self.local_rank, self.local_size, self.cross_rank, self.cross_size)

    @property
    def one_host(self) -> bool:
        """True if, according to the launcher, all ranks are on this host."""
        return self.size in (1, self.local_size)


@dataclass(frozen=True)
class Topology:
    """A rank's place among hosts, derived from the host ids of all ranks."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool  # the same number of ranks on every host


def detect(settings: Settings, environ: Mapping[str, str] = os.environ) -> Place:
    """Return this process's place from NETBOTTLENECK_RANK and _SIZE, else from the first launcher with its variables.

    Raises ValueError listing the variables found if a launcher's are incomplete or invalid, or if two launchers
    disagree. A launcher inside another one (torchrun started by srun, once per node) is no disagreement, as each has a
    job of its own.
    """
    if (settings.rank is None) != (settings.ranks is None):
        raise ValueError(
            f"NETBOTTLENECK_RANK and NETBOTTLENECK_SIZE must be set together, but only one is set: "
            f"rank {settings.rank}, size {settings.ranks}"
        )
    if settings.rank is not None and settings.ranks is not None:
        _check_rank(EXPLICIT, settings.rank, settings.ranks)
        return Place(settings.rank, settings.ranks, launcher=EXPLICIT.name)
    environ = _without_exported(environ)
    present = [launcher for launcher in LAUNCHERS if _is_present(launcher, environ)]
    complete = [(launcher, place) for launcher in present if (place := _read(launcher, environ)) is not None]
    for launcher in present:
        _reject_incomplete(launcher, complete, environ)
    chosen = next(((launcher, place) for launcher, place in complete if place.size >= launcher.min_ranks), None)
    if chosen is None:
        return Place(0, 1, 0, 1, 0, 1)
    if not all(_agree(chosen, other, environ) for other in complete):
        listed = "; ".join(f"{place.launcher}: rank {place.rank} of {place.size}" for _, place in complete)
        raise ValueError(
            f"the launchers disagree about rank or size of the job ({listed}): unset the variables of the one that did "
            f"not start it, or set NETBOTTLENECK_RANK and NETBOTTLENECK_SIZE. {_found_variables(environ)}"
        )
    _check_local(*chosen, environ)
    return chosen[1]


def with_known_place(settings: Settings, place: Place, environ: Mapping[str, str] = os.environ) -> Settings:
    """Return settings with a rank and size that are known otherwise, if the launchers' variables leave them open.

    They do if they imply other ranks, give no rank and size, and agree with the place in what they give: Lightning's
    own launcher sets WORLD_SIZE and LOCAL_RANK only. Else returns the settings as they are.
    """
    if (settings.rank, settings.ranks) != (None, None):
        return settings
    environ = _without_exported(environ)
    present = [launcher for launcher in LAUNCHERS if _is_present(launcher, environ)]
    try:
        given = [launcher for launcher in present if _implies_other_ranks(launcher, environ)]
        known = any(_read(launcher, environ) is not None for launcher in present)
        agree = all(_is_consistent(launcher, place, environ) for launcher in given)
    except ValueError:  # detect names the variable
        return settings
    return replace(settings, rank=place.rank, ranks=place.size) if given and agree and not known else settings


def export_place(settings: Settings, environ: MutableMapping[str, str]) -> None:
    """Set Horovod's variables of a place (HOROVOD_RANK, HOROVOD_SIZE, …) from the launcher's values.

    For scripts that read these variables. Variables already set are kept; without a launcher nothing is set. `detect`
    ignores the variables written here, in this process and in its children. Raises as detect.
    """
    place = detect(settings, environ)
    for name in _exported(environ) if _without_exported(environ) is not environ else ():
        del environ[name]  # written by the parent process
    if place.launcher in ("none", HOROVODRUN.name):
        return
    local = settings.host_id is None  # with a host id, local ranks depend on all ranks' hosts, not yet known
    places = (place.local_rank, place.local_size, place.cross_rank, place.cross_size) if local else (None,) * 4
    if local and place.local_size == place.size:
        places = (*places[:2], 0, 1)
    hosts = place.cross_size
    if hosts and place.size != hosts * (place.local_size or place.size // hosts):
        places = (*places[:2], None, None)  # hosts differ in ranks: cross values depend on all ranks' hosts
    values = zip(
        (HOROVODRUN.rank, HOROVODRUN.size, *HOROVODRUN.place_variables), (place.rank, place.size, *places), strict=True
    )
    written = {name: str(value) for name, value in values if value is not None and not environ.get(name)}
    environ.update(written, **{EXPORTED: " ".join(f"{name}={value}" for name, value in written.items())})


def _exported(environ: Mapping[str, str]) -> dict[str, str]:
    return dict(word.split("=") for word in environ.get(EXPORTED, "").split() if word.count("=") == 1)


def _without_exported(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment without the variables that `export_place` has written.

    If horovodrun has set them anew (its server is named, or a value differs), the whole environment counts.
    """
    exported = _exported(environ)
    set_again = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR") or any(
        environ.get(name) != exported[name] for name in exported
    )
    if set_again or not exported:
        return environ
    return {name: value for name, value in environ.items() if name not in exported}


def _is_present(launcher: Launcher, environ: Mapping[str, str]) -> bool:
    return not launcher.marker or environ.get(launcher.marker, "") not in ("", *launcher.marker_excludes)


def _read(launcher: Launcher, environ: Mapping[str, str]) -> Place | None:
    """Return the place that a launcher's variables give; None unless rank and size are both set."""
    rank, size = _number(launcher.rank, environ), _number(launcher.size, environ)
    if rank is None or size is None:
        return None
    _check_rank(launcher, rank, size)
    return Place(
        rank,
        size,
        _number(launcher.local_rank, environ),
        _number(launcher.local_size, environ),
        _number(launcher.cross_rank, environ),
        _number(launcher.cross_size, environ),
        launcher.name,
    )


def _reject_incomplete(
    launcher: Launcher, complete: Sequence[tuple[Launcher, Place]], environ: Mapping[str, str]
) -> None:
    """Raise ValueError if a launcher's variables imply other ranks, but do not give both rank and size.

    An incomplete launcher is accepted if another launcher is complete and agrees with it.
    """
    if any(other is launcher for other, _ in complete) or (complete and not launcher.size):
        return
    if not _implies_other_ranks(launcher, environ) or any(
        _is_consistent(launcher, place, environ) for _, place in complete
    ):
        return
    values = ", ".join(f"{name}={environ[name]}" for name in launcher.variables() if environ.get(name))
    missing = [name for name in (launcher.rank, launcher.size) if name and not environ.get(name)]
    lacks = (
        f"{' and '.join(missing)} is not set, and {launcher.name} sets both" if missing else "their number is not set"
    )
    raise ValueError(
        f"{values}: the job has other ranks, but {lacks}. Start the script with its launcher, unset the variables "
        f"of any other launcher, or set NETBOTTLENECK_RANK and NETBOTTLENECK_SIZE. {_found_variables(environ)}"
    )


def _is_consistent(launcher: Launcher, place: Place, environ: Mapping[str, str]) -> bool:
    """Return whether an incomplete launcher agrees with a place that has other ranks."""
    rank, size = _number(launcher.rank, environ), _number(launcher.size, environ)
    return rank in (None, place.rank) and size in (None, place.size) and place.size > 1


def _implies_other_ranks(launcher: Launcher, environ: Mapping[str, str]) -> bool:
    """Return whether a launcher sets a rank, or a number that a job of one rank would not have.

    Batch scripts and container images may set a size of 1.
    """
    alone = {launcher.size: 1, launcher.local_rank: 0, launcher.local_size: 1, launcher.cross_rank: 0}
    alone[launcher.cross_size] = 1
    more = any((_number(name, environ) or 0) > number for name, number in alone.items())
    return more or _number(launcher.rank, environ) is not None


def _agree(chosen: tuple[Launcher, Place], other: tuple[Launcher, Place], environ: Mapping[str, str]) -> bool:
    """Return whether the values of two launchers are compatible."""
    inner, place = chosen
    outer, theirs = other
    if (place.rank, place.size) == (theirs.rank, theirs.size):
        return True
    if outer.name in inner.may_run_inside and (not inner.inside_marker or environ.get(inner.inside_marker)):
        return True
    # A task of srun, to which --mpi=pmi2 gives PMI's variables too, may start several ranks itself, as
    # torch.multiprocessing does.
    task = outer.name == "srun" or (outer.name == "pmi" and _is_present(launcher_named("srun"), environ))
    return task and place.size > theirs.size and place.size % theirs.size == 0


def _found_variables(environ: Mapping[str, str]) -> str:
    names = dict.fromkeys(name for launcher in LAUNCHERS for name in launcher.variables())
    return "Found: " + " ".join(f"{name}={environ[name]}" for name in names if environ.get(name))


def _number(name: str, environ: Mapping[str, str]) -> int | None:
    text = environ.get(name, "")
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text}: must be a whole number: {REMEDY}") from None


REMEDY = "start the script with its launcher, or correct or unset these variables"


def _check_rank(launcher: Launcher, rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(
            f"{launcher.rank}={rank}, {launcher.size}={size}: rank {rank} of {size}: a rank must be from 0 to one less "
            f"than the size: {REMEDY}"
        )
    if size > RANKS_MAX:
        raise ValueError(f"{launcher.size}={size}: a job has at most {RANKS_MAX} ranks: {REMEDY}")


def _check_local(launcher: Launcher, place: Place, environ: Mapping[str, str]) -> None:
    """Raise ValueError for a local rank, or a number of ranks on this host, that the job cannot have.

    Without that number, any local rank is accepted: local ranks are then derived from the hosts of all ranks. In an
    elastic job a local rank is a worker's name, and workers come and go.
    """
    if environ.get("HOROVOD_ELASTIC"):
        return
    rank, size = place.local_rank or 0, place.local_size
    if rank < 0 or (size is not None and not (rank < size <= place.size)):
        given = ((launcher.local_rank, place.local_rank), (launcher.local_size, size), (launcher.size, place.size))
        values = ", ".join(f"{name}={value}" for name, value in given if value is not None)
        raise ValueError(
            f"{values}: a local rank must be from 0 to one less than the number of ranks on its host, and that number "
            f"at most the size: {REMEDY}"
        )


def machine() -> str:
    """Return the machine's identity, shared by processes with a common loopback: boot id and network namespace."""
    try:
        return f"{boot_id()}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return os.uname().nodename


def machine_digest() -> bytes:
    """Return a 16-byte digest of machine()."""
    return _digest(machine())


def host_digest(settings: Settings) -> bytes:
    """Return a 16-byte digest that ranks of one host share: of NETBOTTLENECK_HOST_ID, else of machine()."""
    return _digest(settings.host_id if settings.host_id is not None else machine())


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:16]


def topology(host_ids: Sequence[bytes | str], rank: int) -> Topology:
    """Return the place of `rank` among hosts, given the host id of each rank, by rank.

    Hosts are numbered by their lowest rank. The local rank counts the lower ranks of the same host. As in Horovod,
    cross_rank counts the earlier hosts that have a rank of this local rank, and cross_size counts all such hosts.
    """
    members: dict[bytes | str, list[int]] = {}
    for other, host in enumerate(host_ids):
        members.setdefault(host, []).append(other)
    mine = members[host_ids[rank]]
    local = mine.index(rank)
    peers = [ranks[local] for ranks in members.values() if len(ranks) > local]
    sizes = {len(ranks) for ranks in members.values()}
    return Topology(local, len(mine), peers.index(rank), len(peers), len(sizes) == 1)


def with_topology(place: Place, topology: Topology) -> Place:
    """Return the place with the fields of its topology."""
    return replace(
        place,
        local_rank=topology.local_rank,
        local_size=topology.local_size,
        cross_rank=topology.cross_rank,
        cross_size=topology.cross_size,
    )
