"""How ranks tell each other something before they are connected.

Either they leave keys in a folder, at a launcher's server or in a torch store, or the launcher gives what each says to
all (a board). A Meeting is both, seen alike.
"""

import contextlib
import hashlib
import http.client
import os
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

ADVICE = "set NETBOTTLENECK_MASTER=HOST:PORT, rank 0's address, and NETBOTTLENECK_SECRET on all ranks"


class Channel(Protocol):
    """Keys and values that all ranks of a job see, and nobody else is meant to.

    `exposed`: anyone who reaches it can read and write them.
    """

    name: str
    exposed: bool

    def put(self, key: str, value: bytes) -> None:
        """Leave a value for all."""

    def look(self, key: str) -> bytes | None:
        """Return the value, or None where there is none yet. Never blocks for long."""

    def forget(self, key: str) -> None:
        """Drop a key that this rank put, where that can be done."""


class Board(Protocol):
    """A launcher that gives what each rank says to all, once all have said something."""

    name: str

    def share(self, value: bytes, wanted: Sequence[int], limit_s: float) -> list[bytes]:
        """Give a value to all; return those of the wanted ranks. Every rank calls this, in the same order of calls."""


@dataclass(frozen=True)
class Keys:
    """A talk of all ranks with rank 0, through a channel: all report to it, then it answers, once."""

    channel: Channel
    key: str  # no other talk has this one
    rank: int
    size: int
    limit_s: float

    @property
    def exposed(self) -> str:
        """The channel's name where anyone who reaches it can read what is said, else empty."""
        return self.channel.name if self.channel.exposed else ""

    def report(self, value: bytes) -> list[bytes]:
        """Leave a value for rank 0; there, return those of all others once they are all there.

        Raises TimeoutError naming the ranks that did not come.
        """
        if self.rank == 0:
            return gather(self.channel, f"{self.key}/ready", self.size, self.limit_s)
        self.channel.put(f"{self.key}/ready.{self.rank}", value)
        return []

    def answer(self, value: bytes) -> None:
        """Rank 0: tell all others."""
        self.channel.put(f"{self.key}/address", value)

    def hear(self) -> bytes:
        """Any other rank: return the answer. Raises TimeoutError naming rank 0."""
        try:
            # Rank 0 gives up first, and says what is missing.
            return get(self.channel, f"{self.key}/address", time.monotonic() + self.limit_s + 5)
        except TimeoutError:
            raise TimeoutError(
                f"rank 0 did not say at {self.channel.name} where it listens, within {self.limit_s:g} s "
                f"(NETBOTTLENECK_START_TIMEOUT_S); this is rank {self.rank} of {self.size}"
            ) from None

    def clear(self) -> None:
        """Rank 0: remove what was said, where that can be done."""
        for name in ("address", *(f"ready.{rank}" for rank in range(1, self.size))):
            self.channel.forget(f"{self.key}/{name}")


@dataclass(frozen=True)
class Rounds:
    """The same talk on a board: a round of reports, and one in which rank 0 alone has something to say."""

    board: Board
    rank: int
    size: int
    limit_s: float
    exposed = ""  # a launcher of PMI serves its own processes

    def report(self, value: bytes) -> list[bytes]:
        """Give rank 0 a value; there, return those of all others. Raises TimeoutError where not all ranks come."""
        return self.board.share(value, range(1, self.size) if self.rank == 0 else (), self.limit_s)

    def answer(self, value: bytes) -> None:
        """Rank 0: tell all others."""
        self.board.share(value, (), self.limit_s)

    def hear(self) -> bytes:
        """Any other rank: return the answer."""
        return self.board.share(b"", (0,), self.limit_s)[0]

    def clear(self) -> None:
        """What was said stays with the launcher, which ends with the job."""


def gather(channel: Channel, key: str, size: int, limit_s: float) -> list[bytes]:
    """Return what ranks 1 to size - 1 leave under key.RANK.

    Raises TimeoutError naming the ranks that did not come within limit_s, NETBOTTLENECK_START_TIMEOUT_S.
    """
    deadline = time.monotonic() + limit_s
    try:
        return [get(channel, f"{key}.{rank}", deadline, f"rank {rank}") for rank in range(1, size)]
    except TimeoutError:
        missing = [str(rank) for rank in range(1, size) if channel.look(f"{key}.{rank}") is None]
        ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        raise TimeoutError(
            f"of {size} ranks, {ranks} did not come to {channel.name} within {limit_s:g} s "
            f"(NETBOTTLENECK_START_TIMEOUT_S)"
        ) from None


def get(channel: Channel, key: str, deadline: float, whose: str = "rank 0") -> bytes:
    """Wait for a key until `deadline` (time.monotonic()); TimeoutError names whose it is, the key and the channel."""
    pause = 0.002
    while (value := channel.look(key)) is None:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{whose} did not leave {key} at {channel.name} in time (NETBOTTLENECK_START_TIMEOUT_S)")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)
    return value


class Folder:
    """A directory. `private`: others on this machine must not read it, and what a dead process left does not count."""

    exposed = False  # its files are the user's alone

    def __init__(self, path: Path, private: bool = False) -> None:
        self.name = str(path)
        self._path = path
        self._private = private
        path.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
        if private:
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise PermissionError(f"{path} is not a folder of this user alone: remove it, or {ADVICE}")

    def put(self, key: str, value: bytes) -> None:
        """Leave a value for all, whole or not at all."""
        target = self._path / key.replace("/", ".")
        # Rank 0 removes an empty private folder, perhaps just now.
        self._path.mkdir(mode=0o700 if self._private else 0o777, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._path, prefix=".", delete=False) as file:
            file.write((_process(os.getpid()) or b"") + b"\n" + value if self._private else value)
        Path(file.name).replace(target)

    def look(self, key: str) -> bytes | None:
        """Return the value, or None."""
        try:
            value = (self._path / key.replace("/", ".")).read_bytes()
        except FileNotFoundError:
            return None
        if not self._private:
            return value
        writer, _, value = value.partition(b"\n")
        return value if writer == _process(int(writer.split(b" ")[0])) else None

    def forget(self, key: str) -> None:
        """Drop a key."""
        (self._path / key.replace("/", ".")).unlink(missing_ok=True)
        if self._private:
            with contextlib.suppress(OSError):
                self._path.rmdir()


def _process(pid: int) -> bytes | None:
    """Return "pid start" of a live process: no two processes ever share it between two boots."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return b"%d %s" % (pid, fields[19])


def private_folder(what: str) -> Folder:
    """Return the folder of this user that belongs to `what`, such as a launcher's name for its job."""
    digest = hashlib.sha256(what.encode()).hexdigest()[:16]
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    return Folder(base / f"netbottleneck-{os.getuid()}-{digest}", private=True)


class Http:
    """The key-value server of horovodrun: PUT and GET of /scope/key, 404 for what is not there."""

    exposed = True

    def __init__(self, host: str, port: int) -> None:
        self.name = f"http://{host}:{port}"
        self._to = (host, port)

    def _ask(self, method: str, key: str, body: bytes | None = None) -> tuple[int, bytes]:
        scope, _, name = key.rpartition("/")
        connection = http.client.HTTPConnection(*self._to, timeout=10)
        try:
            connection.request(method, f"/{scope.replace('/', '.')}/{name}", body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionError(f"the launcher's rendezvous at {self.name} does not answer: {error}") from error
        finally:
            connection.close()

    def put(self, key: str, value: bytes) -> None:
        """Leave a value for all."""
        status, _ = self._ask("PUT", key, value)
        if status != http.client.OK:
            raise ConnectionError(f"the launcher's rendezvous at {self.name} answers {status} to PUT {key}")

    def look(self, key: str) -> bytes | None:
        """Return the value, or None."""
        status, value = self._ask("GET", key)
        if status not in (http.client.OK, http.client.NOT_FOUND):
            raise ConnectionError(f"the launcher's rendezvous at {self.name} answers {status} to GET {key}")
        return value if status == http.client.OK else None

    def forget(self, key: str) -> None:
        """The server dies with the job."""


class Store:
    """A torch.distributed store. `reach` connects to it, also a second time.

    The server at MASTER_PORT may be one on its way out, of a group that rank 0 is just giving up: a connection that
    breaks is made again, and what this rank left there is left once more.
    """

    exposed = True

    def __init__(self, reach: Callable[[], Any], name: str) -> None:
        self.name = name
        self._reach = reach
        self._store = reach()
        self._left: dict[str, bytes] = {}

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        try:
            return question(self._store)
        except RuntimeError:
            self._store = None  # the port is free before the next attempt
            self._store = self._reach()
            for key, value in self._left.items():
                self._store.set(key, value)
            return question(self._store)

    def put(self, key: str, value: bytes) -> None:
        """Leave a value for all."""
        self._ask(lambda store: store.set(key, value))
        self._left[key] = value

    def look(self, key: str) -> bytes | None:
        """Return the value, or None."""
        return self._ask(lambda store: bytes(store.get(key)) if store.check([key]) else None)  # type: ignore[no-any-return]

    def forget(self, key: str) -> None:
        """Drop a key."""
        self._ask(lambda store: store.delete_key(key))
        self._left.pop(key, None)

    def close(self) -> None:
        """Close the connection, and the server where this rank opened it."""
        self._store = None
