"""Who this process is: rank and size under each launcher, and which ranks share a host."""

import hashlib
import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from netbottleneck.config import Settings
from netbottleneck.launch.launchers import EXPLICIT, HOROVODRUN, LAUNCHERS, Launcher

# Beside Horovod's variables that `hand_on` has written: which, as NAME=value each. They are no launcher's.
HANDED = "_NETBOTTLENECK_HANDED_ON"


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
    those of two say different things. A launcher inside another one (torchrun started by srun, once a node) is no
    disagreement: each has a job of its own.
    """
    if (settings.rank is None) != (settings.ranks is None):
        raise ValueError(
            f"NETBOTTLENECK_RANK and NETBOTTLENECK_SIZE go together, but only one is set: "
            f"rank {settings.rank}, size {settings.ranks}"
        )
    if settings.rank is not None and settings.ranks is not None:
        _check_range(settings.rank, settings.ranks, "NETBOTTLENECK_RANK and NETBOTTLENECK_SIZE")
        return Place(settings.rank, settings.ranks, launcher=EXPLICIT.name)
    environ = _launchers_own(environ)
    there = [launcher for launcher in LAUNCHERS if _counts(launcher, environ)]
    whole = [(launcher, place) for launcher in there if (place := _read(launcher, environ)) is not None]
    for launcher in there:
        _refuse_half(launcher, whole, environ)
    chosen = next(((launcher, place) for launcher, place in whole if place.size >= launcher.least), None)
    if chosen is None:
        return Place(0, 1, 0, 1, 0, 1)
    if not all(_agree(chosen, other, environ) for other in whole):
        said = "; ".join(f"{place.launcher}: rank {place.rank} of {place.size}" for _, place in whole)
        raise ValueError(
            f"the launchers disagree about rank or size of the job ({said}): unset the variables of the one that did "
            f"not start it, or set NETBOTTLENECK_RANK and NETBOTTLENECK_SIZE. {_found(environ)}"
        )
    return chosen[1]


def hand_on(settings: Settings, environ: MutableMapping[str, str]) -> None:
    """Write Horovod's own variables of a place (HOROVOD_RANK, HOROVOD_SIZE, …), as far as the launcher says it.

    For a script that reads them instead of asking. Those that are set stay, and so does an environment without a
    launcher. What is written here, `detect` does not take for horovodrun's, in this process or in one that inherits it.
    Raises as detect.
    """
    place = detect(settings, environ)
    for name in _handed(environ) if _launchers_own(environ) is not environ else ():
        del environ[name]  # of the process that started this one
    if place.launcher in ("none", HOROVODRUN.name):
        return
    local = settings.host_id is None  # else the hosts of all ranks say it, which are not known yet
    whole = (place.local_rank, place.local_size, place.cross_rank, place.cross_size) if local else (None,) * 4
    if local and place.local_size == place.size:
        whole = (*whole[:2], 0, 1)
    told = zip((HOROVODRUN.rank, HOROVODRUN.size, *HOROVODRUN.beside), (place.rank, place.size, *whole), strict=True)
    written = {name: str(value) for name, value in told if value is not None and not environ.get(name)}
    environ.update(written, **{HANDED: " ".join(f"{name}={value}" for name, value in written.items())})


def _handed(environ: Mapping[str, str]) -> dict[str, str]:
    return dict(word.split("=") for word in environ.get(HANDED, "").split() if word.count("=") == 1)


def _launchers_own(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment without what `hand_on` has written.

    All of it counts where horovodrun has written it anew: it names its server, or other values.
    """
    handed = _handed(environ)
    anew = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR") or any(environ.get(name) != handed[name] for name in handed)
    if anew or not handed:
        return environ
    return {name: value for name, value in environ.items() if name not in handed}


def _counts(launcher: Launcher, environ: Mapping[str, str]) -> bool:
    return not launcher.sign or environ.get(launcher.sign, "") not in ("", *launcher.sign_not)


def _read(launcher: Launcher, environ: Mapping[str, str]) -> Place | None:
    """Return what a launcher says, where it says both rank and size."""
    rank, size = _number(launcher.rank, environ), _number(launcher.size, environ)
    if rank is None or size is None:
        return None
    _check_range(rank, size, f"{launcher.rank} and {launcher.size}")
    return Place(
        rank,
        size,
        _number(launcher.local_rank, environ),
        _number(launcher.local_size, environ),
        _number(launcher.cross_rank, environ),
        _number(launcher.cross_size, environ),
        launcher.name,
    )


def _refuse_half(launcher: Launcher, whole: Sequence[tuple[Launcher, Place]], environ: Mapping[str, str]) -> None:
    """Raise ValueError where a launcher's variables tell of other ranks, but not which of how many this one is.

    Half of them may be there beside a launcher that says both, as long as it says the same.
    """
    if any(other is launcher for other, _ in whole) or (whole and not launcher.size):
        return
    if not _tells_of_others(launcher, environ) or any(_says(launcher, place, environ) for _, place in whole):
        return
    given = ", ".join(f"{name}={environ[name]}" for name in launcher.variables() if environ.get(name))
    missing = [name for name in (launcher.rank, launcher.size) if name and not environ.get(name)]
    lacks = f"{' and '.join(missing)} is not set, and {launcher.name} sets both" if missing else "not of how many"
    raise ValueError(
        f"{given}: that tells of other ranks, but {lacks}. Start the script by its launcher, unset what is left of "
        f"another one, or set NETBOTTLENECK_RANK and NETBOTTLENECK_SIZE. {_found(environ)}"
    )


def _says(launcher: Launcher, place: Place, environ: Mapping[str, str]) -> bool:
    """Return whether a launcher's half agrees with a place among others."""
    rank, size = _number(launcher.rank, environ), _number(launcher.size, environ)
    return rank in (None, place.rank) and size in (None, place.size) and place.size > 1


def _tells_of_others(launcher: Launcher, environ: Mapping[str, str]) -> bool:
    """Return whether there is a rank, or a number that a job of one rank would not have.

    A size of 1 is what a batch script or a container image may carry.
    """
    alone = {launcher.size: 1, launcher.local_rank: 0, launcher.local_size: 1, launcher.cross_rank: 0}
    alone[launcher.cross_size] = 1
    more = any((_number(name, environ) or 0) > number for name, number in alone.items())
    return more or _number(launcher.rank, environ) is not None


def _agree(chosen: tuple[Launcher, Place], other: tuple[Launcher, Place], environ: Mapping[str, str]) -> bool:
    """Return whether two launchers can both be right."""
    inner, place = chosen
    outer, theirs = other
    if (place.rank, place.size) == (theirs.rank, theirs.size):
        return True
    if outer.name in inner.inside and (not inner.inside_sign or environ.get(inner.inside_sign)):
        return True
    # A task of srun may start several ranks by itself, as torch.multiprocessing does.
    return outer.name == "srun" and place.size > theirs.size and place.size % theirs.size == 0


def _found(environ: Mapping[str, str]) -> str:
    names = dict.fromkeys(name for launcher in LAUNCHERS for name in launcher.variables())
    return "Found: " + " ".join(f"{name}={environ[name]}" for name in names if environ.get(name))


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
