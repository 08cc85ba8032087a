"""A lab: N ranks on one machine, each simulated host in its own network namespace, with caps on links and flows."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import select
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from netbottleneck.lab import network
from netbottleneck.lab.network import LinkSpec, burst_bytes, parse_lab

# Anonymous network namespaces and the processes inside them. Only this section starts processes.
#
# A namespace lives as long as its holder process (see _space.py). A holder lives until close() writes to a pipe, or the
# lab's own process, which has the write end open, is gone. Nothing is written to /run/netns: a SIGKILL leaves nothing
# to clean up.

READY_S = 10.0
_SCRIPT = str(Path(__file__).with_name("_space.py"))
_PYTHON = [sys.executable, "-I", "-S"]


class LabError(OSError):
    """The machine does not support, or lacks, something that a lab needs; the text names it."""


@dataclass(frozen=True)
class Namespace:
    """A held namespace: the holder, and fds of its user (-1: the caller's) and its network namespace (-1: none)."""

    holder: subprocess.Popen[bytes]
    user_fd: int
    net_fd: int


class Namespaces:
    """The namespaces of one lab. They end with close(), or with this process, even after SIGKILL."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.all: list[Namespace] = []
        self._owner = os.getpid()
        self._alive_read, self._alive_write = os.pipe()  # both close on exec: only holders inherit the read end

    def hold(self, how: str) -> Namespace:
        """Start a holder: "root" (no user namespace), "user" (one user namespace for all), "loopback" (no namespace).

        Raises LabError with the holder's error text."""
        user_fd = self.all[0].user_fd if self.all else -1
        step = {"root": "new-net", "user": "new-net" if self.all else "new-user", "loopback": "no-space"}[how]
        alive = self._alive_read
        command = ["hold", str(os.getpid()), str(alive), str(user_fd), step, self.mark]
        holder = subprocess.Popen(
            [*_PYTHON, _SCRIPT, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[alive, *([user_fd] if user_fd >= 0 else [])],
            start_new_session=True,
        )
        line = first_line(holder, READY_S)
        if line != b"ready\n":
            why = _stop(holder)
            raise LabError(why or "the process that holds a namespace did not start")
        if how == "user" and user_fd < 0:
            user_fd = os.open(f"/proc/{holder.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        net_fd = -1 if how == "loopback" else os.open(f"/proc/{holder.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self.all.append(Namespace(holder, user_fd, net_fd))
        return self.all[-1]

    def popen(
        self, namespace: Namespace, argv: Sequence[str], env: Mapping[str, str] | None, **kw: Any
    ) -> subprocess.Popen[Any]:
        """Start a command inside a namespace; the arguments are those of subprocess.Popen."""
        inherited = [fd for fd in (namespace.user_fd, namespace.net_fd) if fd >= 0]
        head = ["enter", str(os.getpid()), str(namespace.user_fd), str(namespace.net_fd)]
        kw["pass_fds"] = [*kw.get("pass_fds", ()), *inherited]
        return subprocess.Popen([*_PYTHON, _SCRIPT, *head, *argv], env=None if env is None else dict(env), **kw)

    def batch(self, tool: str, commands: Sequence[tuple[Namespace, str]]) -> None:
        """Run commands of `ip` or `tc`, in all namespaces at once. Raises LabError with the tool's error text."""
        with contextlib.ExitStack() as files:
            running = []
            for namespace, text in commands:
                if text:
                    script = files.enter_context(tempfile.TemporaryFile("w+"))
                    script.write(text)
                    script.seek(0)
                    streams = {"stdin": script, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
                    running.append(self.popen(namespace, [find_tool(tool), "-batch", "-"], None, **streams))
            errors = [_finish(tool, process) for process in running]
        if any(errors):
            raise LabError(next(filter(None, errors)))

    def close(self) -> None:
        """Release the holders and wait for them. May be called again; does nothing in a forked child."""
        if os.getpid() != self._owner or self._alive_write < 0:
            return
        os.write(self._alive_write, b"x")  # closing is not enough if a forked child has a copy of this end
        os.close(self._alive_write)
        os.close(self._alive_read)
        self._alive_write = -1
        descriptors = {fd for namespace in self.all for fd in (namespace.user_fd, namespace.net_fd) if fd >= 0}
        for descriptor in descriptors:
            os.close(descriptor)
        for namespace in self.all:
            with contextlib.suppress(subprocess.TimeoutExpired):
                namespace.holder.wait(READY_S)
            _stop(namespace.holder)
        self.all.clear()


def find_tool(name: str) -> str:
    """Return the path of `ip` or `tc`, even if PATH lacks the sbin folders. Raises LabError."""
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/bin:/bin")
    if path is None:
        raise LabError(f"{name} is not installed (Debian and Ubuntu: apt install iproute2)")
    return path


def _finish(tool: str, process: subprocess.Popen[str]) -> str:
    try:
        _, errors = process.communicate(timeout=READY_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"{tool} did not finish within {READY_S:.0f} s"
    return f"{tool}: {' '.join(errors.split()) or process.returncode}" if process.returncode != 0 else ""


def first_line(process: subprocess.Popen[bytes], limit_s: float) -> bytes:
    """Return the first line that a process prints; incomplete if it exits or takes longer than limit_s."""
    assert process.stdout is not None
    until = time.monotonic() + limit_s
    output = select.poll()  # select() takes no descriptor above 1023
    output.register(process.stdout, select.POLLIN)
    line = b""
    while not line.endswith(b"\n") and output.poll(1000 * max(0.0, until - time.monotonic())):
        got = os.read(process.stdout.fileno(), 64)
        if not got:
            break
        line += got
    return line


def _stop(process: subprocess.Popen[bytes]) -> str:
    if process.poll() is None:
        process.kill()
    _, errors = process.communicate()
    return errors.decode(errors="replace").strip()


# Verification of the links: TCP flows from host 0 to the last host, counted per flow by the receiver.

TOLERANCE = 0.15
WARMUP_S = 0.3
LIMIT_S = 15.0
SCRIPT = str(Path(__file__).with_name("_flows.py"))


def measure(lab: Lab, seconds: float) -> dict[str, Any]:
    """Return `one_flow`, `many_flows` and `ok`: bits per second of payload, over about `seconds` after a warm-up.

    Both are measured on the first link. If hosts have more links, `more_links` has one entry for each, with as many
    flows as fill it. Raises LabError naming what failed."""
    runs = [_run(lab, flows, seconds, 0) for flows in (1, lab.spec.saturating_flows())]
    more = [_run(lab, spec.saturating_flows(), seconds, 1 + index) for index, spec in enumerate(lab.spec.links[1:])]
    found = {"one_flow": runs[0], "many_flows": runs[1], "ok": all(run["ok"] for run in [*runs, *more])}
    return found | ({"more_links": more} if more else {})


def _run(lab: Lab, flows: int, seconds: float, link: int) -> dict[str, Any]:
    limit = LIMIT_S + seconds
    command = [sys.executable, "-I", "-S", SCRIPT]
    pipes: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    last = lab.size - 1
    target = lab.address(lab.hosts - 1, link)
    receiver = lab.popen(
        last, [*command, "receive", target, str(flows), str(WARMUP_S), str(seconds), str(limit)], **pipes
    )
    assert receiver.stdout is not None
    port = receiver.stdout.readline().strip()
    sender = lab.popen(0, [*command, "send", target, port or "0", str(flows), str(limit)], **pipes)
    errors = ""
    texts = []
    for process in (receiver, sender):
        try:
            text, error = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            text, error = process.communicate()
            error = f"did not end within {limit:.0f} s; {error}"
        texts.append(text)
        errors += error
    if not texts[0]:
        raise LabError(f"the lab's {flows} flows from {lab.rank0_address} to {target} did not run: {errors.strip()}")
    return _judge(lab, flows, json.loads(texts[0]), link)


def _judge(lab: Lab, flows: int, counted: dict[str, Any], link: int) -> dict[str, Any]:
    spec = lab.caps[link] if lab.hosts > 1 else LinkSpec()  # no traffic leaves a single host
    found = judged(spec, flows, counted)
    return found if lab.flow_cap == "htb" else found | {"burst_bytes": None}


def judged(spec: LinkSpec, flows: int, counted: dict[str, Any]) -> dict[str, Any]:
    """Return the receiver's counts of some flows with the configured rates; `ok`: they agree within TOLERANCE.

    burst_bytes, link_burst_bytes: the burst that HTB's caps allow an idle flow and an idle link, beyond their rate;
    None without a cap."""
    rates: list[float] = counted["flow_bps"]
    configured = spec.expected_bps(flows)
    ok = configured is None or abs(sum(rates) / configured - 1) <= TOLERANCE
    if spec.flow_bps:  # on an oversubscribed link a flow may get less than its cap, but never more
        caps = [spec.flow_rate(index) for index in range(flows)]
        least = 1 - TOLERANCE if sum(caps) == configured else 0.0
        ok = ok and all(cap * least <= rate <= cap * (1 + TOLERANCE) for rate, cap in zip(rates, caps, strict=True))
    return {
        "flows": flows,
        "configured_bps": configured,
        "measured_bps": sum(rates),
        "measured_flow_bps": rates,
        "seconds": counted["seconds"],
        "burst_bytes": burst_bytes(min(spec.flow_bps)) if spec.flow_bps else None,
        "link_burst_bytes": burst_bytes(spec.link_bps) if spec.link_bps else None,
        "ok": ok,
    }


# The lab: hosts, links and ranks.

WAYS = ("root", "user", "loopback")
SHIM = Path(__file__).with_name("libnbflowcap.so")
MASTER_PORT = 29500
STOP_S = 3.0
_HOW = {"root": "namespaces (root)", "user": "namespaces (user)", "loopback": "loopback"}
_LOOPBACK = (
    "all ranks share this machine's loopback interface: no link is capped, caps per flow are set inside each process, "
    "and no number measured here applies to a network"
)


def preloadable() -> str:
    """Return the shim's path for LD_PRELOAD; if it has a space or colon, that of a symlink, which is kept.

    The symlink is in a folder that only this user can write. Raises LabError if there can be none."""
    if not set(str(SHIM)) & set(" :"):
        return str(SHIM)
    folder = Path(tempfile.gettempdir(), f"netbottleneck-lab-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o022:
        raise LabError(f"{folder} is not a folder that this user alone can write")
    link = folder / f"{hashlib.sha256(os.fsencode(SHIM)).hexdigest()[:16]}.so"
    if set(str(link)) & set(" :"):
        raise LabError(
            f"neither {SHIM} nor {link} can be named in LD_PRELOAD: set TMPDIR to a path without space or colon"
        )
    with contextlib.suppress(FileExistsError):
        link.symlink_to(SHIM)
    return str(link)


class Lab:
    """`hosts` simulated hosts with `ranks_per_host` ranks each, rank r on host r // ranks_per_host. A context manager.

    `flow` selects what caps single flows: "htb", outside the processes as a cloud does it, or "pacing", by
    SO_MAX_PACING_RATE inside them. Several different caps, and the loopback, always use pacing. `ways` are tried in
    turn; `how` is the one in use, `why` the reasons why earlier ones failed. Raises ValueError for a bad argument,
    LabError if no way is possible."""

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
            raise ValueError(f'flow must be "htb" or "pacing", not {flow!r}')
        if not ways or not set(ways) <= set(WAYS):
            raise ValueError(f"ways must be names from {WAYS}, not {tuple(ways)!r}")
        self.hosts = hosts
        self.ranks_per_host = ranks_per_host
        self.spec = parse_lab(spec) if isinstance(spec, str) else spec
        self.way = ""
        self.why = ""
        self._flow = flow
        self._ways = tuple(ways)
        self._token = secrets.token_hex(4)
        self._namespaces: Namespaces | None = None
        self._host_namespaces: list[Namespace] = []
        self._switch: Namespace | None = None
        self._ranks: list[subprocess.Popen[Any]] = []
        self._port = MASTER_PORT

    def __enter__(self) -> Self:
        reasons = []
        for way in self._ways:
            self.way = way
            self._namespaces = Namespaces(f"NETBOTTLENECK_HOST_ID=lab-{self._token}-")
            try:
                self._check()
                self._build(self._namespaces)
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
        """The number of ranks."""
        return self.hosts * self.ranks_per_host

    @property
    def how(self) -> str:
        """The kind of hosts: "namespaces (root)", "namespaces (user)" or "loopback"."""
        return _HOW.get(self.way, "")

    @property
    def flow_cap(self) -> str:
        """The mechanism that caps flows: "htb", "pacing" or "none"."""
        if not self.spec.flow_bps:
            return "none"
        return "pacing" if len(self.spec.flow_bps) > 1 or self.way == "loopback" else self._flow

    @property
    def interface(self) -> str:
        """The interfaces between the hosts, such as "nb0" or "nb0,nb1". The first one carries the rendezvous."""
        return "lo" if self.way == "loopback" else ",".join(map(network.interface, range(len(self.spec.links))))

    @property
    def caps(self) -> tuple[LinkSpec, ...]:
        """The caps that exist, by link: those of `spec`, but none of a link on the loopback."""
        if self.way == "loopback":  # caps of flows are set inside each process
            return tuple(LinkSpec(None, link.flow_bps) for link in self.spec.links)
        return self.spec.links

    def address(self, host: int, link: int = 0) -> str:
        """Return a host's IPv4 address on its first interface, or on interface `link`. Raises IndexError."""
        if not 0 <= host < self.hosts or not 0 <= link < len(self.spec.links):
            raise IndexError(f"host {host} of {self.hosts}, link {link} of {len(self.spec.links)}")
        return "127.0.0.1" if self.way == "loopback" else network.address(host, link)

    def set_link(self, host: int, up: bool, link: int = 0) -> None:
        """Set an interface of a host up or down. Raises IndexError, and LabError without network namespaces."""
        self.address(host, link)
        self._open_namespaces().batch("ip", [(self._host_namespaces[host], network.link_commands(link, up))])

    def set_caps(self, spec: LinkSpec | str, host: int | None = None) -> None:
        """Change the rates of the links and of single flows, while ranks run.

        host: only of its links, and of the flows that it sends; `spec` remains that of the others. Of two hosts, which
        no switch joins, a host's caps are those of what it sends. Raises IndexError, ValueError if other things are
        capped than in the lab's own spec, and LabError without network namespaces, or with paced flows."""
        new = parse_lab(spec) if isinstance(spec, str) else spec
        for old, link in zip(self.spec.links, new.links, strict=False):
            if (old.link_bps is None, len(old.flow_bps)) != (link.link_bps is None, len(link.flow_bps)):
                raise ValueError(f"{new}: caps other things than {self.spec}; only the rates may change")
        if len(self.spec.links) != len(new.links):
            raise ValueError(f"{new}: has other links than {self.spec}")
        namespaces = self._open_namespaces()
        if self.flow_cap == "pacing":
            raise LabError("the caps of paced flows cannot change")
        self.address(host or 0)
        hosts = range(self.hosts) if host is None else [host]
        caps = network.changed_caps(network.host_caps(new, self.flow_cap == "htb"))
        namespaces.batch("tc", [(self._host_namespaces[each], caps) for each in hosts])
        if self._switch is not None:
            namespaces.batch("tc", [(self._switch, network.changed_caps(network.switch_caps(new, hosts)))])
        if host is None:
            self.spec = new

    def drop(self, host: int, part: float) -> None:
        """Drop a part of the packets that a host receives, at random, from now on. Once for each host.

        Raises IndexError, ValueError for a part that is not between 0 and 1, and LabError without network namespaces.
        """
        self.address(host)
        if not 0 < part < 1:
            raise ValueError(f"{part:g} of the packets: the part must be between 0 and 1")
        commands = network.drop_commands(part, len(self.spec.links))
        self._open_namespaces().batch("tc", [(self._host_namespaces[host], commands)])

    def _open_namespaces(self) -> Namespaces:
        if self._namespaces is None or self.way == "loopback":
            raise LabError("a link can change in an open lab of namespaces only")
        return self._namespaces

    @property
    def rank0_address(self) -> str:
        """The address of the host of rank 0."""
        return self.address(0)

    def host(self, rank: int) -> int:
        """Return a rank's host. Raises IndexError."""
        if not 0 <= rank < self.size:
            raise IndexError(f"rank {rank} of {self.size}")
        return rank // self.ranks_per_host

    def variables(self, rank: int, env: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return `env` (default: this process's environment) with the variables of a rank.

        Always set: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, NETBOTTLENECK_HOST_ID and,
        for paced flows, LD_PRELOAD and NBFLOWCAP_*. Set if missing: the interface for gloo, NCCL and this package."""
        result = dict(os.environ if env is None else env)
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            result.setdefault(name, self.interface)
        # Exact match: a new interface is up before its link is, and a prefix match would skip it.
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
        """Start a rank's process on its host, with variables(rank, env); other arguments as for subprocess.Popen.

        The process is the command itself. The process and all its children are killed when the lab ends. Exit code 127:
        the command could not be started."""
        if self._namespaces is None:
            raise LabError("the lab is not open: use it as a context manager")
        process = self._namespaces.popen(self._host_namespaces[self.host(rank)], argv, self.variables(rank, env), **kw)
        self._ranks.append(process)
        return process

    def verify(self, seconds: float = 1.0) -> dict[str, Any]:
        """Measure the actual rates from host 0 to the last host: one flow, then as many as fill the link.

        Returns payload rates with the configured rates, and `ok`: every measured rate is within 15 % of its cap. HTB
        caps include headers, about 5 %. Raises LabError if nothing was sent."""
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
        """End the remaining ranks, first by SIGTERM, and release all resources. May be called again."""
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
        if self._namespaces is not None:
            self._namespaces.close()
            self._namespaces = None
        self._host_namespaces.clear()
        self._switch = None

    def _check(self) -> None:
        if self.flow_cap == "pacing" and not SHIM.exists():
            raise LabError(f"{SHIM.name} is not built, and caps per flow need it here")
        if self.way == "loopback" and self.spec.more_bps:
            raise LabError("hosts with several interfaces need network namespaces")
        if self.way != "loopback":
            find_tool("ip")
            if self.spec.capped:
                find_tool("tc")

    def _build(self, namespaces: Namespaces) -> None:
        if self.way == "loopback":
            self._host_namespaces = [namespaces.hold("loopback")] * self.hosts
            with socket.create_server(("127.0.0.1", 0)) as free:
                self._port = free.getsockname()[1]
            return
        self._port = MASTER_PORT
        self._host_namespaces = [namespaces.hold(self.way) for _ in range(self.hosts)]
        pids, links = [place.holder.pid for place in self._host_namespaces], len(self.spec.links)
        if self.hosts == 2:
            namespaces.batch("ip", [(self._host_namespaces[0], network.pair_commands(pids[1], links))])
        else:
            self._switch = namespaces.hold(self.way)
            namespaces.batch("ip", [(self._switch, network.switch_commands(pids, links))])
            namespaces.batch("tc", [(self._switch, network.switch_caps(self.spec, range(self.hosts)))])
        namespaces.batch(
            "ip", [(place, network.host_commands(host, links)) for host, place in enumerate(self._host_namespaces)]
        )
        caps = network.host_caps(self.spec, self.flow_cap == "htb")
        namespaces.batch("tc", [(place, caps) for place in self._host_namespaces])

    def _pacing(self, env: Mapping[str, str]) -> dict[str, str]:
        result = {
            "LD_PRELOAD": " ".join([preloadable(), *env.get("LD_PRELOAD", "").split()]),
            "NBFLOWCAP_BPS": ",".join(map(str, self.spec.flow_bps)),
            "NBFLOWCAP_FREE": str(self._port),
        }
        if ports := env.get("NETBOTTLENECK_PORTS"):
            result |= {"NBFLOWCAP_PORTS": ports, "NBFLOWCAP_CONTROL": self.rank0_address}
        return result
