"""What the engine offers to adapters: results in their memory, several tensors in one, and agreement on what no
operation compares."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives.base.errors import MismatchError
from collectives.base.reduce_op import Op
from collectives.frontends.agreement import agree
from collectives.tensors.compression import Compression
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World

PARTS = [((2, 3), (4,)), ()]


def _operands(rank: int) -> list[Any]:
    return [np.arange(10, dtype=np.float32) * (rank + 1), np.full((40, 1000), rank + 1.0, np.float32)]


@pytest.mark.parametrize("compression", [None, Compression.fp16])
@pytest.mark.parametrize("size", [1, 3])
def test_results_come_into_the_callers_memory(size: int, compression: Any) -> None:
    def program(world: World) -> None:
        given = _operands(world.rank)
        memory = world.memory(16 + 40_000, np.float32)
        assert memory.ctypes.data % 64 == 0 and memory.shape == (40_016,)
        out = [memory[:10], memory[16:]]
        for _ in range(2):
            memory[:] = -1
            world.grouped_allreduce(given, op=Op.SUM, name="group", out=out, parts=PARTS, compression=compression)
            total = size * (size + 1) / 2
            assert (
                np.array_equal(memory[:10], np.arange(10) * total)
                and np.all(memory[16:] == total)
                and np.all(memory[10:16] == -1)
            )
            assert np.array_equal(given[0], np.arange(10) * (world.rank + 1))

    thread_groups.run(size, program, make_world=World)


def test_other_parts_are_a_mismatch_that_names_them() -> None:
    def program(world: World) -> None:
        parts = PARTS if world.rank == 0 else [((3, 2), (4,)), ()]
        with pytest.raises(
            MismatchError, match=r"(?s)3 tensors: float32\[2, 3\], float32\[4\], .*3 tensors: float32\[3, 2\], "
        ):
            world.grouped_allreduce(_operands(world.rank), op=Op.SUM, name="group", parts=parts)
        world.barrier()

    thread_groups.run(2, program, make_world=World)


def test_a_rank_that_has_joined_takes_part_in_parts() -> None:
    def program(world: World) -> None:
        for step in range(2 if world.rank == 0 else 0):
            reduced = world.grouped_allreduce(_operands(step), op=Op.SUM, parts=PARTS)
            assert np.array_equal(reduced[0], np.arange(10) * (step + 1.0))
        assert world.join() in (0, 1)

    thread_groups.run(2, program, make_world=World)


def test_memory_of_every_size_is_aligned() -> None:
    def program(world: World) -> None:
        for count in (0, 1, 1000, 1 << 18, (1 << 18) + 1):
            memory = world.memory(count, np.float64)
            assert memory.shape == (count,) and memory.dtype == np.float64
            assert not count or memory.ctypes.data % 64 == 0
            memory[:] = 1

    thread_groups.run(1, program, make_world=World)


def test_agreement() -> None:
    def program(world: World) -> None:
        agree(world, "start", {"variable 0": "float32", "variable 1": "int64"})
        mine = {"variable 0": "float32", "variable 1": "int64" if world.rank == 1 else "int32"}
        with pytest.raises(
            MismatchError, match="start: variable 1 is not the same on every rank: int32 on ranks 0, 2; int64 on rank 1"
        ):
            agree(world, "start", mine)

    thread_groups.run(3, program, make_world=World)
