"""Buckets between hosts: tensors that are sent and received where they lie, against tensors that are copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from collectives.base.reduce_op import Op
from collectives.engine import message_buckets
from collectives.engine.message_buckets import MessageBucket
from collectives.transport import threads
from collectives.worlds import World
from tests.scenarios import assert_close, ops_for, sample

SIZES = (1, 0, 5, 63, 64, 1000, 7, 40_000, 0, 200, 3)
"""Elements of a bucket's tensors: empty ones, tiny ones, and one of several parts of a message."""
FUSED = len(SIZES) - SIZES.count(0)
"""Those that are not empty."""
SCALES: tuple[dict[str, float], ...] = ({}, {"prescale_factor": 2.0, "postscale_factor": 0.25})


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Join tensors below 256 bytes; returns the number of tensors of each bucket of lists that a rank carries out."""
    ran: list[int] = []
    run = MessageBucket.run_handles
    monkeypatch.setattr(message_buckets, "JOINED_BELOW", 256)
    monkeypatch.setattr(
        MessageBucket, "run_handles", lambda self, handles: (ran.append(len(handles)), run(self, handles))[1]
    )
    return ran


def alone(size: int) -> list[tuple[int, ...]]:
    """As many hosts of one rank."""
    return [(rank,) for rank in range(size)]


def reduce_group(world: World, mine: Sequence[Any], in_place: bool, **options: Any) -> list[Any]:
    """Reduce copies of this rank's tensors as a group; out of place, check that they are as before."""
    tensors = [array.copy() for array in mine]
    results = (world.grouped_allreduce_ if in_place else world.grouped_allreduce)(tensors, **options)
    for before, after in zip(mine, tensors, strict=True):
        assert in_place or before.tobytes() == after.tobytes()
    return list(results)


def check(world: World, dtype: np.dtype[Any], sizes: Sequence[int] = SIZES, **options: Any) -> None:
    """Reduce a group in lists, and compare every result with that of copied tensors."""
    messages: Any = world._group.messages
    mine = [sample(dtype, size, world.rank, seed) for seed, size in enumerate(sizes)]
    world.barrier()
    messages.takes_lists = False
    copied = reduce_group(world, mine, True, name="copied", **options)
    messages.takes_lists = True
    for in_place in (True, False):
        results = reduce_group(world, mine, in_place, name=f"lists {in_place}", **options)
        assert len(results) == len(sizes)
        for result, wanted in zip(results, copied, strict=True):
            assert result.dtype == dtype
            wide = wanted if dtype.kind in "biu" else wanted.astype(np.complex128 if dtype.kind == "c" else np.float64)
            assert_close(result, wide, world.size)


@pytest.mark.parametrize("size", [2, 3])
def test_every_dtype_and_operation(lists: list[int], size: int) -> None:
    dtypes = [np.dtype(name) for name in ("bool", "int8", "int64", "float16", "float32", "complex64")]

    def scenario(world: World) -> None:
        for dtype in (*dtypes, np.dtype(ml_dtypes.bfloat16)):
            for op in ops_for(dtype):
                check(world, dtype, op=op)

    threads.run(size, scenario, hosts=alone(size), make_world=World)
    assert set(lists) == {FUSED}


@pytest.mark.parametrize("algorithm", ["direct", "ring", "recursive-doubling", "hierarchical"])
def test_every_algorithm_and_scale(lists: list[int], algorithm: str) -> None:
    def scenario(world: World) -> None:
        for scale in SCALES:
            for op in (Op.SUM, Op.AVERAGE):
                check(world, np.dtype(np.float32), op=op, algorithm=algorithm, transport="mpi", **scale)

    threads.run(4, scenario, hosts=alone(4), make_world=World)
    assert set(lists) == {FUSED}


def test_more_blocks_than_a_system_call_takes_and_more_segments_than_one(lists: list[int]) -> None:
    def scenario(world: World) -> None:
        check(world, np.dtype(np.float32), [65 + number % 3 for number in range(1500)], op=Op.SUM)
        check(world, np.dtype(np.float64), [300_000, 2, 100_000], op=Op.AVERAGE)

    threads.run(2, scenario, hosts=alone(2), make_world=World)
    assert set(lists) == {1024, 1500 - 1024, 3}


def test_fewer_elements_than_ranks(lists: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_buckets, "JOINED_BELOW", 1)

    def scenario(world: World) -> None:
        for algorithm in ("direct", "ring", "recursive-doubling", "hierarchical"):
            check(world, np.dtype(np.float32), [1, 1], op=Op.SUM, algorithm=algorithm, transport="mpi")

    threads.run(3, scenario, hosts=alone(3), make_world=World)
    assert set(lists) == {2}


def test_a_rank_that_has_joined_contributes_zeros(lists: list[int]) -> None:
    def scenario(world: World) -> None:
        if world.rank == 1:
            world.join()
            return
        mine = [np.full(size, 3, np.float32) for size in SIZES]
        for in_place in (True, False):
            for result in reduce_group(world, mine, in_place, op=Op.SUM, prescale_factor=2.0):
                np.testing.assert_array_equal(result, np.full(result.size, 12 if world.size == 3 else 6))
        world.join()

    threads.run(3, scenario, hosts=alone(3), make_world=World)
    assert set(lists) == {FUSED}


def test_only_what_is_copied_is_counted(lists: list[int]) -> None:
    def scenario(world: World) -> None:
        before = world.statistics.copy()
        reduce_group(world, [np.ones(size, np.float32) for size in SIZES], True, op=Op.SUM)
        after = world.statistics
        assert after.bytes_packed - before.bytes_packed == 4 * sum(size for size in SIZES if size < 64)
        assert after.bytes_reduced - before.bytes_reduced == 4 * sum(SIZES)

    threads.run(2, scenario, hosts=alone(2), make_world=World)
    assert lists
