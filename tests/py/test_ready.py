"""Stamps of ready gradients: one for each, whoever opens and how often; and the number that stands for a shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from netbottleneck import _core
from netbottleneck.hooks.horovod import Route
from netbottleneck.runtime.collectives import shape_key
from netbottleneck.trace.recorder import EVENTS, read_ring


def named(count: int) -> list[tuple[str, Any]]:
    return [(f"weight{index}", torch.nn.Parameter(torch.ones(2))) for index in range(count)]


def test_what_is_opened_twice_stamps_each_gradient_once_into_the_later_recorder(tmp_path: Path) -> None:
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
def test_a_shapes_number_depends_on_nothing_else(shapes: tuple[tuple[int, ...], ...], number: int) -> None:
    assert shape_key(shapes) == number
