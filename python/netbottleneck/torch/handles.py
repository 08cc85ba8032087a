"""Tensors as the engine sees them, and operations under way by number."""

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from netbottleneck.runtime import async_operations, job

_c: Any = torch._C


def check(tensor: torch.Tensor) -> None:
    """Raise ValueError for a tensor that cannot travel."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ValueError(
            f"a {tensor.layout} tensor on {tensor.device} is not supported: tensors travel from host memory"
        )
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError("a conjugated or negated view is not supported: see resolve_conj, resolve_neg")


@lru_cache(maxsize=64)
def _array_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return NumPy's type of a torch dtype; of bfloat16, which NumPy does not have, 16-bit integers."""
    return torch.empty(0, dtype=torch.int16 if dtype == torch.bfloat16 else dtype).numpy().dtype


def address_of(tensor: torch.Tensor) -> int:
    """Return where a tensor lies. By data_ptr() it would count as written to."""
    return int(_c._data_address(tensor) + tensor.storage_offset() * tensor.element_size())


class _Alias:
    """Memory of a tensor that stays while an array over it does: base of that array.

    The tensor's own storage may be resized, replaced or freed meanwhile. A lazy clone owns the memory too; until it is
    gone, torch gives whoever writes to the tensor a copy.
    """

    def __init__(self, clone: torch.Tensor) -> None:
        self.clone: torch.Tensor | None = clone
        self.address = address_of(clone)
        self.__array_interface__ = {
            "data": (self.address, False),
            "shape": tuple(clone.shape),
            "typestr": _array_dtype(clone.dtype).str,
            "version": 3,
        }


class Memory:
    """A tensor's memory, as an array, while an operation is under way. Raises ValueError for one that cannot travel.

    array: of the tensor's type where NumPy has it, else of 16-bit integers. It keeps the memory. A tensor's
    storage can be resized again after `over`.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        check(tensor)
        plain = tensor.detach()
        self._tensor = tensor
        self._alias: _Alias | None = None
        self.array: async_operations.Array
        plain.data_ptr()  # a lazy clone of the script's own is another's memory from here on
        try:
            if plain.numel() > 0 and type(plain) is torch.Tensor:
                self._alias = _Alias(plain._lazy_clone())
        except (RuntimeError, AttributeError):
            pass  # the memory is not torch's own, and cannot be resized; or torch is too old
        if self._alias is not None:
            self.array = np.asarray(self._alias)
        else:
            self.array = (plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain).numpy()

    def over(self, *, written: bool) -> None:
        """The operation is over. A tensor that was given other memory meanwhile gets what was written to this one.

        Raises RuntimeError where that has another shape or type.
        """
        alias, self._alias = self._alias, None
        if alias is None or alias.clone is None:
            return
        tensor, clone, alias.clone = self._tensor, alias.clone, None
        if written and (tensor.shape, tensor.dtype) != (clone.shape, clone.dtype):
            raise RuntimeError(
                f"a tensor of shape {list(clone.shape)} got another shape or type while it was on its way: change "
                "it after synchronize()"
            )
        if written and address_of(tensor) != alias.address:
            try:
                tensor.detach().copy_(clone)
            except RuntimeError:  # torch lets nobody write to what was resized while it had a lazy clone
                with torch.no_grad():
                    tensor.set_(clone.clone())  # type: ignore[call-overload]
        del clone
        tensor.data_ptr()  # torch forgets the clone: the storage is as it was made


def started(operation: async_operations.Steps[Any]) -> int:
    """Start an operation and return its handle."""
    return job.current().hold(async_operations.Pending(operation))


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, once it is sure that it can travel."""
    check(tensor)
    return tensor.detach().clone()


def poll(handle: int) -> bool:
    """Return whether synchronize(handle) would return, or raise, at once."""
    pending = job.current().handles.get(handle)
    return pending is None or pending.poll()


def synchronize(handle: int) -> Any:
    """Wait for an operation and return its output: a tensor, or a tuple for a group. None for an unknown handle.

    Raises HorovodInternalError when the operation failed.
    """
    if not job.is_started():
        return None
    pending = job.current().handles.pop(handle, None)
    return None if pending is None else pending.wait()


def apply(function: Any, *arguments: Any) -> Any:
    """Call an autograd function."""
    return function.apply(*arguments)
