"""Clients of the process-management interfaces: PMI-1 over a socket, and PMIx through libpmix."""

import atexit
import contextlib
import ctypes
import os
import re
import select
import shutil
import stat
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

# PMI-1: the protocol of hydra (MPICH, Intel MPI) and Slurm for the processes that they start.
#
# Requests and answers are lines of KEY=VALUE fields on the socket PMI_FD, one answer per request. A value that a rank
# puts is visible to all ranks after the barrier.

SUCCESS = "0"


class Pmi:
    """This process's PMI-1 connection to its launcher. One thread at a time."""

    def __init__(self, descriptor: int, rank: int, size: int, limit_s: float) -> None:
        """Open the connection, or share the one that MPI has opened in this process.

        Raises ConnectionError if the launcher is gone or speaks another protocol, TimeoutError if it does not answer
        within limit_s.
        """
        self.name = f"the launcher at PMI_FD={descriptor}"
        self._descriptor = descriptor
        self._rank = rank
        self._size = size
        self._rounds = 0
        self._rest = b""
        self._lost = ""
        self._pid = os.getpid()
        if not _is_socket(descriptor):
            raise ConnectionError(f"PMI_FD={descriptor} is not a socket: the parent process has closed it")
        deadline = time.monotonic() + limit_s
        if not mpi_initialized():
            self._request("response_to_init", deadline, cmd="init", pmi_version="1", pmi_subversion="1")
            atexit.register(self._finalize)
        self._longest = int(self._request("maxes", deadline, cmd="get_maxes")["vallen_max"])
        self._space = self._request("my_kvsname", deadline, cmd="get_my_kvsname")["kvsname"]

    def share(self, value: bytes, wanted: Sequence[int], limit_s: float) -> list[bytes]:
        """Publish a value, and return those of the wanted ranks. Every rank calls this, in the same order of calls.

        A value that is too long for the launcher is truncated. Raises TimeoutError if not all ranks call within
        limit_s, and ConnectionError if the launcher is lost or fails. Every later call then raises, too.
        """
        deadline = time.monotonic() + limit_s
        self._rounds += 1
        key = f"netbottleneck.{self._rounds}."
        text = value[: (self._longest - 1) // 2].hex() or "-"
        self._request("put_result", deadline, cmd="put", kvsname=self._space, key=f"{key}{self._rank}", value=text)
        try:
            self._request("barrier_out", deadline, cmd="barrier_in")
        except TimeoutError:
            self._lost = (
                f"not all {self._size} ranks reached {self.name} in time (NETBOTTLENECK_START_TIMEOUT_S); "
                f"rank {self._rank} waited for the others"
            )
            raise TimeoutError(self._lost) from None
        found = []
        for rank in wanted:
            reply = self._request("get_result", deadline, cmd="get", kvsname=self._space, key=f"{key}{rank}")["value"]
            found.append(b"" if reply == "-" else bytes.fromhex(reply))
        return found

    def _request(self, answer: str, deadline: float, **fields: str) -> dict[str, str]:
        """Send a request and return the fields of its answer."""
        if self._lost:
            raise ConnectionError(self._lost)
        line = " ".join(f"{key}={value}" for key, value in fields.items()).encode() + b"\n"
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
            reply = self._line(deadline)
        except TimeoutError:
            self._lost = f"{self.name} did not answer {fields['cmd']} in time"
            raise TimeoutError(self._lost) from None
        except OSError as error:
            self._lost = f"{self.name} is gone: {error}"
            raise ConnectionError(self._lost) from error
        parsed = dict(part.split("=", 1) for part in reply.split() if "=" in part)
        if parsed.get("cmd") != answer or parsed.get("rc", SUCCESS) != SUCCESS:
            self._lost = f"{self.name} answered {reply!r} to {fields['cmd']}"
            raise ConnectionError(self._lost)
        return parsed

    def _line(self, deadline: float) -> str:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        while b"\n" not in self._rest:
            left_ms = (deadline - time.monotonic()) * 1000
            if left_ms <= 0 or not poll.poll(left_ms):
                raise TimeoutError
            more = os.read(self._descriptor, 65536)
            if not more:
                raise ConnectionError("it has closed the connection")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode(errors="replace")

    def _finalize(self) -> None:
        """Finalize the connection: a process that exits without this counts as failed, and hydra ends the others.

        If MPI has started by now, MPI finalizes, possibly only when the process exits. A forked child does nothing.
        """
        if os.getpid() != self._pid or self._lost or mpi_initialized():
            return
        with contextlib.suppress(OSError):
            self._request("finalize_ack", time.monotonic() + 5, cmd="finalize")


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def mpi_initialized() -> bool:
    """Return whether this process has called MPI_Init."""
    try:
        mapped = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return False
    for path in {line[line.index("/") :] for line in mapped if "/libmpi" in line}:
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            begun = ctypes.c_int()
            library.MPI_Initialized(ctypes.byref(begun))
            if begun.value:
                return True
    return False


def join_pmi(rank: int, size: int, limit_s: float, environ: Mapping[str, str]) -> Pmi | str:
    """Return the connection to the launcher that started this rank, or the reason why there is none."""
    descriptor = environ.get("PMI_FD", "")
    if not descriptor.isdecimal():
        return "no PMI_FD"
    if (environ.get("PMI_RANK"), environ.get("PMI_SIZE")) != (str(rank), str(size)):
        return f"PMI_RANK={environ.get('PMI_RANK')} of PMI_SIZE={environ.get('PMI_SIZE')} is not rank {rank} of {size}"
    try:
        return Pmi(int(descriptor), rank, size, limit_s)
    except ConnectionError as error:
        return str(error)


# PMIx: the protocol of Open MPI and Slurm for the processes that they start, through libpmix, loaded at run time.
#
# This client uses only structures with the same layout in the public headers of versions 2 to 6: a process, and arrays
# of one pmix_info_t. A value that a rank puts is visible to all ranks after the fence.

SONAME = "libpmix.so.2"
VERSIONS = range(2, 7)
PMIX_SUCCESS = 0
GLOBAL_SCOPE = 3
BOOL, BYTES = 1, 27  # pmix_data_type_t
NAME_BYTES, KEY_BYTES = 256, 512
PROCESS = struct.Struct(f"{NAME_BYTES}sI")  # pmix_proc_t: namespace and rank
ANY_RANK = 0xFFFFFFFE  # PMIX_RANK_WILDCARD
FLAG = struct.Struct("H6x?")  # pmix_value_t as far as used: its type, and its value at the ninth byte
NUMBER = struct.Struct("H6xI")
BLOB = struct.Struct("H6xQQ")  # address and length
VALUE_BYTES = 64  # no version has a longer pmix_value_t
INFO_VALUE = KEY_BYTES + 8  # offset of the value in a pmix_info_t, after key, flags and padding
PREFIXES = ("OPAL_PREFIX", "PMIX_INSTALL_PREFIX")
# The server may count a rank of an earlier program that ends as one that has reached the fence.
SECOND = "; for a second program under the same launcher, set NETBOTTLENECK_MASTER or NETBOTTLENECK_RENDEZVOUS"


class Unusable(OSError):
    """PMIx cannot be used here; the text gives the reason."""


class Pmix:
    """This process as a client of its launcher's PMIx server. One thread at a time."""

    def __init__(self, environ: Mapping[str, str], rank: int, size: int, limit_s: float) -> None:
        """Connect to the server. Raises Unusable, and TimeoutError if it does not answer within limit_s."""
        namespace = environ.get("PMIX_NAMESPACE", "")
        self.name = f"PMIx of job {namespace}"
        self._rank = rank
        self._size = size
        self._rounds = 0
        self._lost = ""
        self._pid = os.getpid()
        self._library = _load(environ)
        deadline = time.monotonic() + limit_s
        process = ctypes.create_string_buffer(PROCESS.size)
        self._call("PMIx_Init", deadline, process, None, ctypes.c_size_t(0))
        atexit.register(self._finalize)
        name, own = PROCESS.unpack(process.raw)
        self._namespace = name.rstrip(b"\0")
        many = NUMBER.unpack(self._get(b"pmix.job.size", ANY_RANK, deadline, NUMBER.size))[1]
        if (self._namespace.decode(errors="replace"), own, many) != (namespace, rank, size):
            raise Unusable(0, f"PMIx reports rank {own} of {many}, not {rank} of {size}: it belongs to another job")

    def share(self, value: bytes, wanted: Sequence[int], limit_s: float) -> list[bytes]:
        """Publish a value, and return those of the wanted ranks. Every rank calls this, in the same order of calls.

        Raises TimeoutError if not all ranks call within limit_s, and Unusable if PMIx fails. Every later call then
        raises, too.
        """
        deadline = time.monotonic() + limit_s
        self._rounds += 1
        key = b"netbottleneck.%d" % self._rounds
        memory = ctypes.create_string_buffer(value, len(value) + 1)
        blob = ctypes.create_string_buffer(VALUE_BYTES)
        BLOB.pack_into(blob, 0, BYTES, ctypes.addressof(memory), len(value))
        self._call("PMIx_Put", deadline, ctypes.c_uint8(GLOBAL_SCOPE), _key(key), blob)
        self._call("PMIx_Commit", deadline)
        collect = ctypes.create_string_buffer(b"pmix.collect", INFO_VALUE + VALUE_BYTES)
        FLAG.pack_into(collect, INFO_VALUE, BOOL, True)
        self._call("PMIx_Fence", deadline, None, ctypes.c_size_t(0), collect, ctypes.c_size_t(1))
        found = []
        for rank in wanted:
            kind, address, length = BLOB.unpack(self._get(key, rank, deadline, BLOB.size))
            if kind != BYTES:
                raise Unusable(0, f"PMIx returned type {kind} for the value of rank {rank}")
            found.append(ctypes.string_at(address, length))
        return found

    def _get(self, key: bytes, rank: int, deadline: float, size: int) -> bytes:
        """Return the first bytes of a value. It is never freed: values are few, and freeing differs by version."""
        owner = ctypes.create_string_buffer(PROCESS.pack(self._namespace, rank), PROCESS.size)
        found = ctypes.c_void_p()
        self._call("PMIx_Get", deadline, owner, _key(key), None, ctypes.c_size_t(0), ctypes.byref(found))
        if not found.value:
            raise Unusable(0, f"PMIx_Get of {key.decode()} returned no value")
        return ctypes.string_at(found.value, size)

    def _call(self, function: str, deadline: float, *arguments: object) -> None:
        """Call PMIx in a thread that may be abandoned, as a server may ignore PMIx's own time limits."""
        if self._lost:
            raise Unusable(0, self._lost)
        status = _call_with_limit(deadline - time.monotonic(), lambda: getattr(self._library, function)(*arguments))
        if status == PMIX_SUCCESS:
            return
        if status is None:
            self._lost = f"{self.name} did not answer {function} in time (NETBOTTLENECK_START_TIMEOUT_S)"
            if function == "PMIx_Fence":
                self._lost = (
                    f"not all {self._size} ranks reached {self.name} in time (NETBOTTLENECK_START_TIMEOUT_S); "
                    f"rank {self._rank} waited for the others{SECOND}"
                )
            raise TimeoutError(self._lost)
        self._library.PMIx_Error_string.restype = ctypes.c_char_p
        reply = self._library.PMIx_Error_string(status) or b""
        self._lost = f"{function} failed: {reply.decode(errors='replace')} ({status})"
        if self._rounds:
            self._lost += SECOND
        raise Unusable(0, self._lost)

    def _finalize(self) -> None:
        """Finalize the client: a process that exits without this counts as failed, and mpirun ends the others.

        MPI is counted by the same library and finalizes itself. A forked child does nothing. At exit no thread can
        start, so this calls directly; the library waits for its server for 2 s.
        """
        if os.getpid() == self._pid and not self._lost:
            self._library.PMIx_Finalize(None, ctypes.c_size_t(0))


def _key(key: bytes) -> "ctypes.Array[ctypes.c_char]":
    return ctypes.create_string_buffer(key, KEY_BYTES)


def _call_with_limit(limit_s: float, call: Callable[[], int]) -> int | None:
    """Return the result of a call, or None if it takes longer than limit_s; its thread then continues."""
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(call()), name="netbottleneck-pmix", daemon=True)
    thread.start()
    thread.join(max(0.0, limit_s))
    return results[0] if results else None


def _load(environ: Mapping[str, str]) -> ctypes.CDLL:
    """Return libpmix: the one that is loaded or that the loader finds, else the one next to mpirun."""
    roots = [Path(environ[name]) for name in PREFIXES if environ.get(name)]
    mpirun = shutil.which("mpirun")
    if mpirun is not None:
        roots.append(Path(mpirun).resolve().parent.parent)
    places = [SONAME, *(str(root / lib / SONAME) for root in roots for lib in ("lib", "lib64"))]
    reasons = []
    for place in places:
        try:
            library = ctypes.CDLL(place)
            break
        except OSError as error:
            reasons.append(str(error))
    else:
        raise Unusable(0, f"no {SONAME}: {reasons[0]}")
    library.PMIx_Get_version.restype = ctypes.c_char_p
    version = (library.PMIx_Get_version() or b"").decode(errors="replace")
    found = re.search(r"(\d+)\.\d+", version)
    if found is None or int(found.group(1)) not in VERSIONS:
        raise Unusable(0, f"{SONAME} is {version!r}; versions {VERSIONS[0]} to {VERSIONS[-1]} are supported")
    return library


def join_pmix(rank: int, size: int, limit_s: float, environ: Mapping[str, str]) -> Pmix | str:
    """Return this process as a client of its launcher's server, or the reason why there is none."""
    if not environ.get("PMIX_NAMESPACE") or not any(name.startswith("PMIX_SERVER_URI") for name in environ):
        return "no PMIX_NAMESPACE and PMIX_SERVER_URI…"
    if environ.get("PMIX_RANK") != str(rank):
        return f"PMIX_RANK={environ.get('PMIX_RANK')} is not rank {rank}"
    try:
        return Pmix(environ, rank, size, limit_s)
    except Unusable as error:
        return error.strerror or str(error)
