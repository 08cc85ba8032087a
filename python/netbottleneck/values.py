"""Text to values: how the environment and the command line spell sizes, lists, ranges and switches."""

import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TRANSPORTS = ("stock", "tcp", "ofi", "null", "bare")
ALGORITHMS = ("auto", "ring", "recursive_doubling", "halving_doubling", "two_level")
LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
_SECRET_FILE_BYTES = 4096
SIZES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


@dataclass(frozen=True)
class Kind:
    """A type of value: `parse` turns text into it or raises ValueError; `allowed` says what it takes."""

    parse: Callable[[str], Any]
    allowed: str


def boolean(text: str) -> bool:
    """Return whether a switch is on."""
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


def horovod_boolean(text: str) -> bool:
    """Horovod reads a number, and takes what is above 0 as true; "true" is no number, hence false."""
    found = re.match(r"\s*[+-]?\d+", text)
    return found is not None and int(found.group()) > 0


def size(text: str) -> int:
    """Return bytes: K, M, G are powers of 1000 and Ki, Mi, Gi of 1024; a B may follow."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?)?B?", text)
    if found is None:
        raise ValueError(text)
    value = float(found.group(1)) * SIZES[found.group(2) or ""]
    if value != int(value):
        raise ValueError(text)
    return int(value)


def whole(low: int, high: int | None = None) -> Kind:
    """A whole number in [low, high]."""

    def parse(text: str) -> int:
        value = int(text)
        if value < low or (high is not None and value > high):
            raise ValueError(text)
        return value

    return Kind(parse, f"a whole number from {low}" + (f" to {high}" if high is not None else " up"))


def seconds(low: float) -> Kind:
    """A finite number of seconds, at least low."""

    def parse(text: str) -> float:
        value = float(text)
        if not low <= value < float("inf"):
            raise ValueError(text)
        return value

    return Kind(parse, f"seconds, at least {low:g}")


def transports(text: str) -> tuple[str, ...]:
    """Return the names of a comma-separated list."""
    names = tuple(name.strip() for name in text.split(","))
    if len(set(names)) != len(names) or not set(names) <= set(TRANSPORTS):
        raise ValueError(text)
    return names


def streams(text: str) -> int:
    """Return the number of lanes, 0 for auto."""
    return 0 if text == "auto" else int(whole(1, 64).parse(text))


def ports(text: str) -> tuple[int, int]:
    """Return the first and the last port of a range."""
    found = re.fullmatch(r"(\d+)-(\d+)", text)
    low, high = (int(found.group(1)), int(found.group(2))) if found else (1, 0)
    if not 1 <= low <= high <= 65535:
        raise ValueError(text)
    return low, high


def address(text: str) -> str:
    """Return HOST:PORT as it is, if that is what it is."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError(text)
    return text


def secret(text: str) -> bytes:
    """Return the secret's bytes: an even number of hex digits stands for the bytes it spells, all else for itself."""
    if re.fullmatch(r"(?:[0-9a-fA-F]{2}){16,}", text):
        return bytes.fromhex(text)
    if not 16 <= len(text.encode()) <= 128:
        raise ValueError(text)
    return text.encode()


def secret_file(path: str) -> bytes:
    """Return the secret that a regular file holds; white space around it does not count.

    The rule of a file that holds a private key: it belongs to this user and nobody else has access (mode 0600 or
    less), or to root, and a group may read it (0640 or less). Raises ValueError with what is wrong, never with the
    content.
    """
    try:
        # A pipe without a writer must not block: it is refused.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ValueError("not a regular file")
            if found.st_uid not in (0, os.geteuid()):
                raise ValueError(f"it belongs to user {found.st_uid}: only this user's files and root's are read")
            if found.st_mode & (0o037 if found.st_uid == 0 else 0o077):
                mode = stat.S_IMODE(found.st_mode)
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
    """Return the name of an all-reduce's algorithm, or auto."""
    if text not in ALGORITHMS:
        raise ValueError(text)
    return text


def sharing(text: str) -> str:
    """Return whether memory is shared: auto, 0 or 1."""
    if text not in ("auto", "0", "1"):
        raise ValueError(text)
    return text


def cpus(text: str) -> tuple[int, ...]:
    """Return the CPUs of a list such as 2,3."""
    return tuple(CPU.parse(part) for part in text.split(","))


BOOLEAN = Kind(boolean, "0 or 1")
TEXT = Kind(str, "text")
BYTES = Kind(size, "bytes, such as 65536, 256Ki, 1M or 64Mi (M is 10^6, Mi is 2^20)")
TRANSPORT_LIST = Kind(transports, f"one of {', '.join(TRANSPORTS)}, or a list of them without repetition")
ALGORITHM = Kind(algorithm, f"one of {', '.join(ALGORITHMS)}")
SHARING = Kind(sharing, "auto, 0 or 1")
STREAMS = Kind(streams, "auto, or a number from 1 to 64")
PORT_RANGE = Kind(ports, "LOW-HIGH, two ports from 1 to 65535")
ADDRESS = Kind(address, "HOST:PORT")
SECRET = Kind(secret, "text of 16 to 128 bytes, or at least 32 hex digits")
SECRET_FILE = Kind(str, "path of a file of mode 0600 that holds what NETBOTTLENECK_SECRET may be")
LEVEL = Kind(level, f"one of {', '.join(LEVELS)}")
CPU = whole(0, 1023)
CPUS = Kind(cpus, "numbers of CPUs, such as 2,3")
RANK = whole(0)
RANKS = whole(1)
