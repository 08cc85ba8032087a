"""Host monitor: rated speeds, cores, processor time and sampled counters for a rank's record."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from netbottleneck.config import Settings
from netbottleneck.launch import connect
from netbottleneck.trace.transports import NATIVE, backends

LIMIT_BYTES = 32 << 20  # of each of a host's three files; a full file drops every second reading
END_S = 2.0  # time for the sampler process to write its last rows
ANSWER_BYTES = 4096
_INTERFACES = Path("/sys/class/net")
_SAMPLER = Path(__file__).with_name("sampler.py")

logger = logging.getLogger("netbottleneck")


def cores() -> list[int]:
    """Return the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def quota(
    cgroups: Path = Path("/proc/self/cgroup"),
    root: Path = Path("/sys/fs/cgroup"),
    namespace: Path = Path("/proc/self/ns/cgroup"),
) -> dict[str, Any]:
    """Return the least processor quota of this process's control groups, as its record has it; {} without one.

    Of the group and of those above it, version 2 (cpu.max) or 1 (cpu.cfs_quota_us). In a container the group's own path
    may not exist: the top one has its quota then. quota_group begins with the namespace of control groups, as those of
    all containers may be "/".
    """
    found: list[tuple[float, str]] = []
    with contextlib.suppress(OSError, ValueError):
        for line in cgroups.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            top = root / controllers
            inside = Path(path.strip("/"))
            for group in (inside, *inside.parents):
                cores_ = _quota_of(top / group)
                named = group if (top / inside).is_dir() else inside
                found += [] if cores_ is None else [(cores_, f"/{named}".rstrip("."))]
    if not found:
        return {}
    least, group_ = min(found)
    with contextlib.suppress(OSError):
        group_ = os.readlink(namespace) + group_
    return {"quota_cores": least, "quota_group": group_}


def _quota_of(folder: Path) -> float | None:
    """Return the quota of one control group in cores; None without one."""
    with contextlib.suppress(OSError, ValueError):
        limit, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        return int(limit) / int(period)
    with contextlib.suppress(OSError, ValueError):
        limit, period = ((folder / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period"))
        return int(limit) / int(period) if int(limit) > 0 else None
    return None


def processor_ns() -> int:
    """Return the processor time of all threads of this process, as counted by the kernel."""
    return time.process_time_ns()


def watch(
    settings: Settings,
    place: connect.Place,
    folder: Path,
    *,
    limit_bytes: int = LIMIT_BYTES,
    note: Callable[[str], object] = lambda _: None,
) -> Callable[[], None]:
    """Record this host's counters into `folder`, MONITOR_HZ times a second. Returns a function that stops it.

    Local rank 0 starts a sampler process, which ends when that rank ends for any reason. It is no child of the rank, so
    a script that waits for its own children, or handles SIGCHLD, never sees it. If the counters cannot be recorded, as
    where the rank is process 1 and would adopt it, a warning is logged and training continues. note: called with a
    sentence when the sampler is stopped, if it had ended before.
    """
    if not settings.monitor_hz or place.local_rank not in (0, None):
        return lambda: None
    about = {"rank": place.rank, "hostname": socket.gethostname(), "host_id": connect.host_digest(settings).hex()}
    request = {
        "about": about,
        "hz": settings.monitor_hz,
        "folder": str(folder),
        "limit_bytes": limit_bytes,
        "parent": os.getpid(),
        "local_size": place.local_size or place.size,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pid, link = _start(json.dumps(request))
    except OSError as error:
        logger.warning("the host's counters are not recorded: %s", error.strerror or error)
        return lambda: None
    return lambda: _end(pid, link, request["parent"], note)


def _start(request: str) -> tuple[int, socket.socket]:
    """Start the sampler. Returns its process and its socket, over which it says why it ends before it is told to."""
    if getattr(sys, "frozen", False) or not sys.executable:
        raise OSError("there is no Python to start")  # a frozen script's executable is the script
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            arguments = [sys.executable, "-I", "-S", str(_SAMPLER), request]
            pid = connect.core().spawn_apart([os.fsencode(one) for one in arguments], theirs.fileno())
        return int(pid), ours
    except BaseException:
        ours.close()
        raise


def _end(pid: int, link: socket.socket, parent: object, note: Callable[[str], object]) -> None:
    """Stop the sampler: the end of its input, which also reaches it if a child of this process has the socket too."""
    if os.getpid() != parent:
        return
    with link:
        link.setblocking(False)
        reason, before = _said(link)
        if not before:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_WR)
            link.settimeout(END_S)
            rest, ended = _said(link)
            reason += rest  # it may have been about to end by itself
            if not ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # it holds its end of the socket, so the number is still its own
    if before or reason:
        how = f": {reason.decode(errors='replace')}" if reason else ", because its process was killed"
        text = f"the recording of {socket.gethostname()}'s counters ended before the run{how}"
        logger.warning("%s", text)
        note(text)


def _said(link: socket.socket) -> tuple[bytes, bool]:
    """Return what the sampler said, and whether it ended within the socket's time limit."""
    text = b""
    try:
        while part := link.recv(ANSWER_BYTES):
            text += part
    except (BlockingIOError, TimeoutError):
        return text, False
    except OSError:
        pass  # it was killed with its input unread
    return text, True


def wire(
    settings: Settings, transport: str, environ: Mapping[str, str] = os.environ, *, provider: str | None = None
) -> dict[str, Any]:
    """Return what is known about a transport before its first transfer. provider: as its communicator states it.

    That is `streams_asked`, `interface`, `mtu_bytes`, `link_bps`: as declared, else as the interface states; and
    `declared` if so. streams_asked: the setting, 0 for auto; None if the transport has no lanes of ours. interface:
    None if uncertain. For our lanes it is known only if exactly one is usable. For gloo it is the first of
    GLOO_SOCKET_IFNAME, for NCCL that of NCCL_SOCKET_IFNAME="=NAME"; else the one that has the host's own address.
    """
    lanes, name = None, None
    if transport in NATIVE:
        usable = [name for name, _ in connect.core().interfaces(settings.ifname)]
        lanes, name = settings.streams, usable[0] if len(usable) == 1 else None
    elif transport == "stock":
        named = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        if backends(provider) == {"nccl"}:
            exact = re.fullmatch("=([^,:]+)", environ.get("NCCL_SOCKET_IFNAME", ""))
            named = exact[1] if exact else ""
        name = named or _of_own_address()
    declared = None if settings.link_gbps is None else round(settings.link_gbps * 1e9)
    rated = link_bps(name) if name and not declared else None
    stated = {"link_bps": declared, "declared": True} if declared else {"link_bps": rated}
    return {"streams_asked": lanes, "interface": name, "mtu_bytes": mtu_bytes(name) if name else None, **stated}


def link_bps(interface: str) -> int | None:
    """Return the rated speed of an interface in bits a second, one way.

    None if no device is below it: the speed that a virtual interface reports is not a link's.
    """
    if not _has_device(_INTERFACES / interface):
        return None
    state = psutil.net_if_stats().get(interface)
    return state.speed * 10**6 if state is not None and 0 < state.speed < 2**31 else None


def mtu_bytes(interface: str) -> int | None:
    """Return the MTU of an interface in bytes; None if it cannot be read."""
    state = psutil.net_if_stats().get(interface)
    return (state.mtu or None) if state is not None else None


def _has_device(interface: Path) -> bool:
    """True if the interface belongs to a device, or is stacked (bond, VLAN, bridge) on one that does."""
    lower = [path.name.removeprefix("lower_") for path in interface.glob("lower_*")]
    return (interface / "device").exists() or any((_INTERFACES / name / "device").exists() for name in lower)


def _of_own_address() -> str | None:
    try:
        own = socket.gethostbyname(socket.gethostname())
    except OSError:
        return None
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == own for entry in entries):
            return str(name)
    return None
