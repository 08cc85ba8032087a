"""Horovod's compression classes: what travels in place of a tensor."""

from typing import Any

import torch


class Compressor:
    """Two static methods. Subclasses of the user's own work wherever Compression.fp16 does."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what travels, and what decompress needs to know. What travels is reduced element by element."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor that stands for what came back."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """The tensor itself."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor."""
        return tensor


class FP16Compressor(Compressor):
    """Floating-point tensors as float16: half the bytes of float32, 11 bits of precision, at most 65504."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor in float16, where it holds floating-point numbers, and the type it had."""
        return (tensor.half() if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in the type it had."""
        return tensor.to(ctx)


class Compression:
    """What allreduce and DistributedOptimizer take as `compression`."""

    none = NoneCompressor
    fp16 = FP16Compressor
