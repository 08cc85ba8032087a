"""NCCL over this package's lanes: the arms nccl+tcp and nccl+ofi, beside NCCL as the script runs it.

NCCL loads net plugins once, with its first communicator, and gives each communicator the network that its configuration
names; NCCL_NET overrides that name. `arrange` runs when netbottleneck is imported: it names the plugin, and sets
NCCL_NET to the network that the script's own communicators would get without it. `open_arm` makes a communicator over
our network. csrc/nccl/net.h describes the plugin.
"""

import contextlib
import ctypes
import functools
import itertools
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netbottleneck.config import Settings
from netbottleneck.runtime import job
from netbottleneck.runtime.communicators import native_refusal
from netbottleneck.trace.transports import Arm

if TYPE_CHECKING:
    from netbottleneck import _core

__all__ = ["OverNccl", "arrange", "backend_of", "open_arm", "refusal", "stock_refusal"]

NAME = "NetBottleneck"  # of our network in NCCL
PLUGIN = Path(__file__).parents[1] / "libnccl-net-netbottleneck.so"
LIBRARY = "libnccl.so.2"
LEAST = (2, 18)
BOTH = (2, 28)  # the first that tells a plugin the traffic class of a communicator
# csrc/nccl/net.h: kinds of nets. A traffic class names the transport of one communicator.
TRAFFIC_CLASS = 0x6E6200
PLAIN, KINDS = 0, {"nccl+tcp": 1, "nccl+ofi": 2}
STOCK = "Socket"  # NCCL's own network beside ours
MARK = "_NETBOTTLENECK_NCCL_NET"  # tells the processes that this one starts that we have set NCCL_NET
TABLE_V6_BYTES = 17 * 8  # addresses of counters follow this table
# Fields of ncclConfig_t that an arm copies from the script's own group: the two differ in their network only.
SAME = ("blocking", "cga_cluster_size", "min_ctas", "max_ctas", "collnet_enable", "cta_policy", "nvls_ctas")
END_POLL_S = 0.001
END_S = 5.0  # time that the end of an arm waits for the other ranks
INFINIBAND = Path("/sys/class/infiniband")
SITE = Path("/etc/nccl.conf")
# The table of version 11: places of functions, and the type of the log.
INIT, FINALIZE = 1, 20
Log = ctypes.CFUNCTYPE(
    None, ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p
)

logger = logging.getLogger("netbottleneck")
_opened: list[str] = []  # the arms that this process has opened
_attempts = itertools.count(1)  # of opening an arm: as many on all ranks


class _Counters(ctypes.Structure):
    """What NCCL did with one kind of net in this process: struct nb_net_counters."""

    _fields_ = (("contexts", ctypes.c_uint64), ("bytes", ctypes.c_uint64))


@dataclass(frozen=True)
class _Arranged:
    """What `arrange` found and did.

    network, plugin: NCCL_NET and NCCL_NET_PLUGIN of the script. first: the first arm over NCCL that was asked for. why:
    the reason for having done nothing.
    """

    network: str = ""
    plugin: str = ""
    first: str = ""
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


# What chooses the network of the script's own path.
VARIABLES = (
    *("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_NET"),
    *("NCCL_NET_PLUGIN", "NCCL_SOCKET_FAMILY", "NCCL_NSOCKS_PERTHREAD", "NCCL_SOCKET_NTHREADS"),
)


def stock_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return those of VARIABLES that are set, as the script got them: without what `arrange` sets."""
    found = {name: environ[name] for name in VARIABLES if environ.get(name)}
    if environ.get(MARK) and environ[MARK] == environ.get("NCCL_NET"):
        before = _arranged or _Arranged()
        found |= {"NCCL_NET": before.network, "NCCL_NET_PLUGIN": before.plugin}
    return {name: value for name, value in found.items() if value}


def arrange(arms: Iterable[Arm]) -> None:
    """Prepare NCCL for these arms, if one of them is over NCCL. Call before NCCL's first communicator.

    Sets NCCL_NET_PLUGIN and NCCL_NET. If they are set already, it is too late, or NCCL's own choice of a network is not
    sure to be sockets, changes nothing: `refusal` says why.
    """
    global _arranged  # noqa: PLW0603 - of the process, as NCCL's plugins are
    first = next((arm.transport for arm in arms if arm.over_nccl), None)
    if _arranged is None and first is not None:
        _arranged = _arrange(first)


def _arrange(first: str) -> _Arranged:
    network, plugin = os.environ.get("NCCL_NET", ""), os.environ.get("NCCL_NET_PLUGIN", "")
    if network and network == os.environ.get(MARK) and plugin == NAME.lower():
        network = plugin = ""  # set by the process that started this one
    found = _Arranged(network, plugin, first)
    if _conflict(network, plugin):
        return found
    why = _not_prepared(plugin) or not_sockets(os.environ)
    if why:
        return replace(found, why=why)
    try:
        # NCCL finds a library that is loaded by its name, in each of its versions.
        library = ctypes.CDLL(str(PLUGIN))
    except OSError as error:
        return replace(found, why=f"the plugin cannot be loaded: {error}")
    os.environ["NCCL_NET_PLUGIN"] = NAME.lower()
    os.environ["NCCL_NET"] = os.environ[MARK] = STOCK
    os.environ.setdefault("NCCL_NET_PLUGIN_REF_COUNT", "1")  # else 2.28 and 2.29 drop it with its last communicator
    return replace(found, library=library)


def _not_prepared(plugin: str) -> str:
    """Return why it is too late, or another plugin would be displaced, or ""."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return "torch.distributed was initialised first: import netbottleneck before that"
    if not plugin and loaded("libnccl-net.so") is not None:  # which NCCL_NET_PLUGIN=none excludes
        return "NCCL loads libnccl-net.so here, and it uses one plugin in a process: compare in two runs"
    return ""


def loaded(name: str) -> ctypes.CDLL | None:
    """Return the library that the loader finds by this name, as NCCL does; None: there is none. It stays loaded."""
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def not_sockets(environ: Mapping[str, str], infiniband: Path = INFINIBAND, site: Path = SITE) -> str:
    """Return why NCCL may take another network than Socket for the script, or "".

    A network that is named has no fallback: a wrong name would end the script's first collective. So Socket is named
    only where NCCL has no other choice.
    """
    for file in [*_own_files(environ), site]:
        names = [line.partition("=")[0].strip() for line in _lines(file)]
        named = next((name for name in names if name.startswith(("NCCL_NET", "NCCL_IB_", "NCCL_ENV_PLUGIN"))), None)
        if named is not None:
            return f"{file} sets {named}, so NCCL's own network is not known: compare in two runs"
    if environ.get("NCCL_ENV_PLUGIN"):
        return "NCCL_ENV_PLUGIN is set, so NCCL's own network is not known: compare in two runs"
    devices = sorted(path.name for path in infiniband.glob("*"))
    if devices and environ.get("NCCL_IB_DISABLE", "") != "1":
        return (
            f"NCCL may use InfiniBand device {devices[0]}: compare in two runs, or set NCCL_IB_DISABLE=1 to compare "
            "over sockets"
        )
    return ""


def _own_files(environ: Mapping[str, str]) -> list[Path]:
    """Return the user's configuration file of NCCL; none for a user without a home."""
    if environ.get("NCCL_CONF_FILE"):
        return [Path(environ["NCCL_CONF_FILE"])]
    try:
        return [Path.home() / ".nccl.conf"]
    except RuntimeError:
        return []


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


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
    version, built = _nccl_of_torch()
    if built is None:
        return f"{transports[0]}: torch {version} has no NCCL: use tcp or ofi"
    nccl = _nccl_here(built)
    number = _dotted(nccl)
    arranged = _arranged or _Arranged(why="it was not asked for when netbottleneck was imported: set it before that")
    conflict = _conflict(arranged.network, arranged.plugin)
    if _is_rocm():
        why = f"torch {version} has RCCL, whose plugins are others: use tcp or ofi"
    elif nccl < LEAST:
        why = f"NCCL {number} is too old: {_dotted(LEAST)} or later is needed"
    elif conflict:
        why = conflict if conflict.startswith("NCCL_NET_PLUGIN") else f"NCCL {number} {conflict}"
    elif arranged.why:
        why = arranged.why
    elif min(nccl, built) < BOTH and [*transports] != [arranged.first]:
        has = (
            f"NCCL {number} has" if nccl < BOTH else f"torch {version} was built with NCCL {_dotted(built)}, so it has"
        )
        why = f"{has} one of our networks in a process, the first of NETBOTTLENECK_TRANSPORT: name one"
    elif platform.machine() == "aarch64" and not without_ll128(os.environ):
        why = (
            "NCCL may take its protocol LL128 on aarch64, which is not safe over our network: set NCCL_LL128_C2C=0, or "
            "NCCL_PROTO=^LL128"
        )
    else:
        return next((f"{name}: {why}" for name in transports if (why := native_refusal(lanes_of(name), settings))), "")
    return f"{transports[0]}: {why}"


def without_ll128(environ: Mapping[str, str]) -> bool:
    """Return True if these variables keep NCCL from taking LL128 over NVLink-C2C.

    NCCL_PROTO that names LL128 overrides NCCL_LL128_C2C. A NCCL_PROTO with functions ("allreduce:…") excludes nothing
    here: it may name LL128 for one of them.
    """
    listed = environ.get("NCCL_PROTO", "").strip().lower()
    names = listed.removeprefix("^").split(",")
    if not listed:
        return environ.get("NCCL_LL128_C2C", "") == "0"
    if ":" in listed or ";" in listed:
        return False
    if listed.startswith("^"):
        return "ll128" in names or environ.get("NCCL_LL128_C2C", "") == "0"
    return "ll128" not in names


def lanes_of(transport: str) -> str:
    """Return the native transport below one over NCCL."""
    return transport.removeprefix("nccl+")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _nccl_of_torch() -> tuple[str, tuple[int, ...] | None]:
    """Return torch's version, and that of the NCCL that it was built with; None: it has none.

    torch has names for the options of that NCCL.
    """
    import torch
    import torch.distributed as dist

    has = dist.is_available() and dist.is_nccl_available()
    return torch.__version__, tuple(torch.cuda.nccl.version()[:3]) if has else None


def _nccl_here(built: tuple[int, ...]) -> tuple[int, ...]:
    """Return the version of the NCCL that this process has loaded. built: the version where none is found."""
    for name, mode in ((LIBRARY, os.RTLD_NOLOAD), (None, ctypes.DEFAULT_MODE)):  # or linked into another library
        with contextlib.suppress(OSError, AttributeError):
            found = ctypes.c_int()
            if ctypes.CDLL(name, mode=mode).ncclGetVersion(ctypes.byref(found)) == 0:
                major, rest = divmod(found.value, 10_000 if found.value >= 10_000 else 1_000)
                return major, rest // 100, rest % 100
    return built


def _is_rocm() -> bool:
    import torch

    return torch.version.hip is not None


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

    def __init__(
        self, name: str, group: Any, sent: Callable[[], int], about: Mapping[str, Any], settle: Callable[[], None]
    ) -> None:
        """sent: returns the bytes that the arm has sent. settle: waits until no rank has work of the arm under way."""
        self.name = name
        self._group = group
        self._settle = settle
        self._sent = sent
        self._about = about

    def target(self, gradients: Any) -> None:
        """Route the reducer's buckets over this group from now on."""
        gradients.to_group(self._group)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._group.barrier().wait()

    def info(self) -> dict[str, Any]:
        """Return the record's entry for this transport."""
        return {**self._about, "bytes_out": self._sent()}

    def wire(self) -> int:
        """Return the bytes that NCCL has handed to our network in this process since the arm opened."""
        return self._sent()

    def close(self) -> None:
        """End the group once all ranks have arrived and their devices are idle, or END_S after this one."""
        group, self._group = self._group, None
        if group is None:
            return
        if self._sent() == 0:
            logger.info(
                "%s: NCCL sent nothing from this rank over %s, but by peer access or shared memory", self.name, NAME
            )
        try:
            self._settle()
        except (OSError, RuntimeError) as error:
            logger.info("%s: its group ends before those of the other ranks: %s", self.name, error)
        with contextlib.suppress(RuntimeError):  # the script may have ended NCCL
            _call(group, "shutdown")

    def abort(self) -> None:
        """End the group without waiting for the other ranks, which may be gone."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                _call(group, "abort")


def _settle(device: Any, control: "_core.Comm", name: str) -> None:
    """Wait until the streams of the training and of the device's default are idle, and so are those of other ranks.

    At most END_S for each of the two.
    Older versions of torch end a group by aborting it, which cuts off what another rank still waits for. name: the
    same on all ranks, and of this end alone. Raises TimeoutError, and as Comm.submit and Work.wait.
    """
    import torch

    core = job.core()
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # of an earlier failure on the device
            ends = [torch.cuda.current_stream(device).record_event(), torch.cuda.default_stream(device).record_event()]
            until = time.monotonic() + END_S
            while not all(end.query() for end in ends) and time.monotonic() < until:
                time.sleep(END_POLL_S)
    if not control.submit(name, core.BARRIER, [], core.UINT8).wait(END_S):
        raise TimeoutError(f"not all ranks arrived within {END_S:g} s")


def _call(group: Any, name: str) -> None:
    """Call a method of NCCL's group, which older versions of torch name with an underscore."""
    (getattr(group, name, None) or getattr(group, f"_{name}"))()


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
    if theirs is not None and theirs.lower() != STOCK.lower():
        return f"its group has net_name {theirs}, and beside {NAME} it has {STOCK}: compare in two runs"
    if not _opened and _arranged.queries():  # nothing but the script has used NCCL
        return f"NCCL took {NAME} for its own group, too: leave NCCL_NET={STOCK} as netbottleneck sets it"
    return ""


def open_arm(name: str, settings: Settings, own: Any, device: Any) -> Callable[[], OverNccl]:
    """Prepare the arm of a transport over NCCL; return what opens it, with the other ranks.

    own: the model's process group, for which stock_refusal is ""; the arm has its configuration. Raises ValueError for
    what fails on this rank alone, such as a wrong setting. What is returned raises ValueError if NCCL has no
    communicator over our network. Once all ranks have called it, they wait for each other as NCCL does.
    """
    import torch
    import torch.distributed as dist

    attempt = next(_attempts)  # before anything that may fail on this rank alone
    assert _arranged is not None
    mine = backend_of(own, device)
    _, built = _nccl_of_torch()
    assert built is not None
    nccl = _nccl_here(built)
    number = _dotted(nccl)
    kind = KINDS[name] if min(nccl, built) >= BOTH else PLAIN
    _try_out(_arranged.library, name, kind)
    counters = _arranged.counters(kind)
    before_bytes = counters.bytes
    _opened.append(name)
    c10d: Any = dist.distributed_c10d
    options = c10d.ProcessGroupNCCL.Options()
    _configure(options, mine.options, kind)
    options.group_name, options.global_ranks_in_group = f"netbottleneck {name}", list(range(own.size()))
    options._timeout = getattr(mine.options, "_timeout", timedelta(seconds=settings.timeout_s))
    key = f"netbottleneck/{attempt}/{name}"
    store = c10d.PrefixStore(key, c10d._get_default_store())
    group = c10d.ProcessGroupNCCL(store, own.rank(), own.size(), options)
    tensor = torch.zeros(1, device=device)
    arranged = _arranged
    settle = functools.partial(_settle, device, job.current().comm, f"{key}/end")

    def connect() -> OverNccl:
        before = arranged.queries(), counters.contexts
        try:
            with _our_network():
                group.allreduce([tensor], dist.AllreduceOptions()).wait()  # opens the communicator
        except RuntimeError as error:
            raise ValueError(f"{name}: NCCL {number} has no communicator over {NAME}: {error}") from error
        if arranged.queries() == before[0] or (kind != PLAIN and counters.contexts == before[1]):
            raise ValueError(f"{name}: NCCL {number} took another network, not {NAME}: NCCL_DEBUG=INFO shows why")
        about = {"provider": f"NCCL {number} over {NAME}", "lanes": lanes_of(name), "beside": STOCK}
        return OverNccl(name, group, lambda: int(counters.bytes) - before_bytes, about, settle)

    return connect


def _try_out(library: ctypes.CDLL | None, name: str, kind: int) -> None:
    """Open our network as NCCL would, and close it. Raises ValueError with what it writes to NCCL's log."""
    assert library is not None
    said: list[str] = []
    log = Log(lambda _level, _flags, _file, _line, _format, text: said.append((text or b"").decode(errors="replace")))
    table = ctypes.addressof(ctypes.c_char.in_dll(library, "ncclNetPlugin_v11"))
    init, finalize = (ctypes.c_void_p.from_address(table + 8 * place).value for place in (INIT, FINALIZE))
    assert init is not None
    assert finalize is not None
    context, config = ctypes.c_void_p(), ctypes.c_int(TRAFFIC_CLASS + kind if kind != PLAIN else -1)
    pointer = ctypes.c_void_p
    call = ctypes.CFUNCTYPE(ctypes.c_int, pointer, ctypes.c_uint64, pointer, Log, pointer)(init)
    if call(ctypes.addressof(context), 0, ctypes.addressof(config), log, None) != 0:
        raise ValueError(f"{name}: {said[-1] if said else 'the plugin cannot be opened'}")
    ctypes.CFUNCTYPE(ctypes.c_int, pointer)(finalize)(context)


def _configure(options: Any, own: Any, kind: int) -> None:
    """Set the options of an arm's group: those of the script's own group, over our network."""
    with contextlib.suppress(AttributeError):
        options.is_high_priority_stream = own.is_high_priority_stream
    theirs = getattr(own, "config", None)
    for field in SAME:
        if hasattr(theirs, field):
            setattr(options.config, field, getattr(theirs, field))
    options.config.net_name = NAME  # as NCCL_NET says while it opens, so that a difference would be an error
    if kind != PLAIN:
        options.config.traffic_class = TRAFFIC_CLASS + kind


@contextlib.contextmanager
def _our_network() -> Generator[None, None, None]:
    """Have NCCL take our network for the communicator that opens. NCCL_NET overrides a communicator's configuration."""
    os.environ["NCCL_NET"] = NAME
    try:
        yield
    finally:
        os.environ["NCCL_NET"] = STOCK
