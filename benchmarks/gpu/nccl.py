"""Our ring over NCCL's send and receive beside NCCL's own collectives, through one communicator: ``python -m
benchmarks.gpu.nccl``.

Two ranks are threads of this process, each with a stream, on one GPU: so they run side by side, and not in turn as
processes would.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.gpu.figures import Figure, attempt, publish, skip
from collectives.device.diagnosis import why_not
from collectives.tools.bench.device import Cuda
from collectives.tools.bench.measure import Summary, alternate, bandwidth
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World

_SIZES = (64 << 20, 256 << 20, 1 << 30)
_RANKS = 2
_PATIENCE = 45.0


class ThreadRanks:
    """`collectives.tools.bench.ranks.Ranks` for ranks that are threads: what the stopwatch needs of it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=_PATIENCE)
        self._values: dict[int, np.ndarray] = {}

    def of(self, rank: int) -> Any:
        """One rank's view of them."""
        return _ThreadRank(self, rank)


class _ThreadRank:
    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        self._ranks, self.rank, self.size = ranks, rank, ranks.size
        self.barrier = ranks._barrier.wait

    def maximum(self, values: np.ndarray) -> np.ndarray:
        self._ranks._values[self.rank] = values
        self.barrier()
        largest: np.ndarray = np.maximum.reduce(list(self._ranks._values.values()))
        self.barrier()
        return largest


def main() -> None:
    problem = why_not()
    if problem:
        skip(problem)
    ranks = ThreadRanks(_RANKS)
    publish(
        thread_groups.run(
            _RANKS, lambda world: measure(world, ranks.of(world.rank)), timeout=_PATIENCE, make_world=World
        )[0]
    )


def measure(world: World, ranks: Any) -> list[Figure]:
    """All figures; the same on every rank."""
    memory = Cuda(0)
    cupy = memory.cupy
    figures = []
    with cupy.cuda.Stream(non_blocking=True):
        attempt(lambda: world.allreduce_(memory.zeros(1, np.float32), transport="nccl"), world.rank)
        for nbytes in _SIZES:
            work = memory.zeros(nbytes // 4, np.float32)
            share = work[: work.size // _RANKS]
            pairs = {
                "all-reduce": partial(world.allreduce_, work, average=False, transport="nccl"),
                "allgather": partial(world.allgather, share, transport="nccl"),
                "broadcast": partial(world.broadcast_, work, 0, transport="nccl"),
            }
            for name, call in pairs.items():
                _check(cupy, world, name, work, call)
                work.fill(0)
                calls = [partial(call, algorithm="ring"), partial(call, algorithm="native")]
                ring, native = alternate(ranks, calls, 3, 15, _nothing, memory=memory) * 1e6
                what = f"{name}, {nbytes >> 20} MiB"
                for who, times in (("our ring", ring), ("NCCL's own", native)):
                    figures.append(Figure(f"{what}, {who}: algbw", bandwidth(nbytes, float(np.median(times))), "GB/s"))
                figures.append(
                    Figure(f"{what}: our bandwidth / NCCL's", Summary.of(native / ring).median, "", least=0.8)
                )
        issued = _issue(cupy, ranks, lambda: world.allreduce_(work, average=False, algorithm="ring", transport="nccl"))
        what = "host time to issue one ring of 1 GiB, two ranks in one process"
        figures.append(Figure(what, issued, "us", most=60, record="both ranks need the interpreter's lock"))
    return figures


def _check(cupy: Any, world: World, name: str, work: Any, call: Callable[..., Any]) -> None:
    """Ring and native give what they must, on every element."""
    for algorithm in ("ring", "native"):
        work.fill(world.rank + 1)
        result = call(algorithm=algorithm)
        if name == "allgather":
            parts = result.reshape(_RANKS, -1)
            right = all(bool((parts[rank] == rank + 1).all()) for rank in range(_RANKS))
        else:
            right = bool((result == (sum(range(1, _RANKS + 1)) if name == "all-reduce" else 1)).all())
        assert right, f"{name}, {algorithm}: wrong values"


def _issue(cupy: Any, ranks: Any, call: Callable[[], Any]) -> float:
    """Microseconds until the call returns, the work not being waited for: the median of 50, of the slower rank."""
    seconds = np.zeros(50)
    for turn in range(-5, seconds.size):
        ranks.barrier()
        start = perf_counter()
        call()
        stop = perf_counter()
        cupy.cuda.get_current_stream().synchronize()
        if turn >= 0:
            seconds[turn] = stop - start
    return float(np.median(ranks.maximum(seconds))) * 1e6


def _nothing() -> None:
    """No progress bar."""


if __name__ == "__main__":
    main()
