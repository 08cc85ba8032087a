"""Horovod's own all-reduce over Gloo as a path: the ranks of the benchmark are Horovod's ranks too.

Rank 0 serves the meeting place that horovodrun would. Horovod is taken from where it is installed, or from what
tools/peers.sh has built.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Generator, Mapping
from importlib import metadata
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from netbottleneck import launch
from netbottleneck.bench.paths import Path

if TYPE_CHECKING:
    from netbottleneck.bench.peers import Ground

BUILT = FilePath(__file__).resolve().parents[3] / "build" / "peers" / "horovod"
_OPS = {"sum": "Sum", "min": "Min", "max": "Max", "product": "Product"}
_ADDRESS_BYTES = 80


def absent(ground: Ground) -> str:
    """Return why Horovod cannot be tried in this process; "" where it can."""
    if BUILT.is_dir() and str(BUILT) not in sys.path:
        sys.path.append(str(BUILT))
    if importlib.util.find_spec("horovod") is None:
        return "horovod is not installed"
    if importlib.util.find_spec("torch") is None:
        return "torch, by which it is called, is not installed"
    place = ground.place
    return "" if place.size == (place.local_size or place.size) or place.local_size == 1 else "it is started by host"


class Horovod(Path):
    """horovod.torch's allreduce_ on tensors of the benchmark's memory, one at a time, by its Gloo."""

    name = "horovod"
    streams = 1

    def __init__(self, ground: Ground) -> None:
        self._server: Any = None
        self._memory = ground.memory
        self._torch = importlib.import_module("torch")
        self._dtype = getattr(self._torch, ground.what[0])
        self._tensor: Any = None
        with _environment(self._meet(ground)):
            self._horovod = importlib.import_module("horovod.torch")
            self._op = getattr(self._horovod, _OPS[ground.what[1]])
            self._horovod.init()

    def _meet(self, ground: Ground) -> dict[str, str]:
        """Return the variables that horovodrun would set. Every rank calls this."""
        place, port = ground.place, 0
        host = str(launch.core().interfaces(f"={ground.interface}")[0][1])
        local = place.local_size or 1
        if place.rank == 0:
            hosts = importlib.import_module("horovod.runner.common.util.hosts")
            server = importlib.import_module("horovod.runner.http.http_server").RendezvousServer(0)
            port = server.start()
            named = ",".join(f"host{number}:{local}" for number in range(place.size // local))
            server.init(hosts.get_host_assignments(hosts.parse_hosts(named), place.size))
            self._server = server
        said = ground.control.exchange(f"{host} {port}".encode().ljust(_ADDRESS_BYTES))[0].decode().split()
        numbers = {
            "RANK": place.rank,
            "SIZE": place.size,
            "LOCAL_RANK": place.rank % local,
            "LOCAL_SIZE": local,
            "CROSS_RANK": place.rank // local,
            "CROSS_SIZE": place.size // local,
            "HOSTNAME": f"host{place.rank // local}",
            "GLOO_RENDEZVOUS_ADDR": said[0],
            "GLOO_RENDEZVOUS_PORT": said[1],
            "GLOO_IFACE": ground.interface,
            "CONTROLLER": "gloo",
            "CPU_OPERATIONS": "gloo",
        }
        return {f"HOROVOD_{name}": str(value) for name, value in numbers.items()}

    def prepare(self, count: int) -> None:
        empty = self._torch.empty(0, dtype=self._dtype)
        self._tensor = self._torch.frombuffer(self._memory, dtype=self._dtype, count=count) if count else empty

    def go(self, times: int) -> None:
        for _ in range(times):
            self._horovod.allreduce_(self._tensor, name="bench", op=self._op)

    def info(self) -> dict[str, Any]:
        return {"provider": f"Horovod {version()} (Gloo)", "streams_used": 1}

    def close(self) -> None:
        self._tensor = None
        self._horovod.shutdown()
        if self._server is not None:
            self._server.stop()


def version() -> str:
    """Return Horovod's version, "" where nobody knows."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("horovod")
    return ""


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Generator[None, None, None]:
    kept = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
