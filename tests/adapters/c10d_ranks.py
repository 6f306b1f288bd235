"""Process groups of the ranks of an mpirun, of our backend and of gloo, for tests that compare them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from mpi4py import MPI

import collectives.c10d

BOUND = timedelta(seconds=60)


def rank() -> int:
    return int(MPI.COMM_WORLD.Get_rank())


def size() -> int:
    return int(MPI.COMM_WORLD.Get_size())


@contextlib.contextmanager
def default_group(backend: str = "collectives", timeout: timedelta = BOUND) -> Iterator[Any]:
    """torch's default group, for a ``with`` block that all ranks enter."""
    collectives.c10d.register()
    folder = MPI.COMM_WORLD.bcast(tempfile.mkdtemp(prefix="c10d-") if rank() == 0 else None)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank(), world_size=size(), timeout=timeout
    )
    try:
        yield dist.group.WORLD
    finally:
        MPI.COMM_WORLD.Barrier()
        dist.destroy_process_group()
