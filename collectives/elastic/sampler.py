"""`ElasticSampler`: which samples each rank processes, while ranks come and go within an epoch."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sized
from itertools import cycle, islice
from typing import Any

from collectives.elastic import retry
from collectives.elastic.shadow import Part
from collectives.worlds import generations, runtime


class ElasticSampler:
    """Deals the indices of a data set to the ranks, and deals the unprocessed ones again when the ranks change.

    The indices of an epoch have the same order on all ranks; rank r of n takes every n-th, starting with the r-th. Some
    indices are dealt twice, so that all ranks get equally many.

    If ranks die and steps continue without them (``recover="retry"``), their indices are *postponed*: they are dealt
    again, to all ranks, after the rest of the epoch, once the next commit has been made; or in the next epoch, if that
    begins first.

    Pass it to a state, call `record_batch` after each step, and commit at the end of each epoch before you call
    `set_epoch`.

    Args:
        dataset: anything with a length, which stays the same.
        shuffle: whether the order is a random one, another one for each epoch.
        seed: of that order; equal on all ranks.

    Attributes:
        epoch: as set by `set_epoch`.
        processed_num: samples that all ranks together have processed in this epoch.
        postponed: indices that ranks would have processed that have died, in the order in which they are dealt again.
        carried: those that were postponed in the epoch before and not processed there; this one has them, too.
        num_replicas, rank: the ranks among which indices are dealt, and this one.
        remaining_indices: those that were unprocessed when they were dealt, in their order.
        num_samples, total_size: indices of this rank, and of all ranks.

    Example:
        sampler = ElasticSampler(range(1000))
        for batch, index in enumerate(sampler):
            sampler.record_batch(batch, 1)
            state.commit()
        state.commit()
        sampler.set_epoch(1)
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = self.processed_num = self._recorded = 0
        self.carried: list[int] = []
        self._postponed: list[int] = []
        """As positions: those below the length of the data set are its indices, and the others are in `carried`."""
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: no sample is processed. Call it at the end of the previous epoch, so that an epoch in which
        ranks changed is not begun again; and after a commit, so that postponed samples are processed in their epoch."""
        carried = self.carried
        if epoch != self.epoch:
            unprocessed = len(self.dataset) + len(self.carried) - self.processed_num
            first = max(len(self._postponed) - unprocessed, 0)
            carried = self._indices(self._postponed[first:])
        self.load_state_dict({"epoch": epoch, "processed_num": 0, "carried": carried})

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has processed a batch of this size; ``batch_idx`` is part of Horovod's interface.

        Call it after the batch's step, which shows whether ranks died before it.
        """
        self._deal_anew()
        start = self._recorded
        self._recorded = min(start + batch_size * self.num_replicas, len(self.remaining_indices))
        self.processed_num += self._recorded - start
        living = retry.contributors()
        if living != self._members:
            dead = {position for position, member in enumerate(self._members) if member not in living}
            batches = range(start, self._recorded)
            lost = {self._remaining[at]: None for at in batches if at % self.num_replicas in dead}
            self._postponed = [*(position for position in self._postponed if position not in lost), *lost]
            self.processed_num -= len(lost)

    @property
    def postponed(self) -> list[int]:
        return self._indices(self._postponed)

    def state_dict(self) -> dict[str, Any]:
        """Epoch, number of processed samples, and what is postponed and carried, if anything is."""
        others = {"postponed": list(self._postponed), "carried": list(self.carried)}
        present = {name: indices for name, indices in others.items() if indices}
        return {"epoch": self.epoch, "processed_num": self.processed_num, **present}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a `state_dict`, and deal the indices that are unprocessed by it."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self._postponed = list(state_dict.get("postponed", ()))
        self.carried = list(state_dict.get("carried", ()))
        self.reset()

    def reset(self) -> None:
        """Deal the unprocessed indices among the ranks that there are."""
        # Not simply the present ranks: one that has not noticed a death yet must deal as the others do.
        job, self._members = generations.job(), retry.contributors()
        if job is not None and job.member in self._members:
            self.num_replicas, self.rank = len(self._members), self._members.index(job.member)
        else:
            self.num_replicas, self.rank = runtime.size(), runtime.rank()
        self._recorded = 0
        count = len(self.dataset)
        positions = list(range(count))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(positions)
        positions += range(count, count + len(self.carried))
        if self._postponed:
            behind = set(self._postponed)
            positions = [position for position in positions if position not in behind] + self._postponed
        self._remaining = positions[self.processed_num :]
        self.remaining_indices = self._indices(self._remaining)
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __getstate__(self) -> dict[str, Any]:
        # Another rank must not deal this one's share.
        return {name: value for name, value in self.__dict__.items() if name != "_members"}

    def __iter__(self) -> Iterator[int]:
        self._deal_anew()
        return islice(cycle(self.remaining_indices), self.rank, self.total_size, self.num_replicas)

    def __len__(self) -> int:
        self._deal_anew()
        return self.num_samples

    def _indices(self, positions: list[int]) -> list[int]:
        count = len(self.dataset)
        return [position if position < count else self.carried[position - count] for position in positions]

    def _deal_anew(self) -> None:
        """Deal the first time after it was received."""
        if not hasattr(self, "_members"):
            self.reset()


class SamplerPart(Part):
    """An `ElasticSampler` of a state, which deals its unprocessed indices again after each synchronization.

    Args:
        sampler: returns it.
    """

    def __init__(self, sampler: Callable[[], ElasticSampler]) -> None:
        self._sampler = sampler

    def described(self) -> Mapping[str, str]:
        return {"attribute": "an ElasticSampler"}

    def read(self) -> tuple[Mapping[str, Any], bytes]:
        return {}, pickle.dumps(self._sampler().state_dict())

    def write(self, tensors: Mapping[str, Any], rest: bytes) -> None:
        self._sampler().load_state_dict(pickle.loads(rest))

    def synced(self) -> None:
        self._sampler().reset()
