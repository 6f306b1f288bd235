"""The ranks of one benchmark run, as the measuring code needs them: a barrier and a few tiny agreements.

MPI is used here directly, and not the engine: what is measured must not also hold the watch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

import collectives

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")


def launched_rank(environment: Mapping[str, str] | None = None) -> int:
    """This process's rank as the launcher tells it, before any MPI is started; 0 without a launcher."""
    source = os.environ if environment is None else environment
    for variable in _RANK_VARIABLES:
        if source.get(variable, "").isdigit():
            return int(source[variable])
    return 0


class Ranks:
    """Rank, size, and what all ranks agree on. One rank alone needs no MPI."""

    def __init__(self) -> None:
        self.rank: int = collectives.rank()
        self.size: int = collectives.size()
        self.local_size: int = collectives.local_size()
        self.comm: Any = None
        self.barrier: Any = _nothing
        if self.size > 1:
            from mpi4py import MPI

            self.comm = MPI.COMM_WORLD
            self.barrier = self.comm.Barrier

    def maximum(self, values: np.ndarray) -> np.ndarray:
        """The element-wise maximum over all ranks, on every rank; ``values`` is float64 and is overwritten."""
        return self._combine(values, "MAX")

    def total(self, value: int) -> int:
        """The sum over all ranks, on every rank."""
        return int(self._combine(np.array([value], np.int64), "SUM")[0])

    def agree(self, problem: str | None) -> str | None:
        """None when no rank has a problem; otherwise, on every rank, the first one's text."""
        if self.comm is None:
            return problem
        return next((text for text in self.comm.allgather(problem) if text), None)

    def _combine(self, values: np.ndarray, operation: str) -> np.ndarray:
        if self.comm is not None:
            from mpi4py import MPI

            self.comm.Allreduce(MPI.IN_PLACE, values, getattr(MPI, operation))
        return values


def _nothing() -> None:
    """The barrier of one rank."""
