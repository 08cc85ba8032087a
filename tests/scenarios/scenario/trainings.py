"""Scenarios that run: trainings in a lab with a known cause, drawn by seed, each with a twin without the cause.

Their compute is sleep where the name does not say otherwise, so two cores suffice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from scenario.cases import Case, Draw
from scenario.checks import least_link, raised_link
from scenario.training import Training

Make = Callable[[Draw], Case[Training]]
LIVE: list[Make] = []


def live(make: Make) -> Make:
    """Add a scenario that runs a training."""
    LIVE.append(make)
    return make


SMALL = Training(options={"kib": 16})


@live
def live_flow_cap(draw: Draw) -> Case[Training]:
    flow = draw.randrange(130, 160)
    options = {"layers": 2, "sizes": [4096, 1024], "bucket_kib": 4096, "ms": 10.0, "steps": 90, "learn": True}
    run = Training(f"1gbit/{flow}mbit", "stock,tcp,ofi,bare", options, env={"NETBOTTLENECK_BLOCK_STEPS": "5"})
    return Case(
        "live: flow cap, other transports measured",
        run,
        ("TRANSPORT_LIMITED",),
        run.but("300mbit"),
        "TRANSPORT_LIMITED",
        never=("STRAGGLER", "LINK_LIMITED"),
        advises="NETBOTTLENECK_TRANSPORT=",
        numbers={
            "bandwidth.stock.active_bits_per_s": (0.85e6 * flow, 1.05e6 * flow),
            "bandwidth.stock.active_utilization": (0.0, 0.2),
            "probe.points.0.bits_per_s": (0.85e6 * flow, 1.05e6 * flow),
            "probe.points.3.streams": (8, 8),
            "probe.points.3.bits_per_s": (0.7e9, 1e9),
            "comparisons.tcp.ratio.value": (0.0, 1 / 3),
            "comparisons.ofi.ratio.value": (0.0, 1 / 3),
        },
        same=replace(run.but("none", ms=0.0), arms="stock"),
    )


@live
def live_slow_link_of_one_host(draw: Draw) -> Case[Training]:
    slow, options = draw.randrange(3), {"sizes": [16, 256, 256, 256], "ms": 20.0, "steps": 80}
    even = Training("1gbit", "stock", options, hosts=3, env={"NETBOTTLENECK_MONITOR_HZ": "20"})
    run = replace(even, slow_link=(slow, f"{draw.randrange(60, 100)}mbit"))
    return Case(
        "live: the link of one of three hosts is slow",
        run,
        ("LINK_LIMITED",),
        even,
        "LINK_LIMITED",
        never=("STRAGGLER", "IMBALANCE", "TRANSPORT_LIMITED", "MISCONFIGURED"),
        saves=True,
        says=f"The link of the host of rank {slow}",
        advises=f"Look at the interface, cable and switch port of the host of rank {slow}",
    )


@live
def live_slow_interface_of_one_host(draw: Draw) -> Case[Training]:
    mbit, gbps = draw.randrange(60, 100), "NETBOTTLENECK_LINK_GBPS"
    even = Training("1gbit", "stock", {"steps": 80})
    run = replace(even, slow_link=(1, f"{mbit}mbit"), host_env={1: {gbps: str(mbit / 1e3)}})
    return Case(
        "live: the interface of one of two hosts is slow, as it states",
        run,
        ("MISCONFIGURED",),
        even,
        "MISCONFIGURED",
        never=("STRAGGLER", "IMBALANCE", "TRANSPORT_LIMITED", "LINK_LIMITED"),
        says="on rank 1",
        advises="Look at the interface, cable and switch port of the host of rank 1",
    )


@live
def live_full_link(draw: Draw) -> Case[Training]:
    mbit = draw.randrange(100, 160)
    run = Training(f"{mbit}mbit", "stock,tcp,bare", {"sizes": [384, 768, 1152, 768], "ms": 20.0, "steps": 90})
    return Case(
        "live: full link",
        run,
        ("LINK_LIMITED",),
        run.but("none"),
        "LINK_LIMITED",
        never=("STRAGGLER", "INPUT_LIMITED", "TRANSPORT_LIMITED"),
        saves=True,
        says="averaged over the step",
        numbers={
            "bandwidth.stock.active_utilization": (0.85, 1.05),
            "bandwidth.stock.average_utilization": (0.3, 0.8),
        },
        checks=(least_link(0.9, 1e6 * mbit, 1e11),),
    )


@live
def live_sleeping_rank(draw: Draw) -> Case[Training]:
    slow = draw.randrange(2)
    run = SMALL.but(slow_rank=slow, sleep_ms=draw.uniform(15, 50))
    return Case(
        "live: one rank sleeps in its backward",
        run,
        ("STRAGGLER",),
        run.but(sleep_ms=None),
        "STRAGGLER",
        never=("LINK_LIMITED", "INPUT_LIMITED"),
        saves=True,
        says=f"Rank {slow} makes the others wait",
    )


@live
def live_input(draw: Draw) -> Case[Training]:
    run = SMALL.but(input_ms=draw.uniform(20, 60))
    return Case(
        "live: slow input",
        run,
        ("INPUT_LIMITED",),
        run.but(input_ms=None),
        "INPUT_LIMITED",
        never=("STRAGGLER", "OPTIMIZER_LIMITED"),
        saves=True,
    )


@live
def live_optimizer(draw: Draw) -> Case[Training]:
    run = SMALL.but(optimizer_ms=draw.uniform(25, 60))
    return Case(
        "live: slow optimizer",
        run,
        ("OPTIMIZER_LIMITED",),
        run.but(optimizer_ms=None),
        "OPTIMIZER_LIMITED",
        never=("STRAGGLER", "INPUT_LIMITED"),
        saves=True,
    )


@live
def live_second_optimizer(draw: Draw) -> Case[Training]:
    run = SMALL.but(second_ms=draw.uniform(25, 60))
    return Case(
        "live: slow second optimizer",
        run,
        ("OPTIMIZER_LIMITED",),
        run.but(second_ms=None),
        "OPTIMIZER_LIMITED",
        never=("STRAGGLER", "INPUT_LIMITED"),
        saves=True,
    )


@live
def live_forward_all_reduce(draw: Draw) -> Case[Training]:
    run = SMALL.but(f"{draw.randrange(250, 400)}mbit", forward_mib=16, steps=70)
    return Case(
        "live: all-reduce in the forward",
        run,
        ("LINK_LIMITED",),
        run.but(forward_mib=None),
        "LINK_LIMITED",
        never=("STRAGGLER", "INPUT_LIMITED", "OPTIMIZER_LIMITED"),
        saves=True,
    )


@live
def live_batch_norm(draw: Draw) -> Case[Training]:
    run = SMALL.but(f"{draw.randrange(80, 160)}mbit", norm_kib=256, steps=90)
    return Case(
        "live: batch norm over all ranks",
        run,
        ("LINK_LIMITED",),
        run.but(norm_kib=None),
        "LINK_LIMITED",
        never=("STRAGGLER", "INPUT_LIMITED", "OPTIMIZER_LIMITED"),
        saves=True,
    )


@live
def live_jitter(draw: Draw) -> Case[Training]:
    run = SMALL.but(jitter=draw.uniform(0.3, 0.4))
    return Case(
        "live: random steps", run, ("IMBALANCE",), run.but(even=True), "IMBALANCE", never=("STRAGGLER",), saves=True
    )


@live
def live_nothing(_: Draw) -> Case[Training]:
    return Case("live: hidden communication", SMALL, ("NOT_NETWORK",), never=("STRAGGLER", "LINK_LIMITED"))


@live
def live_input_and_link(draw: Draw) -> Case[Training]:
    run = Training("200mbit", "stock,bare", {"input_ms": draw.uniform(70, 90), "ms": 5.0})
    return Case(
        "live: input first, link second",
        run,
        ("INPUT_LIMITED",),
        run.but(input_ms=None),
        "INPUT_LIMITED",
        also=("LINK_LIMITED",),
        saves=True,
    )


@live
def live_pinned(draw: Draw) -> Case[Training]:
    run = Training("none", "stock,bare", {"kib": 1024, "core": draw.randrange(2), "spin": True})
    return Case(
        "live: both ranks on one core",
        run,
        ("HOST_LIMITED",),
        run.but(core=None),
        "HOST_LIMITED",
        never=("LINK_LIMITED", "INPUT_LIMITED"),
        says="of its cores busy over the whole step",
        numbers={"cores_busy": (0.9, 1.05)},
    )


@live
def live_clocks(draw: Draw) -> Case[Training]:
    run = SMALL.but(clock_s=draw.randrange(5, 500))
    return Case(
        "live: clocks of the hosts differ", run, ("NOT_NETWORK",), never=("STRAGGLER", "IMBALANCE", "LINK_LIMITED")
    )


@live
def live_clocks_and_a_straggler(draw: Draw) -> Case[Training]:
    slow = draw.randrange(2)
    run = SMALL.but(clock_s=draw.randrange(5, 500), slow_rank=slow, sleep_ms=draw.uniform(15, 50))
    return Case(
        "live: clocks differ, and one rank sleeps",
        run,
        ("STRAGGLER",),
        run.but(sleep_ms=None),
        "STRAGGLER",
        never=("LINK_LIMITED", "INPUT_LIMITED"),
        saves=True,
        says=f"Rank {slow} makes the others wait",
    )


@live
def live_slower_rank(draw: Draw) -> Case[Training]:
    slow = draw.randrange(2)
    run = SMALL.but(slow_rank=slow, slower=draw.uniform(1.12, 1.3))
    return Case(
        "live: one of two ranks is slower",
        run,
        ("STRAGGLER",),
        run.but(slower=None),
        "STRAGGLER",
        never=("LINK_LIMITED", "TRANSPORT_LIMITED", "INPUT_LIMITED"),
        saves=True,
        says=f"Rank {slow} makes the others wait",
        advises=f"rank {slow}'s host",
    )


@live
def live_slow_input_of_one_rank(draw: Draw) -> Case[Training]:
    slow = draw.randrange(2)
    run = SMALL.but(slow_rank=slow, late_input_ms=draw.uniform(20, 50))
    return Case(
        "live: input of one rank is slow",
        run,
        ("STRAGGLER",),
        run.but(late_input_ms=None),
        "STRAGGLER",
        never=("LINK_LIMITED", "TRANSPORT_LIMITED"),
        saves=True,
        says="Its input takes",
        advises="its data loader",
    )


@live
def live_slow_optimizer_of_one_rank(draw: Draw) -> Case[Training]:
    slow = draw.randrange(2)
    run = SMALL.but(slow_rank=slow, late_optimizer_ms=draw.uniform(20, 50))
    return Case(
        "live: optimizer of one rank is slow",
        run,
        ("STRAGGLER",),
        run.but(late_optimizer_ms=None),
        "STRAGGLER",
        never=("LINK_LIMITED", "TRANSPORT_LIMITED"),
        saves=True,
        says=f"Rank {slow} makes the others wait",
    )


@live
def live_sleeping_rank_of_four(draw: Draw) -> Case[Training]:
    slow = draw.randrange(4)
    run = replace(SMALL.but(slow_rank=slow, sleep_ms=draw.uniform(20, 50), steps=110), hosts=4)
    return Case(
        "live: one of four ranks sleeps in its backward",
        run,
        ("STRAGGLER",),
        run.but(sleep_ms=None),
        "STRAGGLER",
        never=("LINK_LIMITED", "INPUT_LIMITED"),
        saves=True,
        says=f"Rank {slow} makes the others wait",
    )


@live
def live_jitter_of_eight(draw: Draw) -> Case[Training]:
    run = replace(SMALL.but(jitter=draw.uniform(0.15, 0.25), ms=40.0, steps=70), hosts=4, ranks_per_host=2)
    return Case(
        "live: eight equal ranks with random steps",
        run,
        ("IMBALANCE",),
        run.but(even=True),
        "IMBALANCE",
        never=("STRAGGLER", "LINK_LIMITED"),
        saves=True,
        says="No rank is last persistently",
    )


@live
def live_link_and_input(draw: Draw) -> Case[Training]:
    run = Training(f"{draw.randrange(60, 80)}mbit", "stock,bare", {"input_ms": draw.uniform(40, 50), "ms": 5.0})
    return Case(
        "live: link first, input second",
        run,
        ("LINK_LIMITED",),
        run.but("none"),
        "LINK_LIMITED",
        never=("STRAGGLER", "TRANSPORT_LIMITED"),
        also=("INPUT_LIMITED",),
        saves=True,
    )


@live
def live_clocks_on_a_full_link(draw: Draw) -> Case[Training]:
    run = Training(f"{draw.randrange(80, 160)}mbit", "stock,bare", {"clock_s": draw.randrange(5, 500)})
    return Case(
        "live: clocks differ, full link",
        run,
        ("LINK_LIMITED",),
        run.but("none"),
        "LINK_LIMITED",
        never=("STRAGGLER", "IMBALANCE"),
        saves=True,
    )


@live
def live_straggler_on_a_full_link(draw: Draw) -> Case[Training]:
    slow = draw.randrange(2)
    run = Training(f"{draw.randrange(60, 90)}mbit", options={"slow_rank": slow, "sleep_ms": draw.uniform(20, 30)})
    return Case(
        "live: full link, and a straggler",
        run,
        ("LINK_LIMITED",),
        run.but("none"),
        "LINK_LIMITED",
        never=("TRANSPORT_LIMITED",),
        also=("STRAGGLER",),
        saves=True,
    )


@live
def live_flow_cap_on_a_faster_link(draw: Draw) -> Case[Training]:
    flow = draw.randrange(60, 100)
    run = Training(f"250mbit/{flow}mbit", "stock,tcp,bare", {"kib": 384, "steps": 110})
    return Case(
        "live: flow cap, the link could do more",
        run,
        ("TRANSPORT_LIMITED",),
        run.but(f"1gbit/{flow}mbit"),
        "LINK_LIMITED",
        never=("STRAGGLER", "LINK_LIMITED"),
        advises="NETBOTTLENECK_TRANSPORT=tcp",
        checks=(raised_link(1e6 * flow, 0.25e9, 1e9, 0.1),),
    )


@live
def live_as_good(draw: Draw) -> Case[Training]:
    one = {"NETBOTTLENECK_STREAMS": "1"}
    run = Training(f"1gbit/{draw.randrange(80, 120)}mbit", "stock,tcp,bare", {"steps": 400}, env=one)
    return Case(
        "live: another transport is as good",
        run,
        ("DO_NOTHING",),
        never=("TRANSPORT_LIMITED", "LINK_LIMITED", "STRAGGLER"),
        advises="keep stock",
    )


@live
def live_hidden_compared(_: Draw) -> Case[Training]:
    run = replace(SMALL.but(steps=200), arms="stock,tcp,bare,null")
    return Case(
        "live: hidden communication, all arms measured",
        run,
        ("NOT_NETWORK",),
        never=("TRANSPORT_LIMITED", "LINK_LIMITED", "STRAGGLER"),
        silent=("NETBOTTLENECK_TRANSPORT=",),
    )


@live
def live_small_operations(draw: Draw) -> Case[Training]:
    parts = draw.randrange(12, 20)
    run = Training("1gbit", options={"parts": parts, "kib": 1, "bucket_kib": 0.5, "ms": 2.0})
    return Case(
        "live: many small operations",
        run,
        ("LATENCY_LIMITED",),
        run.but(bucket_kib=25 << 10),
        "LATENCY_LIMITED",
        never=("LINK_LIMITED", "TRANSPORT_LIMITED", "STRAGGLER"),
        says="does not depend on size",
        advises="larger buckets",
    )


@live
def live_contended_compute(draw: Draw) -> Case[Training]:
    run = Training("none", "stock,null", {"spin": True, "kib": 8192, "ms": draw.uniform(10, 20), "steps": 130})
    return Case(
        "live: traffic slows compute",
        run,
        ("HOST_LIMITED",),
        run.but(kib=16, spin=None),
        "HOST_LIMITED",
        never=("LINK_LIMITED", "STRAGGLER", "INPUT_LIMITED"),
    )


@live
def live_traffic_of_others(draw: Draw) -> Case[Training]:
    run = replace(
        Training(f"{draw.randrange(100, 200)}mbit", "stock,bare", env={"NETBOTTLENECK_MONITOR_HZ": "20"}), other_flows=1
    )
    return Case(
        "live: another job's traffic",
        run,
        ("OTHER_TRAFFIC",),
        replace(run, other_flows=0),
        "OTHER_TRAFFIC",
        never=("LINK_LIMITED", "TRANSPORT_LIMITED", "STRAGGLER"),
    )


@live
def live_packets_lost(draw: Draw) -> Case[Training]:
    run = replace(SMALL, lost=draw.uniform(0.05, 0.1), env={"NETBOTTLENECK_MONITOR_HZ": "20"}).but(kib=64)
    return Case(
        "live: packets are lost",
        run,
        ("PACKET_LOSS",),
        replace(run, lost=0.0),
        "PACKET_LOSS",
        never=("LINK_LIMITED", "TRANSPORT_LIMITED"),
        advises="ethtool -S",
    )


@live
def live_large_buckets(draw: Draw) -> Case[Training]:
    options = {"sizes": [64, *[256] * 9], "ms": 10.0, "bucket_kib": 1536, "steps": 120}
    run = Training(f"none/{draw.randrange(140, 200)}mbit", options=options)
    return Case(
        "live: buckets too large to overlap",
        run,
        ("BUCKET_SIZES",),
        run.but(bucket_kib=250),
        "BUCKET_SIZES",
        never=("STRAGGLER", "INPUT_LIMITED", "TRANSPORT_LIMITED", "LINK_LIMITED"),
        advises="bucket_cap_mb of DDP",
    )


@live
def live_two_levels(draw: Draw) -> Case[Training]:
    run = replace(Training(f"{draw.randrange(80, 140)}mbit", "tcp,bare"), ranks_per_host=2)
    return Case(
        "live: two hosts of two ranks, full link",
        run,
        ("LINK_LIMITED",),
        run.but("none"),
        "LINK_LIMITED",
        never=("STRAGGLER",),
        saves=True,
    )


@live
def live_sharded(draw: Draw) -> Case[Training]:
    run = Training(f"{draw.randrange(80, 140)}mbit", "stock,bare", {"wrap": "fsdp"})
    return Case(
        "live: FSDP2 on a full link",
        run,
        ("LINK_LIMITED",),
        run.but("none"),
        "LINK_LIMITED",
        never=("STRAGGLER", "INPUT_LIMITED", "OPTIMIZER_LIMITED", "OTHER_TRAFFIC"),
        saves=True,
    )


@live
def live_sharded_straggler(draw: Draw) -> Case[Training]:
    slow = draw.randrange(2)
    run = SMALL.but(wrap="fsdp", slow_rank=slow, sleep_ms=draw.uniform(15, 50))
    return Case(
        "live: one rank of FSDP2 sleeps in every step",
        run,
        ("STRAGGLER",),
        run.but(sleep_ms=None),
        "STRAGGLER",
        saves=True,
        says=f"Rank {slow} makes the others wait",
    )


@live
def live_horovod(draw: Draw) -> Case[Training]:
    run = Training(f"{draw.randrange(80, 140)}mbit", "tcp", {"wrap": "horovod"})
    return Case(
        "live: DistributedOptimizer on a full link",
        run,
        ("LINK_LIMITED",),
        run.but("none"),
        "LINK_LIMITED",
        never=("STRAGGLER", "INPUT_LIMITED", "OPTIMIZER_LIMITED"),
        saves=True,
    )


@live
def live_accumulation(draw: Draw) -> Case[Training]:
    run = Training(f"{draw.randrange(80, 140)}mbit", options={"accumulate": 2, "ms": 5.0})
    return Case(
        "live: gradients of two passes on a full link",
        run,
        ("LINK_LIMITED",),
        run.but("none"),
        "LINK_LIMITED",
        never=("STRAGGLER", "INPUT_LIMITED", "OPTIMIZER_LIMITED"),
        saves=True,
    )


@live
def live_evaluation(draw: Draw) -> Case[Training]:
    run = SMALL.but(evaluate_ms=draw.uniform(30, 60), save_ms=draw.uniform(30, 60))
    return Case(
        "live: evaluation and checkpoints between steps",
        run,
        ("NOT_NETWORK",),
        never=("INPUT_LIMITED", "OPTIMIZER_LIMITED", "STRAGGLER", "IMBALANCE"),
    )


@live
def live_one_rank(_: Draw) -> Case[Training]:
    return Case("live: one rank", replace(SMALL.but(steps=60), hosts=1), ("NO_COMMUNICATION",))


@live
def live_few_steps(_: Draw) -> Case[Training]:
    run = replace(SMALL.but(steps=13), arms="stock", env={"NETBOTTLENECK_BLOCK_STEPS": "100"})
    return Case("live: three steps", run, ("INCONCLUSIVE",), advises="more steps")
