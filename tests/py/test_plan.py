"""The buckets: every tensor once, one type each, limits as in DDP, in the order in which they become complete."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from netbottleneck.whatif.plan import buckets, described

MIB = 1 << 20


def test_first_bucket_is_small_and_the_rest_large_in_backward_order() -> None:
    sizes = [10 * MIB] * 6 + [MIB // 2] * 4
    assert buckets(sizes, ["f"] * 10) == [[9, 8], [7, 6, 5, 4, 3], [2, 1, 0]]


def test_a_tensor_that_is_larger_than_the_limit_closes_its_bucket() -> None:
    assert buckets([400 * MIB, 1, 400 * MIB], ["f"] * 3) == [[2], [1, 0]]


def test_the_given_order_is_used() -> None:
    assert buckets([MIB, MIB, MIB], ["f"] * 3, [1, 0, 2], bucket_bytes=2 * MIB) == [[1], [0, 2]]


def test_types_do_not_mix_and_buckets_follow_their_last_tensor() -> None:
    assert buckets([4, 4, 4, 4], ["f", "h", "f", "h"]) == [[3, 1], [2, 0]]
    assert buckets([MIB, 4, 4], ["f", "h", "h"], [1, 0, 2]) == [[0], [1, 2]]


def test_no_tensors_make_no_buckets() -> None:
    assert buckets([], []) == []


def test_every_tensor_is_in_one_bucket() -> None:
    draw = random.Random(5)
    for _ in range(200):
        count = draw.randrange(1, 60)
        sizes = [draw.randrange(0, 3 * MIB) for _ in range(count)]
        types = [draw.choice("fhi") for _ in range(count)]
        order = draw.sample(range(count), count)
        made = buckets(sizes, types, order, 1000, 2 * MIB)
        assert sorted(index for bucket in made for index in bucket) == list(range(count))
        assert all(len({types[index] for index in bucket}) == 1 for bucket in made)
        place = {index: at for at, index in enumerate(order)}
        assert all(bucket == sorted(bucket, key=place.__getitem__) for bucket in made)
        last = [place[bucket[-1]] for bucket in made]
        assert last == sorted(last)
        for bucket in made:
            assert sum(sizes[index] for index in bucket[:-1]) < 2 * MIB


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (([1, 2], ["f"]), "2 sizes but 1 dtypes"),
        (([1, 2], ["f", "f"], [0, 0]), "each of the 2 tensors once"),
        (([1, 2], ["f", "f"], [0]), "each of the 2 tensors once"),
        (([1], ["f"], None, 0), "at least 1 byte"),
        (([-1], ["f"]), "must be at least 0"),
    ],
)
def test_invalid_arguments_are_refused(arguments: tuple[list[int]], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        buckets(*arguments)


@dataclass(frozen=True)
class Sent:
    name: str
    nbytes: int
    dtype: object
    parameters: tuple[int, ...]


def test_a_record_lists_tensors_with_their_buckets() -> None:
    class Torchlike:
        def __str__(self) -> str:
            return "torch.float16"

    tensors = [("a", 4, "float32"), ("b", 8, Torchlike()), ("left out", 2, "float32")]
    record = described(tensors, [Sent("second", 8, Torchlike(), (1,)), Sent("first", 4, "float32", (0,))], len)
    assert [(row["name"], row["bytes"], row["dtype"], row["bucket"]) for row in record["parameters"]] == [
        ("a", 4, "float32", 1),
        ("b", 8, "float16", 0),
        ("left out", 2, "float32", None),
    ]
    assert record["buckets"] == [
        {"name": "second", "key": 6, "bytes": 8, "dtype": "float16", "parameters": [1]},
        {"name": "first", "key": 5, "bytes": 4, "dtype": "float32", "parameters": [0]},
    ]
