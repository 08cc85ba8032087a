"""A run folder that not all ranks share: the records of the others are brought to rank 0."""

from pathlib import Path
from typing import TYPE_CHECKING

from netbottleneck import launch

if TYPE_CHECKING:
    from netbottleneck import _core

NAME_BYTES = 64
COUNT_BYTES = 8


def shared(comm: "_core.Comm", sign: Path) -> bool:
    """Return whether every rank sees the file that rank 0 wrote. Every rank calls it, after rank 0 wrote."""
    return all(seen == b"1" for seen in comm.exchange(b"1" if sign.exists() else b"0"))


def gather(comm: "_core.Comm", folder: Path) -> None:
    """Bring each rank's own files (ranks/<rank>.*) to rank 0's folder. Every rank calls it; the files are closed.

    Raises what Comm.submit and Work.wait raise, and OSError where rank 0 cannot write.
    """
    core = launch.core()
    for rank in range(1, comm.size):
        packed = _pack(folder, rank) if comm.rank == rank else b""
        counts = comm.exchange(len(packed).to_bytes(COUNT_BYTES, "little"))
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
