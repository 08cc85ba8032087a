"""Every variable of the environment, once: its name, type, default and text.

The documentation and `netbottleneck env` are made from this table. Precedence: an argument, ours, Horovod's, the
default.
"""

import difflib
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from netbottleneck.values import (
    ADDRESS,
    ALGORITHM,
    BOOLEAN,
    BYTES,
    CPUS,
    LEVEL,
    PORT_RANGE,
    RANK,
    RANKS,
    SECRET,
    SECRET_FILE,
    SHARING,
    STREAMS,
    TEXT,
    TRANSPORT_LIST,
    Kind,
    horovod_boolean,
    seconds,
    secret_file,
    whole,
)

PREFIX = "NETBOTTLENECK"


@dataclass(frozen=True)
class Variable:
    """One row: `instead` are other programs' variables that count where ours is unset, each with its parser."""

    name: str
    kind: Kind
    text: str
    instead: tuple[tuple[str, Callable[[str], Any]], ...] = ()


def _row(name: str, kind: Kind, default: Any, text: str, *instead: tuple[str, Callable[[str], Any]]) -> Any:
    full = f"{PREFIX}_{name}" if name else PREFIX
    return field(default=default, repr=kind is not SECRET, metadata={"variable": Variable(full, kind, text, instead)})


def _stall_off(text: str) -> float | None:
    return 0.0 if horovod_boolean(text) else None


@dataclass(frozen=True)
class Settings:
    """What is in force. Each field is one variable; `sources` says where each value that is no default came from."""

    on: bool = _row("", BOOLEAN, False, "1: measure from import on")
    transports: tuple[str, ...] = _row(
        "TRANSPORT",
        TRANSPORT_LIST,
        ("stock",),
        "what moves the gradients; a list takes turns by blocks of steps; bare: the script's own path, nothing stamped",
    )
    strict: bool = _row("STRICT", BOOLEAN, False, "1: what cannot be measured or moved is an error, not left alone")
    streams: int = _row("STREAMS", STREAMS, 0, "parallel lanes to each peer")
    shm: str = _row("SHM", SHARING, "auto", "memory shared between ranks of one host; 1: an error where they cannot")
    algorithm: str = _row("ALGORITHM", ALGORITHM, "auto", "of all-reduces on the network; auto: what costs least here")
    provider: str | None = _row("PROVIDER", TEXT, None, "libfabric provider; default: the best there is")
    ifname: str | None = _row(
        "IFNAME",
        TEXT,
        None,
        "interfaces, in NCCL_SOCKET_IFNAME's syntax: eth0, =eth0, ^lo,docker",
        ("HOROVOD_GLOO_IFACE", lambda text: f"={text}" if text else None),
    )
    affinity: tuple[int, ...] = _row(
        "AFFINITY",
        CPUS,
        (),
        "CPU of the communication thread, one for each rank of a host; default: the system chooses",
        ("HOROVOD_THREAD_AFFINITY", CPUS.parse),
    )
    congestion: str | None = _row("CONGESTION", TEXT, None, "tcp's congestion control; default: the host's (lo: reno)")
    ports: tuple[int, int] = _row("PORTS", PORT_RANGE, (0, 0), "ports to listen on; default: the system chooses")
    segment_bytes: int = _row("SEGMENT_BYTES", BYTES, 0, "bytes a lane takes at a time; 0: chosen by the engine")
    direct_bytes: int = _row(
        "DIRECT_BYTES", BYTES, 256 << 10, "a gradient from this size on travels from where autograd put it"
    )
    timeout_s: float = _row(
        "TIMEOUT_S",
        seconds(0.1),
        30.0,
        "how long a peer may be silent before it counts as lost",
        ("HOROVOD_GLOO_TIMEOUT_SECONDS", seconds(0.1).parse),
    )
    start_timeout_s: float = _row("START_TIMEOUT_S", seconds(0.1), 300.0, "how long the first rank waits for the last")
    stall_s: float = _row(
        "STALL_S",
        seconds(0),
        60.0,
        "after which a rank that has not submitted is named; 0: never",
        ("HOROVOD_STALL_CHECK_DISABLE", _stall_off),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", seconds(0).parse),
    )
    stall_end_s: float = _row(
        "STALL_END_S",
        seconds(0),
        0.0,
        "after which such a rank ends the job; 0, or less than STALL_S: never",
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", seconds(0).parse),
    )
    dynamic_process_sets: bool = _row(
        "DYNAMIC_PROCESS_SETS",
        BOOLEAN,
        False,
        "1: process sets may be added and removed after init()",
        ("HOROVOD_DYNAMIC_PROCESS_SETS", horovod_boolean),
    )
    start_step: int = _row("START_STEP", whole(0), 10, "the first step that counts")
    end_step: int = _row("END_STEP", whole(0), 0, "the first step that counts no more; 0: to the end")
    block_steps: int = _row("BLOCK_STEPS", whole(1), 10, "steps of a block where TRANSPORT is a list")
    sample_every: int = _row("SAMPLE_EVERY", whole(0), 20, "one step in so many has forward times by module; 0: none")
    monitor_hz: int = _row("MONITOR_HZ", whole(0, 1000), 0, "how often a second a host's counters are read; 0: never")
    trace_events: int = _row("TRACE_EVENTS", whole(1), 1 << 20, "events a rank may record; what comes after is counted")
    directory: str | None = _row(
        "DIR", TEXT, None, "the run folder, or the first free of DIR/2, DIR/3, …; default: netbottleneck-<job or time>"
    )
    timeline: str | None = _row(
        "TIMELINE",
        TEXT,
        None,
        "the file of Horovod's timeline: rank 0's; %r in it, or put before its suffix, is the rank; DYNAMIC: "
        "hvd.start_timeline() says which",
        ("HOROVOD_TIMELINE", str),
    )
    timeline_mark_cycles: bool = _row(
        "TIMELINE_MARK_CYCLES",
        BOOLEAN,
        False,
        "1: the timeline has a mark where rank 0 gives the word for new operations",
        ("HOROVOD_TIMELINE_MARK_CYCLES", horovod_boolean),
    )
    log_level: str = _row("LOG_LEVEL", LEVEL, "warning", "least level that is told", ("HOROVOD_LOG_LEVEL", LEVEL.parse))
    log_file: str | None = _row(
        "LOG_FILE",
        TEXT,
        None,
        "where it is told: %h host, %p process, %r rank; default: stderr, or the program's logging",
    )
    library: str | None = _row("LIBFABRIC", TEXT, None, "path of libfabric; default: as the loader finds it")
    host_id: str | None = _row("HOST_ID", TEXT, None, "ranks with the same text share a host; default: by the kernel")
    rank: int | None = _row("RANK", RANK, None, "this process's rank, instead of the launcher's")
    ranks: int | None = _row("SIZE", RANKS, None, "number of ranks, instead of the launcher's")
    master: str | None = _row("MASTER", ADDRESS, None, "where rank 0 listens; with SECRET, no other meeting point")
    rendezvous: str | None = _row("RENDEZVOUS", TEXT, None, "a folder all ranks can write, to meet in")
    secret: bytes | None = _row("SECRET", SECRET, None, "what a process must know to join; default: drawn by rank 0")
    secret_file: str | None = _row(
        "SECRET_FILE", SECRET_FILE, None, "a file that holds the secret, where SECRET is not set"
    )
    insecure: bool = _row(
        "INSECURE", BOOLEAN, False, "1: the network is trusted: no secret where none can be shared, and no warning"
    )
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def enabled(self) -> bool:
        """True when the environment asks for anything to be done: NETBOTTLENECK=1, or any transport named."""
        return self.on or "transports" in self.sources

    @property
    def observes(self) -> bool:
        """True when gradients travel by the user's own path alone."""
        return set(self.transports) <= {"stock", "bare"}

    @property
    def arms(self) -> tuple[str, ...]:
        """The transports that take turns where the user's own path can be left untouched: observing includes that."""
        return ("stock", "bare") if self.transports == ("stock",) else self.transports

    @property
    def stall_limit_s(self) -> float:
        """After which time a rank that has not submitted ends the job: never, 0, where nobody would be told before."""
        return self.stall_end_s if 0 < self.stall_s <= self.stall_end_s else 0.0

    def tag(self, version: str) -> str:
        """Return what all ranks must agree on, in words that can be shown beside another rank's."""
        agreed = {
            "version": version,
            "transport": ",".join(self.transports),
            "streams": self.streams or "auto",
            "provider": self.provider or "auto",
            "segment_bytes": self.segment_bytes,
            "algorithm": self.algorithm,
            "block_steps": self.block_steps,
            "steps": f"{self.start_step}-{self.end_step or 'end'}",
        }
        return " ".join(f"{key}={value}" for key, value in agreed.items())


def _variables() -> list[tuple[Field[Any], Variable]]:
    return [(row, row.metadata["variable"]) for row in fields(Settings) if "variable" in row.metadata]


def settings(overrides: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Return what is in force.

    overrides: arguments by field name (`streams`, `transports`, …), as text or as the field's own type; None values
    count as not given. An empty variable counts as unset. Raises ValueError that names the variable, its value and
    what is allowed, also where SECRET_FILE cannot be read, or others can read it;
    warns of names that begin with NETBOTTLENECK and mean nothing.
    """
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    rows = _variables()
    unknown = sorted(set(given) - {row.name for row, _ in rows})
    if unknown:
        raise TypeError(f"no such setting: {', '.join(unknown)}")
    _warn_unknown({variable.name for _, variable in rows}, environ)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for row, variable in rows:
        found = _argument(row.name, variable, given) or _from_environment(variable, environ)
        if found is not None:
            values[row.name], sources[row.name] = found
    if values.get("secret") is None and values.get("secret_file") is not None:
        values["secret"], sources["secret"] = _secret_from(values["secret_file"]), f"{PREFIX}_SECRET_FILE"
    chosen = Settings(**values, sources=sources)
    if chosen.end_step and chosen.end_step <= chosen.start_step:
        raise ValueError(
            f"{PREFIX}_END_STEP={chosen.end_step} must be greater than {PREFIX}_START_STEP={chosen.start_step}, or 0"
        )
    return chosen


def _argument(name: str, variable: Variable, given: Mapping[str, Any]) -> tuple[Any, str] | None:
    if name not in given:
        return None
    value = given[name]
    if isinstance(value, bytes):
        value = value.hex()
    text = value if isinstance(value, str) else _show(value, variable.kind)
    return _parse(name, text, variable.kind.parse, variable), "argument"


def _from_environment(variable: Variable, environ: Mapping[str, str]) -> tuple[Any, str] | None:
    text = environ.get(variable.name, "")
    if text:
        return _parse(variable.name, text, variable.kind.parse, variable), variable.name
    for name, parse in variable.instead:
        text = environ.get(name, "")
        value = _parse(name, text, parse, variable) if text else None
        if value is not None:
            return value, name
    return None


def _parse(name: str, text: str, parse: Callable[[str], Any], variable: Variable) -> Any:
    try:
        return parse(text)
    except ValueError:
        shown = "(redacted)" if variable.kind is SECRET else text
        raise ValueError(f"{name}={shown}: must be {variable.kind.allowed}") from None


def _secret_from(path: str) -> bytes:
    try:
        return secret_file(path)
    except ValueError as error:
        raise ValueError(f"{PREFIX}_SECRET_FILE={path}: {error}") from None


def _warn_unknown(known: set[str], environ: Mapping[str, str]) -> None:
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in known:
            continue
        near = difflib.get_close_matches(name, sorted(known), 1, 0.6)
        hint = f"; did you mean {near[0]}?" if near else "; see `netbottleneck env`"
        warnings.warn(f"{name} is not a variable of netbottleneck{hint}", stacklevel=3)


def _show(value: Any, kind: Kind) -> str:
    if value is None:
        return ""
    if kind is SECRET:
        return "(redacted)"
    if kind is STREAMS:
        return str(value or "auto")
    if kind is PORT_RANGE:
        return f"{value[0]}-{value[1]}" if any(value) else ""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Row:
    """One line of `netbottleneck env`: all text; source is a variable's name, "argument" or "default"."""

    name: str
    value: str
    default: str
    source: str
    text: str
    allowed: str
    instead: tuple[str, ...]


def describe(chosen: Settings | None = None, environ: Mapping[str, str] = os.environ) -> list[Row]:
    """Return every variable with its value (secrets redacted), default, source and text."""
    chosen = settings(environ=environ) if chosen is None else chosen
    rows = []
    for row, variable in _variables():
        rows.append(
            Row(
                variable.name,
                _show(getattr(chosen, row.name), variable.kind),
                _show(row.default, variable.kind),
                chosen.sources.get(row.name, "default"),
                variable.text,
                variable.kind.allowed,
                tuple(name for name, _ in variable.instead),
            )
        )
    return rows
