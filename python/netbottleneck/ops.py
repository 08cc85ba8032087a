"""Collective operations on NumPy arrays, without torch."""

from collections.abc import Sequence
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt

from netbottleneck import job
from netbottleneck.steps import (
    Adasum,
    Array,
    Average,
    Max,
    Min,
    Pending,
    Product,
    Sum,
    allgather_steps,
    allreduce_steps,
    alltoall_steps,
    as_bytes,
    barrier_steps,
    broadcast_steps,
    code_of,
    label,
    reducescatter_steps,
)

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "grouped_allreduce",
    "init",
    "rank",
    "reducescatter",
    "shutdown",
    "size",
]


def init() -> None:
    """Start this process's job with all ranks of its launcher; a second call changes nothing."""
    job.start()


def shutdown() -> None:
    """End the job; init() may follow."""
    job.stop()


def rank() -> int:
    """Return this process's number among all ranks; ValueError before init()."""
    return job.current().place.rank


def size() -> int:
    """Return the number of ranks; ValueError before init()."""
    return job.current().place.size


def _in_place(array: Array) -> Array:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"an array is required, not {type(array).__name__}")
    if not array.flags.c_contiguous:
        raise ValueError("Array is required to be contiguous.")
    if not array.flags.writeable:
        raise ValueError("Array is required to be writable.")
    return array


def allreduce(
    array: npt.ArrayLike,
    op: int = Average,
    name: str | None = None,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """Return the reduction of the arrays of all ranks, which are of one shape and type.

    op: Average, Sum, Min, Max or Product. prescale_factor is applied before, postscale_factor after; integers are
    scaled in float64 and truncated. Raises ValueError for a type that cannot be reduced, HorovodInternalError when the
    operation failed.
    """
    return allreduce_(
        np.array(array, order="C"),
        op,
        name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )


def allreduce_(
    array: Array,
    op: int = Average,
    name: str | None = None,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """Reduce in place, and return the array; see allreduce. ValueError for one that is not contiguous or writable."""
    pair = (_in_place(array), code_of(array))
    Pending(allreduce_steps([pair], op, label("allreduce", name), prescale_factor, postscale_factor)).wait()
    return array


def grouped_allreduce(arrays: Sequence[npt.ArrayLike], op: int = Average, name: str | None = None) -> list[Array]:
    """Return the reductions of several arrays, which travel together."""
    copies = [np.array(array, order="C") for array in arrays]
    pairs = [(array, code_of(array)) for array in copies]
    Pending(allreduce_steps(pairs, op, label("grouped_allreduce", name))).wait()
    return copies


def broadcast(array: npt.ArrayLike, root_rank: int = 0, name: str | None = None) -> Array:
    """Return the root's array, which is of the same shape and type on all ranks."""
    return broadcast_(np.array(array, order="C"), root_rank, name)


def broadcast_(array: Array, root_rank: int = 0, name: str | None = None) -> Array:
    """Give every rank the root's array in place, and return it."""
    memory, code = as_bytes(_in_place(array))
    Pending(broadcast_steps(memory, code, root_rank, label("broadcast", name))).wait()
    return array


def allgather(array: npt.ArrayLike, name: str | None = None) -> Array:
    """Return the arrays of all ranks, joined along the first dimension, which may differ from rank to rank."""
    return np.concatenate(Pending(allgather_steps(np.asarray(array), label("allgather", name))).wait())


def reducescatter(array: npt.ArrayLike, op: int = Average, name: str | None = None) -> Array:
    """Return this rank's rows of the reduced array; the first (rows mod size) ranks get one row more."""
    given = np.asarray(array)
    return Pending(reducescatter_steps(given, code_of(given), op, label("reducescatter", name))).wait()


def alltoall(array: npt.ArrayLike, name: str | None = None) -> Array:
    """Return one part of each rank's array, joined by rank; the first dimension is cut into equal parts, one a rank.

    Raises ValueError where it is no such multiple.
    """
    given = np.asarray(array)
    return Pending(alltoall_steps(given, code_of(given), label("alltoall", name))).wait()


def barrier() -> None:
    """Return once every rank has called it."""
    Pending(barrier_steps(label("barrier", None))).wait()


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """Return the root's object, by cloudpickle."""
    name = name or f"broadcast_object.{job.current().number('broadcast_object')}"
    mine = job.current().place.rank == root_rank
    content = np.frombuffer(bytearray(cloudpickle.dumps(obj) if mine else b""), np.uint8)
    length = int(broadcast_(np.array([len(content)], np.int64), root_rank, f"{name}.sz")[0])
    if not mine:
        content = np.zeros(length, np.uint8)
    broadcast_(content, root_rank, f"{name}.t")
    return obj if mine else cloudpickle.loads(content.tobytes())


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks, by rank, by cloudpickle."""
    name = label("allgather", name or f"object.{job.current().number('allgather_object')}")
    content = np.frombuffer(cloudpickle.dumps(obj), np.uint8)
    return [cloudpickle.loads(part.tobytes()) for part in Pending(allgather_steps(content, name)).wait()]
