"""How the ranks of a job meet under each launcher: through which channel, at which address."""

import contextlib
import hashlib
import importlib
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netbottleneck.config import Settings
from netbottleneck.launch import launchers, pmi, pmix
from netbottleneck.launch.stores import (
    ADVICE,
    Board,
    Channel,
    Folder,
    Http,
    Keys,
    Rounds,
    Store,
    gather,
    get,
    private_folder,
)

if TYPE_CHECKING:
    from netbottleneck.launch.topology import Place


@dataclass(frozen=True)
class Meeting:
    """How to meet: through a channel, on a launcher's board, at an address that all know, or through one at another.

    At least one is there.
    """

    channel: Channel | None
    address: str | None = None
    board: Board | None = None

    def talk(self, key: str, place: "Place", limit_s: float) -> Keys | Rounds | None:
        """Return the talk in which rank 0 says where it listens; None where the address is all there is."""
        if self.channel is not None:
            return Keys(self.channel, key, place.rank, place.size, limit_s)
        return None if self.board is None else Rounds(self.board, place.rank, place.size, limit_s)


# One store for each address, kept for the later jobs of this process: a connection may take seconds, as the server
# looks up the name of whoever comes.
_stores: dict[tuple[str, int, bool], Store] = {}

# A way to meet: it returns how, or what stands against it.
Way = Callable[[Settings, "Place", Mapping[str, str]], Meeting | str]

# Servers that answer anyone who reaches them, by the variables that say where they are.
EXPOSED = {
    "http": ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    "torch": ("MASTER_ADDR", "MASTER_PORT"),
}

# A process joins its launcher's server once, or learns once that there is none, and takes leave when it ends.
_boards: dict[str, Board | str] = {}


def torch_store(host: str, port: int, place: "Place", settings: Settings, environ: Mapping[str, str]) -> Store:
    """Return a store that all ranks reach by MASTER_ADDR:MASTER_PORT: the launcher's agent's, or one of our own."""
    timeout_s = settings.start_timeout_s
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = (host, port, agent)
    if address not in _stores:
        name, opens = f"MASTER_ADDR:MASTER_PORT={host}:{port}", place.rank == 0 and not agent
        there = Store(lambda: _reach(host, port, place, timeout_s, opens=opens, shares=opens), name)
        _stores[address] = there if agent else _own_store(there, host, place, settings)
    return _stores[address]


def _reach(host: str, port: int, place: "Place", timeout_s: float, *, opens: bool, shares: bool = False) -> Any:
    try:
        distributed = importlib.import_module("torch.distributed")
    except ImportError as error:
        raise ImportError(f"MASTER_ADDR={host} is torch's way to meet, and there is no torch here: {ADVICE}") from error
    limit = timedelta(seconds=timeout_s)
    try:
        return distributed.TCPStore(
            host, port, place.size, is_master=opens, timeout=limit, wait_for_workers=False, multi_tenant=shares
        )
    except RuntimeError as error:
        side = "cannot listen at" if opens else "does not reach"
        first = str(error).splitlines()[0]
        raise ConnectionError(f"rank {place.rank} {side} MASTER_ADDR:MASTER_PORT={host}:{port}: {first}") from error


def _open_store(host: str, place: "Place", settings: Settings) -> Any:
    """Open a store at the first port of NETBOTTLENECK_PORTS that is free, or where the system chooses.

    Where none of the range is free, the job's own listeners say so.
    """
    low, high = settings.ports
    for port in range(low, high + 1 if low else low):
        with contextlib.suppress(ConnectionError):
            return _reach(host, port, place, settings.start_timeout_s, opens=True)
    return _reach(host, 0, place, settings.start_timeout_s, opens=True)


def _own_store(there: Store, host: str, place: "Place", settings: Settings) -> Store:
    """Return a store at a port of its own, which rank 0 opens and names at `there`.

    `there` is closed on every rank when this returns: MASTER_PORT is torch.distributed's, which takes the keys that an
    earlier group left in its store for those of the present one.
    """
    timeout_s = settings.start_timeout_s
    if place.rank == 0:
        opened = _open_store(host, place, settings)
        there.put("netbottleneck/port", b"%d" % opened.port)
        own = Store(lambda: opened, there.name)
        gather(own, "came", place.size, timeout_s)
        there.close()
        own.put("closed", b"1")
        return own
    deadline = time.monotonic() + timeout_s
    port = int(get(there, "netbottleneck/port", deadline))
    own = Store(lambda: _reach(host, port, place, timeout_s, opens=False), there.name)
    there.close()
    own.put(f"came.{place.rank}", b"1")
    get(own, "closed", deadline)
    return own


def initialised_store(place: "Place") -> Store | None:
    """Return the default store of torch.distributed where a script has initialised it with the same ranks."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    if (distributed.get_rank(), distributed.get_world_size()) != (place.rank, place.size):
        return None
    return Store(distributed.distributed_c10d._get_default_store, "torch.distributed's store")


def choose(settings: Settings, place: "Place", environ: Mapping[str, str] = os.environ) -> Meeting:
    """Return how this job's ranks meet: as the user says, through torch.distributed's store, or as its launcher can.

    Raises ValueError that says what stands against each way, and what to set, where there is none, or none by which a
    secret could be shared.
    """
    if settings.master is not None:
        return _direct(settings.master, settings)
    if settings.rendezvous is not None:
        return Meeting(Folder(Path(settings.rendezvous)))
    store = initialised_store(place)
    if store is not None:
        return Meeting(store)
    against = []
    for way in launchers.named(place.launcher).ways:
        found = WAYS[way](settings, place, environ)
        if isinstance(found, Meeting):
            return found
        against.append(f"{way}: {found}")
    raise ValueError(
        f"{place.size} ranks, started by {place.launcher}, have nowhere to meet ({'; '.join(against)}): {ADVICE}"
    )


def secrecy(settings: Settings, place: "Place", environ: Mapping[str, str] = os.environ) -> str:
    """Return where this job's secret comes from, and who can read it on its way; nothing is connected to.

    A store that a script may have initialised by then is not looked at.
    """
    if settings.secret is not None:
        return f"set by {settings.sources.get('secret', 'an argument')}"
    if place.size == 1:
        return "none needed: one rank"
    drawn = "drawn by rank 0"
    if settings.master is not None:
        if settings.insecure:
            return "none: NETBOTTLENECK_INSECURE=1, anyone can join the job"
        near = is_loopback(settings.master.rpartition(":")[0])
        return f"{drawn}, left in a folder of this user alone" if near else f"missing: {ADVICE}"
    if settings.rendezvous is not None:
        return f"{drawn}, left in {settings.rendezvous}, in a file of this user alone"
    ways = launchers.named(place.launcher).ways
    exposed = [way for way in ways if way in EXPOSED and not _lacks(EXPOSED[way], environ)]
    if not exposed:
        return f"{drawn}, shared by the launcher or in a folder of this user alone"
    names = EXPOSED[exposed[0]]
    where = f"{':'.join(names)}={':'.join(environ[name] for name in names)}"
    sure = "" if ways[0] == exposed[0] else " unless the launcher offers PMIx or PMI"
    return f"{drawn}, and readable by anyone who reaches {where}{sure}: set NETBOTTLENECK_SECRET_FILE"


def _by_http(settings: Settings, place: "Place", environ: Mapping[str, str]) -> Meeting | str:
    """Horovodrun's key-value server."""
    names = EXPOSED["http"]
    lacks = _lacks(names, environ)
    return lacks or Meeting(Http(environ[names[0]], _port(names[1], environ)))


def _by_torch(settings: Settings, place: "Place", environ: Mapping[str, str]) -> Meeting | str:
    """A store of torch's, at the address that torch.distributed meets at."""
    names = EXPOSED["torch"]
    lacks = _lacks(names, environ)
    return lacks or Meeting(torch_store(environ[names[0]], _port(names[1], environ), place, settings, environ))


def _lacks(names: tuple[str, ...], environ: Mapping[str, str]) -> str:
    there = [f"{name}={environ[name]} is set" for name in names if environ.get(name)]
    gone = [name for name in names if not environ.get(name)]
    return ", ".join([*there, f"no {' and '.join(gone)}"]) if gone else ""


def _on_board(name: str, join: Callable[[int, int, float, Mapping[str, str]], Board | str]) -> Way:
    """Return the way to meet on a launcher's board; a process joins once."""

    def way(settings: Settings, place: "Place", environ: Mapping[str, str]) -> Meeting | str:
        if name not in _boards:
            _boards[name] = join(place.rank, place.size, settings.start_timeout_s, environ)
        found = _boards[name]
        return found if isinstance(found, str) else Meeting(None, board=found)

    return way


def _in_folder(settings: Settings, place: "Place", environ: Mapping[str, str]) -> Meeting | str:
    """Return a folder of one host, known by the job's own number."""
    job = _job(place, environ)
    if not job:
        return "nothing tells this job from another"
    if place.one_host or environ.get("SLURM_NNODES") == "1":
        return Meeting(private_folder(job))
    return "not all ranks are on this host"


def _at_first_host(settings: Settings, place: "Place", environ: Mapping[str, str]) -> Meeting | str:
    """Return the address that follows from a step of srun: its first host, and a port made from its number."""
    job = _job(place, environ)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not job or not nodes:
        return "no SLURM_STEP_NODELIST"
    port = settings.ports[0] or 20000 + int(hashlib.sha256(job.encode()).hexdigest(), 16) % 10000
    return _direct(f"{first_host(nodes)}:{port}", settings)


# By the names that launchers.LAUNCHERS use.
WAYS: Mapping[str, Way] = {
    "http": _by_http,
    "pmix": _on_board("pmix", pmix.join),
    "pmi": _on_board("pmi", pmi.join),
    "torch": _by_torch,
    "folder": _in_folder,
    "first host": _at_first_host,
}


def _job(place: "Place", environ: Mapping[str, str]) -> str:
    """Return the launcher's name for this job, the same on all of its ranks; "" where there is none."""
    names = {
        "mpirun": ("PMIX_NAMESPACE", "PMIX_SERVER_URI2", "PMIX_SERVER_URI21"),
        "pmi": ("SLURM_JOB_ID", "SLURM_STEP_ID"),
        "srun": ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    }.get(place.launcher, ())
    found = [f"{name}={environ[name]}" for name in names if environ.get(name)]
    return " ".join(found)


def _direct(address: str, settings: Settings) -> Meeting:
    host = address.rpartition(":")[0]
    if settings.secret is not None or settings.insecure:
        return Meeting(None, address)
    if is_loopback(host):
        return Meeting(private_folder(address), address)
    raise ValueError(
        f"ranks would meet at {address} without a secret, and there is no channel to share one: "
        f"set NETBOTTLENECK_SECRET to the same 16 bytes or more on all ranks"
    )


def _port(name: str, environ: Mapping[str, str]) -> int:
    text = environ.get(name, "")
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise ValueError(f"{name}={text}: must be a port from 1 to 65535")
    return int(text)


def is_loopback(host: str) -> bool:
    """True where a host name or address stands for this machine's loopback."""
    try:
        return host == "[::1]" or socket.gethostbyname(host).startswith("127.")
    except OSError:
        return False


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm list: "a[01-03,07],b" gives "a01", "r[2-3]n[5,7]-ib" gives "r2n5-ib"."""
    first = re.match(r"((?:[^,\[\]]|\[[^,\[\]-][^\[\]]*\])+)(?:,|$)", nodes)
    if first is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes}: no host in it")
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first.group(1))
