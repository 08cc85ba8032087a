"""N ranks on one machine, each simulated host in a network namespace made by this run, with caps on links and flows."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from netbottleneck.lab import network
from netbottleneck.lab.measure import measure
from netbottleneck.lab.spaces import LabError, Space, Spaces, find_tool
from netbottleneck.lab.spec import LinkSpec, parse_lab

WAYS = ("root", "user", "loopback")
SHIM = Path(__file__).with_name("libnbflowcap.so")
MASTER_PORT = 29500
STOP_S = 3.0
_HOW = {"root": "namespaces (root)", "user": "namespaces (user)", "loopback": "loopback"}
_LOOPBACK = (
    "all ranks share this machine's loopback interface: no link is capped, caps per flow are set inside each process, "
    "and no number measured here says anything about a network"
)


def preloadable() -> str:
    """Return the shim's path or, where that holds what parts the paths of LD_PRELOAD, that of a link, which stays.

    The link is in a folder of this user alone. Raises LabError where there can be none."""
    if not set(str(SHIM)) & set(" :"):
        return str(SHIM)
    folder = Path(tempfile.gettempdir(), f"netbottleneck-lab-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022:
        raise LabError(f"{folder} is not a folder that this user alone can write")
    link = folder / f"{hashlib.sha256(os.fsencode(SHIM)).hexdigest()[:16]}.so"
    if set(str(link)) & set(" :"):
        raise LabError(
            f"neither {SHIM} nor {link} can stand in LD_PRELOAD: set TMPDIR to a path without space or colon"
        )
    with contextlib.suppress(FileExistsError):
        link.symlink_to(SHIM)
    return str(link)


class Lab:
    """`hosts` simulated hosts with `ranks_per_host` ranks each, rank r on host r // ranks_per_host. A context manager.

    `flow` says how a single cap per flow is kept: "htb", outside the processes as a cloud does it, or "pacing", by
    SO_MAX_PACING_RATE inside them; several caps, and the loopback, always need pacing. `ways` are tried in turn; `how`
    says which one it was, `why` what stood in the way of the better ones. Raises ValueError for a bad argument,
    LabError where none is possible."""

    def __init__(
        self,
        hosts: int,
        spec: LinkSpec | str,
        ranks_per_host: int = 1,
        *,
        flow: str = "htb",
        ways: Sequence[str] = WAYS,
    ) -> None:
        if not 1 <= hosts <= 200 or ranks_per_host < 1:
            raise ValueError(f"a lab has 1 to 200 hosts with at least one rank each, not {hosts} with {ranks_per_host}")
        if flow not in ("htb", "pacing"):
            raise ValueError(f'flow is "htb" or "pacing", not {flow!r}')
        if not ways or not set(ways) <= set(WAYS):
            raise ValueError(f"ways are some of {WAYS}, not {tuple(ways)!r}")
        self.hosts = hosts
        self.ranks_per_host = ranks_per_host
        self.spec = parse_lab(spec) if isinstance(spec, str) else spec
        self.way = ""
        self.why = ""
        self._flow = flow
        self._ways = tuple(ways)
        self._token = secrets.token_hex(4)
        self._spaces: Spaces | None = None
        self._places: list[Space] = []
        self._ranks: list[subprocess.Popen[Any]] = []
        self._port = MASTER_PORT

    def __enter__(self) -> Self:
        reasons = []
        for way in self._ways:
            self.way = way
            self._spaces = Spaces(f"NETBOTTLENECK_HOST_ID=lab-{self._token}-")
            try:
                self._check()
                self._build(self._spaces)
            except LabError as error:
                reasons.append(f"{_HOW[way]}: {error}")
                self.close()
            except BaseException:
                self.close()
                raise
            else:
                self.why = "; ".join([*([_LOOPBACK] if way == "loopback" else []), *reasons])
                return self
        raise LabError("; ".join(reasons))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.hosts * self.ranks_per_host

    @property
    def how(self) -> str:
        """What the hosts are: "namespaces (root)", "namespaces (user)" or "loopback"."""
        return _HOW.get(self.way, "")

    @property
    def flow_cap(self) -> str:
        """What caps the flows here: "htb", "pacing" or "none"."""
        if not self.spec.flow_bps:
            return "none"
        return "pacing" if len(self.spec.flow_bps) > 1 or self.way == "loopback" else self._flow

    @property
    def interface(self) -> str:
        """The interfaces that join the hosts, first the one of the ranks' first meeting: "nb0", or "nb0,nb1"."""
        return "lo" if self.way == "loopback" else ",".join(map(network.interface, range(len(self.spec.links))))

    def address(self, host: int, link: int = 0) -> str:
        """Return a host's IPv4 address, that of its first interface or of a further one. Raises IndexError."""
        if not 0 <= host < self.hosts or not 0 <= link < len(self.spec.links):
            raise IndexError(f"host {host} of {self.hosts}, link {link} of {len(self.spec.links)}")
        return "127.0.0.1" if self.way == "loopback" else network.address(host, link)

    def set_link(self, host: int, up: bool, link: int = 0) -> None:
        """Set an interface of a host up or down. Raises LabError where hosts have none, IndexError."""
        self.address(host, link)
        if self._spaces is None or self.way == "loopback":
            raise LabError("a link can be set up or down in an open lab of namespaces only")
        self._spaces.batch("ip", [(self._places[host], network.link_commands(link, up))])

    @property
    def rank0_address(self) -> str:
        """The address of rank 0's host."""
        return self.address(0)

    def host(self, rank: int) -> int:
        """Return a rank's host. Raises IndexError."""
        if not 0 <= rank < self.size:
            raise IndexError(f"rank {rank} of {self.size}")
        return rank // self.ranks_per_host

    def variables(self, rank: int, env: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return `env` (default: this process's environment) with what a rank needs to know.

        Set: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, NETBOTTLENECK_HOST_ID and, where
        flows are paced, LD_PRELOAD and NBFLOWCAP_*. Where `env` leaves it open: the interface, for gloo, NCCL, us."""
        result = dict(os.environ if env is None else env)
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            result.setdefault(name, self.interface)
        # By its whole name: one that is new is up before its link is, and would not be taken by a prefix.
        result.setdefault("NETBOTTLENECK_IFNAME", f"={self.interface}")
        result |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(rank % self.ranks_per_host),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_host),
            "MASTER_ADDR": self.rank0_address,
            "MASTER_PORT": str(self._port),
            "NETBOTTLENECK_HOST_ID": f"lab-{self._token}-{self.host(rank)}",
        }
        return result | (self._pacing(result) if self.flow_cap == "pacing" else {})

    def popen(
        self, rank: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **kw: Any
    ) -> subprocess.Popen[Any]:
        """Start a rank's process on its host, with variables(rank, env); the rest as for subprocess.Popen.

        The process is the command itself; it and all its children are killed when the lab ends. Exit code 127: the
        command could not be started."""
        if self._spaces is None:
            raise LabError("the lab is not open: use it as a context manager")
        process = self._spaces.popen(self._places[self.host(rank)], argv, self.variables(rank, env), **kw)
        self._ranks.append(process)
        return process

    def verify(self, seconds: float = 1.0) -> dict[str, Any]:
        """Measure what is in force, from host 0 to the last: one flow, then as many as fill the link.

        Returns rates of payload beside what is configured (which is counted with headers where HTB keeps it, about
        5 % more), and `ok`: every measured rate is within 15 % of its cap. Raises LabError when nothing was sent."""
        return {
            "lab": str(self.spec),
            "hosts": self.hosts,
            "ranks_per_host": self.ranks_per_host,
            "how": self.how,
            "why": self.why,
            "flow_cap": self.flow_cap,
            **measure(self, seconds),
        }

    def close(self) -> None:
        """End the ranks that still run, first by SIGTERM, and give everything back. May be called again."""
        running = [process for process in self._ranks if process.poll() is None]
        for process in running:
            process.terminate()
        until = time.monotonic() + STOP_S
        for process in running:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._ranks.clear()
        if self._spaces is not None:
            self._spaces.close()
            self._spaces = None
        self._places.clear()

    def _check(self) -> None:
        if self.flow_cap == "pacing" and not SHIM.exists():
            raise LabError(f"{SHIM.name} is not built, and caps per flow need it here")
        if self.way == "loopback" and self.spec.more_bps:
            raise LabError("hosts with several interfaces need network namespaces")
        if self.way != "loopback":
            find_tool("ip")
            if self.spec.capped:
                find_tool("tc")

    def _build(self, spaces: Spaces) -> None:
        if self.way == "loopback":
            self._places = [spaces.hold("loopback")] * self.hosts
            with socket.create_server(("127.0.0.1", 0)) as free:
                self._port = free.getsockname()[1]
            return
        self._port = MASTER_PORT
        self._places = [spaces.hold(self.way) for _ in range(self.hosts)]
        pids, links = [place.holder.pid for place in self._places], len(self.spec.links)
        if self.hosts == 2:
            spaces.batch("ip", [(self._places[0], network.pair_commands(pids[1], links))])
        else:
            switch = spaces.hold(self.way)
            spaces.batch("ip", [(switch, network.switch_commands(pids, links))])
            spaces.batch("tc", [(switch, network.switch_caps(self.spec, self.hosts))])
        spaces.batch("ip", [(place, network.host_commands(host, links)) for host, place in enumerate(self._places)])
        caps = network.host_caps(self.spec, self.flow_cap == "htb")
        spaces.batch("tc", [(place, caps) for place in self._places])

    def _pacing(self, env: Mapping[str, str]) -> dict[str, str]:
        result = {
            "LD_PRELOAD": " ".join([preloadable(), *env.get("LD_PRELOAD", "").split()]),
            "NBFLOWCAP_BPS": ",".join(map(str, self.spec.flow_bps)),
            "NBFLOWCAP_FREE": str(self._port),
        }
        if ports := env.get("NETBOTTLENECK_PORTS"):
            result |= {"NBFLOWCAP_PORTS": ports, "NBFLOWCAP_CONTROL": self.rank0_address}
        return result
