"""What scripts take from horovod.common.util, where this package has Horovod's place."""

import importlib.util
import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import cache as _cache
from itertools import pairwise
from typing import Any, TypeVar

from netbottleneck.hooks.horovod_exceptions import HorovodVersionMismatchError, get_version_mismatch_message
from netbottleneck.runtime.build_info import ccl_built, ddl_built, gloo_built, mpi_built, nccl_built

__all__ = [
    "HorovodVersionMismatchError",
    "_cache",
    "ccl_built",
    "check_extension",
    "ddl_built",
    "env",
    "extension_available",
    "get_version_mismatch_message",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]

T = TypeVar("T")


@contextmanager
def env(**values: str | None) -> Generator[None, None, None]:
    """Set variables of the environment for a while; a value None leaves its variable alone."""
    wanted = {name: value for name, value in values.items() if value is not None}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework can be used here: torch, where it is installed."""
    return ext_base_name == "torch" and importlib.util.find_spec("torch") is not None


def check_extension(ext_name: str, *_built_with: Any) -> None:
    """Raise ImportError for a framework whose API is not here: any but torch."""
    if ext_name != "horovod.torch":
        raise ImportError(f"{ext_name}: netbottleneck stands in for horovod.torch only", name=ext_name)


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return False: tensors travel from host memory."""
    return False


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number is a power of two."""
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Return the items in so many runs, the first ones longer by one where they cannot be equal."""
    least, more = divmod(len(items), parts)
    starts = [part * least + min(part, more) for part in range(parts + 1)]
    return [items[start:end] for start, end in pairwise(starts)]


def is_iterable(value: Any) -> bool:
    """Return whether one can iterate over a value."""
    return isinstance(value, Iterable)
