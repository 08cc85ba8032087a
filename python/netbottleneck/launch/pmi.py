"""A client of PMI-1, the protocol by which hydra (MPICH, Intel MPI) and Slurm serve the processes that they start.

Lines of KEY=VALUE words go over the socket PMI_FD, and each is answered by one. What a rank puts is there for all once
all have come to the barrier.
"""

import atexit
import contextlib
import ctypes
import os
import select
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

SUCCESS = "0"


class Pmi:
    """This process's conversation with its launcher. One thread at a time."""

    def __init__(self, descriptor: int, rank: int, size: int, limit_s: float) -> None:
        """Begin it, or join in where MPI has begun it in this process.

        Raises ConnectionError where the launcher is not there or speaks something else, TimeoutError where it does not
        answer within limit_s.
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
            raise ConnectionError(f"PMI_FD={descriptor} is no socket here: what started this process has closed it")
        deadline = time.monotonic() + limit_s
        if not mpi_began():
            self._ask("response_to_init", deadline, cmd="init", pmi_version="1", pmi_subversion="1")
            atexit.register(self._end)
        self._longest = int(self._ask("maxes", deadline, cmd="get_maxes")["vallen_max"])
        self._space = self._ask("my_kvsname", deadline, cmd="get_my_kvsname")["kvsname"]

    def share(self, value: bytes, wanted: Sequence[int], limit_s: float) -> list[bytes]:
        """Give a value to all, and return those of the wanted ranks. Every rank calls this, in the same order of calls.

        A value that is too long for the launcher is cut. Raises TimeoutError where not all ranks come within limit_s,
        and ConnectionError where the launcher goes or fails; so does every later call then.
        """
        deadline = time.monotonic() + limit_s
        self._rounds += 1
        key = f"netbottleneck.{self._rounds}."
        text = value[: (self._longest - 1) // 2].hex() or "-"
        self._ask("put_result", deadline, cmd="put", kvsname=self._space, key=f"{key}{self._rank}", value=text)
        try:
            self._ask("barrier_out", deadline, cmd="barrier_in")
        except TimeoutError:
            self._lost = (
                f"not all {self._size} ranks came to {self.name} in time (NETBOTTLENECK_START_TIMEOUT_S); "
                f"rank {self._rank} waited for the others"
            )
            raise TimeoutError(self._lost) from None
        found = []
        for rank in wanted:
            said = self._ask("get_result", deadline, cmd="get", kvsname=self._space, key=f"{key}{rank}")["value"]
            found.append(b"" if said == "-" else bytes.fromhex(said))
        return found

    def _ask(self, answer: str, deadline: float, **words: str) -> dict[str, str]:
        """Send a line, and return the words of the one that answers it."""
        if self._lost:
            raise ConnectionError(self._lost)
        line = " ".join(f"{word}={value}" for word, value in words.items()).encode() + b"\n"
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
            said = self._line(deadline)
        except TimeoutError:
            self._lost = f"{self.name} did not answer to {words['cmd']} in time"
            raise TimeoutError(self._lost) from None
        except OSError as error:
            self._lost = f"{self.name} is gone: {error}"
            raise ConnectionError(self._lost) from error
        got = dict(part.split("=", 1) for part in said.split() if "=" in part)
        if got.get("cmd") != answer or got.get("rc", SUCCESS) != SUCCESS:
            self._lost = f"{self.name} answers {said!r} to {words['cmd']}"
            raise ConnectionError(self._lost)
        return got

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

    def _end(self) -> None:
        """Take leave: a process that ends without it counts as failed, and hydra ends the others.

        Where MPI has begun by now, it does so, which may be only when the process ends; a child that this process has
        forked has none to take.
        """
        if os.getpid() != self._pid or self._lost or mpi_began():
            return
        with contextlib.suppress(OSError):
            self._ask("finalize_ack", time.monotonic() + 5, cmd="finalize")


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def mpi_began() -> bool:
    """Return whether MPI_Init was called in this process."""
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


def join(rank: int, size: int, limit_s: float, environ: Mapping[str, str]) -> Pmi | str:
    """Return the conversation with the launcher that started this rank, or why there is none."""
    descriptor = environ.get("PMI_FD", "")
    if not descriptor.isdecimal():
        return "no PMI_FD"
    if (environ.get("PMI_RANK"), environ.get("PMI_SIZE")) != (str(rank), str(size)):
        return f"PMI_RANK={environ.get('PMI_RANK')} of PMI_SIZE={environ.get('PMI_SIZE')} is not rank {rank} of {size}"
    try:
        return Pmi(int(descriptor), rank, size, limit_s)
    except ConnectionError as error:
        return str(error)
