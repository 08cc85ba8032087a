"""MPI_Allreduce and oneCCL's all-reduce as paths: a small program beside each rank works on the rank's memory.

Open MPI runs on one host or on the hosts of a lab, which are network namespaces of this machine. MPICH, from PyPI's
wheel, runs on one host. Open MPI starts oneCCL's ranks. Rank 0 starts mpirun. Every rank starts a round of its own
program through one pipe, and reads the duration from another.
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
from typing import Any

from netbottleneck.bench.paths import Context, Path
from netbottleneck.errors import Error
from netbottleneck.launch import connect

CHECKOUT = FilePath(__file__).resolve().parents[2]
OPEN_MPI = ("mpi-shm", "mpi-tcp", "mpi-tcp4", "mpi-ofi")
MPICH = ("mpich-shm", "mpich-ofi")
ONECCL = ("oneccl",)
START_S = 30.0
END_S = 5.0
_SOURCE = FilePath(__file__).with_name("mpi_peer.c")
_CCL_SOURCE = FilePath(__file__).with_name("ccl_peer.cpp")
_CCL_LIBRARIES = CHECKOUT / "build" / "peers" / "oneccl" / "lib"  # PyPI's wheels, installed by tools/peers.sh
_WHEEL = FilePath(sys.prefix, "bin")
_ADDRESS_BYTES = 64
_REASON_BYTES = 200
_ANSWER = struct.Struct("<qq")
_DTYPES = ("float32", "float64", "int32", "int64")  # Open MPI's 8-bit sums saturate on some processors
_LINKS = {"mpi-tcp": 1, "mpi-tcp4": 4}
_ON_INTERFACE = ("FI_TCP_IFACE", "FI_NET_IFACE")
_MPICH = {
    "mpich-shm": {},
    "mpich-ofi": {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"},
}
# Enters a host of a lab and execs Open MPI's daemon there: HOST COMMAND…
_AGENT = """#!/bin/sh
host=$1
shift
case $host in
{cases}
*) echo "no such host: $host" >&2; exit 1 ;;
esac
exec {nsenter} --net=/proc/$pid/ns/net {unshare} --uts sh -c "echo host-$pid >/proc/sys/kernel/hostname; exec $*"
"""


def missing(name: str, context: Context) -> str:
    """Return why MPI or oneCCL cannot be used in this process; "" if it can."""
    return not_installed(name) or unsuitable(name, context)


def not_installed(name: str, *, compiled: bool = True) -> str:
    """Return what is not installed for a path. compiled: its program is compiled here by MPI's compiler."""
    if name in ONECCL and oneccl_missing():
        return oneccl_missing()
    compiler = ("mpicxx" if name in ONECCL else "mpicc",) if compiled else ()
    tools = [tool for tool in (*compiler, "mpirun") if _tool(name, tool) is None]
    if tools and name in MPICH:
        return "the wheel mpich is not installed (pip install mpich)"
    return f"{' and '.join(tools)} not installed (Debian: openmpi-bin libopenmpi-dev)" if tools else ""


def oneccl_missing() -> str:
    """Return why oneCCL is not available; "" if it is."""
    return "" if (_CCL_LIBRARIES / "libccl.so").exists() else "oneCCL's wheels are not installed (tools/peers.sh)"


def unsuitable(name: str, context: Context) -> str:
    """Return why a path cannot run on these ranks; "" if it can."""
    if context.dtype not in _DTYPES:
        return f"MPI has no {context.dtype} with the sums that are checked here"
    if context.memory.fd < 0:
        return "this kernel has no memory that another process can open (memfd)"
    if name in (*MPICH, *ONECCL) and context.interface != "lo":
        return "it runs on one host only"
    if name == "mpi-shm" and context.interface != "lo":
        return "shared memory joins the ranks of one host"
    return ""


def _tool(name: str, tool: str) -> str | None:
    """Return the path of an MPI family's tool, such as mpirun. MPICH's tools are next to this Python."""
    return shutil.which(tool, path=str(_WHEEL) if name in MPICH else _path())


def _path() -> str:
    """Return PATH without the folders that have MPICH but not Open MPI, such as this Python's."""
    folders = [FilePath(part) for part in os.environ.get("PATH", "").split(os.pathsep)]
    return os.pathsep.join(str(f) for f in folders if (f / "ompi_info").exists() or not (f / "mpichversion").exists())


class Mpi(Path):
    """Open MPI over shared memory, TCP with one or four links, or libfabric; MPICH over shared memory or libfabric."""

    start_s = START_S
    before: tuple[str, ...] = ()  # command prefix of mpirun

    def __init__(self, name: str, context: Context) -> None:
        self.name = name
        self.streams = _LINKS.get(name, 1)
        self._count = 0
        self._took = (0, 0)
        self._run: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="netbottleneck-mpi-")
        orders, answers = os.pipe(), os.pipe()
        self._orders, self._answers = orders[1], answers[0]
        pipes = (orders[0], answers[1])
        try:
            self._start(context, pipes)
        except BaseException:
            self.close()
            raise
        finally:
            for descriptor in pipes:
                os.close(descriptor)

    def _start(self, context: Context, pipes: tuple[int, int]) -> None:
        """Start all ranks and return when they are ready. Raises Error with mpirun's message."""
        own = descriptors(context, pipes)
        boot = FilePath("/proc/sys/kernel/random/boot_id").read_bytes().strip().ljust(40)
        message = f"{own} {address(context.interface)}".encode().ljust(_ADDRESS_BYTES) + boot
        messages = context.control.exchange(message)
        if any(text[_ADDRESS_BYTES:] != boot for text in messages):
            raise Error(0, "it runs on one machine only, and the ranks are on several")
        ranks = [text[:_ADDRESS_BYTES].decode().split() for text in messages]
        why = b""
        if context.place.rank == 0:
            try:
                self._launch(context, ranks)
                self._took = self._await(self.start_s)
            except (OSError, ValueError) as error:
                why = str(getattr(error, "strerror", None) or error).encode()[:_REASON_BYTES]
        # No rank may close its pipe ends before this exchange: the programs open them by fd number.
        why = context.control.exchange(why.ljust(_REASON_BYTES))[0].strip()
        if why:
            raise Error(0, why.decode(errors="replace"))

    def _launch(self, context: Context, ranks: list[list[str]]) -> None:
        folder = FilePath(self._folder.name)
        # Call Open MPI by name: called by path, it starts programs on other hosts in another way.
        mpirun = (_tool(self.name, "mpirun") if self.name in MPICH else None) or "mpirun"
        command = [*self.before, mpirun, "-np", str(len(ranks)), *_choice(self.name, context.interface)]
        hosts = dict.fromkeys(host for _, host in ranks)
        if len(hosts) > 1:
            pids = {host: own.partition(":")[0] for own, host in reversed(ranks)}
            command += _across(folder, context.interface, pids, len(ranks) // len(hosts))
        command += [*self.program(folder), *reduction(context), *(own for own, _ in ranks)]
        environ = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        environ |= {"TMPDIR": str(folder), "PATH": _path()}
        self._run_in(folder, command, environ | self.variables(context.interface))

    def _run_in(self, folder: FilePath, command: list[str], environ: Mapping[str, str]) -> None:
        with (folder / "output").open("wb") as output:
            self._run = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environ
            )

    def program(self, folder: FilePath) -> list[str]:
        """Return the command that starts one rank. Raises Error with the compiler's message."""
        return [str(program(folder, self.name))]

    def variables(self, interface: str) -> dict[str, str]:
        """Return the variables to add to the ranks' environment."""
        chosen = _MPICH[self.name] if self.name in MPICH else dict.fromkeys(_ON_INTERFACE, interface)
        return {**chosen, **(_ccl_variables(interface) if self.name in ONECCL else {})}

    def _await(self, seconds: float) -> tuple[int, int]:
        """Return the next answer of this rank's program: elapsed ns, CPU ns.

        Raises Error if mpirun has ended, or after `seconds` without an answer.
        """
        until = time.monotonic() + seconds
        while not select.select([self._answers], [], [], 0.2)[0]:
            if self._run is not None and self._run.poll() is not None:
                raise Error(0, self._output() or f"mpirun ended with {self._run.returncode}")
            if time.monotonic() > until:
                raise Error(0, f"{self.name} did not answer within {seconds:.0f} s. {self._output()}".strip())
        found = os.read(self._answers, _ANSWER.size)
        if len(found) < _ANSWER.size:
            raise Error(0, f"{self.name} has ended. {self._output()}".strip())
        took_ns, cpu_ns = _ANSWER.unpack(found)
        return took_ns, cpu_ns

    def _output(self) -> str:
        """Return the first lines of mpirun's output; later lines only repeat the message."""
        try:
            text = (FilePath(self._folder.name) / "output").read_text(encoding="utf-8", errors="replace")
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
        version = _ccl_version() if self.name in ONECCL else _version(_tool(self.name, "mpirun") or "mpirun")
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
    """Return the program, compiled by the mpicc of a path's MPI family and cached in the checkout's build folder.

    Raises Error with the compiler's message. If the cache is not writable, the program stays in `folder`.
    """
    command = _compiler(name)
    sources = b"".join(path.read_bytes() for path in (_SOURCE, _CCL_SOURCE, _CCL_SOURCE.with_suffix(".h")))
    digest = hashlib.sha256(sources + " ".join(command).encode()).hexdigest()[:16]
    kept = CHECKOUT / "build" / "peers" / f"mpi_peer-{digest}"
    if kept.exists():
        return kept
    made = folder / "mpi_peer"
    done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Error(0, f"{command[0]}: {' '.join(done.stderr.split())[:200]}")
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        copy = kept.with_suffix(f".{os.getpid()}")
        shutil.copy(made, copy)
        copy.replace(kept)
        return kept
    return made


def _compiler(name: str) -> list[str]:
    """Return the command that compiles a path's program, without the output option."""
    if name not in ONECCL:
        return [_tool(name, "mpicc") or "mpicc", "-std=gnu11", "-O2", str(_SOURCE)]
    parts = ["-x", "c", str(_SOURCE), "-x", "c++", str(_CCL_SOURCE), "-x", "none"]
    flags = ["-O2", "-DWITH_CCL", f"-isystem{_CCL_LIBRARIES.parent}/include"]
    libraries = [f"-L{_CCL_LIBRARIES}", "-lccl", f"-Wl,-rpath,{_CCL_LIBRARIES}"]
    return [_tool(name, "mpicxx") or "mpicxx", *flags, *parts, *libraries]


def _ccl_variables(interface: str) -> dict[str, str]:
    """Return the variables that select libfabric over an IP network, without shared memory between ranks of a host."""
    return {"CCL_ATL_TRANSPORT": "ofi", "CCL_ATL_SHM": "0", "FI_PROVIDER": "tcp", "CCL_KVS_IFACE": interface}


def _ccl_version() -> str:
    """Return the version in the wheel's name."""
    found = next(_CCL_LIBRARIES.glob("python*/site-packages/oneccl_cpu-*.dist-info"), None)
    number = found.name.removesuffix(".dist-info").partition("-")[2] if found else ""
    return f"oneCCL {number} (ofi: tcp)".replace("  ", " ")


def _choice(name: str, interface: str) -> list[str]:
    """Return the options that restrict Open MPI to one network."""
    if name in MPICH:
        return []
    options = ["--bind-to", "none", "--oversubscribe"]
    if name == "mpi-shm":
        return [*options, "--mca", "pml", "ob1", "--mca", "btl", "vader,self"]
    if name == "mpi-ofi":
        providers = "tcp,tcp;ofi_rxm,net,sockets"
        return [*options, "--mca", "pml", "cm", "--mca", "mtl", "ofi", "--mca", "mtl_ofi_provider_include", providers]
    options += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", interface]
    return [*options, "--mca", "btl_tcp_links", str(_LINKS.get(name, 1))]


def _across(folder: FilePath, interface: str, pids: Mapping[str, str], slots: int) -> list[str]:
    """Return the options that start Open MPI's daemons on the hosts of a lab; pids: address to a process there."""
    agent = folder / "agent"
    tools = {tool: shutil.which(tool) or f"/usr/bin/{tool}" for tool in ("nsenter", "unshare")}
    cases = "\n".join(f"{host}) pid={pid} ;;" for host, pid in pids.items())
    agent.write_text(_AGENT.format(cases=cases, **tools), encoding="utf-8")
    agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
    options = ["-H", ",".join(f"{host}:{slots}" for host in pids), "--mca", "plm_rsh_agent", str(agent)]
    options += ["--mca", "oob_tcp_if_include", interface, "--mca", "plm_rsh_no_tree_spawn", "1"]
    return [*options, "--leave-session-attached"]


def reduction(context: Context) -> list[str]:
    """Return a program's first arguments: element type, reduction, bytes of the memory."""
    return [context.dtype, context.op, str(context.memory.nbytes)]


def descriptors(context: Context, pipes: tuple[int, int]) -> str:
    """Return a program's argument for one rank: process, memory, and its ends of the pipes."""
    return f"{os.getpid()}:{context.memory.fd}:{pipes[0]}:{pipes[1]}"


def address(interface: str) -> str:
    """Return the first address of an interface."""
    return str(connect.core().interfaces(f"={interface}")[0][1])


@functools.cache
def _version(mpirun: str) -> str:
    output = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    if found := re.search(r"Version:\s*(\S+)", output):
        return f"MPICH {found[1]}"
    return output.partition("\n")[0].replace("mpirun (", "").replace(")", "") or "MPI"
