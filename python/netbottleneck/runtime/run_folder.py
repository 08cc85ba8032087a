"""Run folder: its name, the files that a run writes to it, and the transfer of other ranks' records to rank 0.

docs/reference/run-folder.md lists the files. The report writes those that are made from the records.
"""

import atexit
import contextlib
import itertools
import json
import logging
import os
import platform
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netbottleneck.config import Settings, describe
from netbottleneck.launch import connect
from netbottleneck.runtime.job import together
from netbottleneck.runtime.nccl import loaded
from netbottleneck.trace.ring_file import EVENT, RING_HEADER_BYTES, read_slots
from netbottleneck.trace.ring_reader import NCCL

if TYPE_CHECKING:
    from netbottleneck import _core

RANKS = "ranks"
FOLDER_BYTES = 1024  # fixed length of a folder's name in an exchange
NAME_BYTES = 64
COUNT_BYTES = 8
LATE = (1 << 8 * COUNT_BYTES) - 1  # in place of a count: the deadline has passed on this rank
HOST_BYTES = 16
LEAST_S = 0.1

logger = logging.getLogger("netbottleneck")


# The name.


def wanted(settings: Settings, directory: str | None = None) -> Path:
    """Return the run folder given by the settings."""
    stamp = os.environ.get("SLURM_JOB_ID") or time.strftime("%Y%m%d-%H%M%S")
    return Path(directory or settings.directory or f"netbottleneck-{stamp}").absolute()


def run_id(folder: Path) -> str:
    """Return the id of the run in a folder: its name; for DIR/2, DIR/rank0 and runs of a study's cell, after DIR's."""
    inside = re.fullmatch(r"\d+|rank\d+(-\d+)?|run|stock-(alone|x4)", folder.name)
    return f"{run_id(folder.parent)}-{folder.name}" if inside else folder.name


def hidden_in(wanted: Path) -> Path:
    """Return the folder for files that a run writes before its own folder is known, on the same file system as that.

    It is `wanted` if that is a folder that can be written, as it may be a mount point; else its parent.
    """
    return wanted if _is_writable(wanted) else wanted.parent


def _is_writable(folder: Path) -> bool:
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)


def claim(comm: "_core.Comm", wanted: Path, limit_s: float) -> Path:
    """Return the run folder: rank 0's `wanted`, or the first free one of wanted/2, …. See also own_folder.

    Every rank calls it. The folder is reserved for this run. Raises ValueError for a name that is too long, OSError if
    rank 0, or own_folder on another rank, cannot write, and as together.
    """
    name = os.fsencode(wanted.absolute())
    if len(name) > FOLDER_BYTES:
        raise ValueError(f"NETBOTTLENECK_DIR={wanted}: the name must have at most {FOLDER_BYTES} bytes")
    first = Path(os.fsdecode(together(comm, name.ljust(FOLDER_BYTES), limit_s)[0].rstrip()))
    folder, number = first, 1
    while not _is_free(comm, folder, limit_s):
        number += 1
        folder = first / str(number)
    if comm.rank == 0:
        if folder != wanted:
            logger.warning("%s already holds a run: this run is written to %s", wanted, folder)
        return folder
    try:
        (folder / RANKS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return own_folder(wanted, comm.rank, error)
    return folder if _is_writable(folder / RANKS) else own_folder(wanted, comm.rank, "not writable")


def own_folder(wanted: Path, rank: int, why: object) -> Path:
    """Return the first free folder of wanted, wanted/2, …, for a rank that cannot write to rank 0's folder.

    `gather` copies its records. Raises OSError if it cannot be created.
    """
    names = itertools.chain([wanted], (wanted / str(number) for number in itertools.count(2)))
    folder = next(path for path in names if not _holds_records(path, rank))
    _make(folder / RANKS)
    logger.info(
        "rank %d writes to %s, from which its records are copied, not to rank 0's folder: %s", rank, folder, why
    )
    return folder


def _is_free(comm: "_core.Comm", folder: Path, limit_s: float) -> bool:
    """Return True if no rank finds a run in the folder; rank 0 has then reserved it."""
    mine = _take(folder) if comm.rank == 0 else not _holds_records(folder, comm.rank)
    return all(free == b"1" for free in together(comm, b"1" if mine else b"0", limit_s))


def _holds_records(folder: Path, rank: int) -> bool:
    """Return True if a folder holds an earlier run, or records of this rank. Rank 0 describes a run only later."""
    # os.path: this host may not be allowed to look into rank 0's folder.
    ranks = folder / RANKS
    return os.path.exists(folder / "run.json") or (os.path.isdir(ranks) and any(ranks.glob(f"{rank}.*")))


def _make(folder: Path) -> None:
    """Create a folder, with those above it, unless it exists. Raises OSError that names the remedy."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{folder}: cannot create the folder ({error.strerror}): set NETBOTTLENECK_DIR to one that can be written"
        raise OSError(error.errno, why) from error


def _take(folder: Path) -> bool:
    """Reserve a folder for this run, unless it holds a run. Of concurrent attempts, only the first succeeds."""
    if (folder / "run.json").exists():
        return False
    _make(folder)
    try:
        (folder / RANKS).mkdir()
    except FileExistsError:
        return False
    return True


def move_records(scratch: Path, folder: Path) -> None:
    """Move the records of a rank that began without the others into the run folder, and remove `scratch`.

    Raises OSError if the folder is on another file system: the rank still writes to the files.
    """
    (folder / RANKS).mkdir(parents=True, exist_ok=True)
    for path in (scratch / RANKS).iterdir():
        path.rename(folder / RANKS / path.name)
    shutil.rmtree(scratch, ignore_errors=True)


def keep_alone(scratch: Path, wanted: Path, rank: int) -> Path:
    """Rename `scratch` to a free folder of one rank, in `wanted` or, if that is not writable, beside it. Return it."""
    with contextlib.suppress(OSError):
        wanted.mkdir(parents=True, exist_ok=True)
    first = wanted / f"rank{rank}" if _is_writable(wanted) else wanted.with_name(f"{wanted.name}-rank{rank}")
    others = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    folder = next(path for path in itertools.chain([first], others) if not os.path.lexists(path))
    scratch.rename(folder)
    return folder


# The files.


def ring_path(folder: Path, rank: int, name: str) -> Path:
    """Return the file of a rank's events: of the training thread ("train"), or of a transport's thread."""
    return folder / RANKS / f"{rank}.{name}.ring"


def open_ring(folder: Path, rank: int, name: str, settings: Settings) -> "_core.Recorder":
    """Return a recorder that writes to ring_path(). OSError if the folder cannot be written."""
    path = ring_path(folder, rank, name)
    _make(path.parent)
    ring: _core.Recorder = connect.core().Recorder(
        str(path), settings.trace_events, rank, timeline=settings.timeline is not None
    )
    return ring


def write_run(folder: Path, run: Mapping[str, Any]) -> None:
    """Write run.json, the description of the run."""
    _write_json(folder / "run.json", run)


def write_environment(folder: Path, settings: Settings) -> None:
    """Write env.json: the value and source of every variable."""
    _write_json(folder / "env.json", {row.name: [row.value, row.source] for row in describe(settings)})


def write_meta(folder: Path, rank: int, meta: Mapping[str, Any]) -> None:
    """Write a rank's description of itself."""
    _write_json(_meta_path(folder, rank), meta)


def _meta_path(folder: Path, rank: int) -> Path:
    return folder / RANKS / f"{rank}.meta.json"


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_text(json.dumps(value, indent=1), encoding="utf-8")
    scratch.replace(path)


# The records of other ranks.


def is_shared(comm: "_core.Comm", folder: Path, limit_s: float) -> bool:
    """Return True if every rank sees the run.json that rank 0 wrote. Every rank calls it, after rank 0 wrote."""
    seen = b"1" if (folder / "run.json").exists() else b"0"
    return all(sees == b"1" for sees in together(comm, seen, limit_s))


def incomplete(folder: Path, size: int, until: float) -> list[int]:
    """Wait for the records of all `size` ranks in a shared folder; return the ranks without a complete one.

    until: deadline by time.monotonic.
    """
    missing = list(range(size))
    while True:
        missing = [rank for rank in missing if not _is_complete(_meta_path(folder, rank))]
        if not missing or time.monotonic() >= until:
            return missing
        time.sleep(0.02)


def failed(folder: Path) -> bool:
    """Return True if the folder has the record of a rank that failed."""
    return any(_described(meta).get("error") for meta in (folder / RANKS).glob("*.meta.json"))


def _is_complete(meta: Path) -> bool:
    """Return True if a rank's description of itself says that it finished or failed."""
    found = _described(meta)
    return bool(found.get("finished") or found.get("error"))


def _described(meta: Path) -> dict[str, Any]:
    """Return a rank's description of itself; {} if it cannot be read."""
    try:
        found: dict[str, Any] = json.loads(meta.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def gather(comm: "_core.Comm", folder: Path, until: float) -> None:
    """Copy the files (ranks/<rank>.*) of each rank that does not write to rank 0's folder there.

    Every rank calls it; the files are closed. until: deadline by time.monotonic; when it has passed on one rank, all
    stop. Raises what Comm.submit and Work.wait raise, TimeoutError if not all files arrive by then, and OSError if rank
    0 cannot write.
    """
    core = connect.core()
    hosts = comm.exchange(_host(folder, comm.rank), limit_s=_left_s(until))
    for rank in (rank for rank in range(1, comm.size) if hosts[rank] != hosts[0]):
        late = time.monotonic() >= until
        packed = _pack(folder / RANKS, rank) if comm.rank == rank and not late else b""
        count = (LATE if late else len(packed)).to_bytes(COUNT_BYTES, "little")
        counts = [int.from_bytes(one, "little") for one in comm.exchange(count, limit_s=_left_s(until))]
        if LATE in counts:
            raise TimeoutError(f"the time is over: those of rank {rank} and of later ranks are missing")
        if counts[rank] == 0:
            continue
        memory = bytearray(packed) if comm.rank == rank else bytearray(counts[rank])
        work = comm.submit(f"netbottleneck.records.{rank}", core.BROADCAST, memory, core.UINT8, root=rank)
        if not work.wait(_left_s(until)):
            raise TimeoutError(f"those of rank {rank} did not arrive in time")
        if comm.rank == 0:
            _unpack(memory, folder / RANKS)


def _left_s(until: float) -> float:
    return max(LEAST_S, until - time.monotonic())


def _host(folder: Path, rank: int) -> bytes:
    """Return the identity of this rank's host; zeros if it does not see the run.json of rank 0."""
    if rank and not (folder / "run.json").exists():
        return bytes(HOST_BYTES)
    try:
        host = bytes.fromhex(json.loads(_meta_path(folder, rank).read_text(encoding="utf-8"))["host_id"])
    except (OSError, ValueError, KeyError):
        host = (rank + 1).to_bytes(HOST_BYTES, "little")  # a host of its own: its records are copied
    return host.ljust(HOST_BYTES, b"\0")[:HOST_BYTES]


def _pack(ranks: Path, rank: int) -> bytes:
    """Return a rank's files, each as name, length, bytes."""
    parts = []
    for path in sorted(ranks.glob(f"{rank}.*")):
        data = _written(path)
        parts += [path.name.encode().ljust(NAME_BYTES), len(data).to_bytes(COUNT_BYTES, "little"), data]
    return b"".join(parts)


def _written(path: Path) -> bytes:
    """Return the bytes of a file; of a ring that is open, those of its header and its taken slots."""
    if path.suffix == ".ring":
        with contextlib.suppress(ValueError):  # not a ring, or one that is cut short
            head = read_slots(path, 0, 0).head
            with path.open("rb") as file:
                full = head["taken"] > head["capacity"]
                return file.read(-1 if full else RING_HEADER_BYTES + int(head["taken"]) * EVENT.itemsize)
    return path.read_bytes()


def _unpack(memory: bytearray, ranks: Path) -> None:
    at = 0
    while at < len(memory):
        name = Path(bytes(memory[at : at + NAME_BYTES]).decode().rstrip()).name
        at += NAME_BYTES
        count = int.from_bytes(memory[at : at + COUNT_BYTES], "little")
        at += COUNT_BYTES
        (ranks / name).write_bytes(memory[at : at + count])
        at += count


# NCCL's events: its profiler plugin records them from the first communicator on, often before the run folder is known.
# The plugin writes to a hidden file, which becomes a ring of this rank.

NCCL_EVENTS = "NETBOTTLENECK_NCCL_EVENTS"
NCCL_HIDDEN = ".netbottleneck-nccl-"
NCCL_PLUGIN = Path(__file__).parents[1] / "libnccl-profiler-netbottleneck.so"
NCCL_DEFAULT = "libnccl-profiler.so"  # which NCCL loads if NCCL_PROFILER_PLUGIN is not set
PASSED_ON = range(4, 8)  # versions of profilers to which ours passes events on
# By hidden file, the ring that it became. The plugin opens one file in a process, for all runs.
_taken: dict[Path, Path] = {}


def arrange_nccl_events(settings: Settings) -> None:
    """Make NCCL load our profiler plugin in this process, if NETBOTTLENECK_NCCL_EVENTS=1. Call before NCCL is used.

    It passes events on to the plugin that NCCL would load until now. If it cannot, nothing changes, and
    no_nccl_events() tells. A process that this one starts has a file, too.
    """
    if settings.nccl_events == "1" and not _kept_out():
        theirs = _their_profiler()
        if theirs:
            os.environ.setdefault("NETBOTTLENECK_NCCL_PROFILER", theirs)
        hidden = hidden_in(wanted(settings)) / f"{NCCL_HIDDEN}%h-%p.ring"
        with contextlib.suppress(OSError):  # no_nccl_events() tells
            hidden.parent.mkdir(parents=True, exist_ok=True)
        os.environ["NCCL_PROFILER_PLUGIN"] = str(NCCL_PLUGIN)
        os.environ[NCCL_EVENTS] = str(hidden)
    if _nccl_name() is not None:
        atexit.register(_drop_nccl_events)


def _their_profiler() -> str:
    """Return the name of the plugin that NCCL loads if ours is not named, "" if it loads none."""
    named = os.environ.get("NCCL_PROFILER_PLUGIN") or (NCCL_DEFAULT if loaded(NCCL_DEFAULT) is not None else "")
    return "" if named.lower() in ("none", str(NCCL_PLUGIN).lower()) else named


def _kept_out() -> str:
    """Return why our plugin may not take the place of that one, "" if it may: a library that does not load has none."""
    name = _their_profiler()
    library = (loaded(name) or loaded(f"libnccl-profiler-{name}.so")) if name else None
    if library is None or any(hasattr(library, f"ncclProfiler_v{version}") for version in PASSED_ON):
        return ""
    return (
        f"the profiler plugin {name} stays alone, because events can be passed on to versions {PASSED_ON[0]} to "
        f"{PASSED_ON[-1]} only: to record without it, set NCCL_PROFILER_PLUGIN=none"
    )


def _nccl_name() -> Path | None:
    """Return the name of the hidden file of this process, None if there is to be none."""
    named = os.environ.get(NCCL_EVENTS, "").replace("%h", platform.node()).replace("%p", str(os.getpid()))
    path = Path(named)
    return path if path.name.startswith(NCCL_HIDDEN) else None


def _nccl_file() -> Path | None:
    """Return the hidden file of this process, if NCCL has opened it."""
    path = _nccl_name()
    return path if path is not None and path.exists() else None


def _drop_nccl_events() -> None:
    """Remove the hidden file of a process that no run has recorded."""
    path = _nccl_file()
    if path is not None:
        path.unlink(missing_ok=True)


def no_nccl_events(folder: Path, rank: int) -> str:
    """Return a note that a rank has no events of NCCL, although they are to be recorded; "" if it has."""
    path = _nccl_name()
    if os.environ.get(NCCL_EVENTS) == "1":
        why = _kept_out()
        return f"{NCCL_EVENTS}=1 has no effect: {why}" if why else ""
    if path is None or path.exists() or ring_path(folder, rank, NCCL).exists():
        return ""
    if path in _taken:
        return f"NCCL's events are in {_taken[path]}, of the first run of this process"
    return f"{NCCL_EVENTS}=1, but NCCL has recorded no events in this run: with NCCL_DEBUG=WARN, its log says why"


def take_nccl_events(folder: Path, rank: int) -> None:
    """Make the hidden file of this process, if there is one, a ring of this rank."""
    path = _nccl_file()
    if path is not None:
        _taken[path] = Path(shutil.move(path, ring_path(folder, rank, NCCL)))
