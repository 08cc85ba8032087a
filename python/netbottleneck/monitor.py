"""What a host says of itself to a rank's record: the rated speed of interfaces, cores, processor time."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from netbottleneck import launch
from netbottleneck.env import Settings

_INTERFACES = Path("/sys/class/net")


def cores() -> list[int]:
    """Return the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def processor_ns() -> int:
    """Return the processor time that all threads of this process have used, by the kernel's account."""
    return time.process_time_ns()


def wire(settings: Settings, transport: str, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return what is known of a transport before it moves anything: `streams_asked`, `interface`, `link_bps`.

    streams_asked: 0 for auto, None where streams are not ours. interface: None where it is not sure, as it is for our
    own lanes only where one is named, or there is but one; gloo's is that of the host's own address where
    GLOO_SOCKET_IFNAME names none.
    """
    asked, name = None, None
    if transport in ("tcp", "ofi"):
        found = [name for name, _ in launch.core().interfaces(settings.ifname)]
        asked, name = settings.streams, found[0] if len(found) == 1 else None
    elif transport == "stock":
        name = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0] or _of_own_address()
    return {"streams_asked": asked, "interface": name, "link_bps": link_bps(name) if name else None}


def link_bps(interface: str) -> int | None:
    """Return the rated speed of an interface in bits a second, one way.

    None for one that has no device below it: what a virtual interface tells of its speed is no wire's.
    """
    if not _has_device(_INTERFACES / interface):
        return None
    state = psutil.net_if_stats().get(interface)
    return state.speed * 10**6 if state is not None and 0 < state.speed < 2**31 else None


def _has_device(interface: Path) -> bool:
    """Whether it is a device's own interface, or lies (a bond, a VLAN, a bridge) above such a one."""
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
