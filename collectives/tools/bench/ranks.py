"""The ranks of one benchmark run, as the measuring code needs them: a barrier and a few tiny agreements.

MPI is used here directly where it has started the ranks, and not the engine: what is measured should not also hold the
watch. Between ranks without MPI the engine does: outside of what is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

import collectives
from collectives.base.launchers import RANK_VARIABLES


def launchers_variable(environment: Mapping[str, str]) -> str | None:
    """The variable with which a launcher has made this process a rank. (A Slurm job's script has a rank's number as
    well.)"""
    in_slurms_script = "SLURM_STEP_ID" not in environment
    names = [
        name for name in RANK_VARIABLES if name in environment and not (in_slurms_script and name == "SLURM_PROCID")
    ]
    return names[0] if names else None


class Ranks:
    """Rank, size, and what all ranks agree on; ``comm`` is MPI's communicator of them, or None."""

    def __init__(self) -> None:
        self.rank: int = collectives.rank()
        self.size: int = collectives.size()
        self.local_size: int = collectives.local_size()
        self.comm: Any = None
        self.barrier: Any = lambda: None
        # Has been imported where MPI connects the ranks. Ranks without it may import it too, each alone in its world.
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.COMM_WORLD.size == self.size > 1:
            self.comm = mpi.COMM_WORLD
            self.barrier = self.comm.Barrier
        elif self.size > 1:
            self.barrier = collectives.barrier

    def maximum(self, values: np.ndarray) -> np.ndarray:
        """The element-wise maximum over all ranks, on every rank; ``values`` is float64 and is overwritten."""
        return self._combine(values, "MAX", collectives.Max)

    def sum(self, values: np.ndarray) -> np.ndarray:
        """The same of the element-wise sum."""
        return self._combine(values, "SUM", collectives.Sum)

    def total(self, value: int) -> int:
        """The sum over all ranks, on every rank."""
        return int(self.sum(np.array([value], np.int64))[0])

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def agree(self, problem: str | None) -> str | None:
        """None when no rank has a problem; otherwise, on every rank, the first one's text."""
        return next((text for text in self.gather(problem) if text), None)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        return list(collectives.allgather_object(value) if self.comm is None else self.comm.allgather(value))

    def _combine(self, values: np.ndarray, mpis: str, ours: Any) -> np.ndarray:
        if self.comm is None:
            return np.asarray(collectives.allreduce_(values, op=ours))
        mpi = sys.modules["mpi4py.MPI"]
        self.comm.Allreduce(mpi.IN_PLACE, values, getattr(mpi, mpis))
        return values


@contextmanager
def session() -> Iterator[Ranks]:
    """The ranks of a run; the engine is started and shut down, unless the caller had started it."""
    started = not collectives.is_initialized()
    if started:
        collectives.init()
    try:
        yield Ranks()
    finally:
        if started:
            collectives.shutdown()
