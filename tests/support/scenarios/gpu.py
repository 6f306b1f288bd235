"""What every world must do with device tensors: run on a GPU by `tests.gpu.ranks`, and without one on the emulated
device.

As in `scenarios`, each asserts by itself, and every rank's values differ. A scenario knows no framework: its tensors
come from a `Maker`, and what is forced (``algorithm``, ``transport``) is handed to every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from collectives.base.config import ALGORITHMS
from collectives.base.errors import InvalidArgumentError, MismatchError, TransportError
from collectives.base.reduce_op import Op
from collectives.tensors.compression import Compression
from collectives.worlds.world import World
from tests.support.scenarios.gpu_makers import Array, Maker
from tests.support.scenarios.worlds import assert_close, expected, ops_for, sample

Forced = dict[str, Any]
Scenario = Callable[[World, Maker, Forced], None]

FLOAT = np.dtype(np.float32)
HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
COUNTS = (0, 1, 3, 63, 1000, 10_007, 200_003, 1_500_001)
"""Odd ones, so that no block of any rank ends where a vectorised access does."""


def parts_of(world: World, dtype: np.dtype[Any], shape: int | tuple[int, ...], seed: int = 0) -> list[Array]:
    """Every rank's values."""
    return [sample(dtype, shape, rank, seed) for rank in range(world.size)]


def check(maker: Maker, result: Any, wanted: Array, dtype: np.dtype[Any], size: int) -> None:
    """A result is a tensor of the caller's kind, with these values."""
    assert maker.is_mine(result), f"expected a tensor of the caller's kind, got {type(result)}"
    values = maker.host(result)
    assert values.dtype == dtype and values.shape == wanted.shape, (
        f"{values.dtype}{values.shape} for {dtype}{wanted.shape}"
    )
    assert_close(values, wanted, size)


def every_dtype_and_operation(world: World, maker: Maker, forced: Forced) -> None:
    for dtype in maker.dtypes:
        for op in ops_for(dtype):
            for count in (1, 1003):
                parts = parts_of(world, dtype, count)
                tensor = maker.device(parts[world.rank])
                check(maker, world.allreduce(tensor, op=op, **forced), expected(op, parts), dtype, world.size)
                np.testing.assert_array_equal(maker.host(tensor), parts[world.rank])
                assert world.allreduce_(tensor, op=op, **forced) is tensor
                check(maker, tensor, expected(op, parts), dtype, world.size)


def every_size(world: World, maker: Maker, forced: Forced) -> None:
    """Out of place and in place; every rank has the same bits."""
    for count in COUNTS:
        parts = parts_of(world, FLOAT, count, count)
        tensor = maker.device(parts[world.rank])
        result = world.allreduce(tensor, **forced)
        check(maker, result, expected(Op.AVERAGE, parts), FLOAT, world.size)
        world.allreduce_(tensor, average=False, **forced)
        check(maker, tensor, expected(Op.SUM, parts), FLOAT, world.size)
        assert len(set(world.allgather_object(_digest(maker.host(result))))) == 1, "the ranks' results differ in bits"


def _digest(values: Array) -> int:
    """A number of the bits that does not differ from process to process."""
    return int(np.bitwise_xor.reduce(values.view(np.uint32))) if values.size else 0


def every_algorithm(world: World, maker: Maker, forced: Forced) -> None:
    """Each of this transport's algorithms, for several dtypes; one that a collective does not have here is refused on
    every rank."""
    if "algorithm" in forced:
        return
    for dtype in (FLOAT, *HALVES, np.dtype(np.int64)):
        parts = parts_of(world, dtype, (world.size * 1000 + 3, 3))
        tensor, total = maker.device(parts[world.rank]), expected(Op.SUM, parts)
        share = np.array_split(total, world.size)[world.rank]
        calls: list[tuple[str, Callable[[str], Any], Array]] = [
            ("allreduce", lambda a, t=tensor: world.allreduce(t, average=False, algorithm=a, **forced), total),
            ("reducescatter", lambda a, t=tensor: world.reducescatter(t, Op.SUM, algorithm=a, **forced), share),
            ("allgather", lambda a, t=tensor: world.allgather(t, algorithm=a, **forced), np.concatenate(parts)),
            ("broadcast", lambda a, t=tensor: world.broadcast(t, world.size - 1, algorithm=a, **forced), parts[-1]),
        ]  # fmt: skip
        for collective, call, wanted in calls:
            ran = []
            for algorithm in ALGORITHMS[1:]:
                try:
                    result = call(algorithm)
                except (InvalidArgumentError, TransportError):
                    continue
                check(maker, result, wanted.astype(dtype) if wanted.dtype.kind == "i" else wanted, dtype, world.size)
                ran.append(algorithm)
            assert "ring" in ran or "direct" in ran, f"{collective} has neither ring nor direct here"


def odd_addresses_and_layouts(world: World, maker: Maker, forced: Forced) -> None:
    """Tensors that begin in the middle of a vector, that are strided, transposed, 0-d."""
    for dtype in (FLOAT, *HALVES, np.dtype(np.int8)):
        parts = parts_of(world, dtype, (24, 21))
        views: list[Callable[[Any], Any]] = [
            lambda t: t.reshape(-1)[1:],
            lambda t: t.reshape(-1)[3:402],
            lambda t: t[5, 7, ...],
        ]
        strided: list[Callable[[Any], Any]] = [lambda t: t[::2, 1::3], lambda t: t.T]
        for view in (*views, *strided) if maker.strided else views:
            wanted = expected(Op.SUM, [np.asarray(view(part)) for part in parts])
            tensor = maker.device(parts[world.rank])
            check(maker, world.allreduce(view(tensor), average=False, **forced), wanted, dtype, world.size)
            world.allreduce_(view(tensor), average=False, **forced)
            changed = maker.host(tensor)
            assert_close(np.asarray(view(changed)), wanted, world.size)
            untouched = parts[world.rank].copy()
            mask = np.ones(untouched.shape, bool)
            view(mask)[...] = False
            np.testing.assert_array_equal(changed[mask], untouched[mask])


def broadcasts(world: World, maker: Maker, forced: Forced) -> None:
    for root in range(world.size):
        for dtype, count in ((FLOAT, 1), (HALVES[1], 10_007), (np.dtype(np.complex128), 40_001)):
            parts = parts_of(world, dtype, count)
            tensor = maker.device(parts[world.rank])
            check(maker, world.broadcast(tensor, root, **forced), parts[root], dtype, 1)
            np.testing.assert_array_equal(maker.host(tensor), parts[world.rank])
            for result in world.grouped_broadcast([tensor, tensor], root, **forced):
                check(maker, result, parts[root], dtype, 1)
            assert world.broadcast_(tensor, root, **forced) is tensor
            np.testing.assert_array_equal(maker.host(tensor), parts[root])


def allgathers(world: World, maker: Maker, forced: Forced) -> None:
    """Ranks give different numbers of rows, some none."""
    for rows in (lambda r: 3, lambda r: r, lambda r: (r * 7 + 1) % 4 * 5_000, lambda r: 0 if r else 5):
        for dtype in (np.dtype(np.int32), HALVES[0], np.dtype(np.bool_)):
            parts = [sample(dtype, (rows(rank), 3), rank) for rank in range(world.size)]
            check(maker, world.allgather(maker.device(parts[world.rank]), **forced), np.concatenate(parts), dtype, 1)


def reducescatters(world: World, maker: Maker, forced: Forced) -> None:
    for rows in (1, world.size, 3 * world.size + 1, 40_001):
        for op in (Op.AVERAGE, Op.MAX):
            parts = parts_of(world, FLOAT, (rows, 5))
            wanted = np.array_split(expected(op, parts), world.size)[world.rank]
            check(maker, world.reducescatter(maker.device(parts[world.rank]), op, **forced), wanted, FLOAT, world.size)


def alltoalls(world: World, maker: Maker, forced: Forced) -> None:
    size = world.size
    for scale in (1, 3001):
        table = [[(i * 3 + j * 5 + 1) % 4 * scale for j in range(size)] for i in range(size)]
        parts = [sample(np.dtype(np.int16), (sum(table[rank]), 2), rank) for rank in range(size)]
        result, received = world.alltoall(maker.device(parts[world.rank]), table[world.rank], **forced)
        starts = [sum(table[rank][: world.rank]) for rank in range(size)]
        wanted = [parts[rank][starts[rank] : starts[rank] + table[rank][world.rank]] for rank in range(size)]
        check(maker, result, np.concatenate(wanted), np.dtype(np.int16), 1)
        assert [int(count) for count in received] == [table[rank][world.rank] for rank in range(size)]


def scale_factors(world: World, maker: Maker, forced: Forced) -> None:
    for dtype in (FLOAT, *HALVES):
        parts = parts_of(world, dtype, 5003)
        tensor = maker.device(parts[world.rank])
        scaled = world.allreduce(tensor, average=False, prescale_factor=0.5, postscale_factor=3.0, **forced)
        check(maker, scaled, expected(Op.SUM, parts) * 1.5, dtype, 2 * world.size)


def fused_buckets(world: World, maker: Maker, forced: Forced) -> None:
    """Many tensors of several dtypes in one group, empty and odd ones among them, in place and out of place."""
    shapes = [(count,) for count in (5, 0, 1, 1003, 40_001, 7, 64)] + [(3, 7), (128, 129)]
    kinds = (FLOAT, HALVES[1], np.dtype(np.int32))
    every = [[sample(kinds[k % 3], shape, rank, k) for k, shape in enumerate(shapes * 3)] for rank in range(world.size)]
    wanted = [expected(Op.AVERAGE, list(column)) for column in zip(*every, strict=True)]
    tensors = [maker.device(values) for values in every[world.rank]]
    for result, right in zip(world.grouped_allreduce(tensors, **forced), wanted, strict=True):
        check(maker, result, right, result_dtype(maker, result), world.size)
    for result, tensor, right in zip(
        world.grouped_allreduce_(tensors, name="bucket", **forced), tensors, wanted, strict=True
    ):
        assert result is tensor
        check(maker, result, right, result_dtype(maker, result), world.size)


def result_dtype(maker: Maker, tensor: Any) -> np.dtype[Any]:
    """A tensor's dtype in NumPy's words."""
    return maker.host(tensor).dtype


def asynchronous(world: World, maker: Maker, forced: Forced) -> None:
    """Named operations in another order on every rank, in flight at once, in place; fetched in yet another order.
    Twice, by memory."""
    for step in range(2):
        order = np.random.default_rng([world.rank, step]).permutation(24).tolist()
        tensors = {k: maker.device(sample(FLOAT, 100 + 501 * k, world.rank, k)) for k in order}
        handles = {k: world.allreduce_async_(tensors[k], average=False, name=f"tensor {k}", **forced) for k in order}
        for k in order[::-1]:
            assert world.synchronize(handles[k]) is tensors[k]
            check(maker, tensors[k], expected(Op.SUM, parts_of(world, FLOAT, 100 + 501 * k, k)), FLOAT, world.size)
    gathered = world.allgather_async(maker.device(sample(FLOAT, world.rank + 1, world.rank)), **forced)
    sent = world.broadcast_async(maker.device(sample(FLOAT, 77, world.rank)), world.size - 1, **forced)
    shared = world.reducescatter_async(maker.device(sample(FLOAT, (9, 2), world.rank)), Op.SUM, **forced)
    share = np.array_split(expected(Op.SUM, parts_of(world, FLOAT, (9, 2))), world.size)[world.rank]
    check(maker, world.synchronize(shared), share, FLOAT, world.size)
    check(maker, world.synchronize(sent), sample(FLOAT, 77, world.size - 1), FLOAT, 1)
    check(
        maker,
        world.synchronize(gathered),
        np.concatenate([sample(FLOAT, r + 1, r) for r in range(world.size)]),
        FLOAT,
        1,
    )


def shared_memory(world: World, maker: Maker, forced: Forced) -> None:
    """Members of a group read what was submitted, broadcasts from one root share memory, all else in flight at once is
    refused."""
    parts = parts_of(world, FLOAT, 10_007)
    total = expected(Op.SUM, parts)
    tensor, other = maker.device(parts[world.rank]), maker.device(parts[world.rank])
    pair = [tensor, tensor if world.rank == 0 else other]  # only rank 0 has it twice
    for result in world.grouped_allreduce_([*pair, tensor[5:99]], average=False, **forced)[:2]:
        check(maker, result, total, FLOAT, world.size)
    tensor = maker.device(parts[world.rank])
    for handle in [
        world.broadcast_async_(part, world.size - 1, name=f"tied {k}", **forced)
        for k, part in enumerate((tensor, tensor[3:]))
    ]:
        handle.wait()
    np.testing.assert_array_equal(maker.host(tensor), parts[-1])
    if world.size == 1:
        return
    if world.rank > 0:
        world.barrier()  # until then rank 0 is alone with the first one, which cannot be complete
    first = world.allreduce_async_(other, average=False, name="first", **forced)
    second = other[7:] if world.rank == 0 else maker.device(parts[world.rank][7:])
    try:
        world.allreduce_async_(second, name="second", **forced).wait()
    except (InvalidArgumentError, MismatchError) as error:
        assert isinstance(error, InvalidArgumentError) is (world.rank == 0) and "'first'" in str(error), str(error)
    else:
        raise AssertionError("the same memory was in flight twice")
    if world.rank == 0:
        world.barrier()
    world.synchronize(first)


def compressed(world: World, maker: Maker, forced: Forced) -> None:
    """float32 and float64 travel as halves, and come back as they were, as exact as a half is."""
    for compression, precision in ((Compression.fp16, 1e-3), (Compression.bf16, 8e-3)):
        for dtype in (FLOAT, np.dtype(np.float64)):
            parts = parts_of(world, dtype, 10_007)
            tensor = maker.device(parts[world.rank])
            for result in (
                world.allreduce(tensor, compression=compression, **forced),
                world.grouped_allreduce([tensor, tensor], compression=compression, **forced)[1],
            ):
                values = maker.host(result)
                assert values.dtype == dtype
                np.testing.assert_allclose(
                    values, expected(Op.AVERAGE, parts), rtol=4 * precision, atol=4 * world.size * precision
                )


def adasum(world: World, maker: Maker, forced: Forced) -> None:
    """As the engine has it for host memory."""
    own = sample(FLOAT, 1003, world.rank)
    wanted = world.allreduce(own, op=Op.ADASUM)
    np.testing.assert_allclose(
        maker.host(world.allreduce(maker.device(own), op=Op.ADASUM)), wanted, rtol=1e-5, atol=1e-5
    )


def process_sets(world: World, maker: Maker, forced: Forced) -> None:
    """Two halves at once, each at its own pace, and everybody's operation in flight meanwhile."""
    if world.size == 1:
        return
    halves = tuple(range(world.size // 2)), tuple(range(world.size // 2, world.size))
    sets = [world.add_process_set(ranks) for ranks in halves]
    mine = 0 if sets[0] is not None else 1
    own, ranks = sets[mine], halves[mine]
    assert own is not None
    parts = parts_of(world, FLOAT, 3003)
    everybody = world.allreduce_async(maker.device(parts[world.rank]), average=False, name="tensor", **forced)
    for step in range(2 + mine):
        values = [sample(FLOAT, 501, rank, step) for rank in range(world.size)]
        result = own.allreduce(maker.device(values[world.rank]), average=False, **forced)
        check(maker, result, expected(Op.SUM, [values[rank] for rank in ranks]), FLOAT, world.size)
    check(maker, world.synchronize(everybody), expected(Op.SUM, parts), FLOAT, world.size)
    for members, child in zip(halves, sets, strict=True):
        world.remove_process_set(members, child)


def results_are_independent(world: World, maker: Maker, forced: Forced) -> None:
    """A result stays what it is while later calls use the memory of dropped ones."""
    total = sum(range(world.size))
    kept = [
        world.allreduce(maker.device(np.full(300_001, float(k + world.rank))), average=False, **forced)
        for k in range(4)
    ]
    for _ in range(5):
        world.allreduce(maker.device(np.full(300_001, -1.0)), **forced)
    for k, result in enumerate(kept):
        np.testing.assert_array_equal(maker.host(result), float(k * world.size + total))


def many_calls_in_a_row(world: World, maker: Maker, forced: Forced) -> None:
    """The tensor is summed again and again without a look at it: every call sees the one before."""
    tensor = maker.device(np.full(1003, float(world.rank + 1)))
    for _ in range(100):
        world.allreduce_(tensor, **forced)
    np.testing.assert_allclose(maker.host(tensor), (world.size + 1) / 2)


def persistent(world: World, maker: Maker, forced: Forced) -> None:
    """Every start is the ordinary operation, under the persistent one's number; one after the other and overlapping."""
    parts = parts_of(world, FLOAT, 1003)
    total, others = expected(Op.SUM, parts), [sample(FLOAT, 70_001, rank) for rank in range(world.size)]
    tensor, group = maker.device(parts[world.rank]), [maker.device(each[world.rank]) for each in (parts, others)]
    alone = world.allreduce_init(tensor, average=False, **forced)
    together = world.grouped_allreduce_init(group, name="group", **forced)
    gathered = world.allgather_init(group[0], transport=forced.get("transport"))
    for step in range(3):
        together.start()
        if step % 2:
            alone.start()
            result = alone.wait()
        else:
            result = alone()
        assert result is tensor
        check(maker, tensor, total * world.size**step, FLOAT, world.size)
        for each, of_ranks in zip(together.wait(), (parts, others), strict=True):
            check(maker, each, expected(Op.AVERAGE, of_ranks), FLOAT, world.size)
        check(maker, gathered(), np.tile(expected(Op.AVERAGE, parts), world.size), FLOAT, world.size)
    if world.size > 1:
        second = world.allreduce_init(maker.device(parts[world.rank]), average=False, **forced)
        try:
            second() if world.rank else alone()
        except MismatchError as error:
            assert "persistent" in str(error), str(error)
        else:
            raise AssertionError("ranks started different operations, and nobody was told")
    for operation in (alone, together, gathered):
        operation.free()


def mistakes(world: World, maker: Maker, forced: Forced) -> None:
    """Ranks that disagree are all told, nothing is touched, and the next call works."""
    if world.size == 1:
        return
    odd = world.rank == world.size - 1
    tensor = maker.device(np.full(100, float(world.rank), FLOAT))
    disagreements: list[tuple[Callable[[], Any], str]] = [
        (lambda: world.allreduce_(tensor[:50] if odd else tensor, **forced), "shape"),
        (lambda: world.allreduce_(tensor, op=Op.MAX if odd else Op.SUM, **forced), "op"),
        (lambda: world.broadcast_(tensor, 1 if odd else 0, **forced), "root"),
    ]
    for call, what in disagreements:
        try:
            call()
        except MismatchError as error:
            assert what in str(error), str(error)
        else:
            raise AssertionError(f"ranks disagreed on the {what}, and nobody was told")
        np.testing.assert_array_equal(maker.host(tensor), float(world.rank))
        check(maker, world.allreduce(tensor, **forced), np.full(100, (world.size - 1) / 2), FLOAT, world.size)


def joining(world: World, maker: Maker, forced: Forced) -> None:
    """Rank 0 has no more data: it is as if it gave neutral elements; an average still divides by all. Then all go
    on."""
    if world.size > 1 and world.rank > 0:
        for op in (Op.SUM, Op.AVERAGE, Op.MIN, Op.PRODUCT):
            parts = [sample(FLOAT, 701, rank) for rank in range(1, world.size)]
            wanted = expected(Op.SUM, parts) / world.size if op is Op.AVERAGE else expected(op, parts)
            check(
                maker, world.allreduce(maker.device(parts[world.rank - 1]), op=op, **forced), wanted, FLOAT, world.size
            )
    world.join()
    parts = parts_of(world, FLOAT, 33)
    check(
        maker,
        world.allreduce(maker.device(parts[world.rank]), **forced),
        expected(Op.AVERAGE, parts),
        FLOAT,
        world.size,
    )


QUICK: list[Scenario] = [every_size, odd_addresses_and_layouts, broadcasts, allgathers, fused_buckets, asynchronous]
"""What touches memory in every way there is, for tools that slow everything down."""

SCENARIOS: list[Scenario] = [
    *QUICK,
    every_dtype_and_operation,
    every_algorithm,
    reducescatters,
    alltoalls,
    scale_factors,
    compressed,
    adasum,
    process_sets,
    shared_memory,
    results_are_independent,
    many_calls_in_a_row,
    mistakes,
    persistent,
    joining,
]
