"""Memory of torch tensors for the engine, streams of operations on devices, and handles of pending operations."""

import contextlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from netbottleneck.runtime import async_operations, job
from netbottleneck.torch.gradients import is_reachable

_c: Any = torch._C


# Memory.


def memory_of(tensor: torch.Tensor) -> tuple[int, int] | torch.Tensor:
    """Return a contiguous tensor's memory as the engine takes it: address and bytes, or a tensor on a device itself."""
    if tensor.is_cpu:
        return tensor.data_ptr(), tensor.numel() * tensor.element_size()
    return _on_device(tensor)


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that an operation of the current stream is about to use.

    Its memory may be of another stream, and freed before the last copy is done. The current stream waits for that copy.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def within_reach(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor with these values that can be sent: on the same device, or else in host memory."""
    return (tensor if is_reachable(tensor.device) else tensor.cpu()).contiguous()


def _check_type(tensor: Any) -> None:
    """Raise TypeError for a value that is no tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a tensor is required, not {type(tensor).__name__}: pass torch.as_tensor(...) of it")


def check(tensor: torch.Tensor) -> None:
    """Raise ValueError for a tensor that cannot be sent, TypeError for a value that is no tensor."""
    _check_type(tensor)
    if not is_reachable(tensor.device) or tensor.layout != torch.strided:
        raise ValueError(
            f"a {tensor.layout} tensor on {tensor.device} is not supported: only dense tensors in host or CUDA memory "
            "are"
        )
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError("a conjugated or negated view is not supported: see resolve_conj, resolve_neg")


@lru_cache(maxsize=64)
def array_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that NumPy has for a dtype's memory: integers for bfloat16 and for types of one byte it lacks.

    Raises ValueError for other types that NumPy lacks.
    """
    if dtype == torch.bfloat16:
        return torch.int16
    sample = torch.empty(0, dtype=dtype, device="cpu")
    try:
        sample.numpy()
    except TypeError:
        if sample.element_size() > 1 or sample.is_quantized:
            raise ValueError(f"Tensor type {dtype} is not supported.") from None
        return torch.uint8
    return dtype


@lru_cache(maxsize=64)
def _type_string(dtype: torch.dtype) -> str:
    return torch.empty(0, dtype=array_dtype(dtype), device="cpu").numpy().dtype.str


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor. data_ptr() would count as a write."""
    return int(_c._data_address(tensor) + tensor.storage_offset() * tensor.element_size())


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor with a tensor's values, whose memory stays while the script replaces or frees the tensor's.

    It has the tensor's memory if that cannot be resized, or if the tensor is all of its storage: a lazy clone. While a
    lazy clone exists, torch moves the storage when anyone writes to a part of it. So a part of a storage, or one that
    already has a lazy clone, is copied. Raises RuntimeError if the memory is not torch's own.
    """
    storage = tensor.untyped_storage()
    if not storage.resizable():
        tensor.data_ptr()  # materialises a lazy clone made by the script
        return tensor.detach()
    if tensor.nbytes == storage.nbytes() and not _c._is_cow_tensor(tensor):
        return tensor._lazy_clone()
    return tensor.clone()


def _put(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write values to a tensor of their shape and type. It gets other memory if its own has become too small."""
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if end <= tensor.untyped_storage().nbytes():
        with contextlib.suppress(RuntimeError):  # torch forbids writes to a tensor resized while it had a lazy clone
            tensor.detach().copy_(values)
            return
    with torch.no_grad():
        tensor.set_(values.clone())  # type: ignore[call-overload]


class _Alias:
    """Keeps memory alive for an array: the base of that array. kept: a tensor over that memory, until `over`."""

    def __init__(self, kept: torch.Tensor) -> None:
        self.kept: torch.Tensor | None = kept
        self.address = address_of(kept)
        self.__array_interface__ = {
            "data": (self.address, False),
            "shape": tuple(kept.shape),
            "typestr": _type_string(kept.dtype),
            "version": 3,
        }


class Memory:
    """A tensor's memory as an array, while an operation is pending. Raises ValueError if it cannot be sent.

    array: of the tensor's type, or of integers of its size if NumPy lacks the type. It keeps its memory alive: the
    tensor's, or that of a copy, see `_kept`. The tensor's storage can be resized again after `over`. For a tensor in
    CUDA memory, it is a tensor.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        check(tensor)
        plain = tensor.detach()
        self._tensor = tensor
        self._alias: _Alias | None = None
        self._copied = False
        self.array: Any
        if not plain.is_cpu:
            plain.data_ptr()  # materialises a lazy clone made by the script
            self.array = _on_device(plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain)
            return
        try:
            if plain.numel() > 0 and type(plain) is torch.Tensor:
                self._alias = _Alias(_kept(plain))
        except (RuntimeError, AttributeError):
            pass  # the memory is not torch's own and cannot be resized, or torch is too old
        if self._alias is not None:
            self._copied = self._alias.address != address_of(plain)
            self.array = np.asarray(self._alias)
        else:
            self.array = plain.view(array_dtype(plain.dtype)).numpy()

    def over(self, *, written: bool) -> None:
        """End the operation. A tensor that has other memory than the array receives what was written to the array.

        Raises RuntimeError if the tensor has another shape or type by now.
        """
        alias, self._alias = self._alias, None
        if written and isinstance(self.array, torch.Tensor) and self._tensor.data_ptr() != self.array.data_ptr():
            self._tensor.detach().copy_(self.array.view(self._tensor.dtype))
        if alias is None or alias.kept is None:
            return
        tensor, kept, alias.kept = self._tensor, alias.kept, None
        if written and (tensor.shape, tensor.dtype) != (kept.shape, kept.dtype):
            raise RuntimeError(
                f"a tensor of shape {list(kept.shape)} changed its shape or type during an operation: change it only "
                "after synchronize()"
            )
        if written and address_of(tensor) != alias.address:
            _put(tensor, kept)
        del kept
        if not self._copied:
            tensor.data_ptr()  # torch drops the lazy clone: the storage is as originally made


# Streams.


@contextlib.contextmanager
def _entered(stream: Any) -> Iterator[None]:
    """Make a stream the current one.

    Leaving torch.cuda.stream sets the stream of the device that was current before, and with it this device. In a
    thread of ours that is device 0, of which this process may have no context: one takes half a gigabyte of it.
    """
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def _used_here(result: Any) -> None:
    """Keep a result's memory from others until the current stream is done with it. It is of the operation's stream."""
    if isinstance(result, torch.Tensor) and result.is_cuda:
        result.record_stream(torch.cuda.current_stream(result.device))
    elif isinstance(result, tuple | list):
        for each in result:
            _used_here(each)


class DeviceStream:
    """The stream that was current when an operation on a device began. All that the operation does there is on it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = self._current()
        self._end: Any = None

    def _current(self) -> Any:
        return (torch.cuda if self._device.type == "cuda" else torch.accelerator).current_stream(self._device)

    def entered(self) -> Any:
        """Return a context in which it is the current stream."""
        stream = self._stream
        if self._device.type == "cuda":
            return _entered(stream)
        # The stream is its own context. Threads that share one would restore each other's streams.
        return torch.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )

    def on_device(self) -> Any:
        """Return a context in which the stream's device is the current one."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()

    def end(self) -> None:
        """Note that the stream holds all that the operation does."""
        self._end = self._stream.record_event()

    def follow(self) -> None:
        """Make the current stream wait for the end."""
        self._current().wait_event(self._end)

    def reached(self) -> bool:
        """Return True if the stream has reached the end."""
        return bool(self._end.query())


class DevicePending(async_operations.Pending[Any]):
    """A pending operation on a device. A stream that is current in wait() sees its result from then on."""

    def __init__(self, steps: async_operations.Steps[Any], device: torch.device) -> None:
        self._stream = DeviceStream(device)
        super().__init__(steps)

    def advance(self) -> None:
        """Resume the operation on its stream."""
        if self._done:
            return
        with self._stream.entered():
            super().advance()
        if self._done:
            self._stream.end()

    def wait(self) -> Any:
        """Return the result. Raises HorovodInternalError when the operation failed."""
        result = super().wait()
        self._stream.follow()
        _used_here(result)
        return result


# Handles.


def started(operation: async_operations.Steps[Any], tensors: Sequence[torch.Tensor] = ()) -> int:
    """Start an operation on tensors, all of one device, and return its handle. TypeError if one is no tensor."""
    for tensor in tensors:
        _check_type(tensor)
    on_host = not tensors or tensors[0].is_cpu or not is_reachable(tensors[0].device)
    pending = async_operations.Pending(operation) if on_host else DevicePending(operation, tensors[0].device)
    return job.current().hold(pending)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, after checking that it can be sent."""
    check(tensor)
    return tensor.detach().clone()


def poll(handle: int) -> bool:
    """Return True if synchronize(handle) would return, or raise, at once."""
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
