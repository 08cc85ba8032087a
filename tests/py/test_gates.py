"""The benchmark's gates: verdicts by interval, comparisons with peers, and excluded results."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import cases  # noqa: E402
import gates  # noqa: E402
import nccl_gates  # noqa: E402
import scale  # noqa: E402
import sharing  # noqa: E402
import transport  # noqa: E402
from judge import Figure, certain, closeness, held_out, ratio, worst  # noqa: E402
from table import Table, against  # noqa: E402

from netbottleneck.analysis.comparisons import Estimate  # noqa: E402
from netbottleneck.bench import Results  # noqa: E402
from netbottleneck.errors import Error  # noqa: E402

SIZE = 10**6


def row(name: str, times: list[float], **more: Any) -> dict[str, Any]:
    """A row of the benchmark with as many wire bytes as required."""
    rounds = {"time_s": times, "busy_s": [2 * t for t in times], "sent_bytes": [2 * SIZE] * len(times)}
    base = {"transport": name, "streams": "auto", "bytes": SIZE, "ranks": 2, "wrong": 0, "owed_bytes": 2 * SIZE}
    return {**base, "rounds": rounds, **more}


def table(*rows: dict[str, Any]) -> Table:
    found = Table()
    found.add(Results(rows=list(rows)))
    return found


@pytest.mark.parametrize(
    ("low", "high", "rounds", "verdict"),
    [
        (1.0, 1.1, 6, "pass"),
        (0.99, 1.1, 60, "undecided"),
        (0.9, 0.99, 6, "fail"),
        (1.0, 1.1, 5, "undecided"),
        (0.9, 0.99, 5, "undecided"),
    ],
)
def test_the_interval_decides_and_needs_rounds(low: float, high: float, rounds: int, verdict: str) -> None:
    assert Figure("", 1.0, Estimate((low + high) / 2, low, high), rounds).verdict == verdict


def test_wrong_elements_fail_at_any_speed_and_a_reason_is_not_a_failure() -> None:
    assert Figure("", 1.0, certain(9.0), 60, broken="3 elements were wrong").verdict == "fail"
    assert Figure("", 1.0, reason="iperf3 is not installed").verdict == "not run"
    assert Figure("", 1.0).verdict == "not run"
    assert "iperf3 is not installed" in Figure("x", 1.0, reason="iperf3 is not installed").line()


def test_a_gate_is_as_good_as_its_worst_figure() -> None:
    good, better = Figure("a", 1.0, certain(1.1), 9), Figure("b", 2.0, certain(4.0), 9)
    assert worst([better, good]) is good
    undecided = Figure("c", 1.0, Estimate(1.5, 0.9, 2.0), 9)
    absent, bad = Figure("d", 1.0, reason="no"), Figure("e", 1.0, certain(0.99), 9)
    assert [worst([good, undecided]), worst([undecided, absent]), worst([absent, bad])] == [undecided, absent, bad]


def test_a_ratio_compares_with_the_fastest() -> None:
    found = ratio([2.0] * 8, {"slow": [8.0] * 8, "fast": [3.0] * 8})
    assert (found.value, found.low, found.high) == (1.5, 1.5, 1.5)
    with pytest.raises(ValueError, match="same number of rounds"):
        ratio([1.0, 1.0], {"other": [1.0]})


def test_rounds_are_drawn_in_pairs() -> None:
    # Both are slow in the same rounds: unpaired draws would give an interval from 0.1 to 10.
    times = [1.0, 10.0] * 10
    found = ratio(times, {"other": [1.2 * t for t in times]})
    assert (found.low, found.high) == (pytest.approx(1.2), pytest.approx(1.2))


def test_an_interval_is_the_same_every_time_and_holds_the_value() -> None:
    times = [1.0, 1.1, 0.9, 1.3, 0.8, 1.05, 1.2, 0.95]
    first, second = (ratio(times, {"other": times[::-1]}) for _ in range(2))
    assert first == second
    assert first.low < first.value < first.high


def test_busy_seconds_are_compared_by_their_means() -> None:
    # Ticks of 10 ms: a median would see nothing.
    found = ratio([0.0, 0.0, 0.01], {"gloo": [0.01, 0.0, 0.02]}, means=True)
    assert found.value == pytest.approx(3.0)


def test_closeness_is_symmetric() -> None:
    assert closeness([0.8] * 6, [1.0] * 6).value == pytest.approx(0.8)
    assert closeness([1.25] * 6, [1.0] * 6).value == pytest.approx(0.8)


def test_the_best_is_picked_on_odd_rounds_and_judged_on_even_ones() -> None:
    # "lucky" is the fastest on even rounds only, and does not count.
    lucky, steady = [0.5, 4.0] * 6, [2.0, 2.0] * 6
    estimate, best = held_out([2.0, 9.0] * 6, {"lucky": lucky, "steady": steady})
    assert (best, estimate.value) == ("steady", 1.0)


def test_a_needed_peer_that_is_missing_is_named() -> None:
    found = table(row("tcp", [1.0] * 8))
    found.add(Results(rows=[row("tcp", [1.0] * 8)], notes=["mpi-tcp left out: mpicc and mpirun not installed"]))
    figure = against(found, SIZE, "tcp", ("mpi-tcp",), 1.0)
    assert (figure.verdict, figure.reason) == ("not run", "mpi-tcp: mpicc and mpirun not installed")


def test_an_optional_peer_counts_if_it_was_measured() -> None:
    rows = [row("tcp", [2.0] * 8), row("stock", [3.0] * 8)]
    assert against(table(*rows), SIZE, "tcp", ("stock",), 1.0, also=("horovod",)).verdict == "pass"
    joined = table(*rows, row("horovod", [1.0] * 8))
    assert against(joined, SIZE, "tcp", ("stock",), 1.0, also=("horovod",)).verdict == "fail"


def test_a_path_that_was_missing_in_one_run_is_not_compared() -> None:
    found = table(row("tcp", [1.0] * 8), row("stock", [2.0] * 8))
    found.add(Results(rows=[row("tcp", [1.0] * 8)]))
    assert found.series(SIZE, "tcp") == [1.0] * 16
    assert against(found, SIZE, "tcp", ("stock",), 1.0).verdict == "not run"


def test_too_few_bytes_on_the_wire_invalidate_a_figure() -> None:
    short = row("tcp", [1.0] * 8)
    short["rounds"]["sent_bytes"][3] = 2 * SIZE - 1
    figure = against(table(short, row("stock", [2.0] * 8)), SIZE, "tcp", ("stock",), 1.0)
    assert figure.verdict == "fail"
    assert "must send 2000000" in figure.broken


def test_a_constant_bound_counts_as_a_peer() -> None:
    figure = against(table(row("tcp", [1.25] * 8)), SIZE, "tcp", (), 0.75, constant=1.0)
    assert figure.estimate == Estimate(0.8, 0.8, 0.8)
    assert figure.verdict == "pass"


def settled(monkeypatch: pytest.MonkeyPatch, batches: Iterator[list[list[float]]]) -> tuple[list[Figure], list[Any]]:
    """Measure a case of two sizes; each batch gives the next rounds of tcp, and stock always takes 1 s."""
    measured_sizes = []

    def start(request: Any, *_: Any, **__: Any) -> Results:
        measured_sizes.append(request.sizes)
        rows = []
        for size, times in zip(request.sizes, next(batches), strict=True):
            for name, each in (("tcp", times), ("stock", [1.0] * len(times))):
                rows.append(row(name, each, bytes=size))
        return Results({"lab": None, "machine": {}, "versions": {}}, rows)

    monkeypatch.setattr(cases, "start", start)
    monkeypatch.setattr(cases, "QUIET_S", 0.0)
    case = cases.Case(
        "here", None, ("tcp", "stock"), (SIZE, 2 * SIZE), lambda t, n: [against(t, n, "tcp", ("stock",), 1)]
    )
    return cases.settle(case, cases.Run(lambda _: None, batches=3)), measured_sizes


def test_only_undecided_figures_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    unsure = [0.5, 2.0] * 4
    figures, measured_sizes = settled(monkeypatch, iter([[[0.5] * 8, unsure], [unsure], [unsure]]))
    assert measured_sizes == [(SIZE, 2 * SIZE), (2 * SIZE,), (2 * SIZE,)]
    assert [(figure.verdict, figure.rounds) for figure in figures] == [("pass", 8), ("undecided", 24)]


def test_the_error_of_a_failed_rank_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any, **__: Any) -> Results:
        raise Error(0, "rank 1 was killed by SIGKILL")

    monkeypatch.setattr(cases, "start", start)
    monkeypatch.setattr(cases, "QUIET_S", 0.0)
    (figure,) = gates.t7(cases.Run(lambda _: None))
    assert (figure.verdict, figure.reason) == ("not run", "rank 1 was killed by SIGKILL")


def test_all_ten_gates_have_a_line_and_only_ten_passes_are_a_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def gate(figure: Figure) -> Any:
        return lambda _run: iter([figure])

    good = Figure("good", 1.0, certain(1.5), 9)
    fake = dict.fromkeys(gates.GATES, gate(good))
    monkeypatch.setattr(transport, "GATES", fake)
    file = tmp_path / "gates.json"
    monkeypatch.setattr(sys, "argv", ["transport.py", "--gates", "--json", str(file)])
    assert transport.main() == 0
    last = capsys.readouterr().out.rstrip().splitlines()[-10:]
    assert [line.split()[:2] for line in last] == [[f"T{n}", "pass"] for n in range(1, 11)]
    assert file.exists()
    fake["T4"] = gate(Figure("absent", 1.0, reason="no shared memory"))
    assert transport.main() == 1
    assert "T4  not run:  no shared memory" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["transport.py", "--gates", "--only", "T1"])
    assert transport.main() == 1


def test_the_rate_of_a_span_is_between_its_first_and_last_result() -> None:
    done = [10**9 + n * 10**8 for n in range(11)]  # one every 0.1 s
    assert sharing.rate(done, 0, 3 * 10**9) == pytest.approx(8 * sharing.BYTES * 10)
    assert sharing.rate(done, 0, 10**9) == 0.0


def test_a_continuous_job_reports_the_time_and_correctness_of_each_all_reduce(plain_ranks: Any) -> None:
    results = plain_ranks(
        2, BENCHMARKS / "steady.py", {"NETBOTTLENECK_IFNAME": "lo"}, args=["tcp", "2", "400000", "0.2"]
    )
    assert results[0].stdout.splitlines()[0] == "moving"
    records = [json.loads(result.stdout.splitlines()[-1]) for result in results]
    assert len(records[0]["done_ns"]) == len(records[1]["done_ns"]) >= 2
    for each in records:
        assert (each["wrong"], each["error"]) == (0, None)
        assert each["done_ns"] == sorted(each["done_ns"])


def test_a_rank_reports_the_cost_of_its_communicator(plain_ranks: Any) -> None:
    results = plain_ranks(
        3, BENCHMARKS / "scale.py", {"NETBOTTLENECK_IFNAME": "lo"}, args=["--rank", "tcp", "--lanes", "2"]
    )
    records = [json.loads(result.stdout) for result in results]
    assert [each["wrong"] for each in records] == [0, 0, 0]
    # Two lanes to and from each of two neighbours, beside the control connections: rank 0 has one to each other rank.
    assert [each["connections"] for each in records] == [10, 9, 9]
    assert all(each["setup_s"] > 0 and each["large_s"] > 0 for each in records)


def test_a_model_reproduces_the_times_it_was_fitted_to() -> None:
    link = scale.Link(1e-4, 1e8)
    fitted = scale.fitted(scale.ring_s(link, 2, 0), scale.ring_s(link, 2, scale.LARGE))
    assert (fitted.alpha_s, fitted.bytes_per_s) == (pytest.approx(1e-4), pytest.approx(1e8))


def test_with_many_ranks_few_steps_are_best_for_small_sizes_and_a_ring_for_large() -> None:
    best = {each["bytes"]: each["best"] for each in scale.predicted(scale.Link(1e-5, 1e9), 1024)}
    assert best[4096] == "recursive doubling"
    assert best[64_000_000] == "halving and doubling"
    times = scale.predicted(scale.Link(0.0, 1e9), 1024)[-1]["predicted_s"]
    assert times["ring"] == pytest.approx(times["halving and doubling"])


def test_the_bound_of_the_judge_is_that_of_the_bus_bandwidth() -> None:
    assert gates.bits_s(10**6, 8e6) == 1.0
    assert gates.bits_s(10**6, 8e6, 8) == 1.75


def test_a_path_of_nccl_selects_network_lanes_and_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_gates, "library", lambda: Path("/libnccl.so.2"))
    options, names = nccl_gates.way("stock 4x1")
    assert options == ["--stock", "/libnccl.so.2"]
    assert names == {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "1"}
    assert nccl_gates.way("stock")[1] == {}
    options, names = nccl_gates.way("ofi x16")
    assert options == ["--plugin", str(nccl_gates.PLUGIN)]
    assert (names["NETBOTTLENECK_TRANSPORT"], names["NETBOTTLENECK_STREAMS"]) == ("ofi", "16")


def test_without_nccl_its_gates_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_gates, "library", lambda: None)
    run = cases.Run(lambda _: None)
    figures = [figure for name in ("N1", "N2", "N3", "N4", "N5") for figure in nccl_gates.GATES[name](run)]
    assert {figure.reason for figure in figures} == {"NCCL is not installed (requirements/nccl.txt)"}


@pytest.fixture
def nccl_times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Replace the measurement of NCCL's paths; return the time of each path, 1 s if it is not set."""
    times: dict[str, float] = {}

    def sample(_program: Path, name: str, *_: Any) -> dict[str, Any]:
        took = times.get(name, 1.0)
        return {"time_s": took, "latency_us": 1e6 * took, "cpu_s": 2 * took, "wrong": 0, "error_after_s": took}

    for name, value in (("sample", sample), ("_await_quiet", int), ("library", lambda: Path("/none/a/b/c/d"))):
        monkeypatch.setattr(nccl_gates, name, value)
    monkeypatch.setattr(nccl_gates, "compiled", lambda folder: folder / "measure")
    monkeypatch.setattr(nccl_gates, "checked", contextlib.nullcontext)
    return times


def test_nccl_is_compared_with_its_best_setting(nccl_times: dict[str, float]) -> None:
    nccl_times |= {"tcp x4": 0.8, "ofi x4": 1.1}
    run = cases.Run(lambda _: None, batches=1)
    assert [(figure.verdict, figure.rounds) for figure in nccl_gates.n3(run)] == [("pass", 10), ("fail", 10)]
    nccl_times["stock 2x8"] = 0.5
    assert [figure.verdict for figure in nccl_gates.n3(run)] == ["fail", "fail"]
    assert {row["bytes"] for row in run.rows} == {nccl_gates.LOOPBACK_BYTES}


def test_a_slow_flow_is_compared_on_as_many_sockets(nccl_times: dict[str, float]) -> None:
    nccl_times |= {"tcp x4": 0.39, "ofi x4": 0.41, "tcp x16": 0.19, "ofi x16": 0.21, "stock 4x4": 0.5}
    found = {figure.name.partition(": ")[2]: figure.verdict for figure in nccl_gates.n2(cases.Run(lambda _: None))}
    assert found["tcp x4 against the best of stock with up to 4 sockets"] == "pass"
    assert found["ofi x4 against the best of stock with up to 4 sockets"] == "fail"
    assert found["tcp x16 against the best of stock with up to 16 sockets"] == "pass"
    assert found["ofi x16 against the best of stock with up to 16 sockets"] == "fail"


def test_the_slowest_error_after_a_fault_counts(nccl_times: dict[str, float]) -> None:
    nccl_times["ofi x4"] = 2.5
    verdicts = [figure.verdict for figure in nccl_gates.n6(cases.Run(lambda _: None))]
    assert verdicts == ["pass", "fail", "pass", "pass"]  # killed: 2 s, stopped: 3 s
