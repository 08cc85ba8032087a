"""Ready times of gradients: hooks that stamp them, and those of DDP's reducer; and the number of a shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from netbottleneck import _core
from netbottleneck.hooks.horovod import Route
from netbottleneck.runtime.collectives import shape_key
from netbottleneck.trace.ring_file import EVENTS, read_ring


def named(count: int) -> list[tuple[str, Any]]:
    return [(f"weight{index}", torch.nn.Parameter(torch.ones(2))) for index in range(count)]


def test_gradients_of_a_model_opened_twice_are_recorded_once_in_the_later_recorder(tmp_path: Path) -> None:
    parameters = named(3)
    standing = Route(parameters, 2)
    recorders = [_core.Recorder(str(tmp_path / name), 64, 0) for name in ("first", "second")]
    for recorder in recorders:
        standing.open(recorder)
    sum(parameter.sum() for _, parameter in parameters).backward()
    standing.close()
    sum(parameter.sum() for _, parameter in parameters).backward()
    for recorder in recorders:
        recorder.close()
    first, second = (read_ring(tmp_path / name).events for name in ("first", "second"))
    assert not len(first)
    assert set(second["kind"]) == {EVENTS["GRAD_READY"]}
    assert sorted(second["key"]) == [0, 1, 2]


def stamped(path: Path, *args: Any) -> tuple[int, list[tuple[int, int]]]:
    """Return what put_ready returns, and the (parameter, ns) pairs that it stamped."""
    recorder = _core.Recorder(str(path), 64, 0)
    begin = recorder.put_ready(*args)
    recorder.close()
    events = read_ring(path).events
    assert set(events["kind"]) <= {EVENTS["GRAD_READY"]}
    return begin, [(int(key), int(ns)) for key, ns in zip(events["key"], events["time_ns"], strict=True)]


def test_a_pass_begins_as_late_as_its_buckets_allow(tmp_path: Path) -> None:
    sent = [(1100, (2, 1)), (1400, (0,))]  # the second bucket was sent 50 ns after its gradient, the first 10
    found = stamped(tmp_path / "ring", [260, 90, 40], sent, 900)
    assert found == (1010, [(2, 1050), (1, 1100), (0, 1270)])


def test_a_bucket_sent_after_an_earlier_one_waited_for_that_ones_gradients(tmp_path: Path) -> None:
    sent = [(1100, (2, 1)), (1101, (0,))]
    assert stamped(tmp_path / "ring", [40, 90, 80], sent, 900)[0] == 1010


def test_unknown_buckets_leave_the_last_one_as_bound(tmp_path: Path) -> None:
    sent: list[tuple[int, tuple[int, ...]]] = [(1100, ()), (1400, ())]
    assert stamped(tmp_path / "ring", [260, 90, 40], sent, 900)[0] == 1140


def test_a_parameter_without_an_offset_is_not_stamped(tmp_path: Path) -> None:
    assert stamped(tmp_path / "ring", [260, 0, 90], [(1400, (0, 1, 2))], 900) == (1140, [(2, 1230), (0, 1400)])


def test_many_parameters_of_any_time_are_stamped_one_by_one(tmp_path: Path) -> None:
    offsets = [0 if at % 7 == 3 else 1 + at * (1 << 28) for at in range(33)]  # from the 16th on beyond 32 bits
    last = max(offsets)
    begin, stamps = stamped(tmp_path / "ring", offsets, [(last + 1000, ())], 0)
    assert begin == 1000
    assert sorted(stamps) == [(at, 1000 + ns) for at, ns in enumerate(offsets) if ns]


def test_ten_parameters_take_one_event(tmp_path: Path) -> None:
    recorder = _core.Recorder(str(tmp_path / "ring"), 64, 0)
    recorder.put_ready([5] * 20, [(10, ())], 0)
    recorder.close()
    assert (tmp_path / "ring").stat().st_size == 4096 + 2 * 64


@pytest.mark.parametrize(("offsets", "since"), [([900, 10], 1000), ([0, 0], 0), ([-5, -9], 0)])
def test_times_of_a_clock_that_was_set_are_dropped(tmp_path: Path, offsets: list[int], since: int) -> None:
    assert stamped(tmp_path / "ring", offsets, [(1500, (0, 1))], since) == (0, [])


def test_a_bucket_of_parameters_that_do_not_exist_is_refused(tmp_path: Path) -> None:
    recorder = _core.Recorder(str(tmp_path / "ring"), 64, 0)
    with pytest.raises(ValueError, match="parameter 2 of a bucket: there are 2"):
        recorder.put_ready([1, 2], [(5, (2,))], 0)
    with pytest.raises(TypeError):
        recorder.put_ready([1, 2], [(5, [0])], 0)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("shapes", "number"),
    [
        (((2, 3),), 6899590807778513000),
        (((3, 2),), 4133932562297054977),
        (((6,),), 5476643190798302491),
        (((),), 13020603013274838756),
        (((2,), (3,)), 16250338372251720331),
    ],
)
def test_the_hash_of_a_shape_depends_only_on_the_shape(shapes: tuple[tuple[int, ...], ...], number: int) -> None:
    assert shape_key(shapes) == number
