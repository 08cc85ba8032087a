"""Is the network the bottleneck of this training job? Measured in the job itself.

`import netbottleneck` in a training script does nothing until the environment asks for it: NETBOTTLENECK=1, or a
NETBOTTLENECK_TRANSPORT. Then DDP models that the script builds, and Horovod's optimizers, are measured and their
gradients moved by the transports named. See README.md, and `netbottleneck env` for all variables.
"""

import importlib
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
    from netbottleneck.hooks.attaching import attach
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

# Public names whose modules are imported when they are used: importing this package costs next to nothing.
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
    "attach": "netbottleneck.hooks.attaching",
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


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)


def _enabled() -> bool:
    """True when a variable of ours is set that asks for something; reads no more than it must."""
    import os

    return bool(os.environ.get("NETBOTTLENECK") or os.environ.get("NETBOTTLENECK_TRANSPORT"))


if _enabled() and _config.settings().enabled:
    from netbottleneck.hooks import imports

    imports.install()
