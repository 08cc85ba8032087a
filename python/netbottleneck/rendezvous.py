"""How the ranks of a job meet under each launcher: through which channel, at which address."""

import contextlib
import hashlib
import importlib
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netbottleneck.channels import ADVICE, Channel, Folder, Http, Store, gather, get, private_folder
from netbottleneck.env import Settings

if TYPE_CHECKING:
    from netbottleneck.place import Place


@dataclass(frozen=True)
class Meeting:
    """How to meet: through a channel, at an address that all know, or both. At least one is there."""

    channel: Channel | None
    address: str | None = None


# One store for each address, kept for the later jobs of this process: a connection may take seconds, as the server
# looks up the name of whoever comes.
_stores: dict[tuple[str, int, bool], Store] = {}


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
    """Return how this job's ranks meet.

    Raises ValueError with the line to set when there is no way, or none by which a secret could be shared.
    """
    if settings.master is not None:
        return _direct(settings.master, settings)
    if settings.rendezvous is not None:
        return Meeting(Folder(Path(settings.rendezvous)))
    store = initialised_store(place)
    if store is not None:
        return Meeting(store)
    host = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    if place.launcher == "horovodrun" and host:
        return Meeting(Http(host, _port("HOROVOD_GLOO_RENDEZVOUS_PORT", environ)))
    host = environ.get("MASTER_ADDR")
    if host and environ.get("MASTER_PORT"):
        return Meeting(torch_store(host, _port("MASTER_PORT", environ), place, settings, environ))
    found = _by_job(settings, place, environ)
    if found is None:
        raise ValueError(f"{place.size} ranks ({place.launcher}) have nowhere to meet: {ADVICE}")
    return found


def _by_job(settings: Settings, place: "Place", environ: Mapping[str, str]) -> Meeting | None:
    """Return how ranks meet by the job's own number alone: in a folder of one host, or at srun's first host."""
    job = _job(place, environ)
    if job and (place.one_host or environ.get("SLURM_NNODES") == "1"):
        return Meeting(private_folder(job))
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if place.launcher == "srun" and job and nodes:
        port = settings.ports[0] or 20000 + int(hashlib.sha256(job.encode()).hexdigest(), 16) % 10000
        return _direct(f"{first_host(nodes)}:{port}", settings)
    return None


def _job(place: "Place", environ: Mapping[str, str]) -> str:
    """Return the launcher's name for this job, the same on all of its ranks; "" where there is none."""
    names = {
        "mpirun": ("PMIX_NAMESPACE", "PMIX_SERVER_URI2", "PMIX_SERVER_URI21"),
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
        return socket.gethostbyname(host).startswith("127.")
    except OSError:
        return False


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm list: "a[01-03,07],b" gives "a01"."""
    found = re.match(r"([^,\[]+)(?:\[([^,\-\]]+)[^\]]*\]([^,\[]*))?", nodes)
    if found is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes}: no host in it")
    stem, number, rest = found.groups(default="")
    return f"{stem}{number}{rest}"
