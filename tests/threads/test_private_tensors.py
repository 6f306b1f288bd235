"""All-reduces of private tensors by direct reads, and calls in which some ranks' tensors are mapped."""

from __future__ import annotations

import numpy as np
import pytest

import collectives
from collectives.base.reduce_op import Op
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World

BLOCK = 256 << 10
"""Elements of float32 in a block of 1 MiB, which each rank reads at once."""
COUNTS = (BLOCK, 2 * BLOCK + 1, 5 * BLOCK - 3)


def reduce_and_check(world: World, tensor: np.ndarray, in_place: bool, op: Op, prescale: float) -> None:
    """Reduce distinct values twice, and compare all of them with what they must be."""
    values = np.arange(tensor.size, dtype=np.float32) % 1000
    total = prescale * world.size * (world.size + 1) / 2 / (world.size if op is Op.AVERAGE else 1)
    for _ in range(2):
        np.multiply(values, world.rank + 1, out=tensor)
        options = {"op": op, "prescale_factor": prescale}
        result = world.allreduce_(tensor, **options) if in_place else world.allreduce(tensor, **options)
        np.testing.assert_array_equal(result, values * np.float32(total))
        assert in_place or tensor[999] == 999 * (world.rank + 1)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("in_place", [True, False])
def test_private_tensors(size: int, count: int, in_place: bool) -> None:
    def scenario(world: World) -> None:
        tensor = np.empty(count, np.float32)
        for op, prescale in ((Op.SUM, 1.0), (Op.AVERAGE, 1.0), (Op.SUM, 2.0)):
            reduce_and_check(world, tensor, in_place, op, prescale)

    thread_groups.run(size, scenario, make_world=World)


@pytest.mark.parametrize("nbytes", [64 << 10, 4 << 20])
def test_some_tensors_are_mapped(nbytes: int) -> None:
    """Which ranks' tensors are mapped changes from call to call."""

    def scenario(world: World) -> None:
        private, mapped = np.empty(nbytes // 4, np.float32), collectives.empty(nbytes // 4, np.float32)
        for turn in range(2 << world.size):
            tensor = mapped if turn >> world.rank & 1 else private
            reduce_and_check(world, tensor, True, Op.SUM, 1.0)

    thread_groups.run(3, scenario, make_world=World)
