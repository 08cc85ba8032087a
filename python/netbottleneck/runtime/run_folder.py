"""The run folder: which one is free, and where not all ranks share it, how the others' records come to rank 0."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from netbottleneck.errors import DeadlineError
from netbottleneck.launch import connect

if TYPE_CHECKING:
    from netbottleneck import _core

FOLDER_BYTES = 1024  # of a folder's name as ranks exchange it
RANKS = "ranks"
NAME_BYTES = 64
COUNT_BYTES = 8
LEAST_S = 0.1


def together(comm: "_core.Comm", blob: bytes, limit_s: float) -> list[bytes]:
    """Return what each rank gives, by rank, while they open a measured run. Every rank calls it.

    Raises TimeoutError that names the ranks that did not come within limit_s, NETBOTTLENECK_START_TIMEOUT_S.
    """
    try:
        return comm.exchange(blob, limit_s=limit_s)
    except DeadlineError as error:
        late = DeadlineError(
            error.errno,
            f"rank {comm.rank} would measure a run, and not all ranks came to it within {limit_s:g} s "
            f"(NETBOTTLENECK_START_TIMEOUT_S): {error.strerror}. Every rank of the job must make the optimizer, or the "
            "model, that is measured: see what these ranks do instead, give them more time by that variable, or unset "
            "NETBOTTLENECK and NETBOTTLENECK_TRANSPORT",
        )
        late.peer = error.peer
        raise late from error


def claim(comm: "_core.Comm", wanted: Path, limit_s: float) -> Path:
    """Return the run folder, the same on all ranks: rank 0's `wanted`, or the first of wanted/2, … that is free.

    Every rank calls it. No other run is given that folder from then on. Raises ValueError for a name that is too long,
    OSError where rank 0 cannot write, and as together.
    """
    name = str(wanted.absolute()).encode()
    if len(name) > FOLDER_BYTES:
        raise ValueError(f"NETBOTTLENECK_DIR={wanted}: a name of at most {FOLDER_BYTES} bytes is needed")
    first = Path(together(comm, name.ljust(FOLDER_BYTES), limit_s)[0].decode().rstrip())
    folder, number = first, 1
    while not _free(comm, folder, limit_s):
        number += 1
        folder = first / str(number)
    return folder


def _free(comm: "_core.Comm", folder: Path, limit_s: float) -> bool:
    """Return whether no rank finds a run in a folder; rank 0 has taken it then."""
    mine = _take(folder) if comm.rank == 0 else not any((folder / RANKS).glob(f"{comm.rank}.*"))
    return all(free == b"1" for free in together(comm, b"1" if mine else b"0", limit_s))


def _take(folder: Path) -> bool:
    """Make a folder this run's, unless it holds a run; one of several that try at once is the first."""
    if (folder / "run.json").exists():
        return False
    folder.mkdir(parents=True, exist_ok=True)
    try:
        (folder / RANKS).mkdir()
    except FileExistsError:
        return False
    return True


def shared(comm: "_core.Comm", sign: Path, limit_s: float) -> bool:
    """Return whether every rank sees the file that rank 0 wrote. Every rank calls it, after rank 0 wrote."""
    return all(seen == b"1" for seen in together(comm, b"1" if sign.exists() else b"0", limit_s))


def gather(comm: "_core.Comm", folder: Path, until: float) -> None:
    """Bring each rank's own files (ranks/<rank>.*) to rank 0's folder. Every rank calls it; the files are closed.

    until: by time.monotonic. Raises what Comm.submit and Work.wait raise, TimeoutError where not all ranks come by
    then, and OSError where rank 0 cannot write.
    """
    core = connect.core()
    for rank in range(1, comm.size):
        packed = _pack(folder, rank) if comm.rank == rank else b""
        limit_s = max(LEAST_S, until - time.monotonic())
        counts = comm.exchange(len(packed).to_bytes(COUNT_BYTES, "little"), limit_s=limit_s)
        total = int.from_bytes(counts[rank], "little")
        if total == 0:
            continue
        memory = bytearray(packed) if comm.rank == rank else bytearray(total)
        comm.submit(f"netbottleneck.records.{rank}", core.BROADCAST, memory, core.UINT8, root=rank).wait()
        if comm.rank == 0:
            _unpack(memory, folder)


def _pack(folder: Path, rank: int) -> bytes:
    """Return a rank's files, each as name, length, bytes."""
    parts = []
    for path in sorted(folder.glob(f"{rank}.*")):
        data = path.read_bytes()
        parts += [path.name.encode().ljust(NAME_BYTES), len(data).to_bytes(COUNT_BYTES, "little"), data]
    return b"".join(parts)


def _unpack(memory: bytearray, folder: Path) -> None:
    at = 0
    while at < len(memory):
        name = Path(bytes(memory[at : at + NAME_BYTES]).decode().rstrip()).name
        at += NAME_BYTES
        count = int.from_bytes(memory[at : at + COUNT_BYTES], "little")
        at += COUNT_BYTES
        (folder / name).write_bytes(memory[at : at + count])
        at += count


def finished(path: Path) -> bool:
    """Return whether a rank's description of itself says that its record is complete, or that it failed."""
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(meta.get("finished") or meta.get("error"))
