"""Horovod's all-reduce as a path, over Gloo or over MPI: a separate process beside each rank.

The process works on the rank's memory and is controlled as mpi.py controls MPI_Allreduce. Horovod comes from the
installed package, or from the build of tools/peers.sh. Its background thread never sleeps for long: it negotiates a
thousand times a second, and over MPI it spins. So the processes are stopped while other paths are measured.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shutil
import signal
import sys
from importlib import metadata
from pathlib import Path as FilePath
from typing import Any

from netbottleneck.bench.paths import Context
from netbottleneck.errors import Error

from . import mpi

BUILT = mpi.CHECKOUT / "build" / "peers" / "horovod"
SOURCE = FilePath(__file__).with_name("horovod_peer.py")
START_S = 2 * mpi.START_S  # each rank imports torch
_OPEN_MPI = b"libmpi.so.40"  # name of Open MPI's library since version 3; no other MPI uses it
_ADDRESS_BYTES = 80
_REASON_BYTES = 200


def not_installed() -> str:
    """Return what is not installed for Horovod in this process; "" if it can be used."""
    if BUILT.is_dir() and str(BUILT) not in sys.path:
        sys.path.append(str(BUILT))
    if _folder() is None:
        return "horovod is not installed"
    return "" if importlib.util.find_spec("torch") else "torch, which calls it, is not installed"


def _folder() -> FilePath | None:
    """Return the folder of the real Horovod; None if there is only this package's module of that name."""
    spec = importlib.util.find_spec("horovod")
    folders = (FilePath(folder) for folder in (spec and spec.submodule_search_locations) or ())
    return next((folder for folder in folders if (folder / "torch").is_dir()), None)


def without_mpi() -> str:
    """Return why the installed Horovod has no MPI; "" if it was built with Open MPI."""
    folder = _folder()
    libraries = [] if folder is None else (folder / "torch").glob("mpi_lib*.so")
    if any(_OPEN_MPI in library.read_bytes() for library in libraries):
        return ""
    return "the installed Horovod was built without Open MPI (tools/peers.sh builds it with Open MPI)"


def missing(name: str, context: Context) -> str:
    """Return why Horovod cannot be used in this process; "" if it can."""
    why, place = not_installed(), context.place
    if why:
        return why
    if name == HorovodMpi.name:
        why = without_mpi() or mpi.not_installed(name, compiled=False) or mpi.unsuitable(name, context)
        return why or ("" if shutil.which(HorovodMpi.before[0]) else f"{HorovodMpi.before[0]} is not installed")
    if context.memory.fd < 0:
        return "this kernel has no memory that another process can open (memfd)"
    one_host = place.size == (place.local_size or place.size)
    return "" if one_host or place.local_size == 1 else "it needs one host, or one rank on each"


class Horovod(mpi.Mpi):
    """horovod.torch's allreduce_ on the benchmark's memory, one at a time, over its Gloo.

    Rank 0 runs the rendezvous server that horovodrun would run. Every rank starts its own process.
    """

    name = "horovod"
    network = "Gloo"
    start_s = START_S

    def __init__(self, name: str, context: Context) -> None:
        self._server: Any = None
        self._process = -1
        super().__init__(name, context)
        try:
            self._process = os.pidfd_open(self._took[0])
            self._send(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def _start(self, context: Context, pipes: tuple[int, int]) -> None:
        """Start this rank's process and return when all are ready. Raises Error with the message of a failed rank."""
        rendezvous = self._rendezvous(context)
        folder = FilePath(self._folder.name)
        command = [*self.program(folder), *mpi.reduction(context), mpi.descriptors(context, pipes)]
        why = b""
        try:
            self._run_in(folder, command, {**os.environ, **self.variables(context.interface), **rendezvous})
            self._took = self._await(self.start_s)
        except OSError as error:
            why = str(error.strerror or error).encode()[:_REASON_BYTES]
        for text in context.control.exchange(why.ljust(_REASON_BYTES)):
            if text.strip():
                raise Error(0, text.strip().decode(errors="replace"))

    def _rendezvous(self, context: Context) -> dict[str, str]:
        """Return the variables that horovodrun would set. Every rank calls this."""
        place, port = context.place, 0
        host = mpi.address(context.interface)
        local = place.local_size or 1
        if place.rank == 0:
            hosts = importlib.import_module("horovod.runner.common.util.hosts")
            server = importlib.import_module("horovod.runner.http.http_server").RendezvousServer(0)
            port = server.start()
            named = ",".join(f"host{number}:{local}" for number in range(place.size // local))
            server.init(hosts.get_host_assignments(hosts.parse_hosts(named), place.size))
            self._server = server
        server_at = context.control.exchange(f"{host} {port}".encode().ljust(_ADDRESS_BYTES))[0].decode().split()
        numbers = {
            "RANK": place.rank,
            "SIZE": place.size,
            "LOCAL_RANK": place.rank % local,
            "LOCAL_SIZE": local,
            "CROSS_RANK": place.rank // local,
            "CROSS_SIZE": place.size // local,
            "HOSTNAME": f"host{place.rank // local}",
            "GLOO_RENDEZVOUS_ADDR": server_at[0],
            "GLOO_RENDEZVOUS_PORT": server_at[1],
            "GLOO_IFACE": context.interface,
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
        self.go(0)  # returns when all processes run again

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
    """Horovod over its MPI, which is Open MPI over TCP with one link. mpirun starts the processes."""

    name = "horovod-mpi"
    network = "MPI"
    before = ("setpriv", "--pdeathsig", "KILL")  # a stopped mpirun would not notice the end of its parent

    def _start(self, context: Context, pipes: tuple[int, int]) -> None:
        mpi.Mpi._start(self, context, pipes)
        if context.place.rank != 0:
            self._took = self._await(mpi.START_S)

    def variables(self, interface: str) -> dict[str, str]:
        return {**mpi.Mpi.variables(self, interface), **super().variables(interface)}

    def info(self) -> dict[str, Any]:
        return {"provider": f"Horovod {version()} ({mpi.Mpi.info(self)['provider']})", "streams_used": 1}


def version() -> str:
    """Return Horovod's version, "" if not known."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("horovod")
    return ""
