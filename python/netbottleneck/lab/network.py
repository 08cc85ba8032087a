"""The lab's network as text: the commands for `ip -batch` and `tc -batch`, per namespace. No process is started here.

Two hosts are joined by one veth pair; any other number by a bridge in a namespace of its own, the switch. A link's cap
is an HTB class on the host's side and, with a switch, one on the switch's side too, so that it holds both ways. A
flow's cap is one HTB class of 2048, chosen by a classic BPF program from the exclusive or of the source port and the
other's bits turned by one. Hosts with several links have an interface, a network and, with a switch, a bridge for
each."""

from __future__ import annotations

from netbottleneck.lab._space import PORTS
from netbottleneck.lab.spec import LinkSpec

UNCAPPED_BPS = 100 * 10**9
_FLOW_CLASS = 0x1000  # class ids 1:1000 to 1:17ff


def interface(link: int = 0) -> str:
    """Return the name of an interface, the same on every host."""
    return f"nb{link}"


def address(host: int, link: int = 0) -> str:
    """Return a host's IPv4 address inside the lab."""
    return f"10.77.{link}.{host + 1}"


def pair_commands(peer_pid: int, links: int = 1) -> str:
    """`ip` commands for the first of two hosts; `peer_pid` lives in the other's namespace."""
    names = map(interface, range(links))
    return "".join(f"link add {name} type veth peer name {name} netns {peer_pid}\n" for name in names)


def switch_commands(pids: list[int], links: int = 1) -> str:
    """`ip` commands for the switch; one pid in the namespace of each host."""
    lines = []
    for link in range(links):
        lines += [f"link add br{link} type bridge mcast_snooping 0", f"link set br{link} addrgenmode none up"]
        for host, pid in enumerate(pids):
            port = _port(host, link)
            lines.append(f"link add {port} type veth peer name {interface(link)} netns {pid}")
            lines.append(f"link set {port} addrgenmode none master br{link} up")
    return "\n".join(lines) + "\n"


def host_commands(host: int, links: int = 1) -> str:
    """`ip` commands for one host, when its interfaces are there."""
    lines = ["link set lo up"]
    for link in range(links):
        name = interface(link)
        lines.append(f"link set {name} addrgenmode none")
        lines += [f"addr add {address(host, link)}/24 dev {name}", f"link set {name} up"]
    return "\n".join(lines) + "\n"


def link_commands(link: int, up: bool) -> str:
    """`ip` commands that set one interface of a host up or down."""
    return f"link set {interface(link)} {'up' if up else 'down'}\n"


def host_caps(spec: LinkSpec, per_flow: bool) -> str:
    """`tc` commands for one host's side of its links; `per_flow`: with a class per flow."""
    return "".join(interface_caps(interface(index), link, per_flow) for index, link in enumerate(spec.links))


def interface_caps(device: str, spec: LinkSpec, per_flow: bool, major: int = 1) -> str:
    """`tc` commands for what one interface sends; `major`: of its handle."""
    lines: list[str] = []
    if spec.link_bps is not None or per_flow:
        lines += _link(device, spec.link_bps or UNCAPPED_BPS, major)
    if per_flow:
        lines += _flows(device, spec.flow_bps[0], major)
    return "".join(f"{line}\n" for line in lines)


def switch_caps(spec: LinkSpec, hosts: int) -> str:
    """`tc` commands for the switch's side of every link."""
    lines: list[str] = []
    for index, link in enumerate(spec.links):
        for host in range(hosts if link.link_bps is not None else 0):
            lines += _link(_port(host, index), link.link_bps or UNCAPPED_BPS)
            lines.append(f"qdisc add dev {_port(host, index)} parent 1:10 pfifo limit 256")
    return "".join(f"{line}\n" for line in lines)


def _port(host: int, link: int) -> str:
    return f"port{host}-{link}"


def burst_bytes(bps: int) -> int:
    """What a class that was idle may send at once."""
    # 4 ms of traffic: a class that waits for a busy CPU that long loses nothing; never less than two 64 KiB packets
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


def _classifier(major: int) -> str:
    program = [
        (48, 0, 0, 23),  # A = protocol
        (21, 1, 0, 6),  # TCP: go on
        (21, 0, 12, 17),  # neither TCP nor UDP: the default class
        (177, 0, 0, 14),  # X = length of the IP header
        (72, 0, 0, 14),  # A = source port
        (2, 0, 0, 0),  # M[0] = A
        (72, 0, 0, 16),  # A = destination port
        (84, 0, 0, PORTS - 1),  # A's low bits, the lowest one put on top: ports that the system chose are odd,
        (36, 0, 0, PORTS + 1),  # and of two of them the classes would be even
        (116, 0, 0, 1),
        (97, 0, 0, 0),  # X = M[0]
        (172, 0, 0, 0),  # A ^= X
        (84, 0, 0, PORTS - 1),  # A &= 2047
        (68, 0, 0, (major << 16) + _FLOW_CLASS),  # A |= major:1000
        (22, 0, 0, 0),  # return A
        (6, 0, 0, 0),  # return 0
    ]
    return f"{len(program)}," + ",".join(" ".join(map(str, step)) for step in program)
