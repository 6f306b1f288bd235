"""What every world must do, whatever its ranks are: run by threads in one process and by processes under mpirun.

A scenario is a function of a world that asserts by itself. Every rank can compute every rank's input, so each checks
its own result against NumPy; inputs differ from rank to rank, so that a contribution lost here and doubled there cannot
cancel out.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from collectives.base.errors import (
    CollectivesError,
    InvalidArgumentError,
    MismatchError,
    OperationError,
    TransportError,
)
from collectives.base.reduce_op import Op
from collectives.schedules.registry import on_host as algorithms
from collectives.worlds.world import World

DTYPES = [
    np.dtype(t)
    for t in (
        np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64,
        np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex64, np.complex128,
    )
]  # fmt: skip
COUNTS = (0, 1, 2, 63, 64, 1000, 10_007, 200_003, 1_500_001)
"""Elements that cross every threshold of the planner when they are float32."""


def sample(dtype: np.dtype[Any], shape: int | tuple[int, ...], rank: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Rank ``rank``'s numbers, in memory of their own: small enough for products and halves, never zero."""
    return _drawn(dtype, shape, rank, seed).copy()


@functools.lru_cache(maxsize=32)
def _drawn(dtype: np.dtype[Any], shape: int | tuple[int, ...], rank: int, seed: int) -> np.ndarray[Any, Any]:
    """Every rank needs every rank's numbers, again for each algorithm: to draw them took most of some scenarios."""
    generator = np.random.default_rng([rank, seed])
    if dtype.kind == "b":
        return generator.random(shape) < 0.7
    if dtype.kind in "iu":
        return generator.integers(1, 120, shape).astype(dtype)
    values = generator.uniform(0.5, 2.0, shape) * generator.choice([-1, 1], shape)
    if dtype.kind == "c":
        return (values + 1j * generator.uniform(0.5, 2.0, shape)).astype(dtype)
    return values.astype(dtype)


def expected(op: Op, parts: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """What NumPy makes of all ranks' numbers, halves in float64."""
    dtype = parts[0].dtype
    size = len(parts)
    if dtype.kind == "b":
        function = np.logical_or if op in (Op.SUM, Op.MAX, Op.BOR) else np.logical_and
        function = np.logical_xor if op is Op.BXOR else function
        return functools.reduce(function, parts)
    if dtype.kind in "iu":
        functions = {
            Op.SUM: np.add,
            Op.AVERAGE: np.add,
            Op.MIN: np.minimum,
            Op.MAX: np.maximum,
            Op.PRODUCT: np.multiply,
            Op.BAND: np.bitwise_and,
            Op.BOR: np.bitwise_or,
            Op.BXOR: np.bitwise_xor,
        }
        total = functools.reduce(functions[op], parts)
        return (np.trunc(total.astype(np.float64) / size)).astype(dtype) if op is Op.AVERAGE else total
    wide = [part.astype(np.complex128 if dtype.kind == "c" else np.float64) for part in parts]
    if op is Op.AVERAGE:
        return sum(wide[1:], wide[0]) / size
    functions = {Op.SUM: np.add, Op.MIN: np.minimum, Op.MAX: np.maximum, Op.PRODUCT: np.multiply}
    return functools.reduce(functions[op], wide)


def assert_close(result: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any], size: int = 4) -> None:
    dtype = result.dtype
    if dtype.kind in "biu":
        np.testing.assert_array_equal(result, wanted)
        return
    epsilon = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1.2e-7, "complex64": 1.2e-7}.get(dtype.name, 2.3e-16)
    wide = result.astype(np.complex128 if dtype.kind == "c" else np.float64)
    tolerance = 4 * size * epsilon
    # NumPy's own comparison, which shows the differences, takes several times as long.
    if np.shape(wanted) != wide.shape or not (np.abs(wide - wanted) <= tolerance + tolerance * np.abs(wanted)).all():
        np.testing.assert_allclose(wide, wanted, rtol=tolerance, atol=tolerance)


def ops_for(dtype: np.dtype[Any]) -> Iterator[Op]:
    for op in Op:
        needs_bits = op in (Op.BAND, Op.BOR, Op.BXOR)
        needs_order = op in (Op.MIN, Op.MAX)
        if op is not Op.ADASUM and (dtype.kind in "biu" or not needs_bits) and (dtype.kind != "c" or not needs_order):
            yield op


def choices(world: World, collective: str) -> Iterator[tuple[str, str]]:
    """Every algorithm over every transport that serves here; auto first."""
    yield "auto", "auto"
    for algorithm in algorithms(collective):
        for transport in ("window", "direct-read", "mpi"):
            try:
                native = hasattr(world._group.messages, "native_allreduce")
                world.planner.choose(collective, 4096, native=native, algorithm=algorithm, transport=transport)
            except (TransportError, InvalidArgumentError):
                continue
            yield algorithm, transport


def every_dtype_and_operation(world: World) -> None:
    for dtype in DTYPES:
        for count in (1, 1000):
            parts = [sample(dtype, count, rank) for rank in range(world.size)]
            own = parts[world.rank].copy()
            for op in ops_for(dtype):
                wanted = expected(op, parts)
                result = world.allreduce(own, op=op)
                assert result.dtype == dtype and result.shape == (count,)
                assert_close(result, wanted, world.size)
                np.testing.assert_array_equal(own, parts[world.rank])
                mine = own.copy()
                assert world.allreduce_(mine, op=op) is mine
                # To the bit, but for products of complex numbers, whose last bit depends on where NumPy's loop finds
                # them.
                if dtype.kind == "c" and op is Op.PRODUCT:
                    assert_close(mine, wanted, world.size)
                else:
                    np.testing.assert_array_equal(mine, result)


def every_algorithm_and_size(world: World) -> None:
    for count in COUNTS if world.size <= 4 else COUNTS[:-1]:
        parts = [sample(np.dtype(np.float32), count, rank, count) for rank in range(world.size)]
        average, total = expected(Op.AVERAGE, parts), expected(Op.SUM, parts)
        for algorithm, transport in choices(world, "allreduce"):
            result = world.allreduce(parts[world.rank], algorithm=algorithm, transport=transport)
            assert_close(result, average, world.size)
            mine = parts[world.rank].copy()
            world.allreduce_(mine, average=False, algorithm=algorithm, transport=transport)
            assert_close(mine, total, world.size)
            if count < 10_000:
                results = world.allgather_object(result.tobytes())
                assert len(set(results)) == 1, f"{algorithm} over {transport}: the ranks' results differ in bits"


def every_algorithm_with_halves_and_product(world: World) -> None:
    for dtype in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.int64), np.dtype(np.complex128)):
        parts = [sample(dtype, 3001, rank) for rank in range(world.size)]
        for op in (Op.PRODUCT, Op.AVERAGE):
            wanted = expected(op, parts)
            # What "reproducible" refuses: `tests/threads/test_reproducible.py`.
            without = {"native", *(("reproducible",) if dtype.kind == "c" and op is Op.PRODUCT else ())}
            for algorithm, transport in choices(world, "allreduce"):
                if algorithm not in without:
                    result = world.allreduce(parts[world.rank], op=op, algorithm=algorithm, transport=transport)
                    assert_close(result, wanted, world.size)


def broadcasts(world: World) -> None:
    for count in (0, 1, 1000, 300_001 if world.size <= 4 else 40_001):
        parts = [sample(np.dtype(np.float64), count, rank) for rank in range(world.size)]
        for algorithm, transport in choices(world, "broadcast"):
            for root in range(world.size):
                mine = parts[world.rank].copy()
                result = world.broadcast(mine, root, algorithm=algorithm, transport=transport)
                np.testing.assert_array_equal(result, parts[root])
                np.testing.assert_array_equal(mine, parts[world.rank])
                assert world.broadcast_(mine, root, algorithm=algorithm, transport=transport) is mine
                np.testing.assert_array_equal(mine, result)


def allgathers(world: World) -> None:
    for rows in (lambda r: 3, lambda r: r, lambda r: (r * 7) % 4 * 20_000, lambda r: 0 if r else 5, lambda r: 0):
        for dtype in (np.dtype(np.int32), np.dtype(np.float16)):
            parts = [sample(dtype, (rows(rank), 3), rank) for rank in range(world.size)]
            wanted = np.concatenate(parts)
            for algorithm, transport in choices(world, "allgather"):
                result = world.allgather(parts[world.rank], algorithm=algorithm, transport=transport)
                assert result.dtype == dtype
                np.testing.assert_array_equal(result, wanted)


def reducescatters(world: World) -> None:
    for rows in (0, 1, world.size, 3 * world.size + 1, 40_001):
        parts = [sample(np.dtype(np.float32), (rows, 5), rank) for rank in range(world.size)]
        mine = parts[world.rank].copy()
        share, extra = divmod(rows, world.size)
        first = world.rank * share + min(world.rank, extra)
        for op in (Op.AVERAGE, Op.MAX):
            wanted = expected(op, parts)[first : first + share + (world.rank < extra)]
            for algorithm, transport in choices(world, "reducescatter"):
                result = world.reducescatter(mine, op, algorithm=algorithm, transport=transport)
                assert result.shape == wanted.shape
                assert_close(result, wanted, world.size)
                np.testing.assert_array_equal(mine, parts[world.rank])


def alltoalls(world: World) -> None:
    for algorithm, transport in choices(world, "alltoall"):
        for scale in (1, 9000):
            table = [[(i * 3 + j * 5) % 4 * scale for j in range(world.size)] for i in range(world.size)]
            parts = [sample(np.dtype(np.int16), (sum(table[rank]), 2), rank) for rank in range(world.size)]
            result, received = world.alltoall(
                parts[world.rank], table[world.rank], algorithm=algorithm, transport=transport
            )
            starts = [sum(table[rank][: world.rank]) for rank in range(world.size)]
            wanted = [parts[rank][starts[rank] : starts[rank] + table[rank][world.rank]] for rank in range(world.size)]
            np.testing.assert_array_equal(result, np.concatenate(wanted))
            assert list(received) == [table[rank][world.rank] for rank in range(world.size)]
            even = [sample(np.dtype(np.float64), (2 * world.size,), rank) for rank in range(world.size)]
            result = world.alltoall(even[world.rank], algorithm=algorithm, transport=transport)
            np.testing.assert_array_equal(
                result, np.concatenate([part[2 * world.rank : 2 * world.rank + 2] for part in even])
            )


def layouts(world: World) -> None:
    """0-d, empty, strided, Fortran-ordered, byte-swapped, read-only: all work; in place, all that can be written."""
    total = sum(range(1, world.size + 1))
    base = np.arange(24, dtype=np.float64).reshape(4, 6) * (world.rank + 1)
    for view in (
        base,
        base[::2],
        base[:, 1::2],
        base.T,
        np.asfortranarray(base),
        base.astype(">f8"),
        base[::-1],
        base[:0],
    ):
        wanted = np.asarray(view, np.float64) / (world.rank + 1) * total
        np.testing.assert_allclose(world.allreduce(view, average=False), wanted)
        mine = view.copy(order="K") if view.flags.f_contiguous or view.dtype.byteorder == ">" else view
        keep = view.copy()
        assert world.allreduce_(mine, average=False) is mine
        np.testing.assert_allclose(np.asarray(mine, np.float64), wanted)
        if mine is view:
            view[...] = keep
    frozen = base.copy()
    frozen.flags.writeable = False
    np.testing.assert_allclose(world.allreduce(frozen, average=False), base / (world.rank + 1) * total)
    zero = np.array(float(world.rank + 1))
    assert world.allreduce(zero, average=False) == total and world.allreduce(zero).shape == ()
    assert world.allreduce_(zero, average=False) == total
    scalar = world.allreduce(np.float32(world.rank + 1), average=False)
    assert isinstance(scalar, np.float32) and scalar == total
    assert world.allreduce(world.rank + 1, average=False) == total
    assert isinstance(world.allreduce(float(world.rank)), float)


def scale_factors(world: World) -> None:
    parts = [sample(np.dtype(np.float32), 5000, rank) for rank in range(world.size)]
    result = world.allreduce(parts[world.rank], average=False, prescale_factor=0.5, postscale_factor=3.0)
    assert_close(result, expected(Op.SUM, parts) * 1.5, world.size)
    mine = parts[world.rank].copy()
    world.allreduce_(mine, prescale_factor=2.0)
    assert_close(mine, expected(Op.AVERAGE, parts) * 2.0, world.size)
    scattered = world.reducescatter(parts[world.rank].reshape(-1, 1), Op.SUM, prescale_factor=0.25)
    assert scattered.dtype == np.float32
    factor = np.array(2.0)
    for value in (2.0, 3.0):
        factor[()] = value
        scaled = world.allreduce(parts[world.rank], average=False, postscale_factor=factor)
        assert_close(scaled, expected(Op.SUM, parts) * value, world.size)
    negative = np.full(3, -(world.rank + 1) * 10, np.int32)
    total = -10 * sum(range(1, world.size + 1))
    np.testing.assert_array_equal(world.allreduce(negative), int(total / world.size))
    # float16 would overflow as a sum, and must not as an average with a prescale
    large = np.full(64, 40_000.0, np.float16)
    result = world.allreduce(large, average=False, prescale_factor=1.0 / world.size / 2)
    np.testing.assert_allclose(result.astype(np.float64), 20_000, rtol=2e-3)


def objects(world: World) -> None:
    value = {"rank": world.rank, "data": list(range(world.rank * 1000))}
    everything = world.allgather_object(value)
    assert [entry["rank"] for entry in everything] == list(range(world.size))
    assert len(everything[-1]["data"]) == (world.size - 1) * 1000
    for root in range(world.size):
        assert world.broadcast_object(value if world.rank == root else None, root)["rank"] == root
    assert [function() for function in world.allgather_object(lambda: value["rank"])] == list(range(world.size))
    world.barrier()


def mistakes(world: World) -> None:
    """Every kind of disagreement: an error on every rank that shows both sides; nothing touched; the next call
    works."""
    if world.size == 1:
        return
    odd = world.rank == world.size - 1
    data = np.full(100, float(world.rank))
    disagreements: list[tuple[Callable[[], Any], str]] = [
        (lambda: world.allreduce_(data[:50] if odd else data), "shape"),
        (lambda: world.allreduce_(data.astype(np.float32) if odd else data), "dtype"),
        (lambda: world.allreduce_(data, op=Op.MAX if odd else Op.SUM), "op"),
        (lambda: world.broadcast_(data, 1 if odd else 0), "root"),
        (lambda: world.allgather(data) if odd else world.allreduce_(data), "collective"),
        (lambda: world.barrier() if odd else world.allreduce_(data), "collective"),
        (lambda: world.allreduce_(data, name="b" if odd else "a"), "name"),
        (lambda: world.allreduce_(data, postscale_factor=2.0 if odd else 1.0), "postscale"),
        (lambda: world.allgather(data.reshape(10, 10) if odd else data), "shape"),
        (
            lambda: (
                world.alltoall(data.reshape(-1, 1), [100] + [0] * (world.size - 1))
                if odd
                else world.reducescatter(data)
            ),
            "collective",
        ),
        (lambda: world.allreduce_(data, algorithm="ring" if odd else "direct"), "algorithm"),
    ]
    for call, what in disagreements:
        with pytest.raises(MismatchError) as caught:
            call()
        message = str(caught.value)
        others = f"rank{'s' * (world.size > 2)} 0"
        assert what in message and f"rank {world.size - 1}" in message and others in message, message
        np.testing.assert_array_equal(data, float(world.rank))
        assert_close(world.allreduce(data), np.full(100, (world.size - 1) / 2))


def refusals(world: World) -> None:
    """Arguments that no rank could accept, on all ranks and on one: an exception on every rank, and the next call
    works."""
    data = np.ones((4, world.size), np.float32)
    frozen = data.copy()
    frozen.flags.writeable = False
    refused: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: world.allreduce(np.array([object()])), TypeError, "object"),
        (lambda: world.allreduce(np.array(["text"])), TypeError, "dtype"),
        (lambda: world.allreduce("text"), TypeError, "str"),
        (lambda: world.allreduce([1.0, 2.0]), TypeError, "list"),
        (lambda: world.allreduce(None), TypeError, "NoneType"),
        (lambda: world.allreduce_(frozen), ValueError, "read-only"),
        (lambda: world.broadcast_(frozen, 0), ValueError, "read-only"),
        (lambda: world.allgather(np.float32(1)), ValueError, "0-d"),
        (lambda: world.alltoall(np.array(1.0)), ValueError, "0-d"),
        (lambda: world.reducescatter(np.array(1.0)), ValueError, "0-d"),
        (lambda: world.reducescatter(np.array(1.0)), OperationError, "0-d"),
        (lambda: world.reducescatter(data, op=Op.ADASUM), OperationError, "Adasum"),
        (lambda: world.alltoall(data, [4.0] + [0.0] * (world.size - 1)), ValueError, "splits"),
        (lambda: world.broadcast(data, world.size), ValueError, "root_rank"),
        (lambda: world.broadcast(data, -1), ValueError, "root_rank"),
        (lambda: world.broadcast(data, "0"), TypeError, "root_rank"),
        (lambda: world.alltoall(data, [4]) if world.size > 1 else world.alltoall(data, [4, 1]), ValueError, "splits"),
        (lambda: world.alltoall(data, [5] + [0] * (world.size - 1)), ValueError, "splits"),
        (lambda: world.alltoall(data, [5, -1] if world.size == 2 else [-1] * world.size), ValueError, "splits"),
        (lambda: world.alltoall(data, ["a"] * world.size), TypeError, "splits"),
        (lambda: world.allreduce(data, op="sum"), TypeError, "op"),
        (lambda: world.allreduce(data, Op.SUM), TypeError, "op=Sum"),
        (lambda: world.allreduce(data, op=True), TypeError, "op"),
        (lambda: world.broadcast(data, True), TypeError, "root_rank"),
        (lambda: world.allreduce(data, prescale_factor=10**400), TypeError, "prescale_factor"),
        (lambda: world.allreduce(data.astype(np.complex64), op=Op.MAX), TypeError, "complex"),
        (lambda: world.allreduce(data, name=3), TypeError, "name"),
        (lambda: world.allreduce(data, prescale_factor="x"), TypeError, "prescale_factor"),
        (lambda: world.allreduce(data, algorithm="quick"), ValueError, "algorithm"),
        (lambda: world.allreduce(data, transport="pigeon"), ValueError, "transport"),
        (lambda: world.allgather_object(threading.Lock()), TypeError, "object"),
    ]
    for call, kind, text in refused:
        with pytest.raises(kind) as caught:
            call()
        assert isinstance(caught.value, CollectivesError) and text in str(caught.value), str(caught.value)
        if world.size > 1:
            with pytest.raises(CollectivesError) as caught:
                call() if world.rank == 0 else world.allreduce(data)
            assert isinstance(caught.value, kind if world.rank == 0 else MismatchError)
            assert world.rank == 0 or "refused its arguments" in str(caught.value), str(caught.value)
        assert_close(world.allreduce(data * (world.rank + 1), average=False), data * sum(range(1, world.size + 1)))


def results_are_independent(world: World) -> None:
    """A result stays what it is while later calls reuse the memory of dropped ones."""
    kept = [world.allreduce(np.full(300_000, float(k + world.rank)), average=False) for k in range(4)]
    for _ in range(5):
        world.allreduce(np.full(300_000, -1.0))
    for k, result in enumerate(kept):
        np.testing.assert_array_equal(result, sum(k + rank for rank in range(world.size)))


def groups_of_large_and_tiny_tensors(world: World) -> None:
    sizes = (20_000, 3, 0, 150_000, 4096, 100, 5000)
    total = sum(rank + 1 for rank in range(world.size))
    for name, scale in (("plain", 1), ("scaled", 2)):
        tensors = [np.arange(size, dtype=np.float64) * (world.rank + 1) for size in sizes]
        for _ in range(2):
            results = world.grouped_allreduce(tensors, op=Op.SUM, prescale_factor=scale, name=name)
            for size, result in zip(sizes, results, strict=True):
                np.testing.assert_array_equal(result, np.arange(size) * float(total * scale))
        world.grouped_allreduce_(tensors, op=Op.SUM, prescale_factor=scale, name=f"{name} in place")
        for tensor, result in zip(tensors, results, strict=True):
            np.testing.assert_array_equal(tensor, result)


def a_set_of_one_rank_takes_every_transport(world: World) -> None:
    child = world.add_process_set([0])
    if child is not None:
        own = sample(np.dtype(np.float32), 7, world.rank)
        for transport in ("window", "direct-read", "mpi", "auto"):
            np.testing.assert_array_equal(child.allreduce(own, transport=transport), own)
            np.testing.assert_array_equal(child.allgather_async(own, transport=transport).wait(), own)
            np.testing.assert_array_equal(child.broadcast(own, 0, transport=transport), own)
    world.remove_process_set([0], child)


def parts_of_several_mebibytes(world: World) -> None:
    """The mean of 8 parts, of an odd number of elements each, has the bits of the fixed tree on any number of ranks, by
    every way that this world has."""
    base = sample(np.dtype(np.float32), 1_310_721, 0)
    parts = np.stack([np.roll(base, 12_347 * number) * np.float32(1.5) ** number for number in range(8)])
    tree = parts
    while len(tree) > 1:
        tree = tree[::2] + tree[1::2]
    for count in {1, 2, 4, world.size}:
        if count <= world.size:
            ranks = range(world.size)[-count:]
            members = world.add_process_set(ranks)
            if members is not None:
                share = np.array_split(parts, count)[members.rank]
                for algorithm, transport in choices(members, "allreduce"):
                    if algorithm == "reproducible":
                        mean = members.allreduce(share, parts=8, algorithm=algorithm, transport=transport)
                        assert mean.tobytes() == (tree[0] / 8).tobytes(), (count, transport)
            world.remove_process_set(ranks, members)


def many_calls_in_a_row(world: World) -> None:
    """Slots, call numbers and tokens go round many times."""
    small, middle = np.zeros(3), np.zeros(40_000)
    for call in range(300):
        small[:] = call + world.rank
        world.allreduce_(small, average=False)
        assert small[0] == call * world.size + sum(range(world.size))
        if call % 10 == 0:
            middle[:] = call - world.rank
            world.allreduce_(middle, average=False)
            assert middle[-1] == call * world.size - sum(range(world.size))
            assert world.broadcast(np.array([call * (world.rank + 1)]), call % world.size)[0] == call * (
                call % world.size + 1
            )


SCENARIOS: list[Callable[[World], None]] = [
    every_dtype_and_operation,
    every_algorithm_and_size,
    every_algorithm_with_halves_and_product,
    broadcasts,
    allgathers,
    reducescatters,
    alltoalls,
    layouts,
    scale_factors,
    objects,
    mistakes,
    refusals,
    results_are_independent,
    groups_of_large_and_tiny_tensors,
    parts_of_several_mebibytes,
    many_calls_in_a_row,
    a_set_of_one_rank_takes_every_transport,
]
