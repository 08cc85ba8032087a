"""Horovod's broadcasts of the state of models and optimizers."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from netbottleneck.runtime.ops import allgather_object, broadcast_object
from netbottleneck.torch.handles import within_reach
from netbottleneck.torch.mpi_ops import broadcast_async_, synchronize
from netbottleneck.torch.optimizer import own_step

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]

_making: set[int] = set()  # ids of optimizers that only make their state; an optimizer may be unhashable


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Broadcast the root's parameters, in place.

    params: a dict such as model.state_dict(), or a list of tensors or of (name, tensor) pairs such as
    model.named_parameters(); the same on every rank. Values that are not tensors are left unchanged. Raises ValueError
    for anything else.
    """
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, Iterable):
        pairs = [item if isinstance(item, tuple) else (str(index), item) for index, item in enumerate(params)]
    else:
        raise ValueError(f"invalid params of type {type(params).__name__}: a dict or a list of tensors is required")
    _broadcast([(str(name), value) for name, value in pairs if isinstance(value, torch.Tensor)], root_rank)


def _broadcast(pairs: list[tuple[str, torch.Tensor]], root_rank: int) -> None:
    pending = []
    for name, tensor in pairs:
        target = tensor.detach()
        buffer = within_reach(target)
        pending.append((broadcast_async_(buffer, root_rank, name), buffer, target))
    for handle, buffer, target in pending:
        synchronize(handle)
        if buffer is not target:
            target.copy_(buffer)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Broadcast the root's optimizer state and options.

    Tensors with the root's shape and type are written in place, others are created. Everything else is sent in one
    pickle. State that the root does not have is dropped. An optimizer without state makes it by a step with zero
    gradients, as in Horovod: weight decay and Adam's step count take effect. If only the root has state, as after it
    alone read a checkpoint, that step decays the other ranks' weights: call broadcast_parameters after this. model: its
    sparse embeddings get sparse gradients. Raises ValueError for LBFGS, whose state has another structure.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not optimizer.state:
        _make_state(optimizer, parameters, model)
    mine = [
        {key: _outline(value) for key, value in optimizer.state.get(parameter, {}).items()} for parameter in parameters
    ]
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    states, options = broadcast_object((mine, options), root_rank, "optimizer_state")
    for group, chosen in zip(optimizer.param_groups, options, strict=True):
        for key in set(group) - set(chosen) - {"params"}:
            del group[key]
        group.update(chosen)
    to_send: list[tuple[str, torch.Tensor]] = []
    for index, (parameter, state) in enumerate(zip(parameters, states, strict=True)):
        if state or parameter in optimizer.state:
            optimizer.state[parameter] = _filled(optimizer.state[parameter], state, parameter, index, to_send)
    _broadcast(to_send, root_rank)


def makes_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer is in a step that only makes its state and is not part of training."""
    return id(optimizer) in _making


def _make_state(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], model: Any) -> None:
    sparse = {
        id(parameter)
        for module in (model.modules() if model else ())
        if isinstance(module, torch.nn.Embedding) and module.sparse
        for parameter in module.parameters()
    }
    for parameter in parameters:
        if parameter.requires_grad:
            zeros = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            all_sparse = isinstance(optimizer, torch.optim.SparseAdam)
            some = isinstance(optimizer, torch.optim.SGD) and id(parameter) in sparse
            parameter.grad = zeros.to_sparse() if all_sparse or some else zeros
    _making.add(id(optimizer))
    try:
        own_step(optimizer)
    finally:
        _making.discard(id(optimizer))


class _Outline:
    """A tensor's description without its values."""

    def __init__(self, tensor: torch.Tensor, of: str) -> None:
        self.shape, self.dtype, self.of = tensor.shape, tensor.dtype, of


def _outline(value: Any) -> Any:
    return _Outline(value, value.device.type) if isinstance(value, torch.Tensor) else value


def _filled(
    old: dict[str, Any],
    state: dict[str, Any],
    parameter: torch.Tensor,
    index: int,
    to_send: list[tuple[str, torch.Tensor]],
) -> dict[str, Any]:
    """Return the state of one parameter with room for the root's tensors, and add these to `to_send`."""
    new: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, _Outline):
            new[key] = value
            continue
        here = old.get(key)
        device = torch.device("cpu") if value.of == "cpu" else parameter.device
        wanted = (value.shape, value.dtype, device.type)
        if not isinstance(here, torch.Tensor) or (here.shape, here.dtype, here.device.type) != wanted:
            here = torch.zeros(value.shape, dtype=value.dtype, device=device)
        new[key] = here
        to_send.append((f"optimizer.{index}.{key}", here))
    return new
