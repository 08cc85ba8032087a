"""Names of horovod.common.exceptions and horovod.common.util, for scripts where this package replaces Horovod.

This module does not import torch.
"""

import importlib.util
import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import cache as _cache
from itertools import pairwise
from typing import Any, TypeVar

from netbottleneck.errors import HorovodInternalError, HostsUpdatedInterrupt
from netbottleneck.runtime.job import ccl_built, ddl_built, gloo_built, mpi_built, nccl_built

__all__ = [
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
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


# horovod.common.exceptions.


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return the error message for a framework whose version differs from the one that Horovod was built for."""
    return f"Horovod was built for {name} {version}, and {installed_version} is installed"


class HorovodVersionMismatchError(ImportError):
    """A framework's version differs from the one Horovod was built for. This package never raises it."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version


# horovod.common.util.

T = TypeVar("T")


@contextmanager
def env(**values: str | None) -> Generator[None, None, None]:
    """Set environment variables inside the context and restore them after it. None leaves a variable unchanged."""
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
    """Return whether a framework can be used: only torch, if it is installed."""
    return ext_base_name == "torch" and importlib.util.find_spec("torch") is not None


def check_extension(ext_name: str, *_built_with: Any) -> None:
    """Raise ImportError for any extension except horovod.torch."""
    if ext_name != "horovod.torch":
        raise ImportError(f"{ext_name}: netbottleneck stands in for horovod.torch only", name=ext_name)


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return False: tensors are reduced in host memory."""
    return False


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number is a power of two."""
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Return the items in `parts` consecutive slices; the first ones are longer by one if the division has a rest."""
    least, more = divmod(len(items), parts)
    starts = [part * least + min(part, more) for part in range(parts + 1)]
    return [items[start:end] for start, end in pairwise(starts)]


def is_iterable(value: Any) -> bool:
    """Return whether a value is iterable."""
    return isinstance(value, Iterable)
