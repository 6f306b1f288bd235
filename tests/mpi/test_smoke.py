"""The harness itself: the ranks that were asked for are there and can talk."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.mpi


def test_ranks_reach_each_other() -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    assert world.allgather(world.rank) == list(range(world.size))
