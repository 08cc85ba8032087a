"""The calls of torch.distributed that are recorded, and which of their tensors count."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from netbottleneck.trace.ring_reader import DTYPES

_DTYPES = {getattr(torch, name): code for code, name in enumerate(DTYPES)}
_OTHER_DTYPE = 0xFF


class Call(NamedTuple):
    """A method that communicates. payload: position of the tensors that count. each: they are one rank's of all."""

    kind: str
    payload: int | None = 0
    each: bool = False
    blocks: bool = False


# Methods of ProcessGroup, of every torch from 2.3 on. Bytes are counted as bandwidth.bus_factor expects them.
METHODS = {
    "allreduce": Call("allreduce"),
    "allreduce_coalesced": Call("allreduce"),
    "reduce": Call("reduce"),
    "broadcast": Call("broadcast"),
    "allgather": Call("allgather"),
    "allgather_coalesced": Call("allgather"),
    "allgather_into_tensor_coalesced": Call("allgather"),
    "_allgather_base": Call("allgather"),
    "all_gather_single": Call("allgather"),
    "all_gather_single_coalesced": Call("allgather"),
    "gather": Call("gather", 1, each=True),
    "scatter": Call("scatter", each=True),
    "reduce_scatter": Call("reducescatter", 1),
    "reduce_scatter_tensor_coalesced": Call("reducescatter", 1),
    "_reduce_scatter_base": Call("reducescatter", 1),
    "reduce_scatter_single": Call("reducescatter", 1),
    "reduce_scatter_single_coalesced": Call("reducescatter", 1),
    "alltoall": Call("alltoall", 1),
    "alltoall_base": Call("alltoall", 1),
    "all_to_all_single": Call("alltoall", 1),
    "barrier": Call("barrier", None),
    "monitored_barrier": Call("barrier", None, blocks=True),
    "send": Call("send"),
    "recv": Call("recv"),
    "recv_anysource": Call("recv"),
}
# Operators of functional collectives.
SPACES = ("_c10d_functional", "_c10d_functional_autograd")
OPERATORS = {
    **{f"all_reduce{end}": Call("allreduce") for end in ("", "_", "_coalesced", "_coalesced_")},
    **{f"all_gather_into_tensor{end}": Call("allgather", each=True) for end in ("", "_out", "_coalesced")},
    **{f"reduce_scatter_tensor{end}": Call("reducescatter") for end in ("", "_out", "_coalesced")},
    "all_to_all_single": Call("alltoall"),
    **{f"broadcast{end}": Call("broadcast") for end in ("", "_")},
    "isend": Call("send"),
    "irecv": Call("recv"),
}


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """Yield a tensor, or those of a list, also in lists of it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def tensors_of(call: Call, values: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the tensors that count among a call's arguments without the group."""
    there = call.payload is not None and len(values) > call.payload
    return list(tensors_in(values[call.payload or 0])) if there else []


def payload_of(call: Call, size: int, tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Return the bytes that a call of `size` ranks moves, and the code of the tensors' dtype."""
    nbytes = sum(map(_bytes, tensors)) * (size if call.each else 1)
    return nbytes, _DTYPES.get(tensors[0].dtype, _OTHER_DTYPE) if tensors else 0


def is_inline(values: tuple[Any, ...]) -> bool:
    """Return whether the options among a call's arguments say that it is not asynchronous."""
    return any(getattr(value, "asyncOp", True) is False for value in values)


def address(tensor: torch.Tensor) -> int:
    """Return where the memory of a tensor begins; 0: it has none."""
    return tensor.untyped_storage().data_ptr()


def bytes_submitted(memory: Any) -> int:
    """Return the bytes of what is submitted to the engine: an array, (address, bytes), or a list of these."""
    if isinstance(memory, list):
        return sum(map(bytes_submitted, memory))
    if isinstance(memory, tuple):
        return int(memory[1])
    return int(getattr(memory, "nbytes", 0))


def _bytes(tensor: torch.Tensor) -> int:
    if tensor.layout != torch.strided:
        return 0  # indices and values travel: their size differs from rank to rank
    return tensor.numel() * tensor.element_size()
