"""`ElasticSampler`: which samples each rank processes, while ranks come and go within an epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from itertools import cycle, islice
from typing import Any

from collectives.worlds import runtime


class ElasticSampler:
    """Deals the indices of a data set to the ranks, and deals the unprocessed ones again when the ranks change.

    The indices of an epoch have one order on all ranks; rank r of n takes every n-th from the r-th on. As many numbers
    as ranks need to get equally many are dealt twice.

    Pass it to a state, call `record_batch` after each batch, and `set_epoch` at the end of each epoch.

    Args:
        dataset: anything with a length, which stays the same.
        shuffle: whether the order is a random one, another one for each epoch.
        seed: of that order; equal on all ranks.

    Attributes:
        epoch: as set by `set_epoch`.
        processed_num: samples that all ranks together have processed in this epoch.
        num_replicas, rank: the ranks among which indices are dealt, and this one.
        remaining_indices: those that were unprocessed when they were dealt, in their order.
        num_samples, total_size: indices of this rank, and of all ranks.

    Example:
        sampler = ElasticSampler(range(1000))
        for batch, index in enumerate(sampler):
            sampler.record_batch(batch, 1)
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: no sample is processed. To be called at the end of the one before, so that an epoch in which
        ranks have changed is not begun again."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has processed a batch of this size; ``batch_idx`` is part of Horovod's interface."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Epoch and number of processed samples."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a `state_dict`, and deal the indices that are unprocessed by it."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal the unprocessed indices among the present ranks."""
        self.num_replicas, self.rank = runtime.size(), runtime.rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        return islice(cycle(self.remaining_indices), self.rank, self.total_size, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples
