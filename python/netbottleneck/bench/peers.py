"""Other programs that all-reduce, and the limits of wire and memory, as paths beside our own: who is there, who starts.

A peer that is not installed is named as missing; so is one that is there and does not work, with its own words.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from netbottleneck.bench import paths
from netbottleneck.bench.request import CCL, HEAP, HOROVOD_MPI, IPERF, MEMORY, MPI, MPICH
from netbottleneck.config import Settings
from netbottleneck.launch import connect

if TYPE_CHECKING:
    from netbottleneck import _core

Agree = Callable[[str], str]


@dataclass(frozen=True)
class Ground:
    """What a path is opened with. what: element type and reduction; interface: the one that the ranks meet on."""

    settings: Settings
    place: connect.Place
    control: _core.Comm
    memory: _core.Arena
    what: tuple[str, str]
    interface: str


def open_peer(name: str, ground: Ground, agree: Agree) -> paths.Path | str:
    """Return the path of a peer, open on every rank, or why there is none. agree: the reason of any rank, "" of none.

    Every rank calls this, in the same order.
    """
    why = agree(absent(name, ground))
    if why:
        return why
    path: paths.Path | None = None
    try:
        path = _open(name, ground)
    except (OSError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or str(error)
    why = agree(why)
    if path is not None and not why:
        return path
    if path is not None:
        path.close()
    return why


def absent(name: str, ground: Ground) -> str:
    """Return why a peer cannot be used in this process; "" where it may be tried."""
    if name in (*MPI, *MPICH, *CCL):
        from netbottleneck.bench import mpi

        return mpi.absent(name, ground)
    if name in IPERF:
        if ground.place.size != 2:
            return "iperf3 has two ends, not as many as there are ranks"
        return "" if shutil.which("iperf3") else "iperf3 is not installed"
    if name in HEAP:
        return paths.missing(name.removesuffix("-heap"), ground.settings)
    if name in MEMORY:
        return "" if ground.what == ("float32", "sum") else "memory's limits are measured with sums of float32"
    from netbottleneck.bench import hvd

    return hvd.absent(name, ground)


def _open(name: str, ground: Ground) -> paths.Path:
    if name in (*MPI, *MPICH, *CCL):
        from netbottleneck.bench import mpi

        return mpi.Mpi(name, ground)
    if name in IPERF:
        from netbottleneck.bench import wire

        return wire.Iperf(int(name.partition("-")[2]), ground)
    if name in ("horovod", *HOROVOD_MPI):
        from netbottleneck.bench import hvd

        return (hvd.HorovodMpi if name in HOROVOD_MPI else hvd.Horovod)(name, ground)
    from netbottleneck.bench import memory

    if name in HEAP:
        transport = name.removesuffix("-heap")
        made = connect.connect(ground.settings, ground.place, transport=transport)
        return memory.Heap(made, name, ground.settings.streams, ground.memory, ground.what)
    return memory.LIMITS[name](name, ground.memory)
