"""Ranks whose tensors are mapped and ranks whose tensors are private meet in one call, in every combination."""

from __future__ import annotations

import numpy as np
import pytest

from collectives.tensors.arena import arena
from collectives.transport import threads
from collectives.world import World


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("count", [700, 3000, 40_003, 200_001])
def test_every_combination(count: int, size: int) -> None:
    def program(world: World) -> None:
        total = world.size * (world.size + 1) / 2
        for which in range(1 << world.size):
            tensor = arena.empty(count, np.float64) if which >> world.rank & 1 else np.empty(count)
            for _ in range(2):
                tensor[:] = world.rank + 1
                assert (world.reducescatter(tensor) == total / world.size).all()
                assert (world.allgather(tensor).reshape(-1, count)[:, -1] == np.arange(1, world.size + 1)).all()
                assert (world.broadcast(tensor, world.size - 1) == world.size).all()
                assert (world.allreduce_(tensor, average=False) == total).all()

    threads.run(size, program, make_world=World)
