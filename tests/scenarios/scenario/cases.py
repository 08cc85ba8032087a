"""Scenarios: jobs with a known cause, drawn by seed, each with a twin without the cause."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from scenario.checks import costs, fused, least_link, raised_link
from scenario.job import MIB, Job

if TYPE_CHECKING:
    from scenario.judge import Judged

T = TypeVar("T")
Check = Callable[["Judged", "Judged | None"], Iterator[str]]


@dataclass(frozen=True)
class Case(Generic[T]):
    """A scenario: a job, and what the verdict about it must be.

    expected: codes that may be the verdict; also: codes that must have fired; never: codes that must not. gone: what
    the job is without its cause (the twin), where `cause` must not appear. saves: the saving is compared with the
    twin's step. says, advises: parts of the reason and of the advice. silent: parts that the advice must not have.
    numbers: of summary.json, by path (see judge.number), from the least to the most. checks: each yields what else is
    wrong with the outcome and its twin's. same: a training whose weights must be equal at its end.
    """

    name: str
    job: T
    expected: tuple[str, ...]
    gone: T | None = None
    cause: str = ""
    also: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    saves: bool = False
    says: str = ""
    advises: str = ""
    silent: tuple[str, ...] = field(default=())
    numbers: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    same: T | None = None


Draw = random.Random
Make = Callable[[Draw], Case[Job]]
CASES: list[Make] = []


def case(make: Make) -> Make:
    """Add a scenario of a made trace."""
    CASES.append(make)
    return make


NOISY = Job(jitter=0.004)


def _big(draw: Draw) -> Job:
    """A job whose gradients take about as long as its backward."""
    scale = draw.uniform(0.8, 1.5)
    return replace(NOISY, buckets=tuple(int(scale * size) for size in (12 * MIB, 30 * MIB, 16 * MIB, 6 * MIB)))


def _overlapped(draw: Draw) -> Job:
    """A job that hides most of its communication, measured with and without traffic."""
    last = draw.randrange(MIB // 4, MIB)
    sizes = (20 * MIB, 20 * MIB, 16 * MIB, last)
    return replace(NOISY, arms=("stock", "null"), blocks=5, forward_ms=20, backward_ms=240, buckets=sizes)


@case
def flow_cap_measured(draw: Draw) -> Case[Job]:
    cap = draw.uniform(1.5e9, 2.5e9)
    job = replace(_big(draw), arms=("stock", "tcp", "bare"), blocks=4, link_bps=1e10, flow_bps=cap)
    return Case(
        "flow cap, other transport measured",
        job,
        ("TRANSPORT_LIMITED",),
        replace(job, flow_bps=1e10),
        "TRANSPORT_LIMITED",
        never=("LINK_LIMITED",),
        saves=True,
        advises="NETBOTTLENECK_TRANSPORT=tcp",
        numbers={
            "bandwidth.stock.active_bits_per_s": (0.97 * cap, cap),
            "bandwidth.stock.active_utilization": (0.97 * cap / 1e10, cap / 1e10),
        },
    )


@case
def flow_cap_probed(draw: Draw) -> Case[Job]:
    cap = draw.uniform(1.5e9, 2.5e9)
    job = replace(_big(draw), link_bps=1e10, flow_bps=cap, probe=True)
    return Case(
        "flow cap, probe only",
        job,
        ("TRANSPORT_LIMITED",),
        replace(job, flow_bps=1e10),
        "TRANSPORT_LIMITED",
        saves=True,
        advises="NETBOTTLENECK_TRANSPORT=stock,tcp",
        numbers={
            "bandwidth.stock.active_bits_per_s": (0.97 * cap, cap),
            "probe.points.0.bits_per_s": (0.97 * cap, 1.03 * cap),
            "probe.points.1.streams": (8, 8),
            "probe.points.1.bits_per_s": (0.97e10, 1.03e10),
        },
    )


@case
def flow_cap_on_a_faster_link(draw: Draw) -> Case[Job]:
    cap = draw.uniform(1.5e9, 2.5e9)
    job = replace(_big(draw), arms=("stock", "tcp", "bare"), blocks=4, link_bps=5e9, flow_bps=cap)
    return Case(
        "flow cap, and the same on a faster link",
        job,
        ("TRANSPORT_LIMITED",),
        replace(job, link_bps=1.2e10),
        "LINK_LIMITED",
        never=("LINK_LIMITED",),
        checks=(raised_link(cap, 5e9, 1.2e10, 0.1, "tcp"),),
    )


@case
def full_link(draw: Draw) -> Case[Job]:
    rate = draw.uniform(1e9, 3e9)
    job = replace(_big(draw), link_bps=rate)
    return Case(
        "full link",
        job,
        ("LINK_LIMITED",),
        replace(job, link_bps=1e13, flow_bps=1e13),
        "LINK_LIMITED",
        saves=True,
        numbers={"bandwidth.stock.active_utilization": (0.97, 1.0)},
        checks=(least_link(0.9, rate, 1e12),),
    )


@case
def half_of_the_step_on_a_link(draw: Draw) -> Case[Job]:
    rate = draw.uniform(4e9, 6e9)
    job = replace(NOISY, backward_ms=60, buckets=(2 * MIB, 62 * MIB), link_bps=rate)
    return Case(
        "full link, and compute as long as communication",
        job,
        ("LINK_LIMITED",),
        replace(job, link_bps=1e13, flow_bps=1e13),
        "LINK_LIMITED",
        saves=True,
        says="averaged over the step",
        numbers={
            "bandwidth.stock.active_utilization": (0.97, 1.0),
            "bandwidth.stock.average_utilization": (0.4, 0.7),
        },
    )


@case
def full_link_compared(draw: Draw) -> Case[Job]:
    job = replace(_big(draw), link_bps=draw.uniform(1e9, 3e9), arms=("stock", "tcp", "bare"), blocks=4)
    return Case(
        "full link, no transport is faster",
        job,
        ("LINK_LIMITED",),
        replace(job, link_bps=1e13, flow_bps=1e13),
        "LINK_LIMITED",
        saves=True,
        says="as good as what was tried",
        advises="another transport cannot help much",
    )


@case
def full_link_by_probe(draw: Draw) -> Case[Job]:
    rate = draw.uniform(1e9, 3e9)
    job = replace(_big(draw), link_bps=rate, flow_bps=rate, link_known=False, probe=True)
    return Case(
        "full link of unknown speed", job, ("LINK_LIMITED",), replace(job, link_bps=1e13, flow_bps=1e13), "LINK_LIMITED"
    )


@case
def latency_small(draw: Draw) -> Case[Job]:
    job = replace(
        NOISY, backward_ms=20, buckets=(4096,) * 60, latency_ms=draw.uniform(0.8, 1.5), link_bps=1e10, block_steps=20
    )
    return Case(
        "many small operations",
        job,
        ("LATENCY_LIMITED",),
        replace(job, latency_ms=0.005),
        "LATENCY_LIMITED",
        never=("LINK_LIMITED",),
        saves=True,
        advises="larger buckets",
    )


@case
def latency_of_many_sizes(draw: Draw) -> Case[Job]:
    sizes = tuple(draw.choice((4096, 16384, 65536, 262144)) for _ in range(50))
    job = replace(NOISY, backward_ms=20, buckets=sizes, latency_ms=draw.uniform(0.8, 1.5))
    return Case(
        "latency, several sizes",
        job,
        ("LATENCY_LIMITED",),
        replace(job, latency_ms=0.005),
        "LATENCY_LIMITED",
        saves=True,
    )


@case
def latency_and_fusion(draw: Draw) -> Case[Job]:
    alpha, sizes = draw.uniform(0.8, 1.5), tuple(draw.choice((4096, 16384, 65536, 262144)) for _ in range(50))
    job = replace(NOISY, backward_ms=20, buckets=sizes, latency_ms=alpha)
    return Case(
        "latency, several sizes, and the same with fusion",
        job,
        ("LATENCY_LIMITED",),
        replace(job, buckets=(sum(sizes),)),
        "LATENCY_LIMITED",
        says="does not depend on size",
        advises="larger buckets",
        checks=(fused(64, 0.2), costs(alpha, 10.0, 0.05)),
    )


@case
def slow_rank(draw: Draw) -> Case[Job]:
    slow = draw.randrange(2)
    job = replace(NOISY, jitter=0.01, slower={slow: draw.uniform(1.12, 1.3)})
    return Case(
        "one of two ranks is slower",
        job,
        ("STRAGGLER",),
        replace(job, slower={}),
        "STRAGGLER",
        never=("LINK_LIMITED", "TRANSPORT_LIMITED"),
        saves=True,
        says=f"Rank {slow} makes the others wait",
        advises=f"rank {slow}'s host",
    )


@case
def sleeping_rank(draw: Draw) -> Case[Job]:
    slow = draw.randrange(4)
    job = replace(NOISY, ranks=4, jitter=0.02, sleeps_ms={slow: draw.uniform(20, 60)})
    return Case(
        "one of four ranks sleeps in its backward",
        job,
        ("STRAGGLER",),
        replace(job, sleeps_ms={}),
        "STRAGGLER",
        never=("LINK_LIMITED",),
        saves=True,
        says=f"Rank {slow} makes",
    )


@case
def slow_host(draw: Draw) -> Case[Job]:
    slow = draw.randrange(2)
    ranks = range(4 * slow, 4 * slow + 4)
    job = replace(NOISY, ranks=8, ranks_per_host=4, jitter=0.02, slower=dict.fromkeys(ranks, draw.uniform(1.12, 1.3)))
    return Case(
        "all ranks of one host are slower",
        job,
        ("STRAGGLER",),
        replace(job, slower={}),
        "STRAGGLER",
        never=("IMBALANCE", "LINK_LIMITED", "TRANSPORT_LIMITED"),
        saves=True,
        says=f"Host host{slow} (ranks {ranks[0]} to {ranks[-1]}) makes the others wait",
        advises=f"Look at host host{slow}",
    )


@case
def slow_ranks(draw: Draw) -> Case[Job]:
    slow = sorted(draw.sample(range(6), 2))
    slower = {rank: draw.uniform(1.2, 1.3) for rank in slow}
    job = replace(NOISY, ranks=6, jitter=0.02, slower=slower)
    return Case(
        "two of six ranks are slower",
        job,
        ("STRAGGLER",),
        replace(job, slower={}),
        "STRAGGLER",
        never=("IMBALANCE", "LINK_LIMITED", "TRANSPORT_LIMITED"),
        saves=True,
        says=f"Ranks {slow[0]}, {slow[1]} make the others wait",
        advises=f"Look at the hosts of ranks {slow[0]}, {slow[1]} (host{slow[0]}, host{slow[1]})",
    )


@case
def slow_hosts(draw: Draw) -> Case[Job]:
    slow = sorted(draw.sample(range(4), 2))
    slower = {rank: draw.uniform(1.18, 1.3) for host in slow for rank in (2 * host, 2 * host + 1)}
    job = replace(NOISY, ranks=8, ranks_per_host=2, jitter=0.02, slower=slower)
    named = ", ".join(f"host{host} (ranks {2 * host}, {2 * host + 1})" for host in slow)
    return Case(
        "all ranks of two of four hosts are slower",
        job,
        ("STRAGGLER",),
        replace(job, slower={}),
        "STRAGGLER",
        never=("IMBALANCE", "LINK_LIMITED", "TRANSPORT_LIMITED"),
        saves=True,
        says=f"Hosts {named} make the others wait",
        advises=f"Look at hosts {named}: their clock speed",
    )


@case
def slow_input_of_one_rank(draw: Draw) -> Case[Job]:
    slow = draw.randrange(4)
    job = replace(NOISY, ranks=4, input_of_ms={slow: draw.uniform(25, 60)})
    return Case(
        "input of one rank is slow",
        job,
        ("STRAGGLER",),
        replace(job, input_of_ms={}),
        "STRAGGLER",
        saves=True,
        says="Its input takes",
        advises="its data loader",
    )


@case
def jitter_of_eight(draw: Draw) -> Case[Job]:
    job = replace(NOISY, ranks=8, jitter=draw.uniform(0.08, 0.15), block_steps=30)
    return Case(
        "eight equal ranks with random steps",
        job,
        ("IMBALANCE",),
        replace(job, jitter=0.002),
        "IMBALANCE",
        never=("STRAGGLER", "LINK_LIMITED"),
        saves=True,
        says="No rank is last persistently",
    )


@case
def jitter_of_two(draw: Draw) -> Case[Job]:
    job = replace(NOISY, jitter=draw.uniform(0.12, 0.2), block_steps=40)
    return Case(
        "two equal ranks with random steps",
        job,
        ("IMBALANCE",),
        replace(job, jitter=0.002),
        "IMBALANCE",
        never=("STRAGGLER",),
    )


@case
def input_first(draw: Draw) -> Case[Job]:
    job = replace(
        _big(draw), forward_ms=15, backward_ms=20, input_ms=draw.uniform(60, 90), link_bps=2e10, flow_bps=2e10
    )
    return Case(
        "input first, network second",
        job,
        ("INPUT_LIMITED",),
        replace(job, input_ms=0.5),
        "INPUT_LIMITED",
        also=("LINK_LIMITED",),
        saves=True,
        advises="data loader",
    )


@case
def network_first(draw: Draw) -> Case[Job]:
    job = replace(_big(draw), forward_ms=15, backward_ms=20, input_ms=draw.uniform(60, 80), link_bps=2e9)
    return Case(
        "network first, input second",
        job,
        ("LINK_LIMITED",),
        replace(job, link_bps=1e13, flow_bps=1e13),
        "LINK_LIMITED",
        also=("INPUT_LIMITED",),
    )


@case
def slow_input(draw: Draw) -> Case[Job]:
    job = replace(NOISY, input_ms=draw.uniform(40, 80))
    return Case("slow input", job, ("INPUT_LIMITED",), replace(job, input_ms=0.5), "INPUT_LIMITED", saves=True)


@case
def slow_optimizer(draw: Draw) -> Case[Job]:
    job = replace(NOISY, optimizer_ms=draw.uniform(40, 80))
    return Case(
        "slow optimizer",
        job,
        ("OPTIMIZER_LIMITED",),
        replace(job, optimizer_ms=0.2),
        "OPTIMIZER_LIMITED",
        never=("INPUT_LIMITED",),
        saves=True,
        silent=("data loader",),
    )


@case
def clocks_apart(draw: Draw) -> Case[Job]:
    job = replace(NOISY, clock_ms={1: draw.choice((-1, 1)) * draw.uniform(8, 40)}, buckets=(MIB,) * 4)
    return Case(
        "clocks of the hosts differ",
        job,
        ("NOT_NETWORK",),
        never=("STRAGGLER", "IMBALANCE", "LINK_LIMITED", "TRANSPORT_LIMITED"),
    )


@case
def clocks_apart_on_a_full_link(draw: Draw) -> Case[Job]:
    job = replace(_big(draw), link_bps=1.5e9, clock_ms={1: draw.uniform(8, 15)})
    return Case(
        "clocks differ, full link",
        job,
        ("LINK_LIMITED",),
        replace(job, link_bps=1e13, flow_bps=1e13),
        "LINK_LIMITED",
        never=("STRAGGLER", "IMBALANCE"),
    )


@case
def clocks_apart_and_a_straggler(draw: Draw) -> Case[Job]:
    job = replace(NOISY, buckets=(MIB,) * 4, clock_ms={1: 12.0}, sleeps_ms={1: draw.uniform(25, 50)})
    return Case(
        "clocks differ, and a straggler", job, ("STRAGGLER",), replace(job, sleeps_ms={}), "STRAGGLER", saves=True
    )


@case
def rank_that_saves(draw: Draw) -> Case[Job]:
    job = replace(NOISY, ranks=4, jitter=0.01, blocks=3, block_steps=30, saves_ms={0: draw.uniform(200, 400)}, every=5)
    return Case(
        "rank 0 writes a checkpoint every fifth step",
        job,
        ("IMBALANCE",),
        replace(job, saves_ms={}),
        "IMBALANCE",
        never=("STRAGGLER", "LINK_LIMITED"),
        saves=True,
        says="of these rank 0: it writes a checkpoint then",
        advises="in the background",
    )


@case
def rank_that_stalls(draw: Draw) -> Case[Job]:
    slow = draw.randrange(8)
    job = replace(NOISY, ranks=8, jitter=0.01, blocks=3, block_steps=30, sleeps_ms={slow: draw.uniform(120, 200)})
    job = replace(job, every=draw.randint(6, 8))
    return Case(
        "one of eight ranks stalls every few steps",
        job,
        ("IMBALANCE",),
        replace(job, sleeps_ms={}),
        "IMBALANCE",
        never=("STRAGGLER", "LINK_LIMITED"),
        saves=True,
        says=f"of these rank {slow}.",
        advises=f"Look at what rank {slow} does in these steps",
    )


@case
def one_long_stall(draw: Draw) -> Case[Job]:
    slow = draw.randrange(4)
    job = replace(NOISY, ranks=4, blocks=2, block_steps=40, sleeps_ms={slow: draw.uniform(2000, 10000)}, every=60)
    return Case("one rank stalls once", job, ("NOT_NETWORK",), never=("IMBALANCE", "STRAGGLER"))


@case
def input_now_and_then(draw: Draw) -> Case[Job]:
    late = dict.fromkeys(range(2), draw.uniform(300, 500))
    job = replace(NOISY, blocks=3, block_steps=30, input_of_ms=late, every=4)
    return Case(
        "every fourth step waits for its input",
        job,
        ("INPUT_LIMITED",),
        replace(job, input_of_ms={}),
        "INPUT_LIMITED",
        never=("IMBALANCE", "LINK_LIMITED"),
        says="more in single steps than in most",
    )


@case
def contended_compute(draw: Draw) -> Case[Job]:
    job = replace(_overlapped(draw), contention=draw.uniform(1.3, 1.8), link_bps=1e10, flow_bps=4e9)
    return Case(
        "traffic slows compute",
        job,
        ("HOST_LIMITED",),
        replace(job, contention=1.0),
        "HOST_LIMITED",
        saves=True,
        silent=("null",),
    )


@case
def contention_larger_than_the_link(draw: Draw) -> Case[Job]:
    job = replace(_overlapped(draw), contention=draw.uniform(1.5, 1.8), link_bps=4e9, flow_bps=4e9)
    job = replace(job, buckets=(*job.buckets[:3], 8 * MIB))
    return Case(
        "compute slowed more than the link costs",
        job,
        ("HOST_LIMITED",),
        replace(job, contention=1.0),
        "HOST_LIMITED",
        also=("LINK_LIMITED",),
        saves=True,
    )


@case
def busy_cores(draw: Draw) -> Case[Job]:
    crowded = replace(_big(draw), ranks=4, ranks_per_host=4, shared_cores=2, link_bps=1e11, flow_bps=2e10)
    job = replace(crowded, busy=draw.uniform(0.475, 0.5))
    return Case(
        "four ranks on two cores",
        job,
        ("HOST_LIMITED",),
        replace(job, busy=0.25),
        "HOST_LIMITED",
        says="a step for a core",
    )


@case
def spinning_cores(draw: Draw) -> Case[Job]:
    job = replace(_big(draw), busy=draw.uniform(1.9, 2.0), link_bps=2e10, flow_bps=3e9)
    return Case(
        "all cores busy, perhaps by waiting",
        job,
        ("INCONCLUSIVE",),
        never=("HOST_LIMITED",),
        says="threads may spin",
        advises="NETBOTTLENECK_TRANSPORT=stock,null",
    )


@case
def spinning_cores_on_a_full_link(draw: Draw) -> Case[Job]:
    job = replace(_big(draw), busy=draw.uniform(1.9, 2.0), arms=("stock", "null"), blocks=5, link_bps=3e9)
    return Case(
        "full link, and cores that spin while they wait",
        job,
        ("LINK_LIMITED",),
        replace(job, link_bps=1e13, flow_bps=1e13),
        "LINK_LIMITED",
        never=("HOST_LIMITED",),
        saves=True,
    )


@case
def busy_cores_beside_traffic(draw: Draw) -> Case[Job]:
    contended = replace(_overlapped(draw), contention=draw.uniform(1.3, 1.8), flow_bps=4e9)
    job = replace(contended, busy=draw.uniform(1.9, 2.0))
    return Case(
        "traffic slows compute, all cores busy",
        job,
        ("HOST_LIMITED",),
        replace(job, contention=1.0, busy=1.0),
        "HOST_LIMITED",
        says="also while communication is exposed",
    )


@case
def slow_hooks(draw: Draw) -> Case[Job]:
    job = replace(_big(draw), arms=("stock", "tcp", "bare"), blocks=5, flow_bps=3e9, hooks=draw.uniform(1.3, 1.5))
    return Case(
        "hooks slow the stock path",
        job,
        ("INCONCLUSIVE", "HOST_LIMITED", "NOT_NETWORK"),
        never=("TRANSPORT_LIMITED",),
    )


@case
def nothing(draw: Draw) -> Case[Job]:
    job = replace(NOISY, buckets=(MIB // 2,) * 4, forward_ms=draw.uniform(20, 50))
    return Case("hidden communication", job, ("NOT_NETWORK",))


@case
def nothing_compared(draw: Draw) -> Case[Job]:
    job = replace(NOISY, buckets=(MIB // 2,) * 4, arms=("stock", "tcp", "bare", "null"), blocks=5)
    return Case(
        "hidden communication, all arms measured",
        job,
        ("NOT_NETWORK",),
        says="as good as what was tried",
        advises="without communication the step would be",
    )


@case
def as_good(draw: Draw) -> Case[Job]:
    rate = draw.uniform(2.5e9, 3.5e9)
    job = replace(_big(draw), arms=("stock", "tcp", "bare"), blocks=4, link_bps=rate * 1.6, flow_bps=rate, streams=1)
    return Case(
        "another transport is as good",
        job,
        ("DO_NOTHING",),
        never=("TRANSPORT_LIMITED", "LINK_LIMITED"),
        advises="keep stock",
    )


@case
def two_pairs(draw: Draw) -> Case[Job]:
    job = replace(_big(draw), arms=("stock", "tcp"), blocks=2, block_steps=8, link_bps=5e9, flow_bps=5e9, noise=0.05)
    return Case(
        "two pairs of noisy blocks",
        job,
        ("INCONCLUSIVE", "LINK_LIMITED", "NOT_NETWORK", "DO_NOTHING"),
        never=("TRANSPORT_LIMITED",),
    )


@case
def noisy_gain(draw: Draw) -> Case[Job]:
    job = replace(NOISY, arms=("stock", "tcp"), blocks=3, noise=0.08, link_bps=1e10)
    return Case(
        "three pairs of blocks with much noise",
        job,
        ("INCONCLUSIVE", "NOT_NETWORK"),
        never=("TRANSPORT_LIMITED",),
        silent=("NETBOTTLENECK_TRANSPORT=stock,tcp",),
    )


@case
def providers_differ(draw: Draw) -> Case[Job]:
    job = replace(NOISY, providers=("gloo", "ucc"))
    return Case(
        "ranks differ in their provider", job, ("MISCONFIGURED",), replace(job, providers=("gloo",)), "MISCONFIGURED"
    )


@case
def slow_interface(draw: Draw) -> Case[Job]:
    slow = draw.uniform(0.8e9, 2e9)
    ratings = {"stock": ("eno1", slow), "tcp": ("eth1", 1e10)}
    job = replace(
        _big(draw), link_known=False, link_bps=slow, flow_bps=slow, interfaces=ratings, arms=("stock", "tcp"), blocks=2
    )
    return Case(
        "the stock path uses the slow interface",
        job,
        ("MISCONFIGURED",),
        replace(job, interfaces={"stock": ("eth1", 1e10), "tcp": ("eth1", 1e10)}, link_bps=1e10, flow_bps=1e10),
        "MISCONFIGURED",
        saves=True,
        advises="GLOO_SOCKET_IFNAME",
    )


def _unequal_mtus(job: Job) -> Job:
    return replace(job, interfaces={"stock": ("eth0", 1e11)}, mtus=(9000, 1500), link_known=False)


@case
def mtus_differ(draw: Draw) -> Case[Job]:
    job = _unequal_mtus(replace(_big(draw), flow_bps=draw.uniform(1e9, 3e9)))
    return Case(
        "MTUs differ where nothing else explains the time",
        job,
        ("MISCONFIGURED",),
        replace(job, mtus=(9000,)),
        "MISCONFIGURED",
        says="The MTUs of stock's interfaces differ: 1500 bytes on rank 1 (eth0); 9000 bytes on rank 0 (eth0)",
        advises="ping -M do -s SIZE",
    )


@case
def mtus_differ_beside_a_straggler(draw: Draw) -> Case[Job]:
    job = _unequal_mtus(replace(NOISY, slower={1: draw.uniform(1.5, 2)}))
    return Case("MTUs differ beside a sure cause", job, ("STRAGGLER",), never=("MISCONFIGURED",))


@case
def mtus_differ_on_a_short_communication(draw: Draw) -> Case[Job]:
    job = _unequal_mtus(replace(NOISY, backward_ms=draw.uniform(100, 200), buckets=(4096,) * 4))
    return Case("MTUs differ, and communication is short", job, ("NOT_NETWORK",), never=("MISCONFIGURED",))


@case
def traffic_of_others(draw: Draw) -> Case[Job]:
    share = draw.uniform(0.4, 0.6)
    job = replace(_big(draw), link_bps=4e9, flow_bps=4e9 * (1 - share), other_share=share)
    return Case(
        "another job's traffic",
        job,
        ("OTHER_TRAFFIC",),
        replace(job, other_share=0.0, flow_bps=4e9),
        "OTHER_TRAFFIC",
        saves=True,
    )


@case
def unseen_on_a_full_link(draw: Draw) -> Case[Job]:
    job = replace(_big(draw), link_bps=draw.uniform(1e9, 3e9), other_share=draw.uniform(0.4, 0.6))
    return Case(
        "full link, and bytes that are not recorded",
        job,
        ("OTHER_TRAFFIC",),
        replace(job, other_share=0.0),
        "OTHER_TRAFFIC",
        never=("LINK_LIMITED", "TRANSPORT_LIMITED"),
        says="belong to no recorded operation",
    )


@case
def unseen_on_a_link_with_room(draw: Draw) -> Case[Job]:
    share = draw.uniform(0.4, 0.6)
    job = replace(_big(draw), link_bps=1e10, flow_bps=3e9 * (1 - share), other_share=share)
    return Case(
        "bytes that are not recorded on a link with room",
        job,
        ("INCONCLUSIVE",),
        never=("OTHER_TRAFFIC", "LINK_LIMITED"),
        says="Other traffic may cost",
        advises="Measure while nothing else uses the network",
    )


@case
def unseen_on_a_link_of_unknown_speed(draw: Draw) -> Case[Job]:
    share = draw.uniform(0.4, 0.6)
    job = replace(_big(draw), link_known=False, flow_bps=4e9 * (1 - share), other_share=share)
    return Case(
        "bytes that are not recorded on a link of unknown speed",
        job,
        ("INCONCLUSIVE",),
        never=("OTHER_TRAFFIC", "LINK_LIMITED"),
        says="the link's speed is not known",
        advises="NETBOTTLENECK_LINK_GBPS",
    )


@case
def headers_of_small_operations(draw: Draw) -> Case[Job]:
    small = replace(NOISY, backward_ms=20, buckets=(4096,) * 60, latency_ms=draw.uniform(0.8, 1.5), block_steps=20)
    job = replace(small, link_known=False, other_share=0.0, headers=draw.randrange(1600, 2200))
    return Case("headers of many small operations", job, ("LATENCY_LIMITED",), never=("OTHER_TRAFFIC",))


@case
def little_traffic_beside_small_operations(draw: Draw) -> Case[Job]:
    small = replace(NOISY, backward_ms=20, buckets=(4096,) * 60, latency_ms=draw.uniform(0.8, 1.5), block_steps=20)
    job = replace(small, other_share=0.0, other_bps=draw.uniform(2e7, 1e8))
    return Case("little traffic beside small operations", job, ("LATENCY_LIMITED",), never=("OTHER_TRAFFIC",))


@case
def loopback_beside_a_full_link(draw: Draw) -> Case[Job]:
    job = replace(_big(draw), link_bps=draw.uniform(1e9, 3e9), other_share=0.0, loopback_bps=3e10)
    return Case(
        "full link, and much on the loopback",
        job,
        ("LINK_LIMITED",),
        replace(job, link_bps=1e13, flow_bps=1e13),
        "LINK_LIMITED",
        never=("OTHER_TRAFFIC",),
    )


@case
def shared_memory(draw: Draw) -> Case[Job]:
    job = replace(
        _big(draw),
        ranks=4,
        ranks_per_host=4,
        arms=("tcp",),
        algorithm="shared memory",
        link_known=False,
        link_bps=5e9,
        other_share=0.0,
        other_bps=draw.uniform(1e6, 1e8),
        loopback_bps=draw.uniform(1e6, 1e8),
    )
    return Case("shared memory, and a remote shell", job, ("INCONCLUSIVE",), never=("OTHER_TRAFFIC",))


@case
def others_beside_several_ranks_of_a_host(draw: Draw) -> Case[Job]:
    share = draw.uniform(0.4, 0.6)
    job = replace(
        _big(draw),
        ranks=8,
        ranks_per_host=4,
        arms=("tcp",),
        algorithm="ring all-reduce",
        link_bps=4e9,
        flow_bps=4e9 * (1 - share) / 8,
        other_share=share,
    )
    return Case(
        "another job's traffic, four ranks on each host",
        job,
        ("OTHER_TRAFFIC",),
        replace(job, other_share=0.0, flow_bps=4e9),
        "OTHER_TRAFFIC",
        saves=True,
    )


@case
def flow_cap_on_a_slow_interface(draw: Draw) -> Case[Job]:
    ratings = {"stock": ("eno1", 1e10), "tcp": ("eth1", 4e10)}
    cap = draw.uniform(2e9, 4e9)
    job = replace(_big(draw), link_known=False, flow_bps=cap, streams=1, interfaces=ratings, arms=("stock", "tcp"))
    return Case(
        "flow cap far below the rating of a slow interface",
        replace(job, blocks=2),
        ("INCONCLUSIVE",),
        never=("MISCONFIGURED",),
        says="the used one is",
        advises="Measure over the faster interface: GLOO_SOCKET_IFNAME",
    )


@case
def nccl_beside_the_rated_interface(draw: Draw) -> Case[Job]:
    rate = draw.uniform(1e9, 3e9)
    job = replace(
        _big(draw),
        link_known=False,
        link_bps=rate,
        flow_bps=rate,
        providers=("nccl",),
        interfaces={"stock": ("eth0", rate)},
    )
    return Case(
        "NCCL may use another network than the rated interface", job, ("INCONCLUSIVE",), never=("LINK_LIMITED",)
    )


@case
def nccl_on_a_full_interface(draw: Draw) -> Case[Job]:
    job = replace(nccl_beside_the_rated_interface(draw).job, other_share=0.0)
    return Case("NCCL fills the rated interface, by its bytes", job, ("LINK_LIMITED",))


@case
def all_to_all_on_a_full_link(draw: Draw) -> Case[Job]:
    job = replace(_big(draw), ranks=16, ranks_per_host=8, kind="alltoall", link_bps=4e9, block_steps=8)
    job = replace(job, buckets=tuple(size // 8 for size in job.buckets))
    return Case(
        "two hosts of eight ranks, all-to-all on a full link",
        job,
        ("LINK_LIMITED",),
        replace(job, link_bps=1e13, flow_bps=1e13),
        "LINK_LIMITED",
    )


@case
def machines_of_one_name(draw: Draw) -> Case[Job]:
    job = replace(as_good(draw).job, shared_cores=2, busy=draw.uniform(0.95, 1.2), hostname="localhost")
    return Case("machines of one name", job, ("DO_NOTHING",), never=("HOST_LIMITED",), advises="keep stock")


@case
def packets_lost(draw: Draw) -> Case[Job]:
    job = replace(NOISY, blocks=8, lost=draw.uniform(0.05, 0.15))
    return Case(
        "packets are lost",
        job,
        ("PACKET_LOSS",),
        replace(job, lost=0.0),
        "PACKET_LOSS",
        saves=True,
        says="Packet loss: stock sent",
        advises="ethtool -S",
    )


@case
def two_levels(draw: Draw) -> Case[Job]:
    job = replace(
        _big(draw),
        ranks=16,
        ranks_per_host=8,
        algorithm="two_level all-reduce",
        link_bps=2e9,
        arms=("tcp",),
        block_steps=8,
    )
    return Case(
        "two hosts of eight ranks, full link",
        job,
        ("LINK_LIMITED",),
        replace(job, link_bps=1e13, flow_bps=1e13),
        "LINK_LIMITED",
    )


@case
def one_rank(_: Draw) -> Case[Job]:
    return Case("one rank", replace(NOISY, ranks=1, buckets=(MIB,)), ("NO_COMMUNICATION",))


@case
def few_steps(_: Draw) -> Case[Job]:
    return Case("three steps", replace(NOISY, blocks=1, block_steps=4), ("INCONCLUSIVE",), advises="more steps")


@case
def straggler_on_a_full_link(draw: Draw) -> Case[Job]:
    # The transfers take so long that the step is as long without the straggler.
    job = replace(_big(draw), link_bps=2.5e9, sleeps_ms={1: draw.uniform(20, 30)})
    return Case(
        "full link, and a straggler",
        job,
        ("LINK_LIMITED",),
        replace(job, link_bps=1e13, flow_bps=1e13),
        "LINK_LIMITED",
        never=("STRAGGLER",),
        saves=True,
    )


@case
def slow_link_of_one_host(draw: Draw) -> Case[Job]:
    slow = draw.randrange(4)
    job = replace(_big(draw), ranks=4, link_bps=1e11, flow_bps=1e11, host_bps={slow: draw.uniform(1e9, 3e9)})
    return Case(
        "the link of one of four hosts is slow",
        job,
        ("LINK_LIMITED",),
        replace(job, host_bps={slow: 1e11}),
        "LINK_LIMITED",
        never=("STRAGGLER", "IMBALANCE", "TRANSPORT_LIMITED", "MISCONFIGURED"),
        saves=True,
        says=f"The link of the host of rank {slow} (host{slow}) is the slow one",
        advises=f"Look at the interface, cable and switch port of the host of rank {slow}",
    )


def _large_buckets(draw: Draw) -> Job:
    """A job of 32 tensors in two buckets that are too large to overlap."""
    size = 64 * round(draw.uniform(0.8, 1.0) * MIB / 2)
    job = replace(NOISY, forward_ms=20, backward_ms=150, buckets=(size, 2 * size), tensors=16)
    return replace(job, link_bps=6e9, flow_bps=6e9)


def _small_buckets(job: Job) -> Job:
    """The same tensors in buckets of two each."""
    return replace(job, buckets=tuple(size // 8 for size in job.buckets for _ in range(8)), tensors=2)


@case
def large_buckets(draw: Draw) -> Case[Job]:
    job = _large_buckets(draw)
    return Case(
        "buckets too large to overlap on a full link",
        job,
        ("LINK_LIMITED",),
        _small_buckets(job),
        "BUCKET_SIZES",
        also=("BUCKET_SIZES",),
        never=("STRAGGLER", "LATENCY_LIMITED"),
    )


@case
def large_buckets_alone(draw: Draw) -> Case[Job]:
    job = replace(_large_buckets(draw), link_known=False)
    return Case(
        "buckets too large to overlap",
        job,
        ("BUCKET_SIZES",),
        _small_buckets(job),
        "BUCKET_SIZES",
        never=("LINK_LIMITED", "TRANSPORT_LIMITED", "LATENCY_LIMITED", "STRAGGLER"),
        saves=True,
        advises="bucket_cap_mb of DDP",
    )
