"""Sampler that distributes the rest of an epoch over the current ranks."""

import itertools
import random
from collections.abc import Iterator, Sized
from typing import Any

import torch

from netbottleneck.runtime.ops import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Indices of a data set: an equal share for each rank, without those recorded as processed.

    All ranks give the same data set, whose length does not change, and the same seed. Call record_batch after each
    batch and set_epoch at the end of each epoch. As part of a TorchState, the remaining indices are redistributed
    whenever the ranks change. Shares have equal length: the first indices are repeated if there are too few.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, in its own order, with nothing processed."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch of this rank as processed, and one of each other rank. batch_idx is not used."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from another sampler's position, and redistribute the rest."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Redistribute the unprocessed indices over the current ranks."""
        self.num_replicas, self.rank = size(), rank()
        everything = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(everything)
        self.remaining_indices = everything[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        again = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        self.indices = list(again)[self.rank :: self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
