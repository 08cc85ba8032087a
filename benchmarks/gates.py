"""Gates T1 to T10: paths, peers and bars of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from cases import Case, Run, has_shm, measured, settle
from judge import Figure, held_out
from peers.iperf import IPERF
from sharing import neighbour, two_interfaces
from table import Table, against, megabytes

from netbottleneck.lab import parse_lab

MB = 10**6
NATIVE = ("tcp", "ofi")
GLOO = ("stock", "stock x4")
OPEN_MPI_TCP = ("mpi-tcp", "mpi-tcp4")
CAPPED = ("2gbit/500mbit", "1gbit/125mbit", "4gbit/1gbit")
UNCAPPED: Mapping[str, str | None] = {"loopback": None, "veth": "none"}
UNEQUAL = "none/400mbit,400mbit,400mbit,100mbit"
# Payload of the 1514 bytes that HTB counts for a full frame: without 20 bytes of IPv4, 32 of TCP with timestamps and 14
# of Ethernet. Source: linux/net/core/dev.c, qdisc_pkt_len_init.
PAYLOAD = 1448 / 1514


def bits_s(size: int, bps: float, ranks: int = 2) -> float:
    """Return the seconds of an all-reduce at a bus bandwidth (nccl-tests, doc/PERFORMANCE.md: 2(n-1)/n of the size)."""
    return 8 * size * 2 * (ranks - 1) / ranks / bps


def t1(run: Run) -> Iterator[Figure]:
    """Compare with the best iperf3 on a capped link with capped flows, with iperf3's two best numbers of flows."""
    for lab in CAPPED:
        survey = Case(lab, lab, IPERF, (64 * MB,), lambda _table, _size: [], rounds=2)
        found = _best_iperf(survey, run)

        def judge(table: Table, size: int, found: tuple[str, ...] = found) -> list[Figure]:
            label = f"{megabytes(size)} against the best iperf3"
            return [against(table, size, ours, found, 0.97, label=f"{ours} {label}") for ours in NATIVE]

        yield from settle(Case(lab, lab, (*NATIVE, *found), (64 * MB,), judge), run)


def _best_iperf(survey: Case, run: Run) -> tuple[str, ...]:
    """Return the two fastest numbers of flows; the first two if iperf3 does not run."""
    try:
        table = Table()
        table.add(measured(survey, survey.sizes, dataclasses.replace(run, rounds=survey.rounds)))
    except OSError as error:
        run.say(f"# iperf3: {error.strerror or error}")
        return IPERF[:2]
    size = survey.sizes[0]
    times = {name: min(found) for name in IPERF if (found := table.series(size, name))}
    return tuple(sorted(times, key=lambda name: times[name])[:2]) or IPERF[:2]


def t2(run: Run) -> Iterator[Figure]:
    """Compare with the sum of the payload rates of four flows, one of which is slow."""
    total = float(sum(parse_lab(UNEQUAL).flow_bps))
    bars = {"tcp x4": 0.95, "ofi x4": 0.88}

    def judge(table: Table, size: int) -> list[Figure]:
        label = f"{megabytes(size)} against the flows' sum"
        return [
            against(table, size, ours, (), bar, constant=bits_s(size, total), label=f"{ours} {label}")
            for ours, bar in bars.items()
        ]

    # A fixed port range gives lanes the same rate at both ends, and control connections other flow classes.
    ports = (("NETBOTTLENECK_PORTS", "41000-41127"),)
    yield from settle(Case(UNEQUAL, UNEQUAL, NATIVE, (64 * MB,), judge, streams=(4,), variables=ports), run)


def t3(run: Run) -> Iterator[Figure]:
    """Compare with gloo, Open MPI and Horovod without a cap. ofi is measured without a bar."""
    bars = {MB: 1.0, 16 * MB: 1.0, 64 * MB: 1.2, 256 * MB: 1.2}
    peers = (*GLOO, *OPEN_MPI_TCP, "mpi-ofi")

    def judge(table: Table, size: int) -> list[Figure]:
        label = f"tcp {megabytes(size)} against the best of gloo, Open MPI tcp and ofi"
        return [against(table, size, "tcp", peers, bars[size], also=("horovod",), label=label)]

    transports = (*NATIVE, "stock", *OPEN_MPI_TCP, "mpi-ofi", "horovod")
    for where, lab in UNCAPPED.items():
        yield from settle(Case(where, lab, transports, tuple(bars), judge, rounds=10), run)


def t4(run: Run) -> Iterator[Figure]:
    """Compare shared memory with Open MPI's, with gloo, and with the limit of memory."""
    bars = {MB: 2.0, 16 * MB: 2.0, 64 * MB: 4.0, 256 * MB: 4.0}

    def judge(table: Table, size: int) -> list[Figure]:
        def figure(ours: str, peers: tuple[str, ...], bar: float, text: str) -> Figure:
            return against(table, size, ours, peers, bar, label=f"{megabytes(size)} {text}")

        return [
            figure("tcp", ("mpi-shm",), bars[size], "against Open MPI's shared memory"),
            figure("tcp", GLOO, 8.0, "against gloo"),
            figure("tcp", ("pair",), 0.7, "against the bound"),
            figure("tcp-heap", ("mpi-shm",), 1.5, "of any memory against Open MPI's shared memory"),
        ]

    case = Case("one host", None, ("tcp", "tcp-heap", "stock", "mpi-shm", "pair"), tuple(bars), judge, shm="1")
    if not has_shm():
        why = "this build has no shared memory between ranks"
        yield from (dataclasses.replace(f, reason=why) for size in case.sizes for f in judge(Table(), size))
        return
    yield from settle(dataclasses.replace(case, rounds=10), run)


def t5(run: Run) -> Iterator[Figure]:
    """Compare a hundred small all-reduces in sequence, of max, which repeats without effect. MPI is timed in C."""

    def judge(table: Table, size: int) -> list[Figure]:
        peers = (*GLOO, "mpi-tcp")
        return [against(table, size, "tcp", peers, 1.0, label=f"tcp {megabytes(size)} against gloo and Open MPI tcp")]

    for ranks, inner in ((2, 100), (8, 20)):
        where = f"loopback, {ranks} ranks"
        case = Case(where, None, ("tcp", "stock", "mpi-tcp"), (4096,), judge, ranks, 12, op="max", inner=inner)
        yield from settle(case, run)


def t6(run: Run) -> Iterator[Figure]:
    """Compare the machine's CPU time with gloo's, in the cases of T1 and T3."""

    def judge(names: tuple[str, ...]) -> Callable[[Table, int], list[Figure]]:
        def judged(table: Table, size: int) -> list[Figure]:
            label = f"{megabytes(size)}: busy seconds against gloo's"
            return [against(table, size, n, GLOO, 1.0, what="busy_s", label=f"{n} {label}") for n in names]

        return judged

    for lab in CAPPED:
        yield from settle(Case(lab, lab, (*NATIVE, "stock"), (64 * MB,), judge(NATIVE), rounds=10), run)
    for where, place in UNCAPPED.items():
        yield from settle(Case(where, place, ("tcp", "stock"), (64 * MB, 256 * MB), judge(("tcp",)), rounds=12), run)


def t7(run: Run) -> Iterator[Figure]:
    """Compare eight ranks with the payload rate of their links."""
    ranks, lab, link_bps = 8, "500mbit/125mbit", 500e6

    def judge(table: Table, size: int) -> list[Figure]:
        bound = bits_s(size, PAYLOAD * link_bps, ranks)
        label = f"{megabytes(size)} against the link's payload rate"
        return [against(table, size, "tcp", (), 0.93, constant=bound, label=f"tcp {label}")]

    yield from settle(Case(f"{lab}, {ranks} ranks", lab, ("tcp",), (64 * MB,), judge, ranks, 6), run)


def t8(run: Run) -> Iterator[Figure]:
    """Share the link with a plain TCP job."""
    yield from neighbour(run)


def t9(run: Run) -> Iterator[Figure]:
    """Compare auto with the best fixed number of lanes: odd rounds select it, even rounds measure it."""
    counts = (1, 2, 4, 8, 16)

    def judge(table: Table, size: int) -> list[Figure]:
        label = f"tcp auto {megabytes(size)} against the best fixed number of lanes"
        names = [f"tcp x{count}" for count in counts]
        ours = table.series(size, "tcp")
        why = table.why_not(size, ["tcp", *names])
        if why or ours is None:
            return [Figure(label, 0.95, reason=why or "not measured")]
        estimate, best = held_out(ours, {name: table.series(size, name) or [] for name in names})
        return [Figure(label, 0.95, estimate, (len(ours) + 1) // 2, best, broken=table.broken(size, ["tcp", *names]))]

    yield from settle(Case("loopback", None, ("tcp",), (64 * MB,), judge, rounds=40, streams=(0, *counts)), run)


def t10(run: Run) -> Iterator[Figure]:
    """Use two interfaces of different speed; then one of them goes down."""
    lab = "1gbit+250mbit"

    def judge(table: Table, size: int) -> list[Figure]:
        label = f"tcp {megabytes(size)} against the links' payload together"
        return [against(table, size, "tcp", (), 0.95, constant=bits_s(size, PAYLOAD * 1250e6), label=label)]

    yield from settle(Case(lab, lab, ("tcp",), (64 * MB,), judge, rounds=8), run)
    yield from two_interfaces(run, lab)


GATES: Mapping[str, Callable[[Run], Iterator[Figure]]] = {
    "T1": t1,
    "T2": t2,
    "T3": t3,
    "T4": t4,
    "T5": t5,
    "T6": t6,
    "T7": t7,
    "T8": t8,
    "T9": t9,
    "T10": t10,
}
