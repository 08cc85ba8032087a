"""NCCL over this package's lanes: the arms nccl+tcp and nccl+ofi, beside NCCL as the script runs it.

NCCL loads net plugins once, with its first communicator, and gives each communicator the network that its configuration
names; NCCL_NET overrides that name. `arrange` runs when netbottleneck is imported: it names the plugin, and sets
NCCL_NET to the network that the script's own communicators would get without it. `open_arm` makes a communicator over
our network. csrc/nccl/net.h describes the plugin.
"""

import contextlib
import ctypes
import logging
import os
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from netbottleneck.config import Settings
from netbottleneck.runtime.communicators import native_refusal
from netbottleneck.trace.transports import Arm

__all__ = ["OverNccl", "arrange", "backend_of", "open_arm", "refusal", "stock_refusal"]

NAME = "NetBottleneck"  # of our network in NCCL
PLUGIN = Path(__file__).parents[1] / "libnccl-net-netbottleneck.so"
LEAST = (2, 18)
BOTH = (2, 28)  # the first that tells a plugin the traffic class of a communicator
# csrc/nccl/net.h: kinds of nets. A traffic class names the transport of one communicator.
TRAFFIC_CLASS = 0x6E6200
PLAIN, KINDS = 0, {"nccl+tcp": 1, "nccl+ofi": 2}
TABLE_V6_BYTES = 17 * 8  # addresses of counters follow this table
# Fields of ncclConfig_t that an arm copies from the script's own group: the two differ in their network only.
SAME = ("blocking", "cga_cluster_size", "min_ctas", "max_ctas", "collnet_enable", "cta_policy", "nvls_ctas")
INFINIBAND = Path("/sys/class/infiniband")

logger = logging.getLogger("netbottleneck")
_opened: list[str] = []  # the arms that this process has opened


class _Counters(ctypes.Structure):
    """What NCCL did with one kind of net in this process: struct nb_net_counters."""

    _fields_ = (("contexts", ctypes.c_uint64), ("bytes", ctypes.c_uint64))


@dataclass(frozen=True)
class _Arranged:
    """What `arrange` found and did.

    network, plugin: NCCL_NET and NCCL_NET_PLUGIN of the script. stock: the value that NCCL_NET got. why: the reason for
    having done nothing.
    """

    network: str = ""
    plugin: str = ""
    stock: str = ""
    why: str = ""
    library: ctypes.CDLL | None = None

    def counters(self, kind: int) -> _Counters:
        """Return the counters of a kind; NCCL's calls update them."""
        return _Counters.from_address(self._behind_the_table(0) + kind * ctypes.sizeof(_Counters))

    def queries(self) -> int:
        """Return how often NCCL has asked for the properties of our network, as it does for one that it takes."""
        return ctypes.c_uint64.from_address(self._behind_the_table(1)).value

    def _behind_the_table(self, place: int) -> int:
        """Return one of the addresses that struct nb_net_v6 has behind NCCL's table."""
        assert self.library is not None
        table = ctypes.addressof(ctypes.c_char.in_dll(self.library, "ncclNetPlugin_v6"))
        address = ctypes.c_void_p.from_address(table + TABLE_V6_BYTES + 8 * place).value
        assert address is not None
        return address


_arranged: _Arranged | None = None


def arrange(arms: Iterable[Arm]) -> None:
    """Prepare NCCL for these arms, if one of them is over NCCL. Call before NCCL's first communicator.

    Sets NCCL_NET_PLUGIN and NCCL_NET. If they are set already, or it is too late, changes nothing: `refusal` says why.
    """
    global _arranged  # noqa: PLW0603 - of the process, as NCCL's plugins are
    if _arranged is None and any(arm.over_nccl for arm in arms):
        _arranged = _arrange()


def _arrange() -> _Arranged:
    network, plugin = os.environ.get("NCCL_NET", ""), os.environ.get("NCCL_NET_PLUGIN", "")
    found = _Arranged(network, plugin)
    if _conflict(network, plugin):
        return found
    if _has_begun():
        return _Arranged(
            network, plugin, why="torch.distributed was initialised first: import netbottleneck before that"
        )
    try:
        # NCCL finds a library that is loaded by its name, in each of its versions.
        library = ctypes.CDLL(str(PLUGIN))
    except OSError as error:
        return _Arranged(network, plugin, why=f"the plugin cannot be loaded: {error}")
    if not plugin and _loads("libnccl-net.so"):  # which NCCL_NET_PLUGIN=none excludes
        why = "NCCL loads libnccl-net.so here, and it uses one plugin in a process: compare in two runs"
        return _Arranged(network, plugin, why=why)
    stock = stock_network(os.environ)
    os.environ["NCCL_NET_PLUGIN"] = NAME.lower()
    os.environ["NCCL_NET"] = stock
    return _Arranged(network, plugin, stock, library=library)


def _has_begun() -> bool:
    """Return True if the script may have used NCCL already."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def stock_network(environ: Mapping[str, str], infiniband: Path = INFINIBAND) -> str:
    """Return the network that NCCL takes without a plugin: IB where a port that it may use is active, else Socket."""
    if environ.get("NCCL_IB_DISABLE", "0") not in ("", "0") or not _loads("libibverbs.so.1"):
        return "Socket"
    listed = environ.get("NCCL_IB_HCA", "")
    active = [path.parts for path in infiniband.glob("*/ports/*/state") if _is_active(path)]
    return "IB" if any(_chosen(parts[-4], parts[-2], listed) for parts in active) else "Socket"


def _is_active(state: Path) -> bool:
    try:
        return "ACTIVE" in state.read_text(encoding="utf-8")
    except OSError:
        return False


def _chosen(device: str, port: str, listed: str) -> bool:
    """Return whether NCCL_IB_HCA lists a port: [^][=]DEVICE[:PORT],…; without = a name is a prefix."""
    without, exactly = listed.startswith("^"), listed.lstrip("^").startswith("=")
    names = [name.partition(":") for name in listed.lstrip("^=").split(",") if name]
    inside = any(
        (device == name if exactly else device.startswith(name)) and number in ("", port) for name, _, number in names
    )
    return inside != without if names else True


def _conflict(network: str, plugin: str) -> str:
    """Return why these values of NCCL_NET and NCCL_NET_PLUGIN exclude our network beside NCCL's own, or ""."""
    ours = NAME.lower()
    if network and network.lower() != ours:
        return f"took {network}, not {NAME}: NCCL_NET={network} is set; unset it"
    if network:
        return f"took {NAME} for stock, too: NCCL_NET={network} is set; unset it"
    if plugin.lower() not in ("", "none", ours) and Path(plugin).name != f"libnccl-net-{ours}.so":
        return f"NCCL_NET_PLUGIN={plugin} is set, and NCCL uses one plugin in a process: compare in two runs"
    return ""


def refusal(transports: Sequence[str], settings: Settings) -> str:
    """Return the reason not to use these transports over NCCL in this process, with the remedy; "": there is none."""
    version, nccl = _nccl_of_torch()
    number = ".".join(map(str, nccl or ()))
    arranged = _arranged or _Arranged(why="it was not asked for when netbottleneck was imported: set it before that")
    conflict = _conflict(arranged.network, arranged.plugin)
    if nccl is None:
        why = f"torch {version} has no NCCL: use tcp or ofi"
    elif nccl < LEAST:
        why = f"NCCL {number} is too old: {'.'.join(map(str, LEAST))} or later is needed"
    elif conflict:
        why = conflict if conflict.startswith("NCCL_NET_PLUGIN") else f"NCCL {number} {conflict}"
    elif arranged.why:
        why = arranged.why
    elif len(transports) > 1 and nccl < BOTH:
        why = f"NCCL {number} has one of our networks in a process: compare {' and '.join(transports)} in two runs"
    else:
        return next((f"{name}: {why}" for name in transports if (why := native_refusal(lanes_of(name), settings))), "")
    return f"{transports[0]}: {why}"


def lanes_of(transport: str) -> str:
    """Return the native transport below one over NCCL."""
    return transport.removeprefix("nccl+")


def _nccl_of_torch() -> tuple[str, tuple[int, ...] | None]:
    """Return torch's version, and that of its NCCL; None: it has none."""
    import torch
    import torch.distributed as dist

    has = dist.is_available() and dist.is_nccl_available()
    return torch.__version__, tuple(torch.cuda.nccl.version()[:3]) if has else None


def backend_of(group: Any, device: Any) -> Any:
    """Return the NCCL backend of a process group for a device; None: another one reduces tensors there."""
    import torch.distributed as dist

    try:
        found = group._get_backend(device)
    except RuntimeError:
        found = group
    found = getattr(found, "wrapped_pg", found)
    kind: Any = getattr(dist, "ProcessGroupNCCL", None)
    return found if kind is not None and isinstance(found, kind) else None


class OverNccl:
    """One arm over NCCL. Its group reduces the buckets of a DDP model in place of the model's own."""

    def __init__(self, name: str, group: Any, counters: _Counters, about: Mapping[str, Any]) -> None:
        self.name = name
        self._group = group
        self._counters = counters
        self._about = about

    def target(self, gradients: Any) -> None:
        """Route the reducer's buckets over this group from now on."""
        gradients.to_group(self._group)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._group.barrier().wait()

    def info(self) -> dict[str, Any]:
        """Return the record's entry for this transport."""
        return {**self._about, "bytes_out": self._counters.bytes}

    def wire(self) -> int:
        """Return the bytes that NCCL handed to our network in this process, of all its communicators."""
        return int(self._counters.bytes)

    def close(self) -> None:
        """End the group, and warn if NCCL did not use its network. After an exception, do not wait for other ranks."""
        group, self._group = self._group, None
        if group is None:
            return
        if self._counters.bytes == 0:
            logger.warning(
                "%s: NCCL sent nothing over %s: it reaches ranks of one host by peer access or shared memory, as it "
                "does for stock",
                self.name,
                NAME,
            )
        failed = getattr(sys, "last_value", None) is not None
        with contextlib.suppress(RuntimeError, AttributeError):  # the script may have ended NCCL
            (group.abort if failed else group.shutdown)()


def stock_refusal(group: Any, device: Any) -> str:
    """Return the reason why a model's own process group is not stock beside arms over NCCL, with the remedy, or "".

    Call it before the first arm opens.
    """
    import torch.distributed as dist

    mine = backend_of(group, device)
    if mine is None:
        return f"its gradients travel over {dist.get_backend(group)}, not NCCL: use tcp or ofi"
    assert _arranged is not None
    theirs = getattr(getattr(mine.options, "config", None), "net_name", None)
    if theirs is not None and theirs.lower() != _arranged.stock.lower():
        return f"its group has net_name {theirs}, NetBottleneck needs NCCL_NET={_arranged.stock}: compare in two runs"
    if not _opened and _arranged.queries():  # nothing but the script has used NCCL
        return f"NCCL took {NAME} for its own group, too: leave NCCL_NET={_arranged.stock} as netbottleneck sets it"
    return ""


def open_arm(name: str, settings: Settings, own: Any, device: Any) -> OverNccl:
    """Return the arm of a transport over NCCL, with the configuration of the model's own group. Every rank calls it.

    own: the model's process group, for which stock_refusal is "". Raises ValueError if NCCL takes another network.
    """
    import torch
    import torch.distributed as dist

    assert _arranged is not None
    mine = backend_of(own, device)
    _, nccl = _nccl_of_torch()
    assert nccl is not None
    number = ".".join(map(str, nccl))
    kind = KINDS[name] if nccl >= BOTH else PLAIN
    counters = _arranged.counters(kind)
    _opened.append(name)
    c10d: Any = dist.distributed_c10d
    nccl_group: Any = dist.__dict__["ProcessGroupNCCL"]
    options = nccl_group.Options()
    _configure(options, mine.options, kind)
    options.group_name, options.global_ranks_in_group = f"netbottleneck {name}", list(range(own.size()))
    options._timeout = getattr(mine.options, "_timeout", timedelta(seconds=settings.timeout_s))
    store = c10d.PrefixStore(f"netbottleneck/{len(_opened)}/{name}", c10d._get_default_store())
    before = _arranged.queries(), counters.contexts
    try:
        with _configured_network():
            group = nccl_group(store, own.rank(), own.size(), options)
            group.allreduce([torch.zeros(1, device=device)], dist.AllreduceOptions()).wait()  # opens its communicator
    except RuntimeError as error:
        raise ValueError(f"{name}: NCCL {number} has no communicator over {NAME}: {error}") from error
    if _arranged.queries() == before[0] or (kind != PLAIN and counters.contexts == before[1]):
        raise ValueError(f"{name}: NCCL {number} took another network, not {NAME}: NCCL_DEBUG=INFO shows why")
    about = {"provider": f"NCCL {number} over {NAME}", "lanes": lanes_of(name), "beside": _arranged.stock}
    return OverNccl(name, group, counters, about)


def _configure(options: Any, own: Any, kind: int) -> None:
    """Set the options of an arm's group: those of the script's own group, over our network."""
    with contextlib.suppress(AttributeError):
        options.is_high_priority_stream = own.is_high_priority_stream
    theirs = getattr(own, "config", None)
    for field in SAME:
        if hasattr(theirs, field):
            setattr(options.config, field, getattr(theirs, field))
    options.config.net_name = NAME
    if kind != PLAIN:
        options.config.traffic_class = TRAFFIC_CLASS + kind


@contextlib.contextmanager
def _configured_network() -> Generator[None, None, None]:
    """Leave the choice of the network to a communicator's configuration, which NCCL_NET overrides."""
    before = os.environ.pop("NCCL_NET", None)
    try:
        yield
    finally:
        if before is not None:
            os.environ["NCCL_NET"] = before
