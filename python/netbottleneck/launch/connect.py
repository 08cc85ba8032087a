"""Connection of a job's ranks: from the launcher's environment, through the rendezvous, to a communicator."""

import errno
import importlib
import ipaddress
import itertools
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

from netbottleneck._version import __version__
from netbottleneck.config import Settings
from netbottleneck.errors import Error
from netbottleneck.launch import rendezvous
from netbottleneck.launch.rendezvous import secret_source
from netbottleneck.launch.topology import (
    Place,
    Topology,
    detect,
    export_place,
    host_digest,
    machine_digest,
    topology,
    with_known_place,
    with_topology,
)

if TYPE_CHECKING:
    from netbottleneck import _core

__all__ = [
    "Place",
    "Topology",
    "connect",
    "core",
    "detect",
    "export_place",
    "host_digest",
    "host_of_rank_0",
    "machine_digest",
    "native",
    "reset_rendezvous_count",
    "resolved",
    "secret_source",
    "topology",
    "with_known_place",
    "with_topology",
]

logger = logging.getLogger("netbottleneck")

LOOPBACK = "127.0.0.1"
LOOK_UP_S = 0.5  # between two look-ups of an unknown host


@dataclass
class _Process:
    """State of this process: the number of connects so far, which gives each connect its own keys on all ranks."""

    rendezvous_count: "itertools.count[int]" = field(default_factory=itertools.count)
    warned: bool = False  # the warning about a readable secret is logged once


_process = _Process()


def reset_rendezvous_count() -> None:
    """Restart the count of connects, as in a new process.

    For a launcher whose server has dropped all keys and lets new processes join the existing ones.
    """
    _process.rendezvous_count = itertools.count()


def core() -> ModuleType:
    """Return the C module. Raises ImportError with a one-line remedy if it is not built."""
    try:
        return importlib.import_module("netbottleneck._core")
    except ImportError as error:
        raise ImportError(f"netbottleneck._core is not built: {error}; run `make build`") from error


def native(settings: Settings) -> str:
    """Return the first of our own transports in the settings' list; tcp if it has none."""
    return next((arm for arm in settings.transports if arm.native), "tcp")


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

    transport: "tcp" or "ofi"; None: the first such name of the settings, else tcp. streams: overrides the settings.
    Raises ValueError if ranks have no way to meet or the secret's file cannot be used, TimeoutError naming the ranks
    missing after NETBOTTLENECK_START_TIMEOUT_S, MismatchError if ranks differ in a value of Settings.tag, Error for a
    port in use or a missing interface, CPU, provider or library, and ImportError if the C module is not built.
    """
    with _named_variable(settings):
        return _connect(settings, place, recorder, transport or native(settings), streams, environ)


def connect_at(settings: Settings, place: Place, through: rendezvous.Rendezvous) -> "_core.Comm":
    """Return a communicator of the ranks that use `through`; every one of them calls this. Raises as connect."""
    with _named_variable(settings):
        return _connect(settings, place, None, native(settings), None, through)


@contextmanager
def _named_variable(settings: Settings) -> Generator[None, None, None]:
    """Add to an error the variable that caused it, if the text has the words that the C module says of its value."""
    try:
        yield
    except ValueError as error:
        if settings.master is not None and str(error).startswith(f"{settings.master}: "):
            raise ValueError(f"NETBOTTLENECK_MASTER={error}") from error
        raise
    except Error as error:
        text = error.strerror or str(error)
        for name, (value, words) in _named_by(settings).items():
            if value and re.search(words, text):
                source = settings.sources.get(name.lower(), "")
                other = f" (from {source})" if source.startswith("HOROVOD") else ""
                if name == "MASTER" and error.errno == errno.EADDRNOTAVAIL:
                    text += ": set it to an address of rank 0's host, on all ranks"
                # Not a variable of this frame, which its traceback would keep, and a listener's port with it.
                raise _with_text(error, f"NETBOTTLENECK_{name}={value}{other}: {text}") from error
        raise


def _named_by(settings: Settings) -> dict[str, tuple[object, str]]:
    """Return the value of each variable that an error may be about, and the words of such an error, as a pattern."""
    low, high = settings.ports
    return {
        "PROVIDER": (settings.provider, rf"no provider {re.escape(settings.provider or '')} "),
        "IFNAME": (settings.ifname, rf"matches ('[^']*' of )?'{re.escape(settings.ifname or '')}'"),
        "LIBFABRIC": (settings.library, rf"(?<!\S){re.escape(settings.library or '')}(?![^\s:])"),
        "CONGESTION": (settings.congestion, rf"congestion control '{re.escape(settings.congestion or '')}'"),
        "PORTS": (low and f"{low}-{high}", rf"no port of {low}-{high} |port {low}: .*already in use"),
        "MASTER": (settings.master, rf"listen on \S+, port {_port(settings.master or '')}: "),
        "AFFINITY": (",".join(map(str, settings.affinity)), "communication thread"),
    }


def _with_text(error: Error, text: str) -> Error:
    """Return an error like another one, with another text."""
    made = type(error)(error.errno, text)
    made.peer = error.peer
    return made


def _connect(
    settings: Settings,
    place: Place,
    recorder: "_core.Recorder | None",
    transport: str,
    streams: int | None,
    where: Mapping[str, str] | rendezvous.Rendezvous,
) -> "_core.Comm":
    """Connect all ranks through `where`: a given rendezvous, or the environment that selects one."""
    module, settings = core(), settings.with_secret()
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
        "cuda_library": settings.cuda_library,
        "cuda_gather_bytes": settings.cuda_gather_bytes,
    }
    if place.size == 1:
        comm: _core.Comm = module.Comm(0, 1, secret=secrets.token_bytes(32), **options)
        return comm
    if isinstance(where, rendezvous.Rendezvous):
        through, key = where, "netbottleneck"
    else:
        through = rendezvous.choose(settings, place, where)
        # A worker group that torchrun restarts may find these keys of the previous group in the agent's store.
        # TORCHELASTIC_RESTART_COUNT does not tell the groups apart: it differs between the agents of a job.
        key = f"netbottleneck/{place.size}/{next(_process.rendezvous_count)}"
    exchange = through.exchange(key, place, settings.start_timeout_s)
    if exchange is None:
        return _meet_directly(module, settings, place, str(through.address), options)
    if place.rank == 0:
        return _accept_all(module, settings, place, through.address, exchange, options)
    return _join(module, settings, place, exchange, options)


def _meet_directly(
    module: ModuleType, settings: Settings, place: Place, address: str, options: dict[str, object]
) -> "_core.Comm":
    """Connect without a channel: all ranks know the address and the secret, or run insecurely by the user's choice."""
    secret = settings.secret or f"insecure {address}".encode().ljust(16)
    reached = _address_of_rank_0(settings, place, address)
    listener = None
    if place.rank == 0:
        host = _host(reached)
        if reached != resolved(address):  # which of this host's addresses the name has on other hosts is not known
            host = "[::]" if host.startswith("[") else "0.0.0.0"
            logger.info("%s is a loopback address on this host: rank 0 listens at all addresses", _host(address))
        listener = _listen(module, settings, f"{host}:{_port(reached)}", None)
    comm: _core.Comm = module.Comm(
        place.rank, place.size, secret=secret, listener=listener, address=None if listener else reached, **options
    )
    return comm


def _address_of_rank_0(settings: Settings, place: Place, address: str) -> str:
    """Return `resolved`, or this host's interface if the address has its own name and other hosts have ranks.

    Such a name may have a loopback address here, to which lanes to other hosts could not be bound.
    """
    # The name of another host may appear after this rank has started, as that of a new pod does.
    found = resolved(address, settings.start_timeout_s if place.rank > 0 else 0)
    host = _host(address)
    if rendezvous.is_loopback(host, one_host=True) and not rendezvous.is_loopback(host, place.one_host):
        return f"{_bracketed(_interface(settings))}:{_port(address)}"
    return found


def host_of_rank_0(settings: Settings, place: Place) -> str:
    """Rank 0: return an address of this host, without brackets, at which the other ranks reach it."""
    if settings.master is None:
        return _interface(settings)
    with _named_variable(settings):
        return _host(_address_of_rank_0(settings, place, settings.master)).strip("[]")


def _interface(settings: Settings) -> str:
    """Return the address of the settings' first interface. Raises Error if there is none."""
    return str(core().interfaces(settings.ifname)[0][1]).strip("[]")


def _accept_all(
    module: ModuleType,
    settings: Settings,
    place: Place,
    address: str | None,
    exchange: rendezvous.ChannelExchange | rendezvous.ManagerExchange,
    options: dict[str, object],
) -> "_core.Comm":
    """Rank 0: wait for the reports of all ranks, then listen, publish the address and accept the ranks."""
    try:
        reports = exchange.reports()
        _check_secrets(settings, reports)
        same = all(report[:-1] == machine_digest() for report in reports)
        listener = _listen(module, settings, address, _listening_host(settings, same))
        if address is None and not same:
            _check_reach(listener, settings)
    except (OSError, ValueError) as error:
        with suppress(OSError):  # raise the first failure
            exchange.answer(rendezvous.FAILED + str(error).encode())
        raise
    secret = settings.secret or secrets.token_bytes(32)
    shared_secret = "" if settings.secret else secret.hex()
    if (
        shared_secret
        and exchange.exposed
        and not settings.insecure
        and not rendezvous.is_loopback(_host(listener.address))
    ):
        _warn_exposed(exchange.exposed, listener.address)
    exchange.answer(f"{listener.address} {shared_secret}".encode())
    try:
        comm: _core.Comm = module.Comm(place.rank, place.size, secret=secret, listener=listener, **options)
    finally:
        exchange.clear()
    return comm


def _report(settings: Settings) -> bytes:
    """Return what a rank reports to rank 0: machine_digest(), and whether it has a secret of its own."""
    return machine_digest() + (b"0" if settings.secret is None else b"1")


def _check_secrets(settings: Settings, reports: list[bytes]) -> None:
    """Rank 0: raise ValueError if some ranks have a secret of their own, and others have none."""
    mine = _report(settings)[-1:]
    others = [rank for rank, report in enumerate(reports, 1) if report[-1:] != mine]
    if others:
        here, there = ("not set", "set") if settings.secret is None else ("set", "not")
        more = ", …" if len(others) > rendezvous.NAMED_MOST else ""
        ranks = ", ".join(map(str, others[: rendezvous.NAMED_MOST])) + more
        raise ValueError(
            f"NETBOTTLENECK_SECRET (or NETBOTTLENECK_SECRET_FILE) is {here} on rank 0, but {there} on rank"
            f"{'s' if len(others) > 1 else ''} {ranks}: set it on all ranks or on none"
        )


def _listening_host(settings: Settings, same: bool) -> str | None:
    """Return rank 0's address without NETBOTTLENECK_IFNAME; None: of the first interface. same: all are on this host.

    MASTER_ADDR is an address that the other ranks reach, if it is one of this host.
    """
    if settings.ifname is not None:
        return None
    host = os.environ.get("MASTER_ADDR", "")
    if same or not host:
        return LOOPBACK if same else None
    with suppress(ValueError, OSError):
        found = _host(resolved(f"{_bracketed(host)}:0")).strip("[]")
        address = ipaddress.ip_address(found)
        with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET) as probe:
            probe.bind((found, 0))  # only this host's own addresses can be bound
        if not (address.is_loopback or address.is_unspecified):
            return found
    return None


def _check_reach(listener: "_core.Listener", settings: Settings) -> None:
    """Raise ValueError if ranks of other hosts cannot reach rank 0's listener, as it is at a loopback."""
    host = _host(listener.address)
    if rendezvous.is_loopback(host, one_host=True):
        listener.close()
        variable = f"={settings.ifname}" if settings.ifname else " is not set"
        raise ValueError(
            f"NETBOTTLENECK_IFNAME{variable}: {host} is a loopback, and not all ranks are on this host: "
            "set it to an interface that the other hosts reach"
        )


def _warn_exposed(channel: str, address: str) -> None:
    if _process.warned:
        return
    _process.warned = True
    logger.warning(
        "the job listens at %s, and its secret passes through %s, where anyone who reaches it can read it: "
        "set NETBOTTLENECK_SECRET or NETBOTTLENECK_SECRET_FILE on all ranks, or NETBOTTLENECK_INSECURE=1 if the "
        "network is trusted (docs/explanation/security.md)",
        address,
        channel,
    )


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _join(
    module: ModuleType,
    settings: Settings,
    place: Place,
    exchange: rendezvous.ChannelExchange | rendezvous.ManagerExchange,
    options: dict[str, object],
) -> "_core.Comm":
    """Any other rank: report to rank 0, receive its address, and connect to it."""
    answer = exchange.ask(_report(settings))
    if answer.startswith(rendezvous.FAILED):
        raise Error(0, f"rank 0 could not open the job: {answer.removeprefix(rendezvous.FAILED).decode()}")
    address, _, shared_secret = answer.decode().partition(" ")
    secret = settings.secret or bytes.fromhex(shared_secret)
    comm: _core.Comm = module.Comm(place.rank, place.size, secret=secret, address=address, **options)
    return comm


def _listen(module: ModuleType, settings: Settings, fixed: str | None, host: str | None) -> "_core.Listener":
    """Open rank 0's listener: at a fixed "host:port", else at a host's address, else on the settings' interface."""
    listener: _core.Listener
    if fixed is not None:
        where, _, port = resolved(fixed).rpartition(":")
        listener = module.Listener(where, None, (int(port), int(port)))
    else:
        listener = module.Listener(host, settings.ifname, settings.ports)
    return listener


def resolved(address: str, limit_s: float = 0) -> str:
    """Return "host:port" with the host's address: of IPv4 if it has one, else of IPv6 in brackets.

    An unknown host is looked up again for limit_s. Raises ValueError if it is still unknown.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return _look_up(address)
        except OSError as error:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise ValueError(f"{address}: no such host: {error}") from error
        time.sleep(min(LOOK_UP_S, left_s))


def _look_up(address: str) -> str:
    """Return what `resolved` returns. Raises OSError for an unknown host."""
    host, _, port = address.rpartition(":")
    if not host.startswith("["):
        with suppress(OSError):
            return f"{socket.gethostbyname(host)}:{port}"
    six = socket.getaddrinfo(host.strip("[]"), None, socket.AF_INET6)[0][4][0]
    return f"{_bracketed(str(six))}:{port}"
