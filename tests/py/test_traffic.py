"""Bytes between hosts: those of the operations are told from those of others, on the interface that carries both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from netbottleneck.analysis import traffic
from netbottleneck.analysis.usage import NO_CONNECTIONS, Connected, ConnectionUse, HostUse, Use
from netbottleneck.trace.model import MEMORY_LANE, Collective, Rank, Step, Trace, TransportInfo
from netbottleneck.trace.transports import Arm

TCP = Arm("tcp")
MIB = 1 << 20
MOVED = 64 * MIB  # by an operation of this size a ring of many ranks sends about twice as much


def trace_of(hosts: str, info: TransportInfo | None = None, **operation: Any) -> Trace:
    """A run with a rank on each of these hosts, each named by a letter: a counted step, with one operation."""
    ranks = tuple(
        Rank(number, hostname=host, host_id=host, transports=() if info is None else (info,))
        for number, host in enumerate(hosts)
    )
    steps = tuple(Step(rank.rank, at, 0, TCP, at, at + 1) for rank in ranks for at in (0, 1))
    about: dict[str, Any] = {"start_ns": 1, "done_ns": 2, "step": 1, **operation}
    moved = tuple(Collective(rank.rank, TCP, 1, 1, 1, MOVED, **about) for rank in ranks)
    return Trace("r", len(hosts), (TCP,), ranks=ranks, steps=steps, collectives=moved)


def use_of(**sent: float) -> HostUse:
    """The use of the first rank's host: bytes that each interface sent."""
    uses = tuple(Use(name, "tx", 8e9, None, nbytes, 0.0) for name, nbytes in sent.items())
    return HostUse(0, "a", TCP, 1.0, 1.0, 10.0, uses)


def unseen(trace: Trace, **sent: float) -> traffic.Unseen | None:
    """The unseen bytes of the first host."""
    return traffic.unseen(trace, TCP, [use_of(**sent)])


def part(trace: Trace, **sent: float) -> float | None:
    """The unseen part of the first host's bytes; None if it is not known."""
    found = unseen(trace, **sent)
    return None if found is None else found.part


def test_the_loopback_carries_operations_only_of_one_host() -> None:
    two, one = trace_of("ab"), trace_of("aa")
    assert part(two, lo=100 * MOVED, eth0=1.05 * MOVED) == pytest.approx(1 - 1 / 1.05)
    assert part(two, lo=100 * MOVED) is None
    assert part(one, lo=8 * MOVED, eth0=100 * MOVED) == pytest.approx(0.75)  # two ranks send MOVED each
    assert part(one, eth0=100 * MOVED) is None


def test_the_interface_is_the_known_one_or_the_one_with_the_fewest_unseen_bytes() -> None:
    storage = {"eth1": 20.0 * MOVED, "eth0": 1.05 * MOVED, "eth2": 0.1 * MOVED}
    found = unseen(trace_of("ab"), **storage)
    assert found is not None
    assert found.interface == "eth0"
    inexact = unseen(trace_of("ab"), **storage | {"eth0": 0.97 * MOVED})
    assert inexact is not None
    assert (inexact.interface, inexact.part) == ("eth0", 0.0)
    known = unseen(trace_of("ab", TransportInfo("tcp", interface="eth1", link_bps=10**10)), **storage)
    assert known is not None
    assert (known.interface, known.link_bps) == ("eth1", 10**10)
    assert known.unseen_bps == pytest.approx(8e9 * 0.95)


def test_shared_memory_says_nothing_about_an_interface() -> None:
    for algorithm in ("shared memory", "staged shared memory"):
        for hosts in ("aa", "ab"):
            trace = trace_of(hosts, algorithm=algorithm, wire_bytes=0)
            assert part(trace, lo=MOVED, eth0=MOVED) is None
    lanes = ((0, 0, MOVED), (MEMORY_LANE, 0, 8 * MOVED))
    two = trace_of("aabb", kind="broadcast", algorithm="two_level", wire_bytes=MOVED, lanes=lanes)
    uses = (Use("eth0", "rx", 8e9, None, 4.0 * MOVED, 0.0),)
    found = traffic.unseen(two, TCP, [HostUse(0, "a", TCP, 1.0, 1.0, 10.0, uses)])
    assert found is not None
    assert found.part == pytest.approx(0.5)


def test_of_several_ranks_on_a_host_only_bytes_to_other_hosts_count() -> None:
    bus = 2 * 7 / 8 * MOVED
    ring = trace_of("aaaabbbb", algorithm="ring all-reduce", wire_bytes=round(bus))
    assert part(ring, eth0=2 * bus) == pytest.approx(0.5)
    interleaved = trace_of("abababab", algorithm="ring all-reduce", wire_bytes=round(bus))
    assert part(interleaved, eth0=8 * bus) == pytest.approx(0.5)
    everyone = trace_of("aaaabbbb", kind="alltoall")
    assert part(everyone, eth0=4 * MOVED) == pytest.approx(0.5)  # four ranks send half of their bytes out


def test_without_an_algorithm_only_what_all_bytes_together_do_not_explain_counts() -> None:
    bus, unknown = 2 * 7 / 8 * MOVED, trace_of("aaaabbbb")
    assert part(unknown, eth0=2 * bus) is None
    assert part(unknown, eth0=4 * bus) is None
    assert part(unknown, eth0=8 * bus) == pytest.approx(0.5)
    groups = trace_of("aaaabbbb", kind="alltoall", ranks=2)
    assert part(groups, eth0=MOVED) is None


@pytest.mark.parametrize(
    ("hosts", "kind", "factor"),
    [
        ("ab", "alltoall", 1.0),
        ("aaaa", "alltoall", 1.0),
        ("aaaaaaaabbbbbbbb", "allreduce", 1.0),
        ("aaaaaaaabbbbbbbb", "alltoall", 64 / 15),
        ("aaaaaaaabbbbbbbb", "gather", 8 / 15),
    ],
)
def test_an_interface_carries_the_bytes_of_all_ranks_that_share_it(hosts: str, kind: str, factor: float) -> None:
    assert traffic.on_interface(trace_of(hosts, kind=kind), TCP).active == pytest.approx(factor)
    if kind == "alltoall" and factor > 1:
        assert traffic.on_interface(trace_of(hosts, kind=kind, ranks=2), TCP).active == 1.0


@pytest.mark.parametrize(
    ("group", "later_ns", "factors"),
    [
        ((0, 1, 0, 1), 0, (2.0, 2.0)),
        ((0, 1, 0, 1), 100, (1.0, 2.0)),  # one group after the other
        ((0, 1, 0, 1), 50, (4 / 3, 2.0)),
        ((0, 0, 1, 1), 0, (1.0, 1.0)),  # within hosts: nothing is between them
    ],
)
def test_groups_that_move_data_at_once_share_the_interfaces_of_their_hosts(
    group: tuple[int, ...], later_ns: int, factors: tuple[float, float]
) -> None:
    trace = trace_of("aabb", ranks=2)
    moved = tuple(
        replace(one, comm=at, start_ns=1 + at * later_ns, done_ns=101 + at * later_ns)
        for one in trace.collectives
        for at in (group[one.rank],)
    )
    found = traffic.on_interface(replace(trace, collectives=moved), TCP)
    assert (found.active, found.average) == pytest.approx(factors)


def test_groups_with_a_rank_on_each_host_pass_all_bytes_between_hosts_by_any_algorithm() -> None:
    nccl = TransportInfo("stock", provider="nccl")
    trace = trace_of("aaaabbbb", nccl, ranks=2)
    stock = Arm("stock")
    steps = tuple(replace(step, arm=stock) for step in trace.steps)
    moved = tuple(replace(one, arm=stock, comm=one.rank % 4) for one in trace.collectives)
    groups = replace(trace, arms=(stock,), steps=steps, collectives=moved)
    assert traffic.on_interface(groups, stock).least == 1.0
    whole = replace(groups, collectives=tuple(replace(one, ranks=None, comm=0) for one in moved))
    assert traffic.on_interface(whole, stock).least == pytest.approx(1 / 1.75)


def test_a_declared_rate_is_of_the_network_in_use() -> None:
    rated = {"provider": "nccl", "interface": "eth0", "link_bps": 10**9}
    stock = Arm("stock")
    assert traffic.unproven(trace_of("ab", TransportInfo("stock", **rated)), stock, ()) is not None
    assert traffic.unproven(trace_of("ab", TransportInfo("stock", **rated, declared=True)), stock, ()) is None
    assert traffic.unproven(trace_of("ab", TransportInfo("stock", **rated | {"provider": "gloo"})), stock, ()) is None


# The configuration of an arm's network.

STOCK = Arm("stock")


def network_of(*ranks: tuple[str, str, int | None], provider: str = "gloo") -> Trace:
    """A run whose ranks have these hosts, interfaces and MTUs."""
    return Trace(
        "r",
        len(ranks),
        (STOCK,),
        ranks=tuple(
            Rank(
                rank,
                host_id=host,
                transports=(TransportInfo("stock", provider, interface=interface, mtu_bytes=mtu),),
            )
            for rank, (host, interface, mtu) in enumerate(ranks)
        ),
    )


@pytest.mark.parametrize(
    "ranks",
    [
        [("a", "eth0", 9000), ("b", "eth0", 9000)],
        [("a", "eth0", 9000), ("b", "eth0", None)],
        [("a", "eth0", 1500), ("a", "eth1", 9000)],  # one host
        [("a", "eth0", 1500), ("a", "eth1", 9000), ("b", "eth0", 1500), ("b", "eth1", 9000)],  # two networks
        [("a", "eth0", 1500), ("b", "lo", 65536)],
    ],
)
def test_mtus_that_hosts_have_in_common_are_not_named(ranks: list[tuple[str, str, int | None]]) -> None:
    assert traffic.unequal_mtus(network_of(*ranks), STOCK, ()) == ""


def test_mtus_that_differ_between_hosts_are_named_by_rank() -> None:
    three = network_of(("a", "eth0", 9000), ("b", "ens5", 9000), ("c", "eth0", 1500))
    clause = "the MTUs of stock's interfaces differ: 1500 bytes on rank 2 (eth0); 9000 bytes on rank 0, 1 (ens5, eth0)"
    assert traffic.unequal_mtus(three, STOCK, ()) == clause
    assert traffic.unequal_mtus(three, Arm("tcp"), ()) == ""
    assert traffic.notes(three, STOCK, (), NO_CONNECTIONS) == [f"{clause}. {traffic.SAME_MTU}"]


@pytest.mark.parametrize(
    ("mtus", "path", "named"),
    [
        ((9000, 9000), 1400.0, True),
        ((9000, 1500), 1400.0, True),
        ((9000, 1500), 1500.0, False),
        ((9000, 9000), None, False),
        ((9000, None), 1400.0, False),
        ((65536, 65536), 65535.0, False),  # the kernel's most
    ],
)
def test_a_path_with_a_smaller_mtu_than_both_its_ends_is_named(
    mtus: tuple[int, int | None], path: float | None, named: bool
) -> None:
    end = ConnectionUse(0, 1, STOCK, ("a", 1), ("b", 2), 1.0, 1e9, path_mtu_bytes=path)
    trace = network_of(("a", "eth0", mtus[0]), ("b", "eth0", mtus[1]))
    notes = traffic.notes(trace, STOCK, (), Connected((end,)))
    found = [
        note for note in notes if note.startswith("the kernel's MTU of stock's path from rank 0 to rank 1 is 1400")
    ]
    assert bool(found) == named == any("lies in between" in note for note in notes)
    other = traffic.notes(trace, STOCK, (), Connected((replace(end, arm=Arm("tcp")),)))
    assert not any("lies in between" in note for note in other)


@pytest.mark.parametrize(
    ("provider", "named"),
    [
        ("nccl", ["NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME"]),
        ("gloo", ["GLOO_SOCKET_IFNAME"]),
        ("cpu:gloo,cuda:nccl", ["GLOO_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME"]),
        ("horovod 0.28 over mpi", ["GLOO_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME"]),
    ],
)
def test_variables_of_the_stock_path_that_differ_are_facts(provider: str, named: list[str]) -> None:
    trace = network_of(("a", "eth0", 9000), ("b", "eth0", 9000), provider=provider)
    first, second = (
        {"NCCL_SOCKET_IFNAME": name, "GLOO_SOCKET_IFNAME": name, "NCCL_NET": "Socket"} for name in ("eth0", "eth1")
    )
    ranks = [
        replace(rank, stock_variables=values)
        for rank, values in zip(trace.ranks, (first, second | {"NCCL_IB_DISABLE": "1"}), strict=True)
    ]
    notes = traffic.notes(replace(trace, ranks=tuple(ranks)), STOCK, (), NO_CONNECTIONS)
    assert [note.removeprefix("ranks differ in ").partition(":")[0] for note in notes] == named
    if provider == "nccl":
        assert notes[0] == "ranks differ in NCCL_IB_DISABLE: not set on rank 0; 1 on rank 1"
    assert traffic.notes(replace(trace, ranks=tuple(ranks)), Arm("tcp"), (), NO_CONNECTIONS) == []
