"""Buckets between hosts, whose tensors are copied into a buffer, against the same tensors one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from collectives.base.reduce_op import Op
from collectives.engine.buckets import BufferBucket
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World
from tests.support.scenarios.worlds import assert_close, ops_for, sample

SIZES = (1, 0, 5, 63, 64, 1000, 7, 40_000, 0, 200, 3)
"""Elements of a bucket's tensors, some without any."""
FUSED = len(SIZES) - SIZES.count(0)
SCALES: tuple[dict[str, float], ...] = ({}, {"prescale_factor": 2.0, "postscale_factor": 0.25})


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tensors of each bucket that a rank carries out."""
    counts: list[int] = []
    run = BufferBucket.run_handles
    monkeypatch.setattr(
        BufferBucket, "run_handles", lambda self, handles: (counts.append(len(handles)), run(self, handles))[1]
    )
    return counts


def reduce_group(world: World, arrays: Sequence[Any], in_place: bool, **options: Any) -> list[Any]:
    """Reduce copies of this rank's tensors as a group; out of place, check that they are as before."""
    tensors = [array.copy() for array in arrays]
    results = (world.grouped_allreduce_ if in_place else world.grouped_allreduce)(tensors, **options)
    for before, after in zip(arrays, tensors, strict=True):
        assert in_place or before.tobytes() == after.tobytes()
    return list(results)


def check(world: World, dtype: np.dtype[Any], **options: Any) -> None:
    """Reduce a group, and compare every result with that of its tensor alone."""
    tensors = [sample(dtype, size, world.rank, seed) for seed, size in enumerate(SIZES)]
    alone = [world.allreduce(tensor, **options) for tensor in tensors]
    for in_place in (True, False):
        for result, wanted in zip(reduce_group(world, tensors, in_place, **options), alone, strict=True):
            assert result.dtype == dtype
            wide = wanted if dtype.kind in "biu" else wanted.astype(np.complex128 if dtype.kind == "c" else np.float64)
            assert_close(result, wide, world.size)


@pytest.mark.parametrize("size", [2, 3])
def test_every_dtype_and_operation(fused: list[int], size: int) -> None:
    dtypes = [np.dtype(name) for name in ("bool", "int8", "int64", "float16", "float32", "complex64")]

    def scenario(world: World) -> None:
        for dtype in (*dtypes, np.dtype(ml_dtypes.bfloat16)):
            for op in ops_for(dtype):
                check(world, dtype, op=op)

    thread_groups.run(size, scenario, hosts=[(rank,) for rank in range(size)], make_world=World)
    assert set(fused) == {FUSED, FUSED - 1}, "the largest tensor of complex64 is large enough to go alone"


@pytest.mark.parametrize("algorithm", ["direct", "ring", "recursive-doubling", "hierarchical"])
def test_every_algorithm_and_scale(fused: list[int], algorithm: str) -> None:
    def scenario(world: World) -> None:
        for scale in SCALES:
            for op in (Op.SUM, Op.AVERAGE):
                check(world, np.dtype(np.float32), op=op, algorithm=algorithm, transport="mpi", **scale)

    thread_groups.run(4, scenario, hosts=[(0,), (1,), (2,), (3,)], make_world=World)
    assert set(fused) == {FUSED}


def test_a_rank_that_has_joined_contributes_zeros(fused: list[int]) -> None:
    def scenario(world: World) -> None:
        if world.rank == 1:
            world.join()
            return
        tensors = [np.full(size, 3 + world.rank, np.float32) for size in SIZES]
        for in_place in (True, False):
            for result in reduce_group(world, tensors, in_place, op=Op.SUM, prescale_factor=2.0):
                np.testing.assert_array_equal(result, np.full(result.size, 16))
        world.join()

    thread_groups.run(3, scenario, hosts=[(0,), (1,), (2,)], make_world=World)
    assert set(fused) == {FUSED}
