"""A client of PMIx, by which Open MPI and Slurm serve the processes that they start: libpmix, loaded at run time.

Of its structures only those are used that are laid out alike in the public headers of versions 2 to 6: a process, and
arrays of one pmix_info_t. What a rank puts is there for all once all have come to the fence.
"""

import atexit
import ctypes
import os
import re
import shutil
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

SONAME = "libpmix.so.2"
VERSIONS = range(2, 7)
SUCCESS = 0
GLOBAL_SCOPE = 3
BOOL, UINT32, BYTES = 1, 14, 27  # pmix_data_type_t
NAME_BYTES, KEY_BYTES = 256, 512
PROCESS = struct.Struct(f"{NAME_BYTES}sI")  # pmix_proc_t: namespace and rank
ANYONE = 0xFFFFFFFE  # PMIX_RANK_WILDCARD
FLAG = struct.Struct("H6x?")  # pmix_value_t, as far as it is used: its type, and at the ninth byte its value
NUMBER = struct.Struct("H6xI")
BLOB = struct.Struct("H6xQQ")  # address and length
VALUE_BYTES = 64  # no version has a longer pmix_value_t
INFO_VALUE = KEY_BYTES + 8  # where the value stands in a pmix_info_t, after key, flags and padding
PREFIXES = ("OPAL_PREFIX", "PMIX_INSTALL_PREFIX")


class Unusable(OSError):
    """There is no PMIx to be had here; the text says why."""


class Pmix:
    """This process as a client of its launcher's PMIx server. One thread at a time."""

    def __init__(self, environ: Mapping[str, str], rank: int, size: int, limit_s: float) -> None:
        """Join the server. Raises Unusable, and TimeoutError where it does not answer within limit_s."""
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
        atexit.register(self._end)
        name, own = PROCESS.unpack(process.raw)
        self._namespace = name.rstrip(b"\0")
        many = NUMBER.unpack(self._get(b"pmix.job.size", ANYONE, deadline, NUMBER.size))[1]
        if (self._namespace.decode(errors="replace"), own, many) != (namespace, rank, size):
            raise Unusable(0, f"PMIx says rank {own} of {many}, not {rank} of {size}: another job's")

    def share(self, value: bytes, wanted: Sequence[int], limit_s: float) -> list[bytes]:
        """Give a value to all, and return those of the wanted ranks. Every rank calls this, in the same order of calls.

        Raises TimeoutError where not all ranks come within limit_s, and Unusable where PMIx fails; so does every later
        call then.
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
                raise Unusable(0, f"PMIx gives type {kind} for what rank {rank} left")
            found.append(ctypes.string_at(address, length))
        return found

    def _get(self, key: bytes, rank: int, deadline: float, size: int) -> bytes:
        """Return the first bytes of a value. It is not freed: there are few, and how differs between versions."""
        owner = ctypes.create_string_buffer(PROCESS.pack(self._namespace, rank), PROCESS.size)
        found = ctypes.c_void_p()
        self._call("PMIx_Get", deadline, owner, _key(key), None, ctypes.c_size_t(0), ctypes.byref(found))
        if not found.value:
            raise Unusable(0, f"PMIx_Get of {key.decode()} gives nothing")
        return ctypes.string_at(found.value, size)

    def _call(self, function: str, deadline: float, *arguments: object) -> None:
        """Call PMIx in a thread that may be left behind: its own time limits are the server's to keep or not."""
        if self._lost:
            raise Unusable(0, self._lost)
        status = _within(deadline - time.monotonic(), lambda: getattr(self._library, function)(*arguments))
        if status == SUCCESS:
            return
        if status is None:
            self._lost = f"{self.name} did not answer to {function} in time (NETBOTTLENECK_START_TIMEOUT_S)"
            if function == "PMIx_Fence":
                self._lost = (
                    f"not all {self._size} ranks came to {self.name} in time (NETBOTTLENECK_START_TIMEOUT_S); "
                    f"rank {self._rank} waited for the others"
                )
            raise TimeoutError(self._lost)
        self._library.PMIx_Error_string.restype = ctypes.c_char_p
        said = self._library.PMIx_Error_string(status) or b""
        self._lost = f"{function} fails: {said.decode(errors='replace')} ({status})"
        raise Unusable(0, self._lost)

    def _end(self) -> None:
        """Take leave: a process that ends without it counts as failed, and mpirun ends the others.

        MPI counts in the same library, and takes its own leave. A child that this process has forked has none to take.
        No thread can be started by now; the library waits for its server for 2 s.
        """
        if os.getpid() == self._pid and not self._lost:
            self._library.PMIx_Finalize(None, ctypes.c_size_t(0))


def _key(key: bytes) -> "ctypes.Array[ctypes.c_char]":
    return ctypes.create_string_buffer(key, KEY_BYTES)


def _within(limit_s: float, call: Callable[[], int]) -> int | None:
    """Return what a call returns, or None where it takes longer; it goes on in its thread then."""
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(call()), name="netbottleneck-pmix", daemon=True)
    thread.start()
    thread.join(max(0.0, limit_s))
    return answers[0] if answers else None


def _load(environ: Mapping[str, str]) -> ctypes.CDLL:
    """Return libpmix: the one that is loaded or that the loader finds, else the one beside mpirun."""
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
        raise Unusable(0, f"{SONAME} is {version!r}; versions {VERSIONS[0]} to {VERSIONS[-1]} are known")
    return library


def join(rank: int, size: int, limit_s: float, environ: Mapping[str, str]) -> Pmix | str:
    """Return this process as a client of the server that its launcher runs, or why it is none."""
    if not environ.get("PMIX_NAMESPACE") or not any(name.startswith("PMIX_SERVER_URI") for name in environ):
        return "no PMIX_NAMESPACE and PMIX_SERVER_URI…"
    if environ.get("PMIX_RANK") != str(rank):
        return f"PMIX_RANK={environ.get('PMIX_RANK')} is not rank {rank}"
    try:
        return Pmix(environ, rank, size, limit_s)
    except Unusable as error:
        return error.strerror or str(error)
