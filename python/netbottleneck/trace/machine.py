"""The machine of this process, by the name that a rank's record has for it."""

from __future__ import annotations

import hashlib
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the id of the running kernel. Raises OSError if it is not known."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def machine_id() -> str:
    """Return an id that all processes of one kernel share, in any container; "" if it is not known."""
    try:
        return hashlib.sha256(boot_id().encode()).digest()[:16].hex()
    except OSError:
        return ""
