"""The stopwatch: contestants take turns call by call, so that whatever the machine does meanwhile hits all of them
alike.

Time of a call: a barrier outside the timed part, then the clock around one call on each rank; the slowest rank counts.
On a GPU a call lasts until its stream has done the work.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from random import Random
from time import perf_counter

import numpy as np

from benchmarks.device import HOST, Memory
from benchmarks.ranks import Ranks

Call = Callable[[], object]


def alternate(
    ranks: Ranks,
    calls: Sequence[Call],
    warmup: int,
    iterations: int,
    tick: Callable[[], object],
    evict: int = 0,
    memory: Memory = HOST,
) -> np.ndarray:
    """Time every call ``iterations`` times after ``warmup`` untimed rounds.

    The order changes in each round, so that no call always finds the cache as the same other call left it. With
    ``evict`` every rank overwrites that many bytes before each call, which removes all buffers from the nearest
    caches.

    Returns:
        Seconds, float64, shape (calls, iterations), the maximum over the ranks; the same on every rank.
    """
    seconds = np.zeros((len(calls), iterations))
    whole = [memory.finished(call) for call in calls]
    elsewhere = memory.zeros(evict, np.uint8)
    spoil = memory.finished(lambda: elsewhere.__iadd__(1))
    barrier, order = ranks.barrier, list(range(len(calls)))
    # The same on every rank.
    shuffle = Random(0).shuffle
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(-warmup, iterations):
            shuffle(order)
            for index in order:
                call = whole[index]
                spoil()
                barrier()
                start = perf_counter()
                result = call()
                stop = perf_counter()
                # Dropped here and not by the next assignment: a result must not outlive its call and occupy memory.
                del result
                if turn >= 0:
                    seconds[index, turn] = stop - start
            tick()
    finally:
        if collecting:
            gc.enable()
    return ranks.maximum(seconds)


@dataclass(frozen=True)
class Summary:
    """Quartiles and minimum of a contestant's samples; microseconds for times, a plain number for ratios."""

    median: float
    p25: float
    p75: float
    minimum: float

    @classmethod
    def of(cls, samples: np.ndarray) -> Summary:
        p25, median, p75 = np.percentile(samples, (25, 50, 75))
        return cls(float(median), float(p25), float(p75), float(samples.min()))

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def bandwidth(nbytes: int, microseconds: float) -> float:
    """GB/s, 1 GB = 1e9 bytes."""
    return nbytes / microseconds / 1e3 if microseconds > 0 else 0.0
