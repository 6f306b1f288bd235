"""Adasum and compression through the engine: blocking, asynchronous, in groups, with factors, and beside ranks that
have joined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from collectives.base.errors import InvalidArgumentError, InvalidTypeError, MismatchError
from collectives.base.reduce_op import Op
from collectives.engine import adasum
from collectives.tensors.compression import Compression
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World
from tests.support.scenarios.worlds import sample

TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-6, "float64": 1e-13}


def parts(world: World, shape: int | tuple[int, ...], dtype: Any, seed: int = 0) -> list[np.ndarray[Any, Any]]:
    return [sample(np.dtype(dtype), shape, rank, seed) for rank in range(world.size)]


def close(result: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> None:
    tolerance = TOLERANCE[result.dtype.name]
    np.testing.assert_allclose(result.astype(np.float64), wanted.reshape(result.shape), rtol=tolerance, atol=tolerance)


def reference(tensors: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    return adasum.reference([tensor.reshape(-1).astype(np.float64) for tensor in tensors])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])
def test_adasum_is_the_papers_formula(size: int, dtype: Any) -> None:
    def program(world: World) -> None:
        for shape in (0, 1, 2, (7, 3), 1000, 70_001):
            tensors = parts(world, shape, dtype)
            mine = tensors[world.rank].copy()
            result = world.allreduce(mine, op=Op.ADASUM)
            assert result.dtype == mine.dtype and result.shape == mine.shape
            np.testing.assert_array_equal(mine, tensors[world.rank])
            if mine.size:
                close(result, reference(tensors))
            assert world.allreduce_(mine, op=Op.ADASUM, name="in place") is mine
            np.testing.assert_array_equal(mine, result)

    thread_groups.run(size, program, make_world=World)


def test_adasum_in_groups_is_each_tensors_own_and_factors_apply() -> None:
    def program(world: World) -> None:
        several = [parts(world, shape, np.float32, seed) for seed, shape in enumerate((5, (3, 4), 900))]
        handle = world.grouped_allreduce_async([tensors[world.rank] for tensors in several], op=Op.ADASUM, name="group")
        for result, tensors in zip(handle.wait(), several, strict=True):
            close(result, reference(tensors))
        tensors = several[2]
        scaled = world.allreduce(tensors[world.rank], op=Op.ADASUM, prescale_factor=0.5, postscale_factor=3.0)
        close(scaled, 3.0 * reference([tensor * np.float32(0.5) for tensor in tensors]))

    thread_groups.run(3, program, make_world=World)


def test_adasum_of_ranks_that_have_joined_is_that_of_the_others() -> None:
    def program(world: World) -> None:
        tensors = parts(world, 300, np.float32)
        if world.rank != 1:
            result = world.allreduce(tensors[world.rank], op=Op.ADASUM, name="alone")
            close(result, reference([tensors[0], np.zeros_like(tensors[0]), tensors[2]]))
        world.join()

    thread_groups.run(3, program, make_world=World)


def test_adasum_refuses_what_it_cannot_do() -> None:
    def program(world: World) -> None:
        refused: list[tuple[Callable[[], Any], type[Exception]]] = [
            (lambda: world.allreduce(np.ones(3, np.int32), op=Op.ADASUM), InvalidTypeError),
            (lambda: world.allreduce(np.ones(3, np.complex64), op=Op.ADASUM), InvalidTypeError),
            (lambda: world.allreduce(np.ones(3), op=Op.ADASUM, algorithm="ring"), InvalidArgumentError),
            (lambda: world.reducescatter(np.ones(3), op=Op.ADASUM), InvalidArgumentError),
        ]
        for call, kind in refused:
            with pytest.raises(kind, match="Adasum"):
                call()
        with pytest.raises(MismatchError):
            world.allreduce(np.ones(3), op=Op.ADASUM if world.rank else Op.SUM)
        assert world.allreduce(np.float64(1), average=False) == world.size

    thread_groups.run(2, program, make_world=World)


@pytest.mark.parametrize("compression", [Compression.fp16, Compression.bf16])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_compressed_tensors_come_back_in_their_own_dtype(compression: Any, dtype: Any) -> None:
    tolerance = 2e-3 if compression is Compression.fp16 else 2e-2

    def program(world: World) -> None:
        for shape in ((), 3, (40, 50), 300_000):
            tensors = parts(world, shape, dtype)
            wanted = sum(tensor.astype(np.float64) for tensor in tensors) / world.size
            mine = tensors[world.rank].copy()
            results = [
                world.allreduce(mine, compression=compression),
                world.allreduce_async(mine, compression=compression, name="later").wait(),
                world.grouped_allreduce([mine, mine], compression=compression)[1],
            ]
            for result in results:
                assert result.dtype == dtype and result.shape == mine.shape
                np.testing.assert_allclose(result, wanted, rtol=tolerance, atol=tolerance)
            np.testing.assert_array_equal(mine, tensors[world.rank])
            backwards = np.asfortranarray(mine)
            assert world.allreduce_(backwards, compression=compression) is backwards
            np.testing.assert_array_equal(backwards, results[0])
        whole = world.allreduce(np.arange(5), average=False, compression=compression)
        np.testing.assert_array_equal(whole, np.arange(5) * world.size)

    thread_groups.run(3, program, make_world=World)


class Halve:
    """A compressor of one's own: sends every second element, and the number of all."""

    @staticmethod
    def compress(tensor: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], tuple[int, ...]]:
        return tensor.reshape(-1)[::2], tensor.shape

    @staticmethod
    def decompress(tensor: np.ndarray[Any, Any], context: tuple[int, ...]) -> np.ndarray[Any, Any]:
        return np.repeat(tensor, 2)[: int(np.prod(context))].reshape(context)


def test_a_compressor_of_ones_own() -> None:
    def program(world: World) -> None:
        mine = np.arange(9.0).reshape(3, 3) + world.rank
        wanted = np.repeat(np.arange(0.0, 9.0, 2) + 0.5, 2)[:9].reshape(3, 3)
        np.testing.assert_array_equal(world.allreduce(mine, compression=Halve), wanted)
        handle = world.allreduce_async_(mine, compression=Halve(), name="in place")
        assert handle.wait() is mine
        np.testing.assert_array_equal(mine, wanted)
        with pytest.raises(InvalidTypeError, match="compress"):
            world.allreduce(mine, compression=object())
        with pytest.raises(MismatchError, match="dtype"):
            world.allreduce(np.ones(4, np.float32), compression=Compression.fp16 if world.rank else Compression.bf16)
        assert world.allreduce(np.float64(1), average=False) == world.size

    thread_groups.run(2, program, make_world=World)


def test_consistency_names_the_tensor_and_the_ranks() -> None:
    def program(world: World) -> None:
        tensors = {"weight": np.arange(6.0), "bias": np.ones(3)}
        world.check_consistency(tensors)
        if world.rank == 2:
            tensors["bias"][1] = 5
        with pytest.raises(MismatchError, match="bias") as caught:
            world.check_consistency(tensors)
        assert "rank 2" in str(caught.value)

    thread_groups.run(4, program, make_world=World)


@pytest.mark.parametrize(
    "form", ["allreduce", "allreduce_", "allreduce_async", "grouped_allreduce", "grouped_allreduce_async_"]
)
def test_an_operation_is_said_in_one_way(form: str) -> None:
    """Rank 0 gives both ``average`` and ``op``, and every rank raises; then all pair up again."""

    def program(world: World) -> None:
        call = getattr(world, form)
        tensor: Any = [np.ones(2)] if "grouped" in form else np.ones(2)
        for average, op in ((True, Op.SUM), (False, Op.AVERAGE), (True, Op.AVERAGE), (False, Op.MAX)):
            with pytest.raises(
                InvalidArgumentError if world.rank == 0 else MismatchError, match="either average or op"
            ):
                result = call(tensor, average if world.rank == 0 else None, op=op)
                if "async" in form:
                    result.wait()
            assert world.allreduce(np.float64(world.rank), False) == sum(range(world.size))
        assert (
            world.allreduce(np.float64(world.rank), True)
            == world.allreduce(np.float64(world.rank))
            == (world.size - 1) / 2
        )

    thread_groups.run(2, program, make_world=World)
