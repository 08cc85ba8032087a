"""Horovod's compression classes: transforms of a tensor before and after it is sent."""

from typing import Any

import torch


class Compressor:
    """Two static methods. User-defined subclasses work wherever Compression.fp16 does."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and a context for decompress. The sent tensor is reduced element by element."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the decompressed result."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """No compression."""

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
        """Return a floating-point tensor as float16, others unchanged; and the original type."""
        return (tensor.half() if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in its original type."""
        return tensor.to(ctx)


def check_compression(compression: Any) -> None:
    """Raise ValueError for a value that has no compress and decompress."""
    if not all(callable(getattr(compression, method, None)) for method in ("compress", "decompress")):
        raise ValueError(
            f"compression={compression!r}: a class with the methods compress and decompress is required, such as "
            "hvd.Compression.none or hvd.Compression.fp16"
        )


class Compression:
    """Values of the `compression` argument of allreduce and DistributedOptimizer."""

    none = NoneCompressor
    fp16 = FP16Compressor
