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
from typing import Any

import numpy as np

from collectives.tools.bench.device import HOST, Memory
from collectives.tools.bench.ranks import Ranks

OURS = "collectives"
"""The contestant that everybody is compared with: the engine as a user calls it, its planner choosing."""

Call = Callable[[], object]


def alternate(
    ranks: Ranks,
    calls: Sequence[Call],
    warmup: int,
    iterations: int,
    tick: Callable[[], object] = lambda: None,
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


@dataclass(frozen=True)
class Record:
    """Times in microseconds (None where a contestant cannot), bandwidths in GB/s (1e9 bytes), sizes in bytes."""

    collective: str
    contestant: str
    mode: str
    size: int
    count: int
    dtype: str
    op: str
    root: int
    ranks: int
    factor: float
    wrong: int | None = None
    time: Summary | None = None
    ratio: Summary | None = None
    limit: float | None = None
    unavailable: str | None = None

    @property
    def algbw(self) -> float:
        return bandwidth(self.size, self.time.median) if self.time else 0.0

    @property
    def busbw(self) -> float:
        return self.algbw * self.factor

    @property
    def percent_of_limit(self) -> float | None:
        """100 * the memory floor's time / this contestant's."""
        if self.time is None or self.limit is None or self.time.median <= 0:
            return None
        return 100 * self.limit / self.time.median

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "algbw": self.algbw, "busbw": self.busbw, "percent_of_limit": self.percent_of_limit}
