"""Horovod's own all-reduce as a path, over Gloo or over MPI: a process of its own beside each rank.

It works on that rank's memory, and is driven as mpi.py drives MPI_Allreduce. Horovod is taken from where it is
installed, or from what tools/peers.sh has built. Its thread never rests: it asks the other ranks for work a thousand
times a second, and over MPI it waits for them by spinning. So the processes are stopped while other paths are measured.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from netbottleneck.bench import mpi
from netbottleneck.errors import Error
from netbottleneck.launch import connect

if TYPE_CHECKING:
    from netbottleneck.bench.peers import Ground

BUILT = mpi.CHECKOUT / "build" / "peers" / "horovod"
SOURCE = mpi.CHECKOUT / "benchmarks" / "horovod_peer.py"
START_S = 2 * mpi.START_S  # each rank imports torch
_OPEN_MPI = b"libmpi.so.40"  # what its library is called since Open MPI 3, and no other MPI's
_ADDRESS_BYTES = 80
_REASON_BYTES = 200


def missing() -> str:
    """Return what of Horovod this process does not find; "" where it is there."""
    if BUILT.is_dir() and str(BUILT) not in sys.path:
        sys.path.append(str(BUILT))
    if _folder() is None:
        return "horovod is not installed"
    return "" if importlib.util.find_spec("torch") else "torch, by which it is called, is not installed"


def _folder() -> FilePath | None:
    """Return where Horovod itself is found; None for its name alone, which this package may give itself."""
    spec = importlib.util.find_spec("horovod")
    folders = (FilePath(folder) for folder in (spec and spec.submodule_search_locations) or ())
    return next((folder for folder in folders if (folder / "torch").is_dir()), None)


def without_mpi() -> str:
    """Return why the Horovod that is there has no MPI; "" where it has Open MPI's."""
    folder = _folder()
    libraries = [] if folder is None else (folder / "torch").glob("mpi_lib*.so")
    if any(_OPEN_MPI in library.read_bytes() for library in libraries):
        return ""
    return "the Horovod that is installed was built without Open MPI (tools/peers.sh builds it with it)"


def absent(name: str, ground: Ground) -> str:
    """Return why Horovod cannot be tried in this process; "" where it can."""
    why, place = missing(), ground.place
    if why:
        return why
    if name == HorovodMpi.name:
        why = without_mpi() or mpi.absent(name, ground)
        return why or ("" if shutil.which(HorovodMpi.before[0]) else f"{HorovodMpi.before[0]} is not installed")
    if not SOURCE.exists():
        return "its program is in a checkout of the source only"
    if ground.memory.fd < 0:
        return "this kernel gives no memory that another process could open (memfd)"
    return "" if place.size == (place.local_size or place.size) or place.local_size == 1 else "it is started by host"


class Horovod(mpi.Mpi):
    """horovod.torch's allreduce_ on the benchmark's memory, one at a time, by its Gloo.

    Rank 0 serves the meeting place that horovodrun would, and every rank starts its own process.
    """

    name = "horovod"
    network = "Gloo"
    start_s = START_S

    def __init__(self, name: str, ground: Ground) -> None:
        self._server: Any = None
        self._process = -1
        super().__init__(name, ground)
        try:
            self._process = os.pidfd_open(self._took[0])
            self._send(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def _start(self, ground: Ground, theirs: tuple[int, int]) -> None:
        """Start this rank's process, and return when all are ready. Raises Error with what one of them said."""
        meeting = self._meet(ground)
        own = f"{os.getpid()}:{ground.memory.fd}:{theirs[0]}:{theirs[1]}"
        folder = FilePath(self._folder.name)
        command = [*self.program(folder), *ground.what, str(ground.memory.nbytes), own]
        environ = {**os.environ, **self.variables(ground.interface), **meeting}
        why = b""
        try:
            with (folder / "said").open("wb") as said:
                self._run = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, env=environ
                )
            self._took = self._await(self.start_s)
        except OSError as error:
            why = str(error.strerror or error).encode()[:_REASON_BYTES]
        for text in ground.control.exchange(why.ljust(_REASON_BYTES)):
            if text.strip():
                raise Error(0, text.strip().decode(errors="replace"))

    def _meet(self, ground: Ground) -> dict[str, str]:
        """Return the variables that horovodrun would set. Every rank calls this."""
        place, port = ground.place, 0
        host = str(connect.core().interfaces(f"={ground.interface}")[0][1])
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
        }
        return {f"HOROVOD_{name}": str(value) for name, value in numbers.items()}

    def _send(self, number: signal.Signals) -> None:
        if self._process >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, number)

    def program(self, folder: FilePath) -> list[str]:
        return [sys.executable, str(SOURCE)]

    def variables(self, interface: str) -> dict[str, str]:
        path = [*([str(BUILT)] if BUILT.is_dir() else []), *filter(None, [os.environ.get("PYTHONPATH")])]
        chosen = {f"HOROVOD_{name}": self.network.lower() for name in ("CONTROLLER", "CPU_OPERATIONS")}
        return {**chosen, "PYTHONPATH": os.pathsep.join(path)}

    def prepare(self, count: int) -> None:
        super().prepare(count)
        self._send(signal.SIGCONT)
        self.go(0)  # until all go on

    def finish(self) -> None:
        self._send(signal.SIGSTOP)

    def info(self) -> dict[str, Any]:
        return {"provider": f"Horovod {version()} ({self.network})", "streams_used": 1}

    def close(self) -> None:
        self._send(signal.SIGCONT)
        if self._process >= 0:
            os.close(self._process)
            self._process = -1
        super().close()
        if self._server is not None:
            self._server.stop()
            self._server = None


class HorovodMpi(Horovod):
    """The same by its MPI, which is Open MPI over TCP with one link. mpirun starts the processes, as MPI wants it."""

    name = "horovod-mpi"
    network = "MPI"
    before = ("setpriv", "--pdeathsig", "KILL")  # who is stopped does not see that nobody is left to go on for

    def _start(self, ground: Ground, theirs: tuple[int, int]) -> None:
        mpi.Mpi._start(self, ground, theirs)
        if ground.place.rank != 0:
            self._took = self._await(mpi.START_S)

    def variables(self, interface: str) -> dict[str, str]:
        return {**mpi.Mpi.variables(self, interface), **super().variables(interface)}

    def info(self) -> dict[str, Any]:
        return {"provider": f"Horovod {version()} ({mpi.Mpi.info(self)['provider']})", "streams_used": 1}


def version() -> str:
    """Return Horovod's version, "" where nobody knows."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("horovod")
    return ""
