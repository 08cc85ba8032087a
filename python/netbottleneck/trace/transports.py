"""Transports, and the arms of a run that use them: one list, from which all names, capabilities and texts derive.

The native rows name the networks of nb_transports[] in csrc/transport/transport.c, in its order. The list does not read
that table, because a saved trace is read without the extension; tests/py/test_transports.py compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Transport:
    """What moves gradients in an arm.

    native: its streams are this package's lanes. over_nccl: NCCL moves them, over this package's lanes. own_path: the
    script's own process group moves the bytes. real: it moves the gradients of a measured step; the others are
    references to compare with. selectable: an environment variable may name it. benched: `netbottleneck bench` measures
    it. meaning: a report's description of one that is not real. colour: of its bars and lines.
    """

    name: str
    native: bool = False
    over_nccl: bool = False
    own_path: bool = False
    real: bool = True
    selectable: bool = True
    benched: bool = False
    meaning: str = ""
    colour: str = ""


ALL = (
    Transport("stock", own_path=True, benched=True, colour="#cc4b37"),
    Transport("tcp", native=True, benched=True, colour="#d9a441"),
    Transport("ofi", native=True, benched=True, colour="#2f7f9e"),
    Transport("nccl+tcp", over_nccl=True, colour="#8c6bb1"),
    Transport("nccl+ofi", over_nccl=True, colour="#5b3a8c"),
    Transport("null", real=False, meaning="nothing moves"),
    Transport("bare", own_path=True, real=False, meaning="the untouched script", colour="#9a9a9a"),
    Transport("single", real=False, selectable=False, meaning="one rank alone", colour="#c9c9c9"),
)
# Compressions and schedules that an arm may name beside its transport. None is implemented.
COMPRESSIONS: tuple[str, ...] = ()
SCHEDULES: tuple[str, ...] = ()

SELECTABLE = tuple(one.name for one in ALL if one.selectable)
# Arms that a study or a replay may name; a study adds bare and single itself.
STUDIED = tuple(one.name for one in ALL if one.selectable and not one.over_nccl and one.name != "bare")
BENCHED = tuple(one.name for one in ALL if one.benched)
OVER_NCCL = tuple(one.name for one in ALL if one.over_nccl)
NATIVE = tuple(one.name for one in ALL if one.native)
OWN_PATH = tuple(one.name for one in ALL if one.own_path)
PSEUDO = tuple(one.name for one in ALL if not one.real)
MEANING = {one.name: one.meaning for one in ALL if one.meaning}
TRANSPORT_COLOURS = {one.name: one.colour for one in ALL if one.colour}


class Arm(str):
    """What one block of steps uses: a transport, and optionally a compression and a schedule.

    An arm is its name, TRANSPORT[:COMPRESSION][@SCHEDULE], so records and reports can hold it as text. Two arms are
    equal if their names are.
    """

    __slots__ = ("compression", "schedule", "transport")

    transport: str
    compression: str | None
    schedule: str | None

    def __new__(cls, transport: str, compression: str | None = None, schedule: str | None = None) -> Arm:
        """Return the arm of these parts. Raises ValueError if a part is empty or contains ':', '@' or ','."""
        for part in (transport, compression, schedule):
            if part is not None and (not part or set(part) & set(":@,")):
                raise ValueError(f"part {part!r} of an arm: must not be empty or contain ':', '@' or ','")
        arm = super().__new__(
            cls,
            transport
            + (f":{compression}" if compression is not None else "")
            + (f"@{schedule}" if schedule is not None else ""),
        )
        arm.transport, arm.compression, arm.schedule = transport, compression, schedule
        return arm

    def __getnewargs__(self) -> Any:
        return self.transport, self.compression, self.schedule

    def __repr__(self) -> str:
        return f"Arm({str(self)!r})"

    @classmethod
    def parse(cls, name: str) -> Arm:
        """Return the arm of this name. Raises ValueError as the constructor does."""
        body, has_schedule, schedule = name.partition("@")
        transport, has_compression, compression = body.partition(":")
        return cls(transport, compression if has_compression else None, schedule if has_schedule else None)

    @property
    def native(self) -> bool:
        """True if its transport's streams are this package's lanes."""
        return self.transport in NATIVE

    @property
    def over_nccl(self) -> bool:
        """True if NCCL moves the bytes over this package's lanes."""
        return self.transport in OVER_NCCL

    @property
    def own_path(self) -> bool:
        """True if the script's own process group moves the bytes."""
        return self.transport in OWN_PATH

    @property
    def real(self) -> bool:
        """True if it moves gradients of measured steps; false for the references null, bare and single."""
        return self.transport not in PSEUDO


STOCK: Final = Arm("stock")
BARE: Final = Arm("bare")
SINGLE: Final = Arm("single")
NULL: Final = Arm("null")
AUTO: Final = Arm("auto")  # in settings only: the run chooses among stock and the native transports


def backends(provider: str | None) -> set[str]:
    """The backends of torch.distributed that a provider of the script's own path names: gloo, or cpu:gloo,cuda:nccl."""
    return {one.rpartition(":")[2] for one in (provider or "").split(",")}


def arm_of(name: str) -> Arm:
    """Return the arm that a user names. Raises ValueError if a part of it is not available."""
    arm = Arm.parse(name)
    for part, known in ((arm.compression, COMPRESSIONS), (arm.schedule, SCHEDULES), (arm.transport, SELECTABLE)):
        if part is not None and part not in known:
            raise ValueError(f"{name!r}: {part!r} is not available")
    return arm
