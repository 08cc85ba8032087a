"""Measures, in the job itself, whether the network is the bottleneck of a training job.

`import netbottleneck` in a training script does nothing unless the environment sets NETBOTTLENECK=1, or
NETBOTTLENECK_TRANSPORT without NETBOTTLENECK=0. Then it measures the script's DDP models and Horovod optimizers, and
moves their gradients by the transports named. See README.md, and `netbottleneck env` for all variables.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from netbottleneck import config as _config
from netbottleneck._version import __version__
from netbottleneck.errors import (
    ClosedError,
    DeadlineError,
    Error,
    HorovodInternalError,
    MismatchError,
    PeerError,
    WireError,
)

if TYPE_CHECKING:
    from netbottleneck.analysis.verdict import Verdict
    from netbottleneck.bench import bench
    from netbottleneck.hooks.imports import attach
    from netbottleneck.hooks.loop import profile
    from netbottleneck.report import Run
    from netbottleneck.runtime.ops import (
        Adasum,
        Average,
        Max,
        Min,
        Product,
        Sum,
        allgather,
        allreduce,
        allreduce_,
        alltoall,
        barrier,
        broadcast,
        broadcast_,
        reducescatter,
    )
    from netbottleneck.study.evidence import Evidence

# Public names that are imported on first use, so that importing this package costs almost nothing.
_LATER = {
    "Adasum": "netbottleneck.runtime.ops",
    "Average": "netbottleneck.runtime.ops",
    "Max": "netbottleneck.runtime.ops",
    "Min": "netbottleneck.runtime.ops",
    "Product": "netbottleneck.runtime.ops",
    "Sum": "netbottleneck.runtime.ops",
    "Evidence": "netbottleneck.study.evidence",
    "Run": "netbottleneck.report",
    "Verdict": "netbottleneck.analysis.verdict",
    "allgather": "netbottleneck.runtime.ops",
    "allreduce": "netbottleneck.runtime.ops",
    "allreduce_": "netbottleneck.runtime.ops",
    "alltoall": "netbottleneck.runtime.ops",
    "barrier": "netbottleneck.runtime.ops",
    "attach": "netbottleneck.hooks.imports",
    "bench": "netbottleneck.bench",
    "broadcast": "netbottleneck.runtime.ops",
    "broadcast_": "netbottleneck.runtime.ops",
    "init": "netbottleneck.runtime.ops",
    "profile": "netbottleneck.hooks.loop",
    "rank": "netbottleneck.runtime.ops",
    "reducescatter": "netbottleneck.runtime.ops",
    "shutdown": "netbottleneck.runtime.ops",
    "size": "netbottleneck.runtime.ops",
}

# Public modules that are imported on first use.
_MODULES = {"callbacks": "netbottleneck.callbacks"}

# Names that earlier releases document, served for one release more. A module, and in a module the names of another.
_MOVED = {
    "evidence": "netbottleneck.study.evidence",
    "forecast": "netbottleneck.whatif.forecast",
    "layerlog": "netbottleneck.trace.layer_log",
    "plan": "netbottleneck.whatif.plan",
    "score": "netbottleneck.whatif.plan",
    "sweeps": "netbottleneck.whatif.sweeps",
}
_MOVED_NAMES = {
    "evidence": ("netbottleneck.study.evidence", "facts"),
    "plan": ("netbottleneck.whatif.plan", "Plan"),
    "score": ("netbottleneck.whatif.plan", "score"),
    "whatif.replay_schedule": ("netbottleneck.whatif.plan", "score"),
}

__all__ = [
    "Adasum",
    "Average",
    "ClosedError",
    "DeadlineError",
    "Error",
    "Evidence",
    "HorovodInternalError",
    "Max",
    "Min",
    "MismatchError",
    "PeerError",
    "Product",
    "Run",
    "Sum",
    "Verdict",
    "WireError",
    "__version__",
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "attach",
    "barrier",
    "bench",
    "broadcast",
    "broadcast_",
    "profile",
    "reducescatter",
]


class _Moved(ModuleType):
    """A module that serves one name of another: whatever else looks through sys.modules finds nothing to import."""

    def __getattr__(self, name: str) -> Any:
        home, served = _MOVED_NAMES[self.__name__.partition(".")[2]]
        if name != served:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home), name)


for _name in _MOVED_NAMES:
    sys.modules.setdefault(f"{__name__}.{_name}", _Moved(f"{__name__}.{_name}"))


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name) or _MOVED.get(name)
    if module is not None:
        return importlib.import_module(module)
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)


def _enabled() -> bool:
    """True if a variable of ours enables the package; reads as little as possible."""
    import os

    return bool(os.environ.get("NETBOTTLENECK") or os.environ.get("NETBOTTLENECK_TRANSPORT"))


def _module() -> str:
    """Return the module that Python's option -m names, also as -mNAME or -Pm NAME; "" if none is found."""
    import re

    for word, following in zip(sys.orig_argv[1:], [*sys.orig_argv[2:], ""], strict=True):
        found = re.fullmatch("-[bBdEiIOPqRsSuvx]*m(.*)", word)
        if found is not None:
            return found[1] or following
    return ""


def _settings() -> _config.Settings:
    """Return the settings. A wrong variable ends a command of ours with one line; raises ValueError in a script."""
    try:
        return _config.settings()
    except ValueError as error:
        program = sys.argv[0] if sys.argv else ""
        if program == "-m":  # Python has not found the module yet
            program = _module().partition(".")[0]
        if program.rpartition("/")[2] == "netbottleneck":
            raise SystemExit(f"netbottleneck: {error}") from None
        raise


if _enabled() and _settings().enabled:
    from netbottleneck.hooks import imports

    imports.install()
