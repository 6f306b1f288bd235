"""The ranks of one benchmark run, as the measuring code needs them: a barrier and a few tiny agreements.

MPI is used here directly, and not the engine: what is measured must not also hold the watch.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

import collectives
from collectives.launch.rank import RANK_VARIABLES


def launched_rank(environment: Mapping[str, str] | None = None) -> int:
    """This process's rank as the launcher tells it, before any MPI is started; 0 without a launcher."""
    source = os.environ if environment is None else environment
    for variable in RANK_VARIABLES:
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
        self.barrier: Any = lambda: None
        if self.size > 1:
            from mpi4py import MPI

            self.comm = MPI.COMM_WORLD
            self.barrier = self.comm.Barrier

    def address(self) -> str:
        """An address of this host at which all ranks reach it."""
        return "127.0.0.1" if self.local_size == self.size else socket.gethostbyname(socket.gethostname())

    def maximum(self, values: np.ndarray) -> np.ndarray:
        """The element-wise maximum over all ranks, on every rank; ``values`` is float64 and is overwritten."""
        return self._combine(values, "MAX")

    def total(self, value: int) -> int:
        """The sum over all ranks, on every rank."""
        return int(self._combine(np.array([value], np.int64), "SUM")[0])

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def agree(self, problem: str | None) -> str | None:
        """None when no rank has a problem; otherwise, on every rank, the first one's text."""
        return next((text for text in self.gather(problem) if text), None)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        return [value] if self.comm is None else list(self.comm.allgather(value))

    def _combine(self, values: np.ndarray, operation: str) -> np.ndarray:
        if self.comm is not None:
            from mpi4py import MPI

            self.comm.Allreduce(MPI.IN_PLACE, values, getattr(MPI, operation))
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
