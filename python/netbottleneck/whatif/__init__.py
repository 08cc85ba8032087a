"""What-if simulation: costs fitted to a run, its trace under other settings, and what-if questions about it."""

import importlib
from typing import Any

# Names that earlier releases document here, served for one release more.
_MOVED = {"job": "netbottleneck.whatif.questions"}


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MOVED[name]), name)
