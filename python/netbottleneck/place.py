"""Who this process is: rank and size under each launcher, and which ranks share a host."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from netbottleneck.env import Settings


@dataclass(frozen=True)
class Launcher:
    """The variables of one launcher; an empty name: it has none."""

    name: str
    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""
    cross_rank: str = ""
    cross_size: str = ""
    sign: str = ""  # only counts where this variable is set


# In order of precedence.
LAUNCHERS = (
    Launcher(
        "horovodrun",
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
        "HOROVOD_CROSS_RANK",
        "HOROVOD_CROSS_SIZE",
    ),
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher("pmi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher(
        "srun",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        cross_rank="SLURM_NODEID",
        cross_size="SLURM_NNODES",
        sign="SLURM_STEP_ID",
    ),
)


@dataclass(frozen=True)
class Place:
    """A process in its job. local_*: on its host; cross_*: among the ranks of equal local rank, one a host.

    None where the launcher does not say; `located` fills these in once the hosts of all ranks are known.
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
        """True where the launcher says all of it."""
        return None not in (self.local_rank, self.local_size, self.cross_rank, self.cross_size)

    @property
    def one_host(self) -> bool:
        """True where the launcher says that all ranks are on this host."""
        return self.size in (1, self.local_size)


@dataclass(frozen=True)
class Topology:
    """What follows from the hosts of all ranks."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool  # the same number of ranks on every host


def detect(settings: Settings, environ: Mapping[str, str] = os.environ) -> Place:
    """Return this process's place, by NETBOTTLENECK_RANK and _SIZE, else by the first launcher that left its traces.

    Raises ValueError that lists what was found when a launcher's variables are half there or make no sense, and when
    two launchers disagree about the size. A launcher inside another one (torchrun started by srun, once a node) is no
    disagreement: the inner job then has a multiple of the outer one's processes.
    """
    if (settings.rank is None) != (settings.ranks is None):
        raise ValueError(
            f"NETBOTTLENECK_RANK and NETBOTTLENECK_SIZE go together, but only one is set: "
            f"rank {settings.rank}, size {settings.ranks}"
        )
    if settings.rank is not None and settings.ranks is not None:
        _check_range(settings.rank, settings.ranks, "NETBOTTLENECK_RANK and NETBOTTLENECK_SIZE")
        return Place(settings.rank, settings.ranks, launcher="explicit")
    places = [place for launcher in LAUNCHERS if (place := _read(launcher, environ)) is not None]
    if not places:
        return Place(0, 1, 0, 1, 0, 1)
    chosen = places[0]
    inner = chosen.launcher == "torchrun" and "TORCHELASTIC_RUN_ID" in environ
    for other in places[1:]:
        nested = (inner or other.launcher == "srun") and chosen.size % other.size == 0
        if other.size != chosen.size and not nested:
            found = "; ".join(f"{place.launcher}: rank {place.rank} of {place.size}" for place in places)
            raise ValueError(
                f"the launchers disagree about the size of the job ({found}): unset the variables of the one that "
                "did not start it, or set NETBOTTLENECK_RANK and NETBOTTLENECK_SIZE"
            )
    return chosen


def _read(launcher: Launcher, environ: Mapping[str, str]) -> Place | None:
    if launcher.sign and launcher.sign not in environ:
        return None
    both = [name for name in (launcher.rank, launcher.size) if environ.get(name)]
    if not both:
        return None
    if len(both) == 1:
        missing = launcher.size if both == [launcher.rank] else launcher.rank
        # A size alone is what a batch script or a container image may carry; it says nothing as long as it is 1.
        if both == [launcher.size] and environ[launcher.size].strip() == "1":
            return None
        raise ValueError(f"{both[0]}={environ[both[0]]} is set but {missing} is not: {launcher.name} sets both")
    rank, size = _number(launcher.rank, environ), _number(launcher.size, environ)
    if rank is None or size is None:
        return None
    _check_range(rank, size, f"{launcher.rank} and {launcher.size}")
    if launcher.sign and size == 1:
        return None
    return Place(
        rank,
        size,
        _number(launcher.local_rank, environ),
        _number(launcher.local_size, environ),
        _number(launcher.cross_rank, environ),
        _number(launcher.cross_size, environ),
        launcher.name,
    )


def _number(name: str, environ: Mapping[str, str]) -> int | None:
    text = environ.get(name, "")
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text}: must be a whole number") from None


def _check_range(rank: int, size: int, names: str) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"{names} say rank {rank} of {size}: a rank is from 0 to one less than the size")


def machine() -> str:
    """Return what processes share that reach each other by loopback: boot id and network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return os.uname().nodename


def machine_digest() -> bytes:
    """Return 16 bytes that stand for machine()."""
    return _digest(machine())


def host_digest(settings: Settings) -> bytes:
    """Return 16 bytes that ranks of one host have in common: NETBOTTLENECK_HOST_ID, or what machine() says."""
    return _digest(settings.host_id if settings.host_id is not None else machine())


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:16]


def topology(host_ids: Sequence[bytes | str], rank: int) -> Topology:
    """Return where `rank` stands, given the host id of each rank, by rank.

    Hosts are numbered by their lowest rank; a local rank counts the lower ranks of the same host. cross_rank counts
    the hosts before this one that have a rank of this local rank, cross_size all such hosts, as Horovod has it.
    """
    members: dict[bytes | str, list[int]] = {}
    for other, host in enumerate(host_ids):
        members.setdefault(host, []).append(other)
    mine = members[host_ids[rank]]
    local = mine.index(rank)
    peers = [ranks[local] for ranks in members.values() if len(ranks) > local]
    sizes = {len(ranks) for ranks in members.values()}
    return Topology(local, len(mine), peers.index(rank), len(peers), len(sizes) == 1)


def located(place: Place, found: Topology) -> Place:
    """Return the place with what the hosts say."""
    return replace(
        place,
        local_rank=found.local_rank,
        local_size=found.local_size,
        cross_rank=found.cross_rank,
        cross_size=found.cross_size,
    )
