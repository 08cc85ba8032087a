"""Where ranks meet: a place to leave rank 0's address and secret for the others, under each launcher."""

import contextlib
import hashlib
import http.client
import importlib
import os
import re
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from netbottleneck.env import Settings

if TYPE_CHECKING:
    from netbottleneck.place import Place

ADVICE = "set NETBOTTLENECK_MASTER=HOST:PORT, rank 0's address, and NETBOTTLENECK_SECRET on all ranks"


class Channel(Protocol):
    """Keys and values that all ranks of a job see, and nobody else is meant to."""

    name: str

    def put(self, key: str, value: bytes) -> None:
        """Leave a value for all."""

    def look(self, key: str) -> bytes | None:
        """Return the value, or None where there is none yet. Never blocks for long."""

    def forget(self, key: str) -> None:
        """Drop a key that this rank put, where that can be done."""


@dataclass(frozen=True)
class Meeting:
    """How to meet: through a channel, at an address that all know, or both. At least one is there."""

    channel: Channel | None
    address: str | None = None


def get(channel: Channel, key: str, deadline: float) -> bytes:
    """Wait for a key until `deadline` (time.monotonic()); TimeoutError names the key and the channel."""
    pause = 0.002
    while (value := channel.look(key)) is None:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"nobody left {key} at {channel.name} in time")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)
    return value


class Folder:
    """A directory. `private`: others on this machine must not read it, and what a dead process left does not count."""

    def __init__(self, path: Path, private: bool = False) -> None:
        self.name = str(path)
        self._path = path
        self._private = private
        path.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
        if private:
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise PermissionError(f"{path} is not a folder of this user alone: remove it, or {ADVICE}")

    def put(self, key: str, value: bytes) -> None:
        """Leave a value for all, whole or not at all."""
        target = self._path / key.replace("/", ".")
        # Rank 0 removes an empty private folder, perhaps just now.
        self._path.mkdir(mode=0o700 if self._private else 0o777, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._path, prefix=".", delete=False) as file:
            file.write((_process(os.getpid()) or b"") + b"\n" + value if self._private else value)
        Path(file.name).replace(target)

    def look(self, key: str) -> bytes | None:
        """Return the value, or None."""
        try:
            value = (self._path / key.replace("/", ".")).read_bytes()
        except FileNotFoundError:
            return None
        if not self._private:
            return value
        writer, _, value = value.partition(b"\n")
        return value if writer == _process(int(writer.split(b" ")[0])) else None

    def forget(self, key: str) -> None:
        """Drop a key."""
        (self._path / key.replace("/", ".")).unlink(missing_ok=True)
        if self._private:
            with contextlib.suppress(OSError):
                self._path.rmdir()


def _process(pid: int) -> bytes | None:
    """Return "pid start" of a live process: no two processes ever share it between two boots."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return b"%d %s" % (pid, fields[19])


def private_folder(what: str) -> Folder:
    """Return the folder of this user that belongs to `what`, such as a launcher's name for its job."""
    digest = hashlib.sha256(what.encode()).hexdigest()[:16]
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    return Folder(base / f"netbottleneck-{os.getuid()}-{digest}", private=True)


class Http:
    """The key-value server of horovodrun: PUT and GET of /scope/key, 404 for what is not there."""

    def __init__(self, host: str, port: int) -> None:
        self.name = f"http://{host}:{port}"
        self._to = (host, port)

    def _ask(self, method: str, key: str, body: bytes | None = None) -> tuple[int, bytes]:
        scope, _, name = key.rpartition("/")
        connection = http.client.HTTPConnection(*self._to, timeout=10)
        try:
            connection.request(method, f"/{scope.replace('/', '.')}/{name}", body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except OSError as error:
            raise ConnectionError(f"the launcher's rendezvous at {self.name} does not answer: {error}") from error
        finally:
            connection.close()

    def put(self, key: str, value: bytes) -> None:
        """Leave a value for all."""
        status, _ = self._ask("PUT", key, value)
        if status != http.client.OK:
            raise ConnectionError(f"the launcher's rendezvous at {self.name} answers {status} to PUT {key}")

    def look(self, key: str) -> bytes | None:
        """Return the value, or None."""
        status, value = self._ask("GET", key)
        if status not in (http.client.OK, http.client.NOT_FOUND):
            raise ConnectionError(f"the launcher's rendezvous at {self.name} answers {status} to GET {key}")
        return value if status == http.client.OK else None

    def forget(self, key: str) -> None:
        """The server dies with the job."""


class Store:
    """A torch.distributed store."""

    def __init__(self, store: Any, name: str) -> None:
        self.name = name
        self._store = store

    def put(self, key: str, value: bytes) -> None:
        """Leave a value for all."""
        self._store.set(key, value)

    def look(self, key: str) -> bytes | None:
        """Return the value, or None."""
        return bytes(self._store.get(key)) if self._store.check([key]) else None

    def forget(self, key: str) -> None:
        """Drop a key."""
        self._store.delete_key(key)


# One store for each address, kept open: its port serves every later init of this process, and torch.distributed's
# own env:// rendezvous, which shares a server of the same process.
_stores: dict[tuple[str, int, bool], Store] = {}


def torch_store(host: str, port: int, place: "Place", timeout_s: float, environ: Mapping[str, str]) -> Store:
    """Return the store at MASTER_ADDR:MASTER_PORT: the launcher's agent's, or one that rank 0 opens here."""
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    key = (host, port, agent)
    if key in _stores:
        return _stores[key]
    try:
        distributed = importlib.import_module("torch.distributed")
    except ImportError as error:
        raise ImportError(f"MASTER_ADDR={host} is torch's way to meet, and there is no torch here: {ADVICE}") from error
    try:
        store = distributed.TCPStore(
            host,
            port,
            place.size,
            is_master=place.rank == 0 and not agent,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=not agent,
        )
    except RuntimeError as error:
        side = "cannot listen at" if place.rank == 0 and not agent else "does not reach"
        first = str(error).splitlines()[0]
        raise ConnectionError(f"rank {place.rank} {side} MASTER_ADDR:MASTER_PORT={host}:{port}: {first}") from error
    return _stores.setdefault(key, Store(store, f"MASTER_ADDR:MASTER_PORT={host}:{port}"))


def initialised_store(place: "Place") -> Store | None:
    """Return the default store of torch.distributed where a script has initialised it with the same ranks."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    if (distributed.get_rank(), distributed.get_world_size()) != (place.rank, place.size):
        return None
    return Store(distributed.distributed_c10d._get_default_store(), "torch.distributed's store")


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
        return Meeting(torch_store(host, _port("MASTER_PORT", environ), place, settings.start_timeout_s, environ))
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
