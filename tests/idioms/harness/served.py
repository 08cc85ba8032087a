"""What the package did in an idiom: without this, a model that is silently left out would count as equal."""

from __future__ import annotations

import sys
from typing import Any


class Served:
    """Sessions of this idiom that were open at its looks, and the most bytes that their transports had sent."""

    def __init__(self) -> None:
        self._earlier = {id(session) for session in _sessions()}  # of idioms before: they live as long as the process
        self.sessions = 0
        self.sent_bytes = 0

    def look(self) -> None:
        """Look at the sessions that are open now."""
        found = [session for session in _sessions() if not session.closed and id(session) not in self._earlier]
        self.sessions = max(self.sessions, len(found))
        sent = sum(arm.wire() or 0 for session in found for arm in session.arms.values())
        self.sent_bytes = max(self.sent_bytes, sent)

    def lack(self, *, moves: bool) -> str:
        """Return what is missing: a measured model, or bytes that a transport was to send; "" where nothing is."""
        if not self.sessions:
            return "no model was measured"
        return "a transport was to move gradients, and sent nothing" if moves and not self.sent_bytes else ""


def _sessions() -> list[Any]:
    module: Any = sys.modules.get("netbottleneck.runtime.session")
    return list(getattr(module, "_sessions", ()))


def forget_lines() -> None:
    """Have the package say again what it says once a process, so that each idiom gets its own lines."""
    module: Any = sys.modules.get("netbottleneck.hooks.left_alone")
    if module is not None:
        module._said.clear()
