"""What scripts take from horovod.common.elastic, where this package has Horovod's place."""

from netbottleneck.torch.elastic.loop import run_fn
from netbottleneck.torch.elastic.state import ObjectState, State

__all__ = ["ObjectState", "State", "run_fn"]
