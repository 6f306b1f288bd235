"""All-reduces of some private and some mapped tensors."""

from __future__ import annotations

import numpy as np
import pytest

import collectives
from collectives.base.reduce_op import Op
from collectives.transport import threads
from collectives.world import World


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


@pytest.mark.parametrize("nbytes", [64 << 10, 4 << 20])
def test_some_tensors_are_mapped(nbytes: int) -> None:
    """Which ranks' tensors are mapped changes from call to call."""

    def scenario(world: World) -> None:
        private, mapped = np.empty(nbytes // 4, np.float32), collectives.empty(nbytes // 4, np.float32)
        for turn in range(2 << world.size):
            tensor = mapped if turn >> world.rank & 1 else private
            reduce_and_check(world, tensor, True, Op.SUM, 1.0)

    threads.run(3, scenario, make_world=World)
