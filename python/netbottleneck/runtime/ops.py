"""Collective operations on NumPy arrays, without torch."""

from collections.abc import Sequence
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt

from netbottleneck.runtime import job
from netbottleneck.runtime.async_operations import (
    Adasum,
    Array,
    Average,
    Max,
    Min,
    Pending,
    ProcessSet,
    Product,
    Sum,
    as_bytes,
    code_of,
    global_process_set,
    label,
    members_of,
)
from netbottleneck.runtime.collectives import (
    adasum_steps,
    allgather_steps,
    allreduce_steps,
    alltoall_steps,
    barrier_steps,
    broadcast_steps,
    join_steps,
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
    "join",
    "rank",
    "reducescatter",
    "shutdown",
    "size",
]


def init() -> None:
    """Start this process's job with all ranks of its launcher; no effect if it is already running."""
    job.start()


def shutdown() -> None:
    """End the job; init() may follow."""
    job.stop()


def rank() -> int:
    """Return this process's rank; ValueError before init()."""
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
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Return the reduction of the arrays of all ranks, which are of one shape and type.

    op: Average, Sum, Min, Max, Product or Adasum. prescale_factor is applied before, postscale_factor after; integers
    are scaled in float64 and truncated. The average of integers is their sum, divided toward zero. Raises ValueError
    for a type that cannot be reduced, HorovodInternalError when the operation failed.
    """
    return allreduce_(
        np.array(array, order="C"),
        op,
        name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def allreduce_(
    array: Array,
    op: int = Average,
    name: str | None = None,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Reduce in place, and return the array; see allreduce. ValueError if it is not contiguous or writable."""
    pair = (_in_place(array), code_of(array))
    among = members_of(process_set)
    factors = (prescale_factor, postscale_factor)
    name = label("allreduce", name, among)
    if op == Adasum:
        Pending(adasum_steps(array, name, among, factors)).wait()
    else:
        Pending(allreduce_steps([pair], op, name, among, factors)).wait()
    return array


def grouped_allreduce(
    arrays: Sequence[npt.ArrayLike],
    op: int = Average,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Return the reductions of several arrays, sent together."""
    copies = [np.array(array, order="C") for array in arrays]
    pairs = [(array, code_of(array)) for array in copies]
    among = members_of(process_set)
    Pending(allreduce_steps(pairs, op, label("grouped_allreduce", name, among), among)).wait()
    return copies


def broadcast(
    array: npt.ArrayLike, root_rank: int = 0, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> Array:
    """Return the root's array, which is of the same shape and type on all ranks."""
    return broadcast_(np.array(array, order="C"), root_rank, name, process_set=process_set)


def broadcast_(
    array: Array, root_rank: int = 0, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> Array:
    """Broadcast the root's array in place, and return it."""
    memory, code = as_bytes(_in_place(array))
    among = members_of(process_set)
    Pending(broadcast_steps(memory, code, root_rank, label("broadcast", name, among), among)).wait()
    return array


def allgather(array: npt.ArrayLike, name: str | None = None, *, process_set: ProcessSet = global_process_set) -> Array:
    """Return the arrays of all ranks, joined along the first dimension, which may differ between ranks."""
    among = members_of(process_set)
    return np.concatenate(Pending(allgather_steps(np.asarray(array), label("allgather", name, among), among)).wait())


def reducescatter(
    array: npt.ArrayLike, op: int = Average, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> Array:
    """Return this rank's rows of the reduced array; the first (rows mod size) ranks get one row more."""
    rows = np.asarray(array)
    among = members_of(process_set)
    name = label("reducescatter", name, among)
    return Pending(reducescatter_steps(rows, code_of(rows), op, name, among)).wait().copy()


def alltoall(
    array: npt.ArrayLike,
    name: str | None = None,
    *,
    splits: Sequence[int] | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Return one part of each rank's array, joined by rank.

    splits: rows for each rank; None: equal parts of the first dimension. Raises ValueError for impossible splits.
    """
    among = members_of(process_set)
    name = label("alltoall", name, among)
    return np.concatenate(Pending(alltoall_steps(np.asarray(array), splits, name, among)).wait()[0])


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank has called it."""
    among = members_of(process_set)
    Pending(barrier_steps(label("barrier", None, among), among)).wait()


def join() -> int:
    """Wait until every rank has joined, contributing zeros to their reductions; return the last rank to join."""
    return Pending(join_steps(label("join", None))).wait()


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's object, sent by cloudpickle."""
    among = members_of(process_set)
    name = name or label("broadcast_object", None, among)
    mine = job.current().place.rank == root_rank
    content = np.frombuffer(bytearray(cloudpickle.dumps(obj) if mine else b""), np.uint8)
    length = int(broadcast_(np.array([len(content)], np.int64), root_rank, f"{name}.sz", process_set=process_set)[0])
    if not mine:
        content = np.zeros(length, np.uint8)
    broadcast_(content, root_rank, f"{name}.t", process_set=process_set)
    return obj if mine else cloudpickle.loads(content.tobytes())


def allgather_object(obj: Any, name: str | None = None, *, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks, by rank, sent by cloudpickle."""
    among = members_of(process_set)
    name = label("allgather", name or label("object", None, among))
    content = np.frombuffer(cloudpickle.dumps(obj), np.uint8)
    return [cloudpickle.loads(part.tobytes()) for part in Pending(allgather_steps(content, name, among)).wait()]
