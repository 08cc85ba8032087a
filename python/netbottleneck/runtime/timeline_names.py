"""What a file needs of the time before it: names of operations, and negotiations under way. Pure."""

from __future__ import annotations

from netbottleneck.trace.events import Event

TENSORS_MAX = 1 << 16  # names known at a time


def name_part(event: Event) -> bytes:
    """The 32 bytes of a name that an OP_NAME event carries, zeros beyond its end."""
    return b"".join(value.to_bytes(8, "little") for value in (event.b, event.c, event.d, event.e))


class Names:
    """Names of operations by key, as OP_NAME events tell them; a name counts once its operation is submitted."""

    def __init__(self) -> None:
        self._parts: dict[int, bytes] = {}
        self._names: dict[int, str] = {}

    def take(self, event: Event) -> None:
        if event.kind == "OP_NAME":
            before = self._parts.get(event.key, b"") if event.a else b""
            self._parts[event.key] = before[: event.a] + name_part(event)
        elif event.kind == "OP_SUBMIT" and event.key in self._parts:
            while len(self._names) >= TENSORS_MAX:
                del self._names[next(iter(self._names))]
            self._names[event.key] = self._parts.pop(event.key).rstrip(b"\0").decode("utf-8", "replace")

    def find(self, key: int) -> str | None:
        return self._names.get(key)


class Negotiations:
    """The events that opened each negotiation which is not over."""

    def __init__(self) -> None:
        self._open: dict[int, list[Event]] = {}

    def take(self, event: Event) -> None:
        if event.kind in ("OP_READY", "OP_SUBMIT"):
            self._open.setdefault(event.key, []).append(event)
        elif event.kind == "OP_AGREED":
            self._open.pop(event.key, None)
        elif event.kind == "OP_DONE" and any(one.kind == "OP_SUBMIT" for one in self._open.get(event.key, ())):
            del self._open[event.key]  # it ended without an agreement: what is left is of this round

    def events(self) -> list[Event]:
        return [event for events in self._open.values() for event in events]
