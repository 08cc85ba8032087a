"""A DDP loop for benchmarks/auto.py: `auto_rank.py STEPS SECONDS WIDTH`.

After the first trial of auto, which ends before STEPS, all arms take turns for about SECONDS, to show which one is the
fastest over the connections that it had.
"""

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from netbottleneck.runtime import session
from netbottleneck.runtime.auto import Auto
from netbottleneck.runtime.blocks import Block, Blocks

TURN_STEPS = 10
TIMED_STEPS = 6 * TURN_STEPS  # that tell how long a step takes
LEAST_STEPS, MOST_STEPS = 600, 30000  # in turns


class ThenTurns(Auto):
    """Auto up to the end of its first trial, then blocks in turns."""

    turns: Blocks | None = None

    def at(self, step: int) -> tuple[int, int]:
        """As Deciding.at."""
        return super().at(step) if self.turns is None else self.turns.at(step)

    def ends_before(self, step: int) -> bool:
        """As Deciding.ends_before. False after the trial."""
        return self.turns is None and super().ends_before(step)

    def _decide(self, step: int, block: Block) -> str:
        if self.turns is not None:
            return ""
        line = super()._decide(step, block)
        if self.trials:
            number, _ = super().at(step)
            self.turns = Blocks(self.arms, TURN_STEPS, first_step=step, first_block=number)
        return line


def main() -> None:
    """Train."""
    steps, seconds, width = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    replaced: Any = session
    replaced.Auto = ThenTurns
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(8, width)

    def train(count: int) -> float:
        began = time.monotonic()
        for _ in range(count):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        return (time.monotonic() - began) / count

    train(steps)
    more = torch.tensor(min(max(LEAST_STEPS, round(seconds / train(TIMED_STEPS))), MOST_STEPS))
    dist.broadcast(more, 0)
    train(int(more))
    dist.destroy_process_group()


main()
