"""What the engine offers to adapters: small tensors copied into one array, which are reduced and compared as if each
travelled alone; results in their memory; and agreement on what no operation compares."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from collectives.base.errors import MismatchError
from collectives.base.reduce_op import Op
from collectives.frontends import joined
from collectives.frontends.agreement import agree
from collectives.tensors.compression import Compression
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World

SHAPES = ((3,), (), (0, 4), (100, 41), (7,), (20_000,))


def tensors(seed: int) -> list[np.ndarray[Any, Any]]:
    """Of two dtypes in turn."""
    return [np.full(shape, seed + number, (np.float32, np.int64)[number % 2]) for number, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("in_place", [True, False])
def test_results_are_those_of_each_tensor(in_place: bool) -> None:
    def program(world: World) -> None:
        for step in range(3):
            given = tensors(world.rank + step)
            results = given if in_place else [np.empty_like(tensor) for tensor in given]
            joined.allreduce_apart(
                world, given, results, ((),) * len(given), op=Op.SUM, prescale_factor=2.0, name="joined"
            )
            for number, result in enumerate(results):
                assert (result == 2 * sum(rank + step + number for rank in range(world.size))).all()
                assert result.shape == SHAPES[number]
            if not in_place:
                assert all((one == other).all() for one, other in zip(given, tensors(world.rank + step), strict=True))

    thread_groups.run(3, program, make_world=World)


def test_a_rank_with_other_shapes_of_as_many_elements_is_told() -> None:
    def program(world: World) -> None:
        shapes = ((2, 3), (6,)) if world.rank else ((3, 2), (6,))
        given = [np.zeros(shape) for shape in shapes]
        with pytest.raises(MismatchError, match=r"grouped_allreduce\(.*2 tensors: float64\[3, 2\], float64\[6\]"):
            joined.allreduce_apart(world, given, given, ((), ()))
        joined.allreduce_apart(world, given[1:], given[1:], ((),))

    thread_groups.run(2, program, make_world=World)


def test_a_rank_that_has_joined_contributes_nothing() -> None:
    def program(world: World) -> None:
        if world.rank:
            given = tensors(1)
            joined.allreduce_apart(world, given, given, ((),) * len(given), op=Op.SUM)
            assert all((one == other).all() for one, other in zip(given, tensors(1), strict=True))
        world.join()

    thread_groups.run(2, program, make_world=World)


@pytest.mark.parametrize(
    ("sizes", "op", "compression", "pays", "pays_apart"),
    [
        ([10, 20], Op.SUM, None, True, True),
        ([10, 20], Op.ADASUM, None, False, False),
        ([10, 20], Op.SUM, "float16", False, False),
        ([10], Op.SUM, None, False, False),
        ([100_000, 100], Op.SUM, None, True, True),
        ([200_000, 100], Op.SUM, None, False, True),
        ([50_000] * 30, Op.SUM, None, True, False),
    ],
)
def test_joining_pays_for_small_tensors(
    sizes: list[int], op: Op, compression: Any, pays: bool, pays_apart: bool
) -> None:
    arrays = [np.empty(size, np.float32) for size in sizes]
    assert joined.pays(arrays, op, compression) is pays
    assert joined.pays_apart(arrays, op, compression) is pays_apart


def test_shapes_are_a_tuple_hashed_once() -> None:
    plain = ((2, 3), (), (4,))
    shapes = joined.Shapes(plain)
    assert shapes == plain and hash(shapes) == hash(plain) == hash(shapes) and repr(shapes) == repr(plain)
    again = pickle.loads(pickle.dumps(shapes))
    assert again == plain and hash(again) == hash(plain)


@pytest.mark.parametrize("compression", [None, Compression.fp16])
@pytest.mark.parametrize("size", [1, 3])
def test_results_come_into_the_callers_memory(size: int, compression: Any) -> None:
    def program(world: World) -> None:
        given = [np.arange(10, dtype=np.float32) * (world.rank + 1), np.full((40, 1000), world.rank + 1.0, np.float32)]
        memory = world.memory(16 + 40_000, np.float32)
        assert memory.ctypes.data % 64 == 0 and memory.shape == (40_016,)
        out = [memory[:10], memory[16:]]
        for _ in range(2):
            memory[:] = -1
            world.grouped_allreduce(
                given, op=Op.SUM, name="group", out=out, shapes=[((2, 3), (4,)), ()], compression=compression
            )
            total = size * (size + 1) / 2
            assert (
                np.array_equal(memory[:10], np.arange(10) * total)
                and np.all(memory[16:] == total)
                and np.all(memory[10:16] == -1)
            )
            assert np.array_equal(given[0], np.arange(10) * (world.rank + 1))

    thread_groups.run(size, program, make_world=World)


def test_agreement() -> None:
    def program(world: World) -> None:
        agree(world, "start", {"variable 0": "float32", "variable 1": "int64"})
        mine = {"variable 0": "float32", "variable 1": "int64" if world.rank == 1 else "int32"}
        with pytest.raises(
            MismatchError, match="start: variable 1 is not the same on every rank: int32 on ranks 0, 2; int64 on rank 1"
        ):
            agree(world, "start", mine)

    thread_groups.run(3, program, make_world=World)
