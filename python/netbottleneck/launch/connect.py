"""From the launcher's environment to a communicator: place, meeting, listener and `_core.Comm` put together."""

import importlib
import itertools
import logging
import os
import secrets
import socket
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

from netbottleneck._version import __version__
from netbottleneck.config import Settings
from netbottleneck.errors import Error
from netbottleneck.launch import rendezvous, stores
from netbottleneck.launch.rendezvous import secrecy
from netbottleneck.launch.topology import (
    Place,
    Topology,
    detect,
    hand_on,
    host_digest,
    located,
    machine_digest,
    topology,
)

if TYPE_CHECKING:
    from netbottleneck import _core

__all__ = [
    "Place",
    "Topology",
    "connect",
    "core",
    "detect",
    "hand_on",
    "host_digest",
    "located",
    "machine_digest",
    "meet_as_new",
    "native",
    "secrecy",
    "topology",
]

logger = logging.getLogger("netbottleneck")

LOOPBACK = "127.0.0.1"


@dataclass
class _Process:
    """Every connect of this process meets under keys of its own; all ranks count alike."""

    meetings: "itertools.count[int]" = field(default_factory=itertools.count)
    warned: bool = False  # that the secret can be read: once is enough


_process = _Process()


def meet_as_new() -> None:
    """Count meetings from the beginning, as a process that is new does.

    For a launcher whose server has dropped all keys, and lets new processes in among those that were there.
    """
    _process.meetings = itertools.count()


def core() -> ModuleType:
    """Return the C module; ImportError with one clear line where it is not built."""
    try:
        return importlib.import_module("netbottleneck._core")
    except ImportError as error:
        raise ImportError(f"netbottleneck._core is not built: {error}; run `make build`") from error


def native(settings: Settings) -> str:
    """Return the first transport of the list that is ours to run; tcp where there is none."""
    return next((name for name in settings.transports if name in ("tcp", "ofi")), "tcp")


def connect(
    settings: Settings,
    place: Place,
    *,
    recorder: "_core.Recorder | None" = None,
    transport: str | None = None,
    streams: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> "_core.Comm":
    """Return a communicator of all ranks of the job; every rank calls this, in the same order of calls.

    transport: "tcp" or "ofi"; None: the first such name of the settings, else tcp. streams: instead of the settings'.
    Raises ValueError where ranks have no way to meet, TimeoutError naming the ranks that did not come in
    NETBOTTLENECK_START_TIMEOUT_S, MismatchError where ranks disagree on what Settings.tag holds, Error for a port in
    use or a missing interface, CPU, provider or library, and ImportError where the C module is not built.
    """
    with _explained(settings):
        return _connect(settings, place, recorder, transport or native(settings), streams, environ)


def connect_at(settings: Settings, place: Place, meeting: rendezvous.Meeting) -> "_core.Comm":
    """Return a communicator of the ranks that meet there; every one of them calls this. Raises as connect."""
    with _explained(settings):
        return _connect(settings, place, None, native(settings), None, meeting)


@contextmanager
def _explained(settings: Settings) -> Generator[None, None, None]:
    """Name the variable whose value an error is about."""
    try:
        yield
    except Error as error:
        text = error.strerror or str(error)
        given = {
            "PROVIDER": settings.provider,
            "IFNAME": settings.ifname,
            "LIBFABRIC": settings.library,
            "CONGESTION": settings.congestion,
            "PORTS": "-".join(map(str, settings.ports)) if "already in use" in text or "no port" in text else None,
            "AFFINITY": ",".join(map(str, settings.affinity)) if "communication thread" in text else None,
        }
        for name, value in given.items():
            if value and (name in ("PORTS", "AFFINITY") or value.lstrip("=^") in text):
                raise type(error)(error.errno, f"NETBOTTLENECK_{name}={value}: {text}") from error
        raise


def _connect(
    settings: Settings,
    place: Place,
    recorder: "_core.Recorder | None",
    transport: str,
    streams: int | None,
    where: Mapping[str, str] | rendezvous.Meeting,
) -> "_core.Comm":
    """Open a job whose ranks meet where `where` says: a meeting of its own, or what the environment holds."""
    module = core()
    options = {
        "tag": settings.tag(__version__),
        "transport": transport,
        "streams": settings.streams if streams is None else streams,
        "provider": settings.provider,
        "library": settings.library,
        "ifname": settings.ifname,
        "ports": settings.ports,
        "segment_bytes": settings.segment_bytes,
        "timeout_s": settings.timeout_s,
        "start_timeout_s": settings.start_timeout_s,
        "stall_s": settings.stall_s,
        "stall_end_s": settings.stall_limit_s,
        "recorder": recorder,
        "shm": settings.shm,
        "algorithm": settings.algorithm,
        "host": host_digest(settings),
        "cpus": settings.affinity,
        "congestion": settings.congestion,
    }
    if place.size == 1:
        comm: _core.Comm = module.Comm(0, 1, secret=secrets.token_bytes(32), **options)
        return comm
    if isinstance(where, rendezvous.Meeting):
        meeting, key = where, "netbottleneck"
    else:
        meeting = rendezvous.choose(settings, place, where)
        # A worker group that torchrun starts again may find the agent's store as the one before left it.
        restart = where.get("TORCHELASTIC_RESTART_COUNT", "0")
        key = f"netbottleneck/{restart}/{place.size}/{next(_process.meetings)}"
    talk = meeting.talk(key, place, settings.start_timeout_s)
    if talk is None:
        return _meet_directly(module, settings, place, str(meeting.address), options)
    if place.rank == 0:
        return _receive(module, settings, place, meeting.address, talk, options)
    return _visit(module, settings, place, talk, options)


def _meet_directly(
    module: ModuleType, settings: Settings, place: Place, address: str, options: dict[str, object]
) -> "_core.Comm":
    """No channel: all know the address and the secret, or there is none, by the user's own word."""
    secret = settings.secret or f"insecure {address}".encode().ljust(16)
    listener = _listen(module, settings, address, None) if place.rank == 0 else None
    comm: _core.Comm = module.Comm(
        place.rank,
        place.size,
        secret=secret,
        listener=listener,
        address=None if listener else _resolved(address),
        **options,
    )
    return comm


def _receive(
    module: ModuleType,
    settings: Settings,
    place: Place,
    address: str | None,
    talk: stores.Keys | stores.Rounds,
    options: dict[str, object],
) -> "_core.Comm":
    """Rank 0: wait until all others are there, then open the door, say where it is, and let them in."""
    try:
        same = all(machine == machine_digest() for machine in talk.report(machine_digest()))
        listener = _listen(module, settings, address, LOOPBACK if same and settings.ifname is None else None)
    except (OSError, ValueError) as error:
        with suppress(OSError):  # the first failure is the one to raise
            talk.answer(f"!{error}".encode())
        raise
    secret = settings.secret or secrets.token_bytes(32)
    shown = "" if settings.secret else secret.hex()
    if shown and talk.exposed and not settings.insecure and not rendezvous.is_loopback(_host(listener.address)):
        _warn_exposed(talk.exposed, listener.address)
    talk.answer(f"{listener.address} {shown}".encode())
    try:
        comm: _core.Comm = module.Comm(place.rank, place.size, secret=secret, listener=listener, **options)
    finally:
        talk.clear()
    return comm


def _warn_exposed(channel: str, address: str) -> None:
    if _process.warned:
        return
    _process.warned = True
    logger.warning(
        "the job listens at %s, and its secret travels through %s, where anyone who reaches it can read it: "
        "set NETBOTTLENECK_SECRET or NETBOTTLENECK_SECRET_FILE on all ranks, or NETBOTTLENECK_INSECURE=1 where the "
        "network is trusted (docs/security.md)",
        address,
        channel,
    )


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def _visit(
    module: ModuleType,
    settings: Settings,
    place: Place,
    talk: stores.Keys | stores.Rounds,
    options: dict[str, object],
) -> "_core.Comm":
    """Any other rank: say that it is there, learn where rank 0's door is, and go there."""
    talk.report(machine_digest())
    answer = talk.hear().decode()
    if answer.startswith("!"):
        raise Error(0, f"rank 0 could not open the job: {answer[1:]}")
    address, _, shown = answer.partition(" ")
    secret = settings.secret or bytes.fromhex(shown)
    if len(secret) < 16:
        raise ValueError(
            "NETBOTTLENECK_SECRET is set on rank 0 but not here (or NETBOTTLENECK_SECRET_FILE): "
            "set it on all ranks or on none"
        )
    comm: _core.Comm = module.Comm(place.rank, place.size, secret=secret, address=address, **options)
    return comm


def _listen(module: ModuleType, settings: Settings, fixed: str | None, host: str | None) -> "_core.Listener":
    """Open rank 0's door: at a fixed "host:port", else at a host's address, else on the interface of the settings."""
    listener: _core.Listener
    if fixed is not None:
        where, _, port = _resolved(fixed).rpartition(":")
        listener = module.Listener(where, None, (int(port), int(port)))
    else:
        listener = module.Listener(host, settings.ifname, settings.ports)
    return listener


def _resolved(address: str) -> str:
    host, _, port = address.rpartition(":")
    if host.startswith("["):
        return address
    try:
        return f"{socket.gethostbyname(host)}:{port}"
    except OSError as error:
        raise ValueError(f"{address}: no such host: {error}") from error
