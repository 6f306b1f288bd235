"""``algorithm="reproducible"``: the bits of the fixed tree, whatever moves the elements."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from collectives.base.config import Config
from collectives.base.errors import InvalidArgumentError, MismatchError
from collectives.base.reduce_op import Op
from collectives.frontends.gradient_options import GradientOptions
from collectives.schedules import fixed_tree
from collectives.tensors import reduction
from collectives.tensors.arena import arena
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World
from tests.support.emulated.ranks import emulated, on_threads

Array = np.ndarray[Any, Any]
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex64, np.complex128, np.int8, np.uint64]
SIZES = [1, 1000, 9001, 70_001]
"""Elements: one-shot, inline and doubling up to direct reads, in blocks that end anywhere."""


def contribution(number: int, count: int, dtype: Any) -> Array:
    """Elements whose sum depends on the order: of either sign, and of sizes far apart."""
    random = np.random.default_rng(number)
    values = random.standard_normal((2, count)) * 2.0 ** random.integers(-6, 7, (2, count))
    values[:, number % 3 :: 7] = -0.0
    dtype = np.dtype(dtype)
    if dtype.kind == "c":
        return np.ascontiguousarray((values[0] + 1j * values[1]).astype(dtype))
    return (
        (values[0] * (1 if dtype.kind not in "iu" else 3))
        .astype(np.int64 if dtype.kind in "iu" else dtype)
        .astype(dtype)
    )


def tree(values: Sequence[Array], op: Op = Op.SUM, postscale: float = 1.0) -> Array:
    """What is promised, by the kernels of the library but none of its algorithms."""
    dtype, count = values[0].dtype, len(values)

    def combined(left: tuple[Array, int], right: tuple[Array, int]) -> tuple[Array, int]:
        out = np.empty_like(left[0])
        reduction.weighted(reduction.kernel(op, dtype), left[1], right[1])(left[0], right[0], out)
        return out, left[1] + right[1]

    with reduction.quiet():
        of_leaf = lambda part: (values[part[0]], 1) if part[1] - part[0] == 1 else None  # noqa: E731
        whole = fixed_tree.evaluate(0, count, of_leaf, combined)[0].copy()
        finish = reduction.finish(op, dtype, count, postscale)
        if finish is not None:
            finish(whole, whole)
    return whole


def bits(array: Any) -> bytes:
    return np.asarray(array).tobytes()


WAYS = {
    "auto": ({}, None),
    "window": ({"transport": "window"}, None),
    "direct-read": ({"transport": "direct-read"}, None),
    "messages": ({"transport": "mpi"}, None),
    "hosts of two": ({}, 2),
    "hosts of three": ({}, 3),
    "hosts of one": ({}, 1),
}


@pytest.mark.parametrize("size", [2, 3, 4, 6])
@pytest.mark.parametrize("way", WAYS)
def test_the_bits_are_those_of_the_fixed_tree(way: str, size: int) -> None:
    options, each = WAYS[way]
    hosts = None if each is None else [list(range(at, min(at + each, size))) for at in range(0, size, each)]

    @functools.cache
    def promised(count: int, dtype: Any, op: Op) -> bytes:
        return bits(tree([contribution(rank, count, dtype) for rank in range(size)], op))

    def program(world: World) -> None:
        for number, dtype in enumerate(DTYPES):
            for count in (SIZES[number % len(SIZES)], SIZES[(number + world.size) % len(SIZES)]):
                own = contribution(world.rank, count, dtype)
                how = {"algorithm": "reproducible", **options}
                assert bits(world.allreduce(own, op=Op.SUM, **how)) == promised(count, dtype, Op.SUM), (dtype, count)
                world.allreduce_(own, op=Op.AVERAGE, **how)
                assert bits(own) == promised(count, dtype, Op.AVERAGE), (dtype, count)

    thread_groups.run(size, program, hosts=hosts, make_world=World)


def share(rank: int, size: int, total: int, shape: tuple[int, ...], dtype: Any) -> Array:
    """A rank's share of the parts."""
    count = int(np.prod(shape))
    parts = np.stack([contribution(number, count, dtype).reshape(shape) for number in range(total)])
    return np.array_split(parts, size)[rank]


@pytest.mark.parametrize("way", ["auto", "messages", "hosts of two"])
def test_parts_have_the_same_bits_on_any_number_of_ranks(way: str) -> None:
    options, each = WAYS[way]
    for total, sizes in ((16, (1, 2, 3, 4, 8, 16)), (7, (3, 4)), (8, (5, 7))):
        for size in sizes:
            hosts = None if each is None else [list(range(at, min(at + each, size))) for at in range(0, size, each)]

            def program(world: World, total: int = total) -> None:
                for dtype, shape in zip(DTYPES, [(), (3, 5), (9001,), (7, 1, 3)] * 2, strict=True):
                    own = share(world.rank, world.size, total, shape, dtype)
                    for op in (Op.SUM, Op.AVERAGE):
                        result = world.allreduce(own, op=op, parts=total, algorithm="reproducible", **options)
                        parts = share(0, 1, total, shape, dtype).reshape(total, -1)
                        assert result.shape == shape
                        assert bits(result) == bits(tree(list(parts), op)), (total, world.size, dtype, shape, op)

            thread_groups.run(size, program, hosts=hosts, make_world=World)


def test_a_batch_has_the_bits_of_each_tensor_alone() -> None:
    counts = [1, 700, 5, 30_000, 9001]
    several = [[contribution(9 * rank + n, count, np.float32) for n, count in enumerate(counts)] for rank in range(4)]
    promised = [bits(tree(tensors, Op.AVERAGE)) for tensors in zip(*several, strict=True)]

    def program(world: World) -> None:
        tensors = several[world.rank]
        fused = world.grouped_allreduce(tensors)
        mapped = [arena.empty(count, np.float32) for count in counts]
        for tensor, into in zip(tensors, mapped, strict=True):
            into[...] = tensor
        in_place = world.grouped_allreduce_(mapped)
        assert [bits(each) for each in fused] == promised
        assert [bits(each) for each in in_place] == promised
        assert [bits(world.allreduce(each)) for each in tensors] == promised

    make_world = functools.partial(World, config=Config(reproducible=True))
    thread_groups.run(4, program, make_world=make_world)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_gpu_has_the_bits_of_the_host(size: int) -> None:
    @functools.cache
    def promised(count: int, dtype: Any) -> bytes:
        return bits(tree([contribution(rank, count, dtype) for rank in range(size)], Op.AVERAGE))

    def program(world: World, maker: Any) -> None:
        for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.complex64, np.int32):
            for count in (5, 5000):
                tensor = maker.device(contribution(world.rank, count, dtype))
                result = world.allreduce(tensor, algorithm="reproducible")
                assert bits(maker.host(result)) == promised(count, np.dtype(dtype)), (dtype, count)

    with emulated() as provider:
        on_threads(size, program, provider)


def test_what_differs_or_cannot_be_reproducible_is_refused_on_every_rank() -> None:
    def program(world: World) -> None:
        own = np.ones((2, 3), np.float32)
        with pytest.raises(MismatchError, match="algorithm"):
            world.allreduce(own, name="one", algorithm="reproducible" if world.rank else None)
        with pytest.raises(MismatchError, match="of_parts"):
            world.allreduce(own, name="two", algorithm="reproducible", parts=4 if world.rank else 3)
        with pytest.raises(InvalidArgumentError, match="needs algorithm='reproducible'"):
            world.allreduce(own, name="three", parts=4)
        with pytest.raises(InvalidArgumentError, match="first dimension is 3"):
            world.allreduce(own, name="four", parts=6, algorithm="reproducible")
        with pytest.raises(InvalidArgumentError, match="at least one part for each"):
            world.allreduce(own, name="five", parts=1, algorithm="reproducible")
        with pytest.raises(InvalidArgumentError, match="complex"):
            world.allreduce(own.astype(np.complex64), op=Op.PRODUCT, name="six", algorithm="reproducible")
        assert bits(world.allreduce(own, name="seven", op=Op.SUM)) == bits(own * np.float32(2))

    thread_groups.run(2, program, make_world=World)


def test_no_call_may_ask_for_another_order_where_all_reductions_are_reproducible() -> None:
    def program(world: World) -> None:
        with pytest.raises(InvalidArgumentError, match="COLLECTIVES_REPRODUCIBLE"):
            world.allreduce(np.ones(3, np.float32), algorithm="ring")

    thread_groups.run(2, program, make_world=functools.partial(World, config=Config(reproducible=True)))


def test_passes_that_are_no_subtree_are_refused() -> None:
    for passes in (1, 2, 8):
        GradientOptions(algorithm="reproducible", backward_passes_per_step=passes)
    with pytest.raises(InvalidArgumentError, match="power of two"):
        GradientOptions(algorithm="reproducible", backward_passes_per_step=3)


def test_parts_end_with_an_error_where_a_rank_has_joined_and_with_numbers_of_numpy() -> None:
    def of_a_rank(world: World) -> int:
        if world.rank == 2:
            return world.join()
        with pytest.raises(MismatchError, match=r"a rank has called join\(\)"):
            world.allreduce(share(world.rank, 3, 7, (5,), np.float32), parts=7, algorithm="reproducible", name="joined")
        return world.join()

    thread_groups.run(3, of_a_rank, make_world=World)

    def of_two(world: World) -> Any:
        parts: Any = np.int64(4) if world.rank else 4
        return world.allreduce(np.ones((2, 3), np.float32), parts=parts, algorithm="reproducible")

    for mean in thread_groups.run(2, of_two, make_world=World):
        np.testing.assert_array_equal(mean, np.ones(3, np.float32))
