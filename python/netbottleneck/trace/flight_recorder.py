"""Dumps of torch's flight recorder, one file for each rank, as a Trace: the last operations of torch.distributed.

A dump has no steps and no compute. Its name is `<prefix><rank>`, and it is a pickle or JSON.
"""

from __future__ import annotations

import json
import math
import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from netbottleneck.trace.kineto import HEAD_BYTES, ITEM_BYTES, RANKS_MOST, Event, kind_of, readable
from netbottleneck.trace.model import (
    ENDED,
    POINT_TO_POINT,
    SCHEDULED,
    STATES,
    Clock,
    Collective,
    ProcessGroup,
    Rank,
    Trace,
)
from netbottleneck.trace.transports import STOCK
from netbottleneck.units import listed

DUMP_VERSIONS = "2."  # of the dump, not of torch
DUMP = re.compile(r"(?P<prefix>.*?)(?P<rank>\d+)(?P<suffix>(\.(json|pkl|pickle))?)")
BUFFER = "set TORCH_FR_BUFFER_SIZE before the training"
DEFAULT_GROUP = "default_pg"
# Names of element types in a dump, in lower case; their bytes are ITEM_BYTES.
DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "bfloat16": "bfloat16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "char": "int8",
    "byte": "uint8",
    "bool": "bool",
}
_BATCH = ("process_group", "collective_seq_id", "p2p_seq_id")  # equal in the rows of a batch
_FOLLOWED = ("state", "retired", "time_discovered_started_ns", "time_discovered_completed_ns")
_DAMAGE = (OSError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, MemoryError)
_UNREADABLE = (*_DAMAGE, pickle.UnpicklingError, RecursionError, ImportError)


class _PlainValues(pickle.Unpickler):
    """Reads containers, numbers and text. Any other object is refused, so a file runs no code."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}: a dump has only plain values")


def _is_dump(path: Path) -> bool:
    """True for a file that begins like a dump of the flight recorder."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:
        return False
    if head.startswith(b"{"):
        about = b'"comm_lib_version"' in head or b'"collective_seq_id"' in head
        return about and (b'"entries"' in head or b'"pg_config"' in head)
    return head.startswith(b"\x80") and b"version" in head and (b"pg_config" in head or b"entries" in head)


def _named(paths: Iterable[Path]) -> list[tuple[Path, re.Match[str]]]:
    """The files whose name is that of a dump, with its parts."""
    pairs = ((one, DUMP.fullmatch(one.name)) for one in sorted(paths))
    return [(one, match) for one, match in pairs if match is not None and one.is_file()]


def dumps(path: Path) -> list[Path]:
    """The flight recorder's dumps at a path: the file itself, those in a folder, or those whose names it begins.

    A file beside them with the same prefix is one too, however damaged. May be empty.
    """
    if path.is_file():
        return [one for one, _ in _named([path]) if _is_dump(one)]
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir() or (folder == path and (path / "run.json").exists()):
        return []
    near = _named(folder.iterdir())
    if folder != path:
        near = [(one, match) for one, match in near if match["prefix"] == path.name]
    series = {match.group("prefix", "suffix") for one, match in near if _is_dump(one)}
    return [one for one, match in near if match.group("prefix", "suffix") in series]


@dataclass(frozen=True, slots=True)
class _Dump:
    """One rank's dump. members: of each group by its name, where the dump has them.

    last: number of the last operation that was called, by the group's pg_id. recorded: the recorder was on.
    """

    path: Path
    rank: int
    version: str
    entries: tuple[_Entry, ...]
    members: Mapping[str, tuple[int, ...]]
    last: Mapping[int, int]
    recorded: bool


@dataclass(frozen=True, slots=True)
class _Entry:
    """An operation of a dump. number: of its group; of a send or receive, among these. None: not known."""

    record: int
    group: tuple[str, str]
    group_id: int
    number: int
    between_two: bool
    name: str
    kind: str
    bytes: int | None
    dtype: str
    state: str
    created_ns: int
    start_seen_ns: int | None
    done_seen_ns: int | None


def _sum_bytes(sizes: Any, dtypes: Any) -> int | None:
    """Bytes of tensors of these shapes; None for a type that is not known."""
    if not sizes:
        return 0
    each = [ITEM_BYTES.get(str(one).lower()) for one in dtypes]
    each = each * len(sizes) if len(each) == 1 else each
    if len(each) != len(sizes) or None in each:
        return None
    return sum(math.prod(map(int, shape)) * (item or 0) for shape, item in zip(sizes, each, strict=True))


def _line(frames: Any) -> str:
    """File and line of the script that called, from the innermost frame outside torch; "" if there is none."""
    for frame in frames or ():
        if "/torch/" not in str(frame["filename"]):
            return f", {Path(str(frame['filename'])).name}:{int(frame['line'])}"
    return ""


def _state(row: Mapping[str, Any], backend: str) -> str:
    """Raises KeyError or ValueError for a row without a known state."""
    state = str(row["state"])
    if state not in STATES:
        raise ValueError(f"unknown state {state!r}")
    over = backend != "nccl" and state == SCHEDULED and row.get("retired")
    return ENDED if over else state  # only NCCL's process group follows the state; another one records the end


def _of_batches(rows: Iterable[Event]) -> list[Event]:
    """The rows by record. NCCL follows one row of a batch: the last, "nccl:coalesced", with the numbers of the others.

    The others take its state, and it is a send or receive if they are. Source: issue 137969 of pytorch/pytorch.
    """
    ordered = sorted(rows, key=lambda row: int(row.get("record_id", 0)))
    before: dict[Any, list[int]] = defaultdict(list)
    for at, row in enumerate(ordered):
        name, batch = str(row["profiling_name"]), str([row.get(part) for part in _BATCH])
        if not name.endswith("coalesced"):
            before[batch].append(at)
            continue
        known = {part: row[part] for part in _FOLLOWED if part in row}
        for place in before.pop(batch, []):
            own = ordered[place]
            ordered[place] = {**own, **known} if own.get("state") == SCHEDULED else own
            ordered[at] = {**ordered[at], "is_p2p": ordered[at].get("is_p2p") or own.get("is_p2p", False)}
    return ordered


def _time(row: Mapping[str, Any], name: str) -> int | None:
    """A time of a row in ns; JSON has 0 for one that is not known."""
    return int(row.get(name) or 0) or None


def _entry(row: Mapping[str, Any]) -> _Entry:
    """Raises KeyError, TypeError or ValueError for a row that is damaged."""
    backend, _, full_name = str(row["profiling_name"]).rpartition(":")
    between_two = bool(row.get("is_p2p", False))
    plain, group = full_name.partition(" ")[0], row["process_group"]
    sizes = [_sum_bytes(row[f"{way}_sizes"], row[f"{way}_dtypes"]) for way in ("input", "output")]
    known = [one for one in sizes if one is not None]
    dtypes = [str(one).lower() for one in (*row["input_dtypes"], *row["output_dtypes"])]
    return _Entry(
        int(row["record_id"]),
        (str(group[0]), str(group[1]).replace("undefined", "")),
        int(row["pg_id"]),
        int(row["p2p_seq_id" if between_two else "collective_seq_id"]),
        between_two,
        (full_name if between_two else plain) + _line(row.get("frames")),
        plain if between_two else kind_of(plain) or plain,
        max(known) if len(known) == len(sizes) else None,
        DTYPES.get(dtypes[0], dtypes[0]) if dtypes else "",
        _state(row, backend),
        int(row["time_created_ns"]),
        _time(row, "time_discovered_started_ns"),
        _time(row, "time_discovered_completed_ns"),
    )


def _members(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    found = {}
    for name, about in config.items():
        ranks = about["ranks"]
        ranks = json.loads(ranks) if isinstance(ranks, str) else ranks
        if name and ranks:
            found[str(name)] = tuple(sorted(map(int, ranks)))
            if not 0 <= found[str(name)][0] <= found[str(name)][-1] < RANKS_MOST:
                raise ValueError(f"pg_config of group {name} has ranks outside 0 to {RANKS_MOST - 1}")
    return found


def _check_rank(path: Path, rank: int, members: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError naming the file if the number in its name is no rank."""
    size = 1 + max((own[-1] for own in members.values()), default=RANKS_MOST - 1)
    if rank >= size:
        why = f"its pg_config has ranks below {size}" if members else f"a rank is below {size}"
        raise ValueError(f"{path}: its name ends with {rank}, but {why}: end the name of each dump with its rank")


def _read(path: Path) -> _Dump:
    """Read one dump. Raises ValueError naming it if it is damaged, has another version, or its name has no rank."""
    match = DUMP.fullmatch(path.name)
    assert match is not None
    try:
        with path.open("rb") as file:
            is_json = file.read(1) == b"{"
            file.seek(0)
            whole = json.load(file) if is_json else _PlainValues(file).load()
        version = str(whole["version"])
        if not version.startswith(DUMP_VERSIONS):
            raise ValueError(f"version {version}; this netbottleneck reads versions {DUMP_VERSIONS}x")
        groups = whole["pg_config"] if "entries" not in whole else whole.get("pg_config", {})
        entries = tuple(map(_entry, _of_batches(whole.get("entries", ()))))  # JSON has no key for no operation
        last = {int(key): int(one["last_enqueued_collective"]) for key, one in whole.get("pg_status", {}).items()}
        members = _members(groups)
    except _UNREADABLE as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise ValueError(f"{path}: unreadable dump of the flight recorder: {what}") from error
    rank = int(match["rank"])
    _check_rank(path, rank, members)
    return _Dump(path, rank, version, entries, members, last, bool(groups))


def _with_members(ranks: Sequence[_Dump]) -> list[_Dump]:
    """The dumps, by rank; each has the members of its groups from the others too."""
    told = [pair for dump in ranks for pair in dump.members.items()]
    return [
        replace(dump, members={**{name: own for name, own in told if dump.rank in own}, **dump.members})
        for dump in sorted(ranks, key=lambda one: one.rank)
    ]


# Name, description and members of a group.
_Group = tuple[str, str, tuple[int, ...] | None]


def _group(dump: _Dump, entry: _Entry) -> _Group:
    return (*entry.group, dump.members.get(entry.group[0]))


def _groups(ranks: Sequence[_Dump], size: int) -> dict[_Group, ProcessGroup]:
    """The groups of the dumps. The default group has all ranks; the members of another one may be unknown."""
    last: dict[_Group, dict[int, int]] = {}
    ids: dict[_Group, int] = {}
    for dump in ranks:
        for entry in dump.entries:
            own = last.setdefault(_group(dump, entry), {})
            ids.setdefault(_group(dump, entry), entry.group_id)
            if not entry.between_two:
                own[dump.rank] = max(own.get(dump.rank, 0), entry.number, dump.last.get(entry.group_id, 0))
    for dump in (one for one in ranks if one.recorded and not one.entries):
        for group, own in last.items():
            called = _called(dump, group, ids[group])
            own.update({} if called is None else {dump.rank: called})
    return {
        group: ProcessGroup(
            group[0],
            group[1],
            tuple(range(size)) if group[2] is None and group[1] == DEFAULT_GROUP else group[2],
            tuple(sorted(own.items())),
        )
        for group, own in last.items()
    }


def _called(dump: _Dump, group: _Group, group_id: int) -> int | None:
    """Number of the last operation that a rank without any in its dump called in a group; None if it is not known.

    The id of a group may differ between ranks, that of the default group does not.
    """
    member = group[1] == DEFAULT_GROUP if group[2] is None else dump.rank in group[2]
    most = max(dump.last.values(), default=0)
    if member and group[1] == DEFAULT_GROUP:
        return max(dump.last.get(group_id, 0), 0)
    return 0 if member and most <= 0 else None


# What the operations of one number have in common: group, number, and True for sends and receives.
_Call = tuple[_Group, int, bool]


def _calls(dump: _Dump) -> Counter[_Call]:
    """The number of a dump's operations by call, in the order of its first."""
    return Counter((_group(dump, entry), entry.number, entry.between_two) for entry in dump.entries)


def _overwritten(ranks: Sequence[_Dump]) -> dict[int, Counter[_Call]]:
    """By rank: how many collectives of its first call in each group left its buffer, as other ranks have them."""
    calls = {dump.rank: _calls(dump) for dump in ranks}
    most = Counter[_Call]()
    for own in calls.values():
        most |= own
    found = {dump.rank: Counter[_Call]() for dump in ranks}
    for dump in (one for one in ranks if _dropped(one)):
        own = calls[dump.rank]
        first = {call[0]: call for call in reversed(own) if not call[2]}
        found[dump.rank].update({call: most[call] - own[call] for call in first.values()})
    return found


def _of_dump(
    dump: _Dump, groups: Mapping[_Group, ProcessGroup], overwritten: Counter[_Call], epoch_ns: int
) -> Iterator[Collective]:
    """The operations of a dump. Those of one number (coalesced) are told apart by their place: their key."""
    order, places = list(groups), overwritten.copy()
    for one in dump.entries:
        group = _group(dump, one)
        members = groups[group].ranks
        places[group, one.number, one.between_two] += 1
        yield Collective(
            dump.rank,
            STOCK,
            places[group, one.number, one.between_two] + (POINT_TO_POINT if one.between_two else 0),
            one.number,
            one.created_ns - epoch_ns,
            one.bytes,
            one.name,
            comm=order.index(group),
            ranks=None if members is None else len(members),
            kind=one.kind,
            dtype=one.dtype,
            phase="other",
            state=one.state,
            start_seen_ns=None if one.start_seen_ns is None else one.start_seen_ns - epoch_ns,
            done_seen_ns=None if one.done_seen_ns is None else one.done_seen_ns - epoch_ns,
        )


def _empty(ranks: Sequence[_Dump]) -> Iterator[str]:
    """A note on each dump without an operation."""
    for dump in ranks:
        if not dump.entries:
            why = f"rank {dump.rank} called none, or its dump has only those under way"
            yield f"{dump.path}: no operation: {why if dump.recorded else BUFFER}."


def _dump_notes(ranks: Sequence[_Dump], groups: Iterable[ProcessGroup], damaged: Sequence[str]) -> Iterator[str]:
    yield "read from dumps of torch's flight recorder: they have no steps and no compute."
    yield from damaged
    versions: dict[str, list[int]] = defaultdict(list)
    for dump in ranks:
        versions[dump.version].append(dump.rank)
    yield from _empty(ranks)
    if len(versions) > 1:
        each = "; ".join(f"{version}: rank {listed(own)}" for version, own in versions.items())
        yield f"the dumps have different versions ({each}): the ranks may run different versions of torch."
    known = {name for dump in ranks for name in dump.members}
    for group in groups:
        if group.name not in known and group.description == DEFAULT_GROUP:
            yield f"the number of ranks is not in the dumps: {len(group.ranks or ())}, or more if dumps are missing."
        elif group.ranks is None:
            yield f"the members of group {group} are not in the dumps: a rank that never used it is not missed."
    if any(entry.bytes is None for dump in ranks for entry in dump.entries):
        yield "the sizes of some operations are not known: their element type is not."


def _read_all(paths: Sequence[Path]) -> tuple[list[_Dump], list[str]]:
    """The dumps by rank, and a note for each one that cannot be read."""
    ranks, damaged = readable(paths, _read, "dump of the flight recorder")
    return _with_members(ranks), damaged


def _dropped(dump: _Dump) -> int:
    """Number of operations that left the buffer."""
    return dump.entries[0].record if dump.entries else 0


def _rank_of_dump(dump: _Dump, first: _Dump) -> Rank:
    clock = Clock("rank 0" if dump is first else "wall")
    return Rank(dump.rank, finished=True, clock=clock, events_dropped=_dropped(dump))


def load(paths: Sequence[Path]) -> Trace:
    """The trace of a run from the flight recorder's dumps. A damaged one is named in the notes.

    submit_ns: when the operation was enqueued, by the host's wall clock. Begin and end are None: a dump has only the
    times at which a watchdog noticed them. The number of ranks is that of the largest rank named. Raises ValueError
    if no dump can be read, or if a rank has two.
    """
    ranks, damaged = _read_all(paths)
    named = [(match["prefix"], int(match["rank"])) for _, match in _named(paths)]
    stated = max((own[-1] for one in ranks for own in one.members.values()), default=None)
    most = RANKS_MOST - 1 if stated is None else max(stated, ranks[-1].rank)
    largest = max(stated or 0, *(rank for _, rank in named if rank <= most))
    groups = _groups(ranks, largest + 1)
    overwritten = _overwritten(ranks)
    epoch_ns = min((entry.created_ns for one in ranks for entry in one.entries), default=0)
    return Trace(
        named[0][0].rstrip("_-.") or paths[0].absolute().parent.name,
        largest + 1,
        (STOCK,),
        started_wall_ns=epoch_ns,
        epoch_wall_ns=epoch_ns,
        notes=tuple(_dump_notes(ranks, groups.values(), damaged)),
        ranks=tuple(_rank_of_dump(one, ranks[0]) for one in ranks),
        collectives=tuple(row for one in ranks for row in _of_dump(one, groups, overwritten[one.rank], epoch_ns)),
        groups=tuple(groups.values()),
        recorder="flight recorder",
    )
