"""Rendezvous of a job's ranks under each launcher: the choice of channel and address, and the stores behind them."""

import contextlib
import errno
import functools
import hashlib
import http.client
import importlib
import os
import re
import secrets
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from netbottleneck.config import Settings
from netbottleneck.launch import pmi, topology

if TYPE_CHECKING:
    from netbottleneck.launch.topology import Place


# Exchange of values between ranks that are not yet connected.
#
# A Channel has keys in a folder, at a launcher's server or in a torch store. A ProcessManager
# is a launcher that passes each rank's value to all ranks. A Rendezvous covers both.

ADVICE = "set NETBOTTLENECK_MASTER=HOST:PORT, rank 0's address, and NETBOTTLENECK_SECRET on all ranks"


class Channel(Protocol):
    """Keys and values for all ranks of a job, and for no other process.

    `exposed`: anyone who reaches the channel can read and write them.
    """

    name: str
    exposed: bool

    def put(self, key: str, value: bytes) -> None:
        """Store a value for all ranks."""

    def get(self, key: str) -> bytes | None:
        """Return the value, or None if it is not there yet. Never blocks for long."""

    def delete(self, key: str) -> None:
        """Remove a key that this rank put, if possible."""


class ProcessManager(Protocol):
    """A launcher that passes each rank's value to all ranks, once all have given one."""

    name: str

    def share(self, value: bytes, wanted: Sequence[int], limit_s: float) -> list[bytes]:
        """Publish a value; return those of the wanted ranks. Every rank calls this, in the same order of calls."""


NONCE_BYTES = 16
FAILED = b"!"  # begins an answer that is the reason of a failure


@dataclass(frozen=True)
class ChannelExchange:
    """An exchange of all ranks with rank 0 through a channel: all report to rank 0, which then answers once.

    The channel may hold values of an earlier exchange with the same key, such as that of a job that was killed. Rank 0
    therefore stores its nonce first, and each report repeats it. A rank that finds another nonce reports again. The
    answer is rank 0's nonce, the nonces of the reports by rank, and a value. A rank accepts it if it has its own nonce.
    """

    channel: Channel
    key: str  # unique to this exchange among those of its job
    rank: int
    size: int
    limit_s: float
    nonce: bytes = field(default_factory=lambda: secrets.token_hex(NONCE_BYTES // 2).encode())

    @property
    def exposed(self) -> str:
        """The channel's name if anyone who reaches it can read the exchange, else empty."""
        return self.channel.name if self.channel.exposed else ""

    def reports(self) -> list[bytes]:
        """Rank 0: wait for the values of all others, and return them. Raises TimeoutError naming the missing ranks."""
        self.channel.put(f"{self.key}/address", self.nonce)
        values = gather(self.channel, f"{self.key}/ready", self.size, self.limit_s, self.nonce)
        return [value[2 * NONCE_BYTES :] for value in values]

    def answer(self, value: bytes) -> None:
        """Rank 0: send the answer to all others that have reported."""
        found = [self.channel.get(f"{self.key}/ready.{rank}") or b"" for rank in range(1, self.size)]
        nonces = [
            one[NONCE_BYTES : 2 * NONCE_BYTES] if one.startswith(self.nonce) else bytes(NONCE_BYTES) for one in found
        ]
        self.channel.put(f"{self.key}/address", b"".join([self.nonce, *nonces, value]))

    def ask(self, value: bytes) -> bytes:
        """Any other rank: report a value to rank 0, and return the answer. Raises TimeoutError naming rank 0."""
        found: bytes | None = None
        reported = b""

        def look() -> bytes | None:
            nonlocal found, reported
            found = self.channel.get(f"{self.key}/address")
            if found is None:
                return None
            nonces = [found[at : at + NONCE_BYTES] for at in range(0, self.size * NONCE_BYTES, NONCE_BYTES)]
            if nonces[0] != reported:
                reported = nonces[0]
                self.channel.put(f"{self.key}/ready.{self.rank}", reported + self.nonce + value)
            return found[self.size * NONCE_BYTES :] if nonces[self.rank] == self.nonce else None

        # Rank 0's deadline is earlier, as its error names the missing ranks.
        answer = poll(look, time.monotonic() + self.limit_s + 5)
        if answer is None:
            other = (found or b"")[self.size * NONCE_BYTES :]
            failure = other.removeprefix(FAILED).decode() if other.startswith(FAILED) else ""
            raise TimeoutError(
                f"rank 0 did not publish its address at {self.channel.name} within {self.limit_s:g} s "
                f"(NETBOTTLENECK_START_TIMEOUT_S); this is rank {self.rank} of {self.size}"
                + (f"; rank 0 failed there before: {failure}" if failure else "")
            )
        return answer

    def clear(self) -> None:
        """Rank 0: remove the values of the exchange, if possible."""
        for name in ("address", *(f"ready.{rank}" for rank in range(1, self.size))):
            self.channel.delete(f"{self.key}/{name}")


@dataclass(frozen=True)
class ManagerExchange:
    """The same exchange through a process manager: a round of reports, then a round in which rank 0 gives a value."""

    manager: ProcessManager
    rank: int
    size: int
    limit_s: float
    exposed = ""  # a launcher's PMI serves only its own processes

    def reports(self) -> list[bytes]:
        """Rank 0: return the values of all others. Raises TimeoutError if ranks are missing."""
        return self.manager.share(b"", range(1, self.size), self.limit_s)

    def answer(self, value: bytes) -> None:
        """Rank 0: send the answer to all others."""
        self.manager.share(value, (), self.limit_s)

    def ask(self, value: bytes) -> bytes:
        """Any other rank: give rank 0 a value, and return the answer."""
        self.manager.share(value, (), self.limit_s)
        return self.manager.share(b"", (0,), self.limit_s)[0]

    def clear(self) -> None:
        """Do nothing: the values stay with the launcher, which ends with the job."""


NAMED_MOST = 8  # ranks that an error names
NAMING_S = 1.0  # for finding them, after the deadline


def gather(channel: Channel, key: str, size: int, limit_s: float, prefix: bytes = b"") -> list[bytes]:
    """Return the values of ranks 1 to size - 1 under key.RANK. A value without `prefix` does not count.

    Raises TimeoutError naming the ranks missing after limit_s, NETBOTTLENECK_START_TIMEOUT_S.
    """

    def of(rank: int) -> bytes | None:
        value = channel.get(f"{key}.{rank}")
        return value if value is not None and value.startswith(prefix) else None

    deadline = time.monotonic() + limit_s
    values = []
    for rank in range(1, size):
        value = poll(functools.partial(of, rank), deadline)
        if value is None:
            raise TimeoutError(
                f"of {size} ranks, {_missing_from(of, range(rank, size), deadline + NAMING_S)} did not reach "
                f"{channel.name} within {limit_s:g} s (NETBOTTLENECK_START_TIMEOUT_S)"
            )
        values.append(value)
    return values


def _missing_from(of: Callable[[int], bytes | None], ranks: range, deadline: float) -> str:
    """Return the missing ranks as text: the first of `ranks`, and others found until `deadline`."""
    missing, more = [ranks[0]], ""
    for rank in ranks[1:]:
        if len(missing) == NAMED_MOST or time.monotonic() >= deadline:
            more = " and perhaps others"
            break
        if of(rank) is None:
            missing.append(rank)
    return f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}{more}"


def wait_for(channel: Channel, key: str, deadline: float) -> bytes:
    """Wait for rank 0's value of a key until `deadline` (time.monotonic()); TimeoutError names key and channel."""
    value = poll(lambda: channel.get(key), deadline)
    if value is None:
        raise TimeoutError(f"rank 0 did not store {key} at {channel.name} in time (NETBOTTLENECK_START_TIMEOUT_S)")
    return value


def poll(look: Callable[[], bytes | None], deadline: float) -> bytes | None:
    """Call `look` until it returns a value, and return the value; None after `deadline` (time.monotonic())."""
    pause = 0.002
    while (value := look()) is None and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)
    return value


class Folder:
    """A directory. `private`: only this user can access it, and values of processes that have ended are ignored."""

    exposed = False  # only the user can access the files

    def __init__(self, path: Path, private: bool = False) -> None:
        self.name = str(path)
        self._path = path
        self._private = private
        path.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
        if private:
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise PermissionError(f"{path} is not a folder private to this user: remove it, or {ADVICE}")

    def put(self, key: str, value: bytes) -> None:
        """Store a value atomically."""
        target = self._path / key.replace("/", ".")
        # Rank 0 removes an empty private folder, possibly at this moment.
        self._path.mkdir(mode=0o700 if self._private else 0o777, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._path, prefix=".", delete=False) as file:
            file.write((_process(os.getpid()) or b"") + b"\n" + value if self._private else value)
        Path(file.name).replace(target)

    def get(self, key: str) -> bytes | None:
        """Return the value, or None."""
        try:
            value = (self._path / key.replace("/", ".")).read_bytes()
        except OSError as error:
            # ESTALE: on NFS another host has just replaced the file.
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            return None
        if not self._private:
            return value
        writer, _, value = value.partition(b"\n")
        return value if writer == _process(int(writer.split(b" ")[0])) else None

    def delete(self, key: str) -> None:
        """Remove a key."""
        (self._path / key.replace("/", ".")).unlink(missing_ok=True)
        if self._private:
            with contextlib.suppress(OSError):
                self._path.rmdir()


def _process(pid: int) -> bytes | None:
    """Return "pid start" of a live process, which is unique between two boots; None if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return b"%d %s" % (pid, fields[19])


def private_folder(what: str) -> Folder:
    """Return this user's private folder for `what`, such as a launcher's name for its job."""
    digest = hashlib.sha256(what.encode()).hexdigest()[:16]
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if not (os.path.isdir(base) and os.access(base, os.W_OK | os.X_OK)):  # it may be gone, or another host's
        base = tempfile.gettempdir()
    return Folder(Path(base) / f"netbottleneck-{os.getuid()}-{digest}", private=True)


class Http:
    """The key-value server of horovodrun: PUT and GET of /scope/key, 404 for a missing key."""

    exposed = True

    def __init__(self, host: str, port: int) -> None:
        self.name = f"http://{host}:{port}"
        self._to = (host, port)

    def _request(self, method: str, key: str, body: bytes | None = None) -> tuple[int, bytes]:
        scope, _, name = key.rpartition("/")
        connection = http.client.HTTPConnection(*self._to, timeout=10)
        try:
            connection.request(method, f"/{scope.replace('/', '.')}/{name}", body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionError(f"the launcher's rendezvous at {self.name} does not answer: {error}") from error
        finally:
            connection.close()

    def put(self, key: str, value: bytes) -> None:
        """Store a value for all ranks."""
        status, _ = self._request("PUT", key, value)
        if status != http.client.OK:
            raise ConnectionError(f"the launcher's rendezvous at {self.name} answers {status} to PUT {key}")

    def get(self, key: str) -> bytes | None:
        """Return the value, or None."""
        status, value = self._request("GET", key)
        if status not in (http.client.OK, http.client.NOT_FOUND):
            raise ConnectionError(f"the launcher's rendezvous at {self.name} answers {status} to GET {key}")
        return value if status == http.client.OK else None

    def delete(self, key: str) -> None:
        """Do nothing: the server ends with the job."""


class Store:
    """A torch.distributed store. `reach` connects to it, and may be called again.

    The server at MASTER_PORT may belong to an earlier group that rank 0 is just closing. A broken connection is
    therefore opened again, and this rank's values are stored again.
    """

    exposed = True

    def __init__(self, reach: Callable[[], Any], name: str) -> None:
        self.name = name
        self._reach = reach
        self._store = reach()
        self._stored: dict[str, bytes] = {}

    def _call(self, operation: Callable[[Any], Any]) -> Any:
        try:
            return operation(self._store)
        except RuntimeError:
            self._store = None  # release the port before the next attempt
            self._store = self._reach()
            for key, value in self._stored.items():
                self._store.set(key, value)
            return operation(self._store)

    def put(self, key: str, value: bytes) -> None:
        """Store a value for all ranks."""
        self._call(lambda store: store.set(key, value))
        self._stored[key] = value

    def get(self, key: str) -> bytes | None:
        """Return the value, or None."""
        return self._call(lambda store: bytes(store.get(key)) if store.check([key]) else None)  # type: ignore[no-any-return]

    def delete(self, key: str) -> None:
        """Remove a key."""
        self._call(lambda store: store.delete_key(key))
        self._stored.pop(key, None)

    def close(self) -> None:
        """Close the connection, and the server if this rank opened it."""
        self._store = None


# Choice of the rendezvous under each launcher.


@dataclass(frozen=True)
class Rendezvous:
    """A way to meet: a channel, a launcher's process manager, an address that all ranks know, or a combination.

    At least one is set. With a channel and an address, rank 0 listens there, and the channel carries the secret.
    """

    channel: Channel | None
    address: str | None = None
    manager: ProcessManager | None = None

    def exchange(self, key: str, place: "Place", limit_s: float) -> ChannelExchange | ManagerExchange | None:
        """Return the exchange in which rank 0 publishes its address; None if there is only a fixed address."""
        if self.channel is not None:
            return ChannelExchange(self.channel, key, place.rank, place.size, limit_s)
        return None if self.manager is None else ManagerExchange(self.manager, place.rank, place.size, limit_s)


# One store per address, kept for later jobs of this process. A new connection may take seconds, as the server looks up
# the name of each client.
_stores: dict[tuple[str, int, bool], Store] = {}

# A method of rendezvous: returns the rendezvous, or the reason why it is not possible.
Method = Callable[[Settings, "Place", Mapping[str, str]], Rendezvous | str]

# Servers that answer anyone who reaches them, with the variables of their addresses.
EXPOSED = {
    "http": ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    "torch": ("MASTER_ADDR", "MASTER_PORT"),
}

# A process connects to its launcher's server once, or fails once, and finalizes when it exits.
_managers: dict[str, ProcessManager | str] = {}


def torch_store(host: str, port: int, place: "Place", settings: Settings, environ: Mapping[str, str]) -> Store:
    """Return a store that all ranks reach at MASTER_ADDR:MASTER_PORT: the launcher agent's, or our own."""
    timeout_s = settings.start_timeout_s
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = (host, port, agent)
    if address not in _stores:
        name, opens = f"MASTER_ADDR:MASTER_PORT={host}:{port}", place.rank == 0 and not agent
        shared = Store(lambda: _connect_store(host, port, place, timeout_s, opens=opens, shares=opens), name)
        _stores[address] = shared if agent else _own_store(shared, host, place, settings)
    return _stores[address]


def _connect_store(host: str, port: int, place: "Place", timeout_s: float, *, opens: bool, shares: bool = False) -> Any:
    try:
        distributed = importlib.import_module("torch.distributed")
    except ImportError as error:
        raise ImportError(f"MASTER_ADDR={host} needs torch, which is not installed: {ADVICE}") from error
    limit = timedelta(seconds=timeout_s)
    try:
        return distributed.TCPStore(
            host, port, place.size, is_master=opens, timeout=limit, wait_for_workers=False, multi_tenant=shares
        )
    except RuntimeError as error:
        side = "cannot listen at" if opens else "cannot reach"
        first = str(error).splitlines()[0]
        raise ConnectionError(f"rank {place.rank} {side} MASTER_ADDR:MASTER_PORT={host}:{port}: {first}") from error


def _open_store(host: str, place: "Place", settings: Settings) -> Any:
    """Open a store at the first free port of NETBOTTLENECK_PORTS, or at a port that the system chooses.

    If no port of the range is free, the system chooses; the job's own listeners then report the error.
    """
    low, high = settings.ports
    for port in range(low, high + 1 if low else low):
        with contextlib.suppress(ConnectionError):
            return _connect_store(host, port, place, settings.start_timeout_s, opens=True)
    return _connect_store(host, 0, place, settings.start_timeout_s, opens=True)


def _own_store(shared: Store, host: str, place: "Place", settings: Settings) -> Store:
    """Return a store at a port of its own, which rank 0 opens and publishes in `shared`.

    `shared` is closed on every rank on return. MASTER_PORT belongs to torch.distributed, which would mistake keys of an
    earlier group in its store for those of the present one.
    """
    timeout_s = settings.start_timeout_s
    if place.rank == 0:
        opened = _open_store(host, place, settings)
        shared.put("netbottleneck/port", b"%d" % opened.port)
        own = Store(lambda: opened, shared.name)
        gather(own, "came", place.size, timeout_s)
        shared.close()
        own.put("closed", b"1")
        return own
    deadline = time.monotonic() + timeout_s
    port = int(wait_for(shared, "netbottleneck/port", deadline))
    own = Store(lambda: _connect_store(host, port, place, timeout_s, opens=False), shared.name)
    shared.close()
    own.put(f"came.{place.rank}", b"1")
    wait_for(own, "closed", deadline)
    return own


def initialised_store(place: "Place") -> Store | None:
    """Return the default store of torch.distributed if the script has initialised it with the same ranks, else None."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    if (distributed.get_rank(), distributed.get_world_size()) != (place.rank, place.size):
        return None
    return Store(distributed.distributed_c10d._get_default_store, "torch.distributed's store")


def choose(settings: Settings, place: "Place", environ: Mapping[str, str] = os.environ) -> Rendezvous:
    """Return the rendezvous of this job: as configured, through torch.distributed's store, or by the launcher.

    Raises ValueError if no way is possible, or none that could share a secret. The text gives the reason for each way
    and the variables to set.
    """
    if settings.master is not None:
        return _at_address(settings.master, settings, place)
    if settings.rendezvous is not None:
        return Rendezvous(_named_folder(settings.rendezvous))
    store = initialised_store(place)
    if store is not None:
        return Rendezvous(store)
    reasons = []
    for way in topology.launcher_named(place.launcher).methods:
        found = METHODS[way](settings, place, environ)
        if isinstance(found, Rendezvous):
            return found
        reasons.append(f"{way}: {found}")
    raise ValueError(
        f"{place.size} ranks, started by {place.launcher}, have no way to meet ({'; '.join(reasons)}): {ADVICE}"
    )


def _named_folder(path: str) -> Folder:
    """Return the folder of NETBOTTLENECK_RENDEZVOUS. Raises ValueError if this rank cannot write to it."""
    try:
        folder = Folder(Path(path))
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ValueError(
            f"NETBOTTLENECK_RENDEZVOUS={path}: {error.strerror}: must be a folder that all ranks can write"
        ) from error
    return folder


def secret_source(settings: Settings, place: "Place", environ: Mapping[str, str] = os.environ) -> str:
    """Return the source of this job's secret and who can read it in transit; makes no connection.

    A store that the script may initialise later is not considered. Raises ValueError if the secret's file is unusable.
    """
    settings = settings.with_secret()
    if settings.secret is not None:
        return f"set by {settings.sources.get('secret', 'an argument')}"
    if place.size == 1:
        return "none needed: one rank"
    generated = "generated by rank 0"
    if settings.master is not None:
        if settings.insecure:
            return "none: NETBOTTLENECK_INSECURE=1, anyone can join the job"
        near = is_loopback(settings.master.rpartition(":")[0], place.one_host)
        return f"{generated}, stored in a folder private to this user" if near else f"missing: {ADVICE}"
    if settings.rendezvous is not None:
        return f"{generated}, stored in {settings.rendezvous}, in a file private to this user"
    return _secret_of_launcher(settings, place, environ)


def _secret_of_launcher(settings: Settings, place: "Place", environ: Mapping[str, str]) -> str:
    """Return the source of the secret of ranks that meet by their launcher, and who can read it."""
    methods = topology.launcher_named(place.launcher).methods
    exposed = [way for way in methods if way in EXPOSED and not _missing_variables(EXPOSED[way], environ)]
    if not exposed and "first host" in methods and not _on_one_host(place, environ):
        other = "none: NETBOTTLENECK_INSECURE=1" if settings.insecure else "missing"
        return f"{other}, unless the launcher offers PMIx or PMI: set NETBOTTLENECK_SECRET"
    if not exposed:
        return "generated by rank 0, shared by the launcher or in a folder private to this user"
    names = EXPOSED[exposed[0]]
    where = f"{':'.join(names)}={':'.join(environ[name] for name in names)}"
    sure = "" if methods[0] == exposed[0] else " unless the launcher offers PMIx or PMI"
    return f"generated by rank 0, and readable by anyone who reaches {where}{sure}: set NETBOTTLENECK_SECRET_FILE"


def _by_http(settings: Settings, place: "Place", environ: Mapping[str, str]) -> Rendezvous | str:
    """Meet at horovodrun's key-value server."""
    names = EXPOSED["http"]
    missing = _missing_variables(names, environ)
    return missing or Rendezvous(Http(environ[names[0]], _port(names[1], environ)))


def _by_torch(settings: Settings, place: "Place", environ: Mapping[str, str]) -> Rendezvous | str:
    """Meet at a torch store, at the address of torch.distributed's rendezvous."""
    names = EXPOSED["torch"]
    missing = _missing_variables(names, environ)
    return missing or Rendezvous(torch_store(environ[names[0]], _port(names[1], environ), place, settings, environ))


def _missing_variables(names: tuple[str, ...], environ: Mapping[str, str]) -> str:
    present = [f"{name}={environ[name]} is set" for name in names if environ.get(name)]
    missing = [name for name in names if not environ.get(name)]
    return ", ".join([*present, f"no {' and '.join(missing)}"]) if missing else ""


def _by_manager(name: str, join: Callable[[int, int, float, Mapping[str, str]], ProcessManager | str]) -> Method:
    """Return the method of a launcher's process manager; a process connects once."""

    def way(settings: Settings, place: "Place", environ: Mapping[str, str]) -> Rendezvous | str:
        if name not in _managers:
            _managers[name] = join(place.rank, place.size, settings.start_timeout_s, environ)
        found = _managers[name]
        return found if isinstance(found, str) else Rendezvous(None, manager=found)

    return way


def _in_folder(settings: Settings, place: "Place", environ: Mapping[str, str]) -> Rendezvous | str:
    """Meet in a folder of one host, named by the launcher's job id."""
    job = _job(place, environ)
    if not job:
        return "the launcher sets no job id"
    return Rendezvous(private_folder(job)) if _on_one_host(place, environ) else "not all ranks are on this host"


def _on_one_host(place: "Place", environ: Mapping[str, str]) -> bool:
    """Return whether the launcher says that all ranks are on this host."""
    return place.one_host or environ.get("SLURM_NNODES") == "1"


def _at_first_host(settings: Settings, place: "Place", environ: Mapping[str, str]) -> Rendezvous | str:
    """Meet at an address derived from an srun step: its first host, and a port computed from the step's id."""
    job = _job(place, environ)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not job or not nodes:
        return "no SLURM_STEP_NODELIST"
    port = settings.ports[0] or 20000 + int(hashlib.sha256(job.encode()).hexdigest(), 16) % 10000
    return _at_address(f"{first_host(nodes)}:{port}", settings, place)


# Ways by the names in topology.LAUNCHERS.
METHODS: Mapping[str, Method] = {
    "http": _by_http,
    "pmix": _by_manager("pmix", pmi.join_pmix),
    "pmi": _by_manager("pmi", pmi.join_pmi),
    "torch": _by_torch,
    "folder": _in_folder,
    "first host": _at_first_host,
}


def _job(place: "Place", environ: Mapping[str, str]) -> str:
    """Return the launcher's name for this job, the same on all of its ranks; "" if there is none."""
    names = {
        "mpirun": ("PMIX_NAMESPACE", "PMIX_SERVER_URI2", "PMIX_SERVER_URI21"),
        "pmi": ("SLURM_JOB_ID", "SLURM_STEP_ID"),
        "srun": ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    }.get(place.launcher, ())
    values = [f"{name}={environ[name]}" for name in names if environ.get(name)]
    return " ".join(values)


def _at_address(address: str, settings: Settings, place: "Place") -> Rendezvous:
    host = address.rpartition(":")[0]
    if settings.secret is not None or settings.insecure:
        return Rendezvous(None, address)
    if is_loopback(host, place.one_host):
        return Rendezvous(private_folder(address), address)
    raise ValueError(
        f"the rendezvous at {address} has no secret, and no channel to share one: "
        f"set NETBOTTLENECK_SECRET to the same value of at least 16 bytes on all ranks"
    )


def _port(name: str, environ: Mapping[str, str]) -> int:
    text = environ.get(name, "")
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise ValueError(f"{name}={text}: must be a port from 1 to 65535")
    return int(text)


def is_loopback(host: str, one_host: bool = False) -> bool:
    """Return whether a host name or address is the loopback of every rank's machine.

    one_host: all ranks are on this host. Else a name other than localhost is not: Debian's /etc/hosts gives a host's
    own name a loopback address, which the name does not have on other hosts.
    """
    try:
        named = not one_host and host != "localhost" and not _is_address(host)
        return host == "[::1]" or (not named and socket.gethostbyname(host).startswith("127."))
    except OSError:
        return False


def _is_address(host: str) -> bool:
    """Return whether a host is an address of IPv4."""
    try:
        return bool(socket.inet_aton(host))
    except OSError:
        return False


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm list: "a[01-03,07],b" gives "a01", "r[2-3]n[5,7]-ib" gives "r2n5-ib"."""
    first = re.match(r"((?:[^,\[\]]|\[[^,\[\]-][^\[\]]*\])+)(?:,|$)", nodes)
    if first is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes}: no host in it")
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first.group(1))
