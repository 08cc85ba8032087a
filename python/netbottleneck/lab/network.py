"""Network of a lab: its caps as a value and as text, and the `ip -batch` and `tc -batch` commands that create it.

This module starts no process. Two hosts are joined by one veth pair. Any other number is joined by a bridge in a
namespace of its own, the switch. A link's cap is an HTB class on the host's side. With a switch, another class on the
switch's side limits the other direction. A flow's cap is one of 2048 HTB classes. A classic BPF program selects the
class: the source port XOR the destination port, the latter with its bits rotated by one. Hosts with several links have
one interface, one network and, with a switch, one bridge per link.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from netbottleneck.lab._space import PORTS

# Caps per link and per flow.

UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
FLOW_RATES_MAX = 64  # MAX_RATES of csrc/lab/flowcap.c
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(k|m|g)?bit", re.IGNORECASE)


@dataclass(frozen=True)
class LinkSpec:
    """A cap on each host's link, per direction, and on each flow, in bits per second on the wire.

    `link_bps` None: no cap. `flow_bps` empty: no cap; one value: for every flow; several: assigned to flows in turn.
    `more_bps`: the caps of further interfaces on each host."""

    link_bps: int | None = None
    flow_bps: tuple[int, ...] = ()
    more_bps: tuple[int, ...] = ()

    def __str__(self) -> str:
        first = "none" if self.link_bps is None else format_rate(self.link_bps)
        link = "+".join([first, *map(format_rate, self.more_bps)])
        return link + ("/" + ",".join(map(format_rate, self.flow_bps)) if self.flow_bps else "")

    @property
    def capped(self) -> bool:
        """True if any cap is set."""
        return self.link_bps is not None or bool(self.flow_bps)

    @property
    def links(self) -> tuple[LinkSpec, ...]:
        """Each interface of a host as a link of its own."""
        return tuple(LinkSpec(bps, self.flow_bps) for bps in (self.link_bps, *self.more_bps))

    @property
    def slowest_bps(self) -> int | None:
        """The lowest cap of a link or flow; None without a cap."""
        links = () if self.link_bps is None else (self.link_bps,)
        return min((*links, *self.more_bps, *self.flow_bps), default=None)

    def expected_bps(self, flows: int) -> float | None:
        """Return the rate that `flows` flows in one direction can reach on the first link; None without a cap."""
        total = float(sum(self.flow_rate(index) for index in range(flows))) if self.flow_bps else None
        if self.link_bps is None:
            return total
        return float(self.link_bps) if total is None else min(total, float(self.link_bps))

    def flow_rate(self, index: int) -> int:
        """Return the cap of flow number `index`. Raises ValueError if flows have no cap."""
        if not self.flow_bps:
            raise ValueError("flows have no cap")
        return self.flow_bps[index % len(self.flow_bps)]

    def saturating_flows(self, most: int = 16) -> int:
        """Return how many flows fill the link, at most `most`; 4 if the caps do not determine it."""
        if not self.flow_bps:
            return 4
        if len(self.flow_bps) > 1:
            return min(len(self.flow_bps), most)
        return 4 if self.link_bps is None else max(1, min(most, -(-self.link_bps // self.flow_bps[0])))


def parse_rate(text: str, whole: str | None = None) -> int | None:
    """Return bits per second of "500mbit", "2gbit", "1.5gbit"; None for "none". Raises ValueError naming the text."""
    text = text.strip()
    where = f" in {whole!r}" if whole not in (None, text) else ""
    if text.lower() == "none":
        return None
    match = _RATE.fullmatch(text)
    if match is None:
        raise ValueError(f'{text!r}{where} is not a rate: write "2gbit", "500mbit", "64kbit" or "none"')
    rate = float(match[1]) * UNITS[(match[2] or "").lower() + "bit"]
    if not 1000 <= rate <= 10**12:
        raise ValueError(f"{text!r}{where} is not between 1kbit and 1000gbit")
    return round(rate)


def parse_lab(text: str) -> LinkSpec:
    """Parse "LINK[+LINK…][/FLOW[,FLOW…]]", such as "2gbit/500mbit", "none/400mbit,100mbit" or "1gbit+250mbit".

    Links joined by + are interfaces of every host. At most FLOW_RATES_MAX flow rates. Raises ValueError."""
    link, slash, flows = text.partition("/")
    if slash and not flows.strip():
        raise ValueError(f"{text!r}: no rate after '/'")
    flow_bps = _flow_rates(flows, text) if slash else ()
    first, *more = (parse_rate(part, text) for part in link.split("+"))
    if None in more or (more and first is None):
        raise ValueError(f"{text!r}: with several links, each needs a rate")
    return LinkSpec(first, flow_bps, tuple(rate for rate in more if rate is not None))


def _flow_rates(flows: str, text: str) -> tuple[int, ...]:
    """Return the rates of "FLOW[,FLOW…]", none for "none"; `text`: the whole lab, for errors."""
    rates = [parse_rate(flow, text) for flow in flows.split(",")]
    if rates == [None]:
        return ()
    if None in rates:
        raise ValueError(f"{text!r}: a list of flow rates cannot contain 'none'")
    if len(rates) > FLOW_RATES_MAX:
        raise ValueError(f"{text!r}: {len(rates)} flow rates: at most {FLOW_RATES_MAX}")
    return tuple(rate for rate in rates if rate is not None)


def format_rate(bps: int) -> str:
    """Return the shortest exact text of a rate, such as "500mbit"."""
    for unit in ("gbit", "mbit", "kbit"):
        if bps % UNITS[unit] == 0:
            return f"{bps // UNITS[unit]}{unit}"
    return f"{bps}bit"


# Commands for `ip -batch` and `tc -batch`, per namespace.

UNCAPPED_BPS = 100 * 10**9
_FLOW_CLASS = 0x1000  # class ids 1:1000 to 1:17ff


def interface(link: int = 0) -> str:
    """Return the name of an interface, the same on every host."""
    return f"nb{link}"


def address(host: int, link: int = 0) -> str:
    """Return a host's IPv4 address inside the lab."""
    return f"10.77.{link}.{host + 1}"


def pair_commands(peer_pid: int, links: int = 1) -> str:
    """Return the `ip` commands for the first of two hosts; `peer_pid` is a process in the other's namespace."""
    names = map(interface, range(links))
    return "".join(f"link add {name} type veth peer name {name} netns {peer_pid}\n" for name in names)


def switch_commands(pids: list[int], links: int = 1) -> str:
    """Return the `ip` commands for the switch; `pids` has one process in the namespace of each host."""
    lines = []
    for link in range(links):
        lines += [f"link add br{link} type bridge mcast_snooping 0", f"link set br{link} addrgenmode none up"]
        for host, pid in enumerate(pids):
            port = _port(host, link)
            lines.append(f"link add {port} type veth peer name {interface(link)} netns {pid}")
            lines.append(f"link set {port} addrgenmode none master br{link} up")
    return "\n".join(lines) + "\n"


def host_commands(host: int, links: int = 1) -> str:
    """Return the `ip` commands for one host, to run once its interfaces exist."""
    lines = ["link set lo up"]
    for link in range(links):
        name = interface(link)
        lines.append(f"link set {name} addrgenmode none")
        lines += [f"addr add {address(host, link)}/24 dev {name}", f"link set {name} up"]
    return "\n".join(lines) + "\n"


def link_commands(link: int, up: bool) -> str:
    """Return the `ip` commands that set one interface of a host up or down."""
    return f"link set {interface(link)} {'up' if up else 'down'}\n"


def host_caps(spec: LinkSpec, per_flow: bool) -> str:
    """Return the `tc` commands for one host's side of its links; `per_flow`: with one class per flow."""
    return "".join(interface_caps(interface(index), link, per_flow) for index, link in enumerate(spec.links))


def interface_caps(device: str, spec: LinkSpec, per_flow: bool, major: int = 1) -> str:
    """Return the `tc` commands that cap what one interface sends; `major`: number of the qdisc handle."""
    lines: list[str] = []
    if spec.link_bps is not None or per_flow:
        lines += _link(device, spec.link_bps or UNCAPPED_BPS, major)
    if per_flow:
        lines += _flows(device, spec.flow_bps[0], major)
    return "".join(f"{line}\n" for line in lines)


def switch_caps(spec: LinkSpec, hosts: Iterable[int]) -> str:
    """Return the `tc` commands for the switch's side of the links of these hosts."""
    lines: list[str] = []
    for host, (index, link) in product(hosts, enumerate(spec.links)):
        if link.link_bps is not None:
            lines += _link(_port(host, index), link.link_bps or UNCAPPED_BPS)
            lines.append(f"qdisc add dev {_port(host, index)} parent 1:10 pfifo limit 256")
    return "".join(f"{line}\n" for line in lines)


def _port(host: int, link: int) -> str:
    return f"port{host}-{link}"


def burst_bytes(bps: int) -> int:
    """Return the burst of an HTB class: the bytes that an idle class may send at once."""
    # 4 ms of traffic: a wait of that length for a busy CPU costs no throughput. At least two 64 KiB packets.
    return max(128 * 1024, bps // 8 * 4 // 1000)


def _class(device: str, parent: str, classid: str, rate: int, ceil: int) -> str:
    burst = burst_bytes(ceil)
    return (
        f"class add dev {device} parent {parent} classid {classid} htb rate {rate}bit ceil {ceil}bit "
        f"burst {burst} cburst {burst} quantum 60000"
    )


def _link(device: str, bps: int, major: int = 1) -> list[str]:
    top = f"{major:x}:"
    return [
        f"qdisc add dev {device} root handle {top} htb default 10 r2q 1000",
        _class(device, top, f"{top}1", bps, bps),
        _class(device, f"{top}1", f"{top}10", min(bps, 10**6), bps),
    ]


def _flows(device: str, bps: int, major: int) -> list[str]:
    top, rate = f"{major:x}:", min(bps, 10**6)
    lines = [_class(device, f"{top}1", f"{top}{_FLOW_CLASS + index:x}", rate, bps) for index in range(PORTS)]
    return [*lines, f"filter add dev {device} parent {top} protocol ip prio 1 bpf bytecode '{_classifier(major)}'"]


def changed_caps(commands: str) -> str:
    """Return the commands that change the classes of `interface_caps` or `switch_caps` to these rates."""
    classes = [line for line in commands.splitlines() if line.startswith("class add")]
    return "".join(f"{line.replace('class add', 'class change', 1)}\n" for line in classes)


def drop_commands(part: float, links: int = 1) -> str:
    """Return the `tc` commands that drop a part of the IP packets that a host receives, at random.

    Not of those that it sends: what the sender's own queue drops, TCP knows of, and does not count as lost."""
    program = [
        (32, 0, 0, 0xFFFFF038),  # A = a random number of 32 bits
        (53, 1, 0, min(int(part * 2**32), 2**32 - 1)),  # at least this: continue below
        (6, 0, 0, 2),  # drop
        (6, 0, 0, 0xFFFFFFFF),  # pass
    ]
    code = f"{len(program)}," + ",".join(" ".join(map(str, step)) for step in program)
    return "".join(
        f"qdisc add dev {interface(index)} ingress\n"
        f"filter add dev {interface(index)} parent ffff: protocol ip prio 1 bpf da bytecode '{code}'\n"
        for index in range(links)
    )


def _classifier(major: int) -> str:
    program = [
        (48, 0, 0, 23),  # A = protocol
        (21, 1, 0, 6),  # TCP: continue
        (21, 0, 12, 17),  # neither TCP nor UDP: the default class
        (177, 0, 0, 14),  # X = length of the IP header
        (72, 0, 0, 14),  # A = source port
        (2, 0, 0, 0),  # M[0] = A
        (72, 0, 0, 16),  # A = destination port
        (84, 0, 0, PORTS - 1),  # A's low bits, rotated right by one. Ports that the kernel chooses are odd,
        (36, 0, 0, PORTS + 1),  # so without the rotation all classes would be even.
        (116, 0, 0, 1),
        (97, 0, 0, 0),  # X = M[0]
        (172, 0, 0, 0),  # A ^= X
        (84, 0, 0, PORTS - 1),  # A &= 2047
        (68, 0, 0, (major << 16) + _FLOW_CLASS),  # A |= major:1000
        (22, 0, 0, 0),  # return A
        (6, 0, 0, 0),  # return 0
    ]
    return f"{len(program)}," + ",".join(" ".join(map(str, step)) for step in program)
