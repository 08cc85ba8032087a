"""Table of all environment variables: name, type, default and text; and the parsers of their values.

The documentation and `netbottleneck env` are made from this table. Precedence: an argument, our variable, Horovod's
variable, the default.
"""

import difflib
import logging
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from fractions import Fraction
from typing import Any

from netbottleneck.trace.transports import AUTO, BARE, SELECTABLE, STOCK, Arm, arm_of

logger = logging.getLogger("netbottleneck")

ALGORITHMS = ("auto", "ring", "recursive_doubling", "halving_doubling", "two_level")
LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
ALWAYS, UNTIL_KNOWN = "always", "until_known"
_SECRET_FILE_BYTES = 4096
SIZES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


@dataclass(frozen=True)
class Kind:
    """A type of value: `parse` converts text to it or raises ValueError; `allowed` describes valid text."""

    parse: Callable[[str], Any]
    allowed: str


def boolean(text: str) -> bool:
    """Return True if a switch is on."""
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


def horovod_boolean(text: str) -> bool:
    """Horovod's boolean: a number above 0 is True. "true" is not a number, so it is False."""
    number = re.match(r"\s*[+-]?\d+", text)
    return number is not None and int(number.group()) > 0


def size(text: str) -> int:
    """Return bytes. K, M, G are powers of 1000 and Ki, Mi, Gi of 1024; an optional B may follow."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?)?B?", text)
    if match is None:
        raise ValueError(text)
    value = Fraction(match.group(1)) * SIZES[match.group(2) or ""]
    if value.denominator != 1:
        raise ValueError(text)
    return int(value)


def _decimal(text: str) -> str:
    """Return text that the NCCL plugins read as the same number: decimal, without underscores between digits."""
    if re.fullmatch(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", text, re.ASCII | re.IGNORECASE) is None:
        raise ValueError(text)
    return text


def integer(low: int, high: int | None = None) -> Kind:
    """An integer in [low, high]."""

    def parse(text: str) -> int:
        value = int(_decimal(text))
        if value < low or (high is not None and value > high):
            raise ValueError(text)
        return value

    return Kind(parse, f"a whole number, {low} to {high}" if high is not None else f"a whole number, at least {low}")


MOST = 2**31 - 1  # the core counts steps and events in 32 bits
MOST_S = 2_147_483  # the engine counts milliseconds in 32 bits
MOST_GBPS = 1e6
MOST_BYTES = 2**63 - 1  # the core counts bytes in 63 bits
SEGMENT_BYTES = (16 << 10, 2 << 20)  # of the core


def sizes(low: int, high: int, example: str) -> Kind:
    """A number of bytes in [low, high], or 0. Above 0, low is at least 1."""

    def parse(text: str) -> int:
        value = size(text)
        if value and not low <= value <= high:
            raise ValueError(text)
        return value

    at_least = f"0, or {low} to {high}" if low > 1 else f"at most {high}"
    return Kind(parse, f"bytes, {at_least}, such as {example} (M is 10^6, Mi is 2^20)")


def seconds(low: float) -> Kind:
    """A number of seconds in [low, MOST_S]."""

    def parse(text: str) -> float:
        value = float(_decimal(text))
        if not low <= value <= MOST_S:
            raise ValueError(text)
        return value

    return Kind(parse, f"seconds, {low:g} to {MOST_S}")


def rate(text: str) -> float:
    """Return a rate above zero, in Gbit/s."""
    value = float(text)
    if not 0 < value <= MOST_GBPS:
        raise ValueError(text)
    return value


def fusion_threshold(text: str) -> int:
    """Return the largest bucket that a value of HOROVOD_FUSION_THRESHOLD allows; 0 there: each gradient alone."""
    value: int = integer(0, MOST_BYTES).parse(text)
    return max(1, value)


def transports(text: str) -> tuple[Arm, ...]:
    """Return the arms of a comma-separated list of names, or AUTO."""
    if text.strip() == AUTO:
        return (AUTO,)
    arms = tuple(arm_of(name.strip()) for name in text.split(","))
    if len(set(arms)) != len(arms):
        raise ValueError(text)
    return arms


def streams(text: str) -> int:
    """Return the number of lanes, 0 for auto."""
    return 0 if text == "auto" else int(integer(1, 64).parse(text))


def ports(text: str) -> tuple[int, int]:
    """Return the first and the last port of a range."""
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    low, high = (int(match.group(1)), int(match.group(2))) if match else (1, 0)
    if not 1 <= low <= high <= 65535:
        raise ValueError(text)
    return low, high


def address(text: str) -> str:
    """Return HOST:PORT unchanged if it is valid."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError(text)
    return text


def secret(text: str) -> bytes:
    """Return the secret's bytes: an even number of hex digits is decoded, any other text is used as it is."""
    if re.fullmatch(r"(?:[0-9a-fA-F]{2}){16,}", text):
        return bytes.fromhex(text)
    if not 16 <= len(text.encode()) <= 128:
        raise ValueError(text)
    return text.encode()


def secret_file(path: str) -> bytes:
    """Return the secret in a regular file, without surrounding white space.

    The permissions must be those of a private key file: owned by this user with no access for others (mode 0600 or
    less), or owned by root and at most group-readable (0640 or less). Raises ValueError with the reason, never with the
    content.
    """
    try:
        # Non-blocking, so that a pipe without a writer is refused and does not hang.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("not a regular file")
            if status.st_uid not in (0, os.geteuid()):
                raise ValueError(f"it belongs to user {status.st_uid}: only this user's files and root's are read")
            if status.st_mode & (0o037 if status.st_uid == 0 else 0o077):
                mode = stat.S_IMODE(status.st_mode)
                raise ValueError(f"others have access to it (mode {mode:04o}): set its mode to 0600")
            content = file.read(_SECRET_FILE_BYTES)
    except OSError as error:
        raise ValueError(error.strerror) from None
    try:
        return secret(content.decode().strip())
    except ValueError:
        raise ValueError(f"it must hold {SECRET.allowed}") from None


def level(text: str) -> str:
    """Return a log level in lower case."""
    if text.lower() not in LEVELS:
        raise ValueError(text)
    return text.lower()


def algorithm(text: str) -> str:
    """Return the name of an all-reduce algorithm, or auto."""
    if text not in ALGORITHMS:
        raise ValueError(text)
    return text


def sharing(text: str) -> str:
    """Return the shared-memory mode: auto, 0 or 1."""
    if text not in ("auto", "0", "1"):
        raise ValueError(text)
    return text


def alternation(text: str) -> str:
    """Return how long transports alternate: always, or until_known."""
    if text not in (ALWAYS, UNTIL_KNOWN):
        raise ValueError(text)
    return text


def events(text: str) -> str:
    """Return 0, 1, or the path of a file: a name that has a folder, or ends in .ring."""
    if text not in ("0", "1") and "/" not in text and not text.endswith(".ring"):
        raise ValueError(text)
    return text


def cpus(text: str) -> tuple[int, ...]:
    """Return the CPUs of a list such as 2,3."""
    return tuple(CPU.parse(part) for part in text.split(","))


BOOLEAN = Kind(boolean, "0 or 1")
HOROVOD_BOOLEAN = Kind(horovod_boolean, "a whole number; above 0: on")
TEXT = Kind(str, "text")
GBPS = Kind(rate, f"Gbit/s, above 0, at most {MOST_GBPS:.0f}")
BYTES = sizes(1, MOST_BYTES, "65536, 256Ki, 1M or 64Mi")
SEGMENT = sizes(*SEGMENT_BYTES, "65536, 256Ki or 1M")
FUSION = Kind(fusion_threshold, f"a whole number of bytes without a unit, as Horovod reads it, 0 to {MOST_BYTES}")
GATHER = sizes(1, MOST, "65536, 256Ki or 1M")
TRANSPORT_LIST = Kind(transports, f"auto, one of {', '.join(SELECTABLE)}, or a list of these without repetition")
ALGORITHM = Kind(algorithm, f"one of {', '.join(ALGORITHMS)}")
SHARING = Kind(sharing, "auto, 0 or 1")
EVENTS = Kind(events, "1, 0, or a path, such as /tmp/nccl-%h-%p.ring")
ALTERNATION = Kind(alternation, f"{ALWAYS} or {UNTIL_KNOWN}")
STREAMS = Kind(streams, "auto, or a number from 1 to 64")
PORT_RANGE = Kind(ports, "LOW-HIGH, two ports from 1 to 65535")
ADDRESS = Kind(address, "HOST:PORT")
SECRET = Kind(secret, "text of 16 to 128 bytes, or at least 32 hex digits")
SECRET_FILE = Kind(str, "path of a file with mode 0600, whose content is valid for NETBOTTLENECK_SECRET")
LEVEL = Kind(level, f"one of {', '.join(LEVELS)}")
CPU = integer(0, 1023)
CPUS = Kind(cpus, "numbers of CPUs, such as 2,3")
RANKS_MAX = 10_000_000  # of a job: what a trace can hold
RANK = integer(0, RANKS_MAX - 1)
RANKS = integer(1, RANKS_MAX)


PREFIX = "NETBOTTLENECK"
ARGUMENT = "argument"  # source of a setting

# Variables of Horovod that are set by its launcher: places, and how its own ranks meet.
HOROVOD = "HOROVOD_"
_LAUNCHER = {f"{HOROVOD}{scope}{what}" for scope in ("", "LOCAL_", "CROSS_") for what in ("RANK", "SIZE")} | {
    "HOROVOD_HOSTNAME",
    "HOROVOD_CONTROLLER",
    "HOROVOD_CPU_OPERATIONS",
    "HOROVOD_ELASTIC",
    "HOROVOD_ELASTIC_TIMEOUT",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
}
# Variables of Horovod that change how it works inside, and what to say of each.
_NOT_OURS = "operations start when all ranks have submitted them, without cycles"
_TUNED = "streams and algorithms are chosen by measured costs"
WITHOUT_EFFECT: Mapping[str, str] = {
    "HOROVOD_CYCLE_TIME": _NOT_OURS,
    "HOROVOD_CACHE_CAPACITY": "negotiation has no cache of responses",
    "HOROVOD_DISABLE_GROUP_FUSION": "groups are not fused",
    "HOROVOD_AUTOTUNE": _TUNED,
    "HOROVOD_AUTOTUNE_LOG": _TUNED,
    "HOROVOD_HIERARCHICAL_ALLREDUCE": f"{_TUNED}; NETBOTTLENECK_ALGORITHM=two_level asks for two levels",
    "HOROVOD_HIERARCHICAL_ALLGATHER": _TUNED,
    "HOROVOD_TORUS_ALLREDUCE": _TUNED,
    "HOROVOD_NUM_NCCL_STREAMS": "NETBOTTLENECK_STREAMS has the number of parallel lanes",
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE": "Adasum does not go through MPI",
    "HOROVOD_COMPRESSION": "the argument compression of DistributedOptimizer sets it",
}


CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def shares_a_queue(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if all streams of a GPU share one hardware queue: a stream that waits then delays the others."""
    return environ.get(CONNECTIONS, "").strip() == "1"


def without_effect(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return lines that name each variable of Horovod that is set, and that this package does not follow.

    One line for each of which it says why, and one with the names of all others, whose values may be secret.
    """
    followed = {name for _, variable in _variables() for name, _ in variable.fallbacks} | _LAUNCHER
    found = [name for name in sorted(environ) if name.startswith(HOROVOD) and environ[name] and name not in followed]
    lines = [
        f"{name}={environ[name]} has no effect here: {WITHOUT_EFFECT[name]}" for name in found if name in WITHOUT_EFFECT
    ]
    others = [name for name in found if name not in WITHOUT_EFFECT]
    return [*lines, f"set, but without effect here: {', '.join(others)}"] if others else lines


@dataclass(frozen=True)
class Variable:
    """One row. `fallbacks`: other programs' variables that apply if ours is unset, each with its kind of value.

    argument: the name of the same setting as an argument; "": the name of the field.
    """

    name: str
    kind: Kind
    text: str
    fallbacks: tuple[tuple[str, Kind], ...] = ()
    argument: str = ""


def _row(name: str, kind: Kind, default: Any, text: str, *fallbacks: tuple[str, Kind], argument: str = "") -> Any:
    variable = Variable(f"{PREFIX}_{name}" if name else PREFIX, kind, text, fallbacks, argument)
    return field(default=default, repr=kind is not SECRET, metadata={"variable": variable})


def _stall_off(text: str) -> float | None:
    return 0.0 if horovod_boolean(text) else None


@dataclass(frozen=True)
class Settings:
    """Settings in force. Each field is one variable; `sources` names the source of each non-default value."""

    on: bool = _row("", BOOLEAN, False, "1: measure from import on; 0: do not, even if TRANSPORT is set")
    transports: tuple[Arm, ...] = _row(
        "TRANSPORT",
        TRANSPORT_LIST,
        (STOCK,),
        "transport of the gradients; the arms of a list alternate by blocks of steps; bare: the untouched script; "
        "auto: stock and ours take turns in short blocks of steps, then the fastest stays",
        argument="transport",
    )
    strict: bool = _row("STRICT", BOOLEAN, False, "1: raise an error for training that would be left alone")
    streams: int = _row("STREAMS", STREAMS, 0, "parallel lanes to each peer")
    shm: str = _row("SHM", SHARING, "auto", "shared memory between ranks of one host; 1: fail if it is not available")
    algorithm: str = _row(
        "ALGORITHM", ALGORITHM, "auto", "algorithm of network all-reduces; auto: the one of least cost"
    )
    provider: str | None = _row("PROVIDER", TEXT, None, "libfabric provider; default: the best available one")
    ifname: str | None = _row(
        "IFNAME",
        TEXT,
        None,
        "interfaces, in NCCL_SOCKET_IFNAME's syntax: eth0, =eth0, ^lo,docker",
        ("HOROVOD_GLOO_IFACE", Kind(lambda text: f"={text}", "the name of an interface")),
    )
    affinity: tuple[int, ...] = _row(
        "AFFINITY",
        CPUS,
        (),
        "CPUs of the communication threads, one for each local rank; default: the kernel chooses",
        ("HOROVOD_THREAD_AFFINITY", CPUS),
    )
    congestion: str | None = _row("CONGESTION", TEXT, None, "tcp's congestion control; default: the host's (lo: reno)")
    ports: tuple[int, int] = _row("PORTS", PORT_RANGE, (0, 0), "ports to listen on; default: the kernel chooses")
    segment_bytes: int = _row("SEGMENT_BYTES", SEGMENT, 0, "size of a segment; 0: the engine chooses")
    bucket_bytes: int = _row(
        "BUCKET_BYTES",
        BYTES,
        0,
        "largest bucket of `DistributedOptimizer` and of `netbottleneck.profile` without DDP; 0: 1 MiB for the first "
        "one, 25 MiB for the others. DDP's buckets are DDP's",
        ("HOROVOD_FUSION_THRESHOLD", FUSION),
    )
    direct_bytes: int = _row(
        "DIRECT_BYTES",
        BYTES,
        256 << 10,
        "gradients of at least this size are reduced in place, not copied into a bucket",
    )
    timeout_s: float = _row(
        "TIMEOUT_S",
        seconds(0.1),
        30.0,
        "deadline: seconds of silence after which a peer counts as lost. If it is not set, a DDP model has the timeout "
        "of its process group, 30 minutes over gloo",
        ("HOROVOD_GLOO_TIMEOUT_SECONDS", seconds(0.1)),
    )
    start_timeout_s: float = _row("START_TIMEOUT_S", seconds(0.1), 300.0, "deadline for all ranks to join the job")
    stall_s: float = _row(
        "STALL_S",
        seconds(0),
        60.0,
        "seconds after which the log names ranks that have not submitted an operation; 0: never",
        ("HOROVOD_STALL_CHECK_DISABLE", Kind(_stall_off, HOROVOD_BOOLEAN.allowed)),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", seconds(0)),
    )
    stall_end_s: float = _row(
        "STALL_END_S",
        seconds(0),
        0.0,
        "seconds after which such a stall ends the job; 0, or less than STALL_S: never",
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", seconds(0)),
    )
    dynamic_process_sets: bool = _row(
        "DYNAMIC_PROCESS_SETS",
        BOOLEAN,
        False,
        "1: process sets may be added and removed after init()",
        ("HOROVOD_DYNAMIC_PROCESS_SETS", HOROVOD_BOOLEAN),
    )
    start_step: int = _row("START_STEP", integer(0, MOST), 10, "first step that is recorded")
    end_step: int = _row("END_STEP", integer(0, MOST), 0, "stop recording before this step; 0: never")
    # Nine has no factor in common with the usual periods of a script's work: 5, 8, 10, 20, 50, 64, 100 steps.
    block_steps: int = _row("BLOCK_STEPS", integer(1, MOST), 9, "steps in a block, if TRANSPORT is a list; auto: 5")
    alternate: str = _row(
        "ALTERNATE",
        ALTERNATION,
        ALWAYS,
        "how long the arms of a list alternate; until_known: until the differences from the first are known, then the "
        "first alone (not if all are stock or bare)",
    )
    sample_every: int = _row(
        "SAMPLE_EVERY", integer(0, MOST), 20, "record forward times by module in one of N steps; 0: never"
    )
    link_gbps: float | None = _row(
        "LINK_GBPS",
        GBPS,
        None,
        "rate of each host's link, one way, read by the ranks of a run; without effect if all are on one host; "
        "default: what the interface states",
    )
    monitor_hz: int = _row("MONITOR_HZ", integer(0, 1000), 2, "samples of a host's counters per second; 0: none")
    progress_s: float = _row(
        "PROGRESS_S",
        seconds(0),
        10.0,
        "seconds between two lines of rank 0 about the run so far: on a terminal all, in a log every sixth, at level "
        "info; 0: none. Without a terminal and without this level, nothing unless it is set",
    )
    trace_events: int = _row(
        "TRACE_EVENTS", integer(1, MOST), 1 << 20, "events in a ring file; of more, the first and the last"
    )
    nccl_events: str | None = _row(
        "NCCL_EVENTS",
        EVENTS,
        None,
        "1: record NCCL's events with its profiler plugin; where no script imports netbottleneck, the file for them "
        "(%h: host, %p: process)",
    )
    nccl_profiler: str | None = _row(
        "NCCL_PROFILER", TEXT, None, "another profiler plugin, which gets NCCL's events too, as in NCCL_PROFILER_PLUGIN"
    )
    directory: str | None = _row(
        "DIR",
        TEXT,
        None,
        "run folder; if in use, the first free of DIR/2, DIR/3, …; default: netbottleneck-<job or time>",
    )
    timeline: str | None = _row(
        "TIMELINE",
        TEXT,
        None,
        "file of Horovod's timeline; %r is the rank; without %r, ranks above 0 insert theirs before the suffix; "
        "DYNAMIC: hvd.start_timeline() names the file",
        ("HOROVOD_TIMELINE", TEXT),
    )
    timeline_mark_cycles: bool = _row(
        "TIMELINE_MARK_CYCLES",
        BOOLEAN,
        False,
        "1: mark negotiation cycles in the timeline",
        ("HOROVOD_TIMELINE_MARK_CYCLES", HOROVOD_BOOLEAN),
    )
    log_level: str = _row("LOG_LEVEL", LEVEL, "warning", "lowest level to log", ("HOROVOD_LOG_LEVEL", LEVEL))
    log_file: str | None = _row(
        "LOG_FILE",
        TEXT,
        None,
        "log file; %h: host, %p: process, %r: rank; default: stderr, or the program's log handlers",
    )
    library: str | None = _row("LIBFABRIC", TEXT, None, "path of libfabric; default: the loader's search path")
    cuda_library: str | None = _row(
        "CUDA_LIBRARY",
        TEXT,
        None,
        "path of a CUDA driver in place of libcuda.so.1; PrivateUse1 devices are its devices",
    )
    cuda_gather_bytes: int = _row(
        "CUDA_GATHER_BYTES",
        GATHER,
        0,
        "size up to which a kernel copies the tensors of a grouped operation from and to a GPU together; "
        "0: the copy engine copies each",
    )
    host_id: str | None = _row(
        "HOST_ID", TEXT, None, "name of the host, the same for all its ranks; default: the kernel's"
    )
    rank: int | None = _row("RANK", RANK, None, "this process's rank, instead of the launcher's")
    ranks: int | None = _row("SIZE", RANKS, None, "number of ranks, instead of the launcher's")
    master: str | None = _row("MASTER", ADDRESS, None, "address of rank 0; with SECRET, no rendezvous is needed")
    rendezvous: str | None = _row("RENDEZVOUS", TEXT, None, "rendezvous folder that all ranks can write")
    secret: bytes | None = _row("SECRET", SECRET, None, "secret of the job; default: rank 0 draws one")
    secret_file: str | None = _row("SECRET_FILE", SECRET_FILE, None, "file that holds the secret, if SECRET is not set")
    insecure: bool = _row(
        "INSECURE",
        BOOLEAN,
        False,
        "1: trust the network: run without a secret if none can be shared, without a warning",
    )
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def enabled(self) -> bool:
        """True if the environment enables the package: NETBOTTLENECK=1, or any transport without NETBOTTLENECK=0."""
        return self.on or ("transports" in self.sources and not self.off)

    @property
    def off(self) -> bool:
        """True if the environment switches the package off: NETBOTTLENECK=0."""
        return not self.on and "on" in self.sources

    @property
    def observes(self) -> bool:
        """True when gradients travel by the user's own path alone."""
        return all(arm.own_path for arm in self.transports)

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The arms that take turns. When observing, they include the user's own untouched path."""
        return (STOCK, BARE) if self.transports == (STOCK,) else self.transports

    @property
    def stall_limit_s(self) -> float:
        """Seconds after which a stalled rank ends the job; 0 (never) if stalls are not reported before that."""
        return self.stall_end_s if 0 < self.stall_s <= self.stall_end_s else 0.0

    def source_of(self, name: str) -> str:
        """Return the name of the argument or of the variable that set a field, or else of the variable that would."""
        variable = next(variable for row, variable in _variables() if row.name == name)
        source = self.sources.get(name, variable.name)
        return (variable.argument or name) if source == ARGUMENT else source

    def with_secret(self) -> "Settings":
        """Return the settings of a job that starts, whose secret is that in SECRET_FILE if SECRET is not set.

        Raises ValueError naming the variable if the file cannot be read or is accessible to others.
        """
        if self.secret is not None or self.secret_file is None:
            return self
        name = f"{PREFIX}_SECRET_FILE"
        try:
            found = secret_file(self.secret_file)
        except ValueError as error:
            raise ValueError(f"{name}={self.secret_file}: {error}") from None
        return replace(self, secret=found, sources={**self.sources, "secret": name})

    def tag(self, version: str) -> str:
        """Return the settings that all ranks must share, as text that can be shown beside another rank's."""
        agreed = {
            "version": version,
            "transport": ",".join(self.transports),
            "streams": self.streams or "auto",
            "provider": self.provider or "auto",
            "segment_bytes": self.segment_bytes,
            "algorithm": self.algorithm,
            "bucket_bytes": self.bucket_bytes or "auto",
            "block_steps": self.block_steps,
            "alternate": self.alternate,
            "steps": f"{self.start_step}-{self.end_step or 'end'}",
        }
        return " ".join(f"{key}={value}" for key, value in agreed.items())


def _variables() -> list[tuple[Field[Any], Variable]]:
    return [(row, row.metadata["variable"]) for row in fields(Settings) if "variable" in row.metadata]


def settings(overrides: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings in force.

    overrides: arguments by field name (`streams`, `transports`, …), as text or as the field's own type, and with the
    values that the variable may have; None values count as not given. An empty variable counts as unset. Raises
    ValueError naming the variable, its value and the allowed values. SECRET_FILE is not read yet: see
    Settings.with_secret. Logs a warning, once in a process, for each unknown name that begins with NETBOTTLENECK.
    """
    arguments = {key: value for key, value in (overrides or {}).items() if value is not None}
    rows = _variables()
    unknown = sorted(set(arguments) - {row.name for row, _ in rows})
    if unknown:
        raise TypeError(f"no such setting: {', '.join(unknown)}")
    _warn_unknown({variable.name for _, variable in rows}, environ)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for row, variable in rows:
        setting = _argument(row.name, variable, arguments) or _from_environment(variable, environ)
        if setting is not None:
            values[row.name], sources[row.name] = setting
    chosen = Settings(**values, sources=sources)
    if chosen.end_step and chosen.end_step <= chosen.start_step:
        raise ValueError(
            f"{PREFIX}_END_STEP={chosen.end_step} must be greater than {PREFIX}_START_STEP={chosen.start_step}, or 0"
        )
    return chosen


def _argument(name: str, variable: Variable, arguments: Mapping[str, Any]) -> tuple[Any, str] | None:
    if name not in arguments:
        return None
    value = arguments[name]
    if isinstance(value, bytes):
        value = value.hex()
    elif type(value) is int:  # 0 streams are as wrong here as in the variable, though 0 stands for auto in Settings
        value = str(value)
    text = value if isinstance(value, str) else _show(value, variable.kind)
    return _parse(variable.argument or name, text, variable.kind), ARGUMENT


def _from_environment(variable: Variable, environ: Mapping[str, str]) -> tuple[Any, str] | None:
    text = environ.get(variable.name, "")
    if text:
        return _parse(variable.name, text, variable.kind), variable.name
    for name, kind in variable.fallbacks:
        text = environ.get(name, "")
        value = _parse(name, text, kind) if text else None
        if value is not None:
            return value, name
    return None


def _parse(name: str, text: str, kind: Kind) -> Any:
    try:
        return kind.parse(text)
    except ValueError:
        shown = "(redacted)" if kind is SECRET else text
        raise ValueError(f"{name}={shown}: must be {kind.allowed}") from None


_warned: set[str] = set()  # unknown names, each of which is logged once in a process


def _warn_unknown(known: set[str], environ: Mapping[str, str]) -> None:
    """Log the unknown names. No Python warning: `-W error` would make it an exception of the script's import."""
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in known or name in _warned:
            continue
        _warned.add(name)
        near = difflib.get_close_matches(name, sorted(known), 1, 0.6)
        hint = f"; did you mean {near[0]}?" if near else "; see `netbottleneck env`"
        logger.warning("%s is not a variable of netbottleneck%s", name, hint)


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
                tuple(name for name, _ in variable.fallbacks),
            )
        )
    return rows
