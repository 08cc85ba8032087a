"""MPI_Allreduce and oneCCL's all-reduce as paths: a small program beside each rank, which works on its own memory.

Open MPI on one host, or on the hosts of a lab, each a network namespace of this machine; MPICH of PyPI's wheel, on one
host; oneCCL, whose ranks Open MPI brings together. Rank 0 starts mpirun; every rank tells its own program by a pipe
when to go, and learns by another how long that took.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import select
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from netbottleneck.bench import ccl
from netbottleneck.bench.paths import Path
from netbottleneck.bench.request import CCL, HOROVOD_MPI, MPICH
from netbottleneck.errors import Error

if TYPE_CHECKING:
    from netbottleneck.bench.peers import Ground

CHECKOUT = FilePath(__file__).resolve().parents[3]
SOURCE = CHECKOUT / "benchmarks" / "mpi_peer.c"
START_S = 30.0
END_S = 5.0
_ADDRESS_BYTES = 64
_ANSWER = struct.Struct("<qq")
_DTYPES = ("float32", "float64", "int32", "int64")  # Open MPI's sums of 8 bits saturate on some processors
_LINKS = {"mpi-tcp": 1, "mpi-tcp4": 4}
_ON_INTERFACE = ("FI_TCP_IFACE", "FI_NET_IFACE")
_MPICH = {
    "mpich-shm": {},
    "mpich-ofi": {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"},
}
WHEEL = FilePath(sys.prefix, "bin")
# What enters the host of a lab before it becomes Open MPI's daemon there: HOST COMMAND…
_AGENT = """#!/bin/sh
host=$1
shift
case $host in
{cases}
*) echo "no such host: $host" >&2; exit 1 ;;
esac
exec {nsenter} --net=/proc/$pid/ns/net {unshare} --uts sh -c "echo host-$pid >/proc/sys/kernel/hostname; exec $*"
"""


def absent(name: str, ground: Ground) -> str:
    """Return why MPI cannot be tried in this process; "" where it can."""
    why = _not_installed(name)
    if why:
        return why
    if ground.what[0] not in _DTYPES:
        return f"MPI has no {ground.what[0]} with the sums that are checked here"
    if ground.memory.fd < 0:
        return "this kernel gives no memory that another process could open (memfd)"
    if name in (*MPICH, *CCL) and ground.interface != "lo":
        return "it is started on one host here"
    if name == "mpi-shm" and ground.interface != "lo":
        return "shared memory joins the ranks of one host"
    return ""


def _not_installed(name: str) -> str:
    if not SOURCE.exists():
        return "its program is in a checkout of the source only"
    if name in CCL and ccl.absent():
        return ccl.absent()
    compiler = () if name in HOROVOD_MPI else ("mpicxx" if name in CCL else "mpicc",)
    missing = [tool for tool in (*compiler, "mpirun") if _tool(name, tool) is None]
    if missing and name in MPICH:
        return "the wheel mpich is not installed (pip install mpich)"
    return f"{' and '.join(missing)} not installed (Debian: openmpi-bin libopenmpi-dev)" if missing else ""


def _tool(name: str, tool: str) -> str | None:
    """Return the path of a family's mpicc or mpirun: MPICH's lie beside this Python."""
    return shutil.which(tool, path=str(WHEEL) if name in MPICH else _path())


def _path() -> str:
    """Return PATH without the folders that hold MPICH and no Open MPI: this Python's, any other environment's."""
    folders = [FilePath(part) for part in os.environ.get("PATH", "").split(os.pathsep)]
    return os.pathsep.join(str(f) for f in folders if (f / "ompi_info").exists() or not (f / "mpichversion").exists())


class Mpi(Path):
    """Open MPI by shared memory, by TCP with one or four links, or by libfabric; MPICH by the first or the last."""

    start_s = START_S
    before: tuple[str, ...] = ()  # what starts mpirun

    def __init__(self, name: str, ground: Ground) -> None:
        self.name = name
        self.streams = _LINKS.get(name, 1)
        self._count = 0
        self._took = (0, 0)
        self._run: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="netbottleneck-mpi-")
        orders, answers = os.pipe(), os.pipe()
        self._orders, self._answers = orders[1], answers[0]
        theirs = (orders[0], answers[1])
        try:
            self._start(ground, theirs)
        except BaseException:
            self.close()
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)

    def _start(self, ground: Ground, theirs: tuple[int, int]) -> None:
        """Start all ranks, and return when they are ready. Raises Error with what mpirun said."""
        own = f"{os.getpid()}:{ground.memory.fd}:{theirs[0]}:{theirs[1]}"
        boot = FilePath("/proc/sys/kernel/random/boot_id").read_bytes().strip().ljust(40)
        said = ground.control.exchange(f"{own} {_address(ground.interface)}".encode().ljust(_ADDRESS_BYTES) + boot)
        if any(text[_ADDRESS_BYTES:] != boot for text in said):
            raise Error(0, "it is started on one machine only, and the ranks are on several")
        ranks = [text[:_ADDRESS_BYTES].decode().split() for text in said]
        why = b""
        if ground.place.rank == 0:
            try:
                self._launch(ground, ranks)
                self._took = self._await(self.start_s)
            except (OSError, ValueError) as error:
                why = str(getattr(error, "strerror", None) or error).encode()[:200]
        # Until here no rank may close its end of the pipes: the programs open them by its number.
        why = ground.control.exchange(why.ljust(200))[0].strip()
        if why:
            raise Error(0, why.decode(errors="replace"))

    def _launch(self, ground: Ground, ranks: list[list[str]]) -> None:
        folder = FilePath(self._folder.name)
        # Open MPI by its name: called by its path, it starts programs on other hosts in another way.
        mpirun = (_tool(self.name, "mpirun") if self.name in MPICH else None) or "mpirun"
        command = [*self.before, mpirun, "-np", str(len(ranks)), *_choice(self.name, ground.interface)]
        hosts = dict.fromkeys(host for _, host in ranks)
        if len(hosts) > 1:
            pids = {host: own.partition(":")[0] for own, host in reversed(ranks)}
            command += _across(folder, ground.interface, pids, len(ranks) // len(hosts))
        command += [*self.program(folder), *ground.what, str(ground.memory.nbytes), *(own for own, _ in ranks)]
        environ = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        environ |= {"TMPDIR": str(folder), "PATH": _path()}
        environ |= self.variables(ground.interface)
        with (folder / "said").open("wb") as said:
            self._run = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, env=environ
            )

    def program(self, folder: FilePath) -> list[str]:
        """Return the words that start one rank. Raises Error with a compiler's words."""
        return [str(program(folder, self.name))]

    def variables(self, interface: str) -> dict[str, str]:
        """Return what the ranks' environment has beside this process's."""
        chosen = _MPICH[self.name] if self.name in MPICH else dict.fromkeys(_ON_INTERFACE, interface)
        return {**chosen, **(ccl.environment(interface) if self.name in CCL else {})}

    def _await(self, seconds: float) -> tuple[int, int]:
        """Return the next answer of this rank's program: ns that passed, ns of processors.

        Raises Error where mpirun has ended, or none comes.
        """
        until = time.monotonic() + seconds
        while not select.select([self._answers], [], [], 0.2)[0]:
            if self._run is not None and self._run.poll() is not None:
                raise Error(0, self._words() or f"mpirun ended with {self._run.returncode}")
            if time.monotonic() > until:
                raise Error(0, f"{self.name} did not answer within {seconds:.0f} s. {self._words()}".strip())
        found = os.read(self._answers, _ANSWER.size)
        if len(found) < _ANSWER.size:
            raise Error(0, f"{self.name} has ended. {self._words()}".strip())
        took_ns, cpu_ns = _ANSWER.unpack(found)
        return took_ns, cpu_ns

    def _words(self) -> str:
        """Return what mpirun said first: what comes after repeats it in other words."""
        try:
            text = (FilePath(self._folder.name) / "said").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        lines = [line.strip() for line in text.splitlines() if line.strip(" -\t")]
        return " ".join(lines)[:180]

    def prepare(self, count: int) -> None:
        self._count = count

    def go(self, times: int) -> None:
        os.write(self._orders, struct.pack("<QQ", self._count, times))
        self._took = self._await(600.0)

    def taken_ns(self) -> int | None:
        return self._took[0]

    def cpu_ns(self) -> int | None:
        return self._took[1]

    def info(self) -> dict[str, Any]:
        version = ccl.version() if self.name in CCL else _version(_tool(self.name, "mpirun") or "mpirun")
        return {"provider": version, "streams_used": self.streams}

    def close(self) -> None:
        for descriptor in (self._orders, self._answers):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        if self._run is not None:
            try:
                self._run.wait(END_S)
            except subprocess.TimeoutExpired:
                self._run.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._run.wait(END_S)
                self._run.kill()
                self._run.wait()
            self._run = None
        self._folder.cleanup()


def program(folder: FilePath, name: str) -> FilePath:
    """Return the program, compiled by the mpicc of a path's family; kept beside the checkout's other builds.

    Raises Error with the compiler's words. Where nothing can be kept, it lies in `folder`.
    """
    words = _compiler(name)
    sources = b"".join(source.read_bytes() for source in (SOURCE, *ccl.SOURCES))
    digest = hashlib.sha256(sources + " ".join(words).encode()).hexdigest()[:16]
    kept = CHECKOUT / "build" / "peers" / f"mpi_peer-{digest}"
    if kept.exists():
        return kept
    made = folder / "mpi_peer"
    done = subprocess.run([*words, "-o", str(made)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Error(0, f"{words[0]}: {' '.join(done.stderr.split())[:200]}")
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        copy = kept.with_suffix(f".{os.getpid()}")
        shutil.copy(made, copy)
        copy.replace(kept)
        return kept
    return made


def _compiler(name: str) -> list[str]:
    """Return the command that makes the program of a path, less where it goes to."""
    if name not in CCL:
        return [_tool(name, "mpicc") or "mpicc", "-std=gnu11", "-O2", str(SOURCE)]
    return ccl.command(_tool(name, "mpicxx") or "mpicxx", SOURCE)


def _choice(name: str, interface: str) -> list[str]:
    """Return the words that make Open MPI use one network and no other."""
    if name in MPICH:
        return []
    words = ["--bind-to", "none", "--oversubscribe"]
    if name == "mpi-shm":
        return [*words, "--mca", "pml", "ob1", "--mca", "btl", "vader,self"]
    if name == "mpi-ofi":
        providers = "tcp,tcp;ofi_rxm,net,sockets"
        return [*words, "--mca", "pml", "cm", "--mca", "mtl", "ofi", "--mca", "mtl_ofi_provider_include", providers]
    words += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", interface]
    return [*words, "--mca", "btl_tcp_links", str(_LINKS.get(name, 1))]


def _across(folder: FilePath, interface: str, pids: Mapping[str, str], slots: int) -> list[str]:
    """Return the words that start Open MPI's daemons on the hosts of a lab: pids by address, of a process in each."""
    agent = folder / "agent"
    tools = {tool: shutil.which(tool) or f"/usr/bin/{tool}" for tool in ("nsenter", "unshare")}
    cases = "\n".join(f"{host}) pid={pid} ;;" for host, pid in pids.items())
    agent.write_text(_AGENT.format(cases=cases, **tools), encoding="utf-8")
    agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
    words = ["-H", ",".join(f"{host}:{slots}" for host in pids), "--mca", "plm_rsh_agent", str(agent)]
    words += ["--mca", "oob_tcp_if_include", interface, "--mca", "plm_rsh_no_tree_spawn", "1"]
    return [*words, "--leave-session-attached"]


def _address(interface: str) -> str:
    from netbottleneck.launch import connect

    return str(connect.core().interfaces(f"={interface}")[0][1])


@functools.cache
def _version(mpirun: str) -> str:
    said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    if found := re.search(r"Version:\s*(\S+)", said):
        return f"MPICH {found[1]}"
    return said.partition("\n")[0].replace("mpirun (", "").replace(")", "") or "MPI"
