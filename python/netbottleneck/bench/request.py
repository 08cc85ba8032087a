"""What a benchmark is asked to do: the command line's words as a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from netbottleneck.bench.data import DTYPES, REDUCTIONS
from netbottleneck.config import size as parse_size
from netbottleneck.config import streams as parse_streams

TRANSPORTS = ("stock", "tcp", "ofi")
# Other programs that do the same, and limits of wire and memory; see bench/peers.py.
MPI = ("mpi-shm", "mpi-tcp", "mpi-tcp4", "mpi-ofi")
MPICH = ("mpich-shm", "mpich-ofi")
CCL = ("oneccl",)
HOROVOD_MPI = ("horovod-mpi",)
IPERF_FLOWS = (1, 2, 4, 8, 16)
IPERF = tuple(f"iperf3-{flows}" for flows in IPERF_FLOWS)
HEAP = ("tcp-heap", "ofi-heap")
MEMORY = ("memcpy", "add", "pair")
PEERS = (*MPI, *MPICH, *CCL, "horovod", *HOROVOD_MPI, *IPERF, *HEAP, *MEMORY)
SHARING = ("auto", "0", "1")
SIZES = (10**6, 16 * 10**6, 64 * 10**6)
# Iterations by size where nobody says how many: (up to bytes, iterations).
ITERATIONS = ((10**6, 20), (16 * 10**6, 10), (1 << 62, 5))


@dataclass(frozen=True)
class Request:
    """All-reduces to be measured. streams: lanes of each native transport, 0: auto. iterations 0: by size.

    shm: whether ranks of one host share memory, in the words of NETBOTTLENECK_SHM; each is measured. None: as it says.

    `exact`: the transports were named by the user, so that one that is missing is an error. inner: all-reduces of a
    timed round, one on the result of the other: a reduction that changes nothing the second time, min or max.
    """

    transports: tuple[str, ...] = TRANSPORTS
    streams: tuple[int, ...] = (0,)
    sizes: tuple[int, ...] = SIZES
    dtype: str = "float32"
    op: str = "sum"
    iterations: int = 0
    exact: bool = False
    inner: int = 1
    shm: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _each("transport", self.transports, (*TRANSPORTS, *PEERS))
        _each("dtype", (self.dtype,), tuple(DTYPES))
        _each("op", (self.op,), REDUCTIONS)
        if self.shm:
            _each("shm", self.shm, SHARING)
        if not self.sizes or not self.streams:
            raise ValueError("a benchmark needs at least one size and one number of streams")
        if self.iterations < 0 or min(self.sizes) < 0 or not all(0 <= n <= 64 for n in self.streams):
            raise ValueError(f"sizes {self.sizes}, streams {self.streams}, iterations {self.iterations}: out of range")
        if self.inner < 1 or (self.inner > 1 and self.op not in ("min", "max")):
            raise ValueError(f"{self.inner} all-reduces a round: at least one, and more than one of min and max only")

    def elements(self, nbytes: int) -> int:
        """Return how many whole elements fit; one where a size is smaller than an element, none where it is 0."""
        itemsize = DTYPES[self.dtype].itemsize
        return max(nbytes // itemsize, 1 if nbytes > 0 else 0)

    def rounds(self, nbytes: int) -> int:
        """Return how often a size is measured on each path."""
        return self.iterations or next(count for limit, count in ITERATIONS if nbytes <= limit)

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` takes."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Request:
        """Return the request that a dictionary spells."""
        fields: dict[str, Any] = {name: tuple(item) if isinstance(item, list) else item for name, item in value.items()}
        return cls(**fields)


def _each(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{what} {name}: must be one of {', '.join(known)}")
    if not names or len(set(names)) != len(names):
        raise ValueError(f"{what} {','.join(names) or '(none)'}: one or more, each once")


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return bytes of a list such as "1M,16M,64Mi". Raises ValueError naming the part."""
    return tuple(_parsed(part, parse_size, "a size such as 65536, 256Ki, 1M or 64Mi") for part in text.split(","))


def parse_lanes(text: str) -> tuple[int, ...]:
    """Return lanes of a list such as "auto" or "1,2,4,8"; auto is 0. Raises ValueError naming the part."""
    return tuple(_parsed(part, parse_streams, "auto or a number from 1 to 64") for part in text.split(","))


def _parsed(part: str, parse: Any, allowed: str) -> int:
    try:
        return int(parse(part.strip()))
    except ValueError:
        raise ValueError(f"{part!r}: must be {allowed}") from None
