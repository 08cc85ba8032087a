"""`netbottleneck.attach`: what a variable of the environment does at import, by a call."""

from typing import Any


def attach(model: Any = None, optimizer: Any = None) -> Any:
    """Measure what is there already, and move its gradients by the transports of the environment.

    model: a DistributedDataParallel, or what torch.compile made of one, as hooks.ddp.attach takes it with an optimizer.
    None: the Horovod that is installed; its next distributed optimizer is measured. Every rank calls it. Raises
    ImportError where there is no Horovod of its own.
    """
    if model is not None:
        from netbottleneck.hooks import ddp

        return ddp.attach(model, optimizer)
    from netbottleneck.hooks import real_horovod

    return real_horovod.attach()
