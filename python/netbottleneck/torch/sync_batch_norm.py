"""Batch normalisation with statistics over the batches of all ranks."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from netbottleneck.runtime.async_operations import Sum
from netbottleneck.runtime.ops import size
from netbottleneck.torch.gradients import is_reachable
from netbottleneck.torch.handles import apply, synchronize, within_reach
from netbottleneck.torch.mpi_ops import allgather_async, allreduce_async_


class SyncBatchNorm(_BatchNorm):
    """torch.nn.BatchNorm of any dimension over the batches of all ranks, which may differ in size.

    All ranks run it equally often and in the same order, forward and backward. Outputs, running statistics and input
    gradients equal those of one process with the joined batch. A gradient of weight or bias is this rank's part: the
    sum over the ranks equals the single process's. In evaluation with tracked statistics nothing is exchanged.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalised input, (N, C, …), in the same shape.

        Raises ValueError for fewer than two dimensions, and in training if all ranks together have fewer than two
        values a channel; HorovodInternalError if a rank is lost.
        """
        self._check_input_dim(input)
        momentum = self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        momentum = 0.0 if momentum is None else momentum
        tracked = self.running_mean, self.running_var
        batch = self.training or tracked[0] is None
        if not batch or size() == 1:
            kept = tracked if not self.training or self.track_running_stats else (None, None)
            return torch.nn.functional.batch_norm(
                input, *kept, self.weight, self.bias, training=batch, momentum=momentum, eps=self.eps
            )
        updated = tracked if self.training and self.track_running_stats else (None, None)
        result: torch.Tensor = apply(_SyncBatchNorm, input, self.weight, self.bias, updated, momentum, self.eps)
        return result


def _around(tensor: torch.Tensor, dims: int) -> torch.Tensor:
    """Return per-channel values, shaped to broadcast over an input with `dims` dimensions."""
    return tensor.view(1, -1, *[1] * (dims - 2))


def _others(tensor: torch.Tensor) -> list[int]:
    return [0, *range(2, tensor.dim())]


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Return the type to compute in: float32 for types of lower precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _joined(values: torch.Tensor) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Return count, mean and variance of all ranks' values by channel, in float64 (count: of each channel).

    Means and sums of squares about them are merged as in Chan, Golub and LeVeque, "Updating formulae and a pairwise
    algorithm for computing sample variances": no difference of large squares.
    """
    channels, count = values.size(1), values.numel() // max(values.size(1), 1)
    place = values.device if is_reachable(values.device) else "cpu"
    mine = torch.zeros(1, 2 * channels + 1, dtype=torch.float64, device=place)
    mine[0, 0] = count
    if count:
        variance, mean = torch.var_mean(values, _others(values), correction=0)
        mine[0, 1 : channels + 1] = mean
        mine[0, channels + 1 :] = variance.double() * count
    every: torch.Tensor = synchronize(allgather_async(mine, "sync_batch_norm.statistics"))
    counts, means, squares = every[:, :1], every[:, 1 : channels + 1], every[:, channels + 1 :]
    total = float(counts.sum())
    if total < 2:
        raise ValueError(f"expected more than 1 value per channel when training, got {total:.0f} on all ranks together")
    mean = (counts * means).sum(0) / total
    variance = (squares.sum(0) + (counts * (means - mean).square()).sum(0)) / total
    return total, mean, variance


def _track(running: tuple[Any, Any], momentum: float, mean: torch.Tensor, variance: torch.Tensor) -> None:
    for kept, new in zip(running, (mean, variance), strict=True):
        if kept is not None:
            kept.copy_((1.0 - momentum) * kept.double() + momentum * new.to(kept.device))


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - one argument for each thing that may have a gradient
        ctx: Any,
        tensor: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running: tuple[torch.Tensor | None, torch.Tensor | None],
        momentum: float,
        eps: float,
    ) -> torch.Tensor:
        exact = _exact(tensor.dtype)
        count, mean, variance = _joined(tensor.detach().to(exact))
        _track(running, momentum, mean, variance * (count / (count - 1.0)))
        mean, variance = (value.to(tensor.device, exact) for value in (mean, variance))
        ctx.count, ctx.eps = count, eps
        ctx.save_for_backward(tensor, weight, mean, variance)
        weight, bias = (None if factor is None else factor.to(exact) for factor in (weight, bias))
        return torch.nn.functional.batch_norm(tensor.to(exact), mean, variance, weight, bias, eps=eps).to(tensor.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        tensor, weight, mean, variance = ctx.saved_tensors
        exact, dims = _exact(tensor.dtype), tensor.dim()
        gradient = gradients[0].to(exact)
        centred = tensor.to(exact) - _around(mean, dims)
        scale = torch.rsqrt(variance.double() + ctx.eps)
        sums = torch.stack((gradient.sum(_others(gradient)), (gradient * centred).sum(_others(gradient)))).double()
        to_tensor, to_weight, to_bias = ctx.needs_input_grad[:3]
        grads: list[torch.Tensor | None] = [None] * 6
        if weight is not None:
            grads[1] = (sums[1] * scale).to(weight.dtype) if to_weight else None
            grads[2] = sums[0].to(weight.dtype) if to_bias else None
        if to_tensor:
            travelling = within_reach(sums.detach().clone())
            handle = allreduce_async_(travelling, name="sync_batch_norm.gradients", op=Sum)
            means = synchronize(handle).to(sums.device) / ctx.count
            factor = scale if weight is None else scale * weight.double()
            centred.mul_(_around((-factor * scale * scale * means[1]).to(exact), dims))
            centred.addcmul_(gradient, _around(factor.to(exact), dims))
            centred.sub_(_around((factor * means[0]).to(exact), dims))
            grads[0] = centred.to(tensor.dtype)
        return tuple(grads)
