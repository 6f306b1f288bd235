"""The cost of each tensor of a training step, apart from its bytes."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter, process_time

import numpy as np

import collectives
from benchmarks.device import Cuda, Host
from benchmarks.ranks import Ranks


@dataclass(frozen=True)
class Cost:
    """What one tensor of a single element costs, in microseconds: there is next to nothing in it but our own Python."""

    tensors: int
    submission: float
    """The caller's time per submission; the whole call where calls block."""
    whole: float
    """A step's time divided by its tensors."""
    processor: float
    """Processor time of all threads of the process, divided by the tensors."""

    def __str__(self) -> str:
        return (
            f"{self.tensors} tensors of one element, microseconds per tensor: submission {self.submission:.2f}, "
            f"whole step {self.whole:.2f}, processor time {self.processor:.2f}"
        )


def cost_per_tensor(ranks: Ranks, count: int, steps: int, blocking: bool, place: Host | Cuda) -> Cost:
    """Medians over ``steps`` steps of ``count`` tensors of one element, in place; the slowest rank counts."""
    tensors = [place.zeros(1, np.float32) for _ in range(count)]
    wait = place.finished(lambda: None)
    names = [f"one element.{index}" for index in range(count)]
    samples = np.zeros((steps, 3))
    warmup = 3
    for step in range(-warmup, steps):
        ranks.barrier()
        processor, start = process_time(), perf_counter()
        if blocking:
            for tensor, name in zip(tensors, names, strict=True):
                collectives.allreduce_(tensor, average=False, name=name)
            submitted = perf_counter()
        else:
            handles = [
                collectives.allreduce_async_(tensor, average=False, name=name)
                for tensor, name in zip(tensors, names, strict=True)
            ]
            submitted = perf_counter()
            for handle in handles:
                collectives.synchronize(handle)
        wait()
        stop = perf_counter()
        if step >= 0:
            samples[step] = submitted - start, stop - start, process_time() - processor
    submission, whole, processor = (float(value) for value in np.median(ranks.maximum(samples), axis=0) / count * 1e6)
    return Cost(count, submission, whole, processor)
