"""The 2020 simulator: compared with its own outputs, if available, and with a closed form of its rules."""

from __future__ import annotations

import csv
import itertools
import math
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netbottleneck.trace import layer_log
from netbottleneck.trace.layer_log import LayerLog, VecTable
from netbottleneck.whatif import compat2020
from netbottleneck.whatif.compat2020 import Grid

EQUAL_S = 1e-12
MODELS = ("resnet50", "resnet101", "vgg16")


def rows(path: Path) -> Iterator[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


@pytest.fixture(scope="module")
def logs(paper1: Path) -> dict[str, LayerLog]:
    return {model: layer_log.read(paper1 / "inputs" / f"{model}.bk.log") for model in MODELS}


@pytest.fixture(scope="module")
def table(paper1: Path) -> VecTable:
    return layer_log.read_table(paper1 / "inputs" / "cuda_vec_add.log")


def test_all_rows_of_the_papers_sweep_match(paper1: Path, logs: dict[str, LayerLog], table: VecTable) -> None:
    seen = 0
    for row in rows(paper1 / "scaling.csv"):
        grid = Grid(
            (int(row["N"]),), (float(row["linkspeed_bps"]),), (float(row["compression"]),), float(row["slowdown"])
        )
        (got,) = compat2020.sweep(logs[row["model"]], table, float(row["batch_t_s"]), grid)
        assert got.compute_end_s == pytest.approx(float(row["backward_sum_s"]), rel=0, abs=EQUAL_S)
        assert got.communication_end_s == pytest.approx(float(row["bk_coll_time_s"]), rel=0, abs=EQUAL_S)
        assert got.overhead_s == pytest.approx(float(row["overhead_s"]), rel=0, abs=EQUAL_S)
        assert got.scaling_factor == pytest.approx(float(row["scaling_factor"]), rel=0, abs=EQUAL_S)
        assert (got.model, got.buckets) == (row["model"], int(row["n_buckets"]))
        seen += 1
    assert seen == 270


def test_every_bucket_matches(paper1: Path, logs: dict[str, LayerLog]) -> None:
    want: dict[tuple[str, float], list[tuple[float, int]]] = {}
    for row in rows(paper1 / "buckets.csv"):
        place = want.setdefault((row["model"], float(row["slowdown"])), [])
        place.append((float(row["send_time_s"]), int(row["bytes"])))
    assert {slowdown for _, slowdown in want} == {10, 1000}
    for (model, slowdown), buckets in want.items():
        sent, _ = compat2020.buckets(logs[model].tensors, slowdown)
        assert [bucket.bytes for bucket in sent] == [size for _, size in buckets]
        assert [bucket.ready_s for bucket in sent] == pytest.approx([at for at, _ in buckets], rel=0, abs=EQUAL_S)


def test_every_timeline_matches(paper1: Path, logs: dict[str, LayerLog], table: VecTable) -> None:
    seen = 0
    for row in rows(paper1 / "timeline.csv"):
        link_bps, ratio = float(row["linkspeed_bps"]), float(row["compression"])
        moved = compat2020.timeline(logs[row["model"]].tensors, table, int(row["N"]), link_bps, ratio)[
            int(row["bucket"])
        ]
        assert moved.bytes == int(row["bytes"])
        for got, name in (
            (moved.ready_s, "ready_s"),
            (moved.start_s, "start_s"),
            (moved.network_s, "net_one_stage_s"),
            (moved.reduce_s, "reduce_s"),
            (moved.end_s, "end_s"),
        ):
            assert got == pytest.approx(float(row[name]), rel=0, abs=EQUAL_S)
        seen += 1
    assert seen == 89


def test_every_addition_matches(paper1: Path, table: VecTable) -> None:
    want = [(float(row["size_bytes"]), float(row["est_s"])) for row in rows(paper1 / "vecadd_est.csv")]
    got = compat2020.add_seconds(table, [size for size, _ in want])
    assert got.tolist() == pytest.approx([seconds for _, seconds in want], rel=0, abs=EQUAL_S)


def test_the_papers_figure_8a_matches_within_a_point(paper1: Path, logs: dict[str, LayerLog], table: VecTable) -> None:
    seen = 0
    steps = {row["model"]: float(row["batch_t_s"]) for row in rows(paper1 / "scaling.csv")}
    for row in rows(paper1 / "paper_figures.csv"):
        if row["figure"] != "8a" or not row["value"]:
            continue
        model = row["series"].removesuffix(" 10 Gbps").lower()
        grid = Grid((64,), (10e9,), (float(row["x"].removesuffix("x")),))
        (got,) = compat2020.sweep(logs[model], table, steps[model], grid)
        assert 100 * got.scaling_factor == pytest.approx(float(row["value"]), rel=0, abs=1)
        seen += 1
    assert seen == 11


def test_resnet101_on_32_gpus_at_1_gbit_matches_the_authors_measurement_within_two_per_cent(
    paper1: Path, logs: dict[str, LayerLog], table: VecTable
) -> None:
    (authors,) = [row for row in rows(paper1 / "author_gist.csv") if row["bw_limit_gbps"] == "1"]
    (got,) = compat2020.sweep(logs["resnet101"], table, 0.192, Grid((int(authors["nodes_gpus"]),), (1e9,)))
    assert got.communication_end_s == pytest.approx(float(authors["horovod_coll_us"]) / 1e6, rel=0.02)


def single(value: float) -> float:
    """The float32 nearest."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def addition_s(table: VecTable, size: float) -> float:
    known = [(single(at), single(seconds)) for at, seconds in zip(table.bytes, table.seconds, strict=True)]
    if size <= known[0][0]:
        return known[0][1]
    for (low, low_s), (high, high_s) in itertools.pairwise(known):
        if size <= high:
            return low_s + (high_s - low_s) * (size - low) / (high - low)
    return known[-1][1]


def closed_form_s(log: LayerLog, table: VecTable, grid: Grid) -> float:
    """End of all work: the maximum of the backward pass, and of each bucket plus all work after it."""
    (n,), (bps,), (ratio,) = grid.workers, grid.link_bps, grid.compression

    def spent(seconds: float) -> float:
        return seconds if seconds * grid.slowdown > 30e-6 else 0.0

    sent: list[tuple[float, int]] = []
    begin = 0
    for end in range(1, len(log.tensors) + 1):
        waits, sizes = zip(*log.tensors[begin:end], strict=True)
        full = sum(waits) >= 0.005 or sum(sizes) >= 64 * 1024 * 1024
        if full or (end == len(log.tensors) and sum(sizes) > 0):
            sent.append((sum(spent(wait) for wait, _ in log.tensors[:end]), sum(sizes)))
            begin = end
    costs = []
    for _, size in sent:
        stage = 8 * size * (n - 1) / (n * bps * ratio)
        costs.append(spent(stage + (n - 1) * addition_s(table, size / n)) + spent(stage))
    ends = [ready + sum(costs[at:]) for at, (ready, _) in enumerate(sent)]
    return max(sum(spent(wait) for wait, _ in log.tensors), *ends, 0.0)


made_logs = st.builds(
    LayerLog,
    st.just("m"),
    st.lists(
        st.tuples(st.sampled_from([0.0, 2e-6, 4e-6, 1.7e-4, 0.0011, 0.0049, 0.007]), st.integers(0, 90 << 20)),
        min_size=1,
        max_size=12,
    ).map(tuple),
)
made_tables = st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(0, 1e-2)), min_size=1, max_size=6).map(
    lambda pairs: VecTable(*zip(*sorted(dict(pairs).items()), strict=True))
)
grids = st.builds(
    Grid,
    st.tuples(st.integers(1, 100_000)),
    st.tuples(st.floats(1e6, 4e11)),
    st.tuples(st.floats(0.5, 1000)),
    st.sampled_from([1.0, 10.0, 1000.0]),
)


@settings(max_examples=300, deadline=None)
@given(made_logs, made_tables, grids)
def test_any_other_input_matches_the_closed_form(log: LayerLog, table: VecTable, grid: Grid) -> None:
    (got,) = compat2020.sweep(log, table, 0.1, grid)
    want = closed_form_s(log, table, grid)
    assert got.communication_end_s == pytest.approx(want, rel=1e-12, abs=EQUAL_S)
    assert got.overhead_s == pytest.approx(want - log.backward_s, rel=1e-12, abs=EQUAL_S * max(1, want))
    assert got.step_s == 0.1 + got.overhead_s
    assert got.scaling_factor == pytest.approx(0.1 / got.step_s, rel=1e-15)


@settings(max_examples=100, deadline=None)
@given(made_logs, made_tables, grids, st.floats(1, 100))
def test_a_faster_link_or_more_compression_never_makes_it_slower(
    log: LayerLog, table: VecTable, grid: Grid, times: float
) -> None:
    def end_s(link: float, ratio: float) -> float:
        cell = Grid(grid.workers, (link,), (ratio,), grid.slowdown)
        return compat2020.sweep(log, table, 0.1, cell)[0].communication_end_s

    (link,), (ratio,) = grid.link_bps, grid.compression
    here = end_s(link, ratio) * (1 + 1e-12)
    assert end_s(link * times, ratio) <= here
    assert end_s(link, ratio * times) <= here


def test_one_worker_has_no_overhead() -> None:
    log = LayerLog("m", ((0.001, 1 << 20), (0.006, 1 << 27)))
    (got,) = compat2020.sweep(log, VecTable((1,), (1.0,)), 0.5, Grid((1,), (1e9,)))
    assert (got.overhead_s, got.scaling_factor, got.step_s) == (0.0, 1.0, 0.5)


def test_a_late_tensor_closes_its_bucket_and_a_bucket_may_exceed_the_limit() -> None:
    sent, end_s = compat2020.buckets(((0.004, 10), (0.02, 20), (0.001, 60 << 20), (0.001, 60 << 20), (0.0, 0)))
    assert [(bucket.bytes, bucket.ready_s) for bucket in sent] == [(30, 0.024), (120 << 20, pytest.approx(0.026))]
    assert end_s == pytest.approx(0.026)


def test_batches_are_averaged() -> None:
    one, other = ((0.001, 1 << 20),), ((0.006, 1 << 26),)
    table, grid = VecTable((1, 1 << 30), (1e-5, 1e-3)), Grid((4,), (1e9,))
    (first,), (second,), (both,) = (
        compat2020.sweep(log, table, 0.1, grid)
        for log in (LayerLog("m", one), LayerLog("m", other), LayerLog("m", one, None, (other,)))
    )
    assert both.overhead_s == pytest.approx((first.overhead_s + second.overhead_s) / 2)
    assert both.communication_end_s == pytest.approx((first.communication_end_s + second.communication_end_s) / 2)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (((0,), (1e9,)), "0 workers: must be 1 or more"),
        (((2,), (0.0,)), "link 0.0"),
        (((2,), (-1e9,)), "link -"),
        (((2,), (math.nan,)), "link nan"),
        (((2,), (1e9,), (0.0,)), "compression 0.0"),
        (((2,), (1e9,), (1.0,), math.inf), "slowdown inf"),
    ],
)
def test_invalid_arguments_are_refused(arguments: tuple[tuple[float, ...], ...], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Grid(*arguments)  # type: ignore[arg-type]


def test_a_step_of_zero_time_is_refused() -> None:
    with pytest.raises(ValueError, match=r"step 0\.0: must be a finite number above 0"):
        compat2020.sweep(LayerLog("m", ((0.1, 1),)), VecTable((1,), (1.0,)), 0.0, Grid((2,), (1e9,)))
