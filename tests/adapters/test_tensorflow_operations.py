"""The collectives of the TensorFlow interface: eagerly, in functions and in sessions, with TensorFlow's types and
Horovod's habits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from collectives.base.errors import CollectivesError

WAYS = ("eager", "function", "session")
NUMBERS = ("uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
OTHERS = ("bool", "int16", "uint16", "uint32", "uint64", "complex64", "complex128")


def carried_out(way: str, function: Callable[..., Any], *arrays: Any) -> Any:
    """The results of a function of tensors as NumPy arrays, however it is carried out."""
    if way == "session":
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            return session.run(function(*[tf.constant(array) for array in arrays]))
    tensors = [tf.constant(array) for array in arrays]
    results = tf.function(function)(*tensors) if way == "function" else function(*tensors)
    assert all(isinstance(result, tf.Tensor) for result in tf.nest.flatten(results))
    return tf.nest.map_structure(lambda result: result.numpy(), results)


def of_rank(hvd: Any, *shape: int, dtype: str = "float32") -> np.ndarray[Any, Any]:
    """Distinct on every rank and in every place, and exact in every dtype."""
    base = np.arange(np.prod(shape, dtype=int)).reshape(shape) + 1
    return np.asarray(tf.cast(base * (hvd.rank() + 1), dtype))


def ranks_sum(hvd: Any) -> int:
    return sum(rank + 1 for rank in range(hvd.size()))


def same(found: Any, expected: Any, dtype: Any = None) -> None:
    expected = np.asarray(expected)
    assert dtype is None or found.dtype == tf.as_dtype(dtype).as_numpy_dtype
    assert found.shape == expected.shape and np.array_equal(found, expected.astype(found.dtype)), (found, expected)


@pytest.mark.parametrize("way", WAYS)
def test_every_dtype(hvd: Any, way: str) -> None:
    given = [of_rank(hvd, 2, 3, dtype=dtype) for dtype in NUMBERS] + [of_rank(hvd, 2, dtype=dtype) for dtype in OTHERS]

    def function(*tensors: Any) -> Any:
        reduced = hvd.grouped_allreduce(tensors[: len(NUMBERS)], op=hvd.Sum, name="dtypes")
        return reduced, [hvd.allgather(x, name=f"dtypes.{i}") for i, x in enumerate(tensors[len(NUMBERS) :])]

    reduced, gathered = carried_out(way, function, *given)
    for dtype, found in zip(NUMBERS, reduced, strict=True):
        same(found, np.arange(1, 7).reshape(2, 3) * ranks_sum(hvd), dtype)
    for dtype, found in zip(OTHERS, gathered, strict=True):
        expected = np.concatenate([np.arange(1, 3) * (rank + 1) for rank in range(hvd.size())])
        same(found, expected.astype(tf.as_dtype(dtype).as_numpy_dtype), dtype)


@pytest.mark.parametrize("way", WAYS)
def test_reductions(hvd: Any, way: str) -> None:
    x = of_rank(hvd, 3)
    base, size, total = np.arange(1, 4), hvd.size(), ranks_sum(hvd)
    product = np.prod([base * (rank + 1) for rank in range(size)], 0)

    def function(x: Any) -> Any:
        return [
            hvd.allreduce(x, name="a"),
            hvd.allreduce(x, True, name="b"),
            hvd.allreduce(x, average=False, name="c"),
            hvd.allreduce(x, op=hvd.Min, name="d"),
            hvd.allreduce(x, op=hvd.Max, name="e"),
            hvd.allreduce(x, op=hvd.Product, name="f"),
            hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0, name="g"),
            hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16, name="h"),
            hvd.allreduce(x, op=hvd.Adasum, name="i"),
        ]

    found = carried_out(way, function, x)
    expected = [base * total / size] * 2 + [base * total, base, base * size, product, base * total * 2, base * total]
    for each, wanted in zip(found, expected, strict=False):
        np.testing.assert_allclose(each, wanted, rtol=1e-6)
    # Parallel vectors a and b: (1 - ab/2aa) a + (1 - ab/2bb) b is their mean.
    assert size > 2 or np.allclose(found[-1], base * total / size)


@pytest.mark.parametrize("way", WAYS)
def test_the_other_collectives(hvd: Any, way: str) -> None:
    rank, size = hvd.rank(), hvd.size()
    rows = np.full((rank + 1, 2), rank, np.float32)
    square = of_rank(hvd, size, 2)
    uneven = of_rank(hvd, size + 1)
    splits = np.arange(size, dtype=np.int32)
    parts = np.repeat(np.arange(size), splits).astype(np.float32) + 100 * rank

    def function(rows: Any, square: Any, uneven: Any, parts: Any, splits: Any) -> Any:
        return [
            hvd.allgather(rows),
            hvd.grouped_allgather([rows, uneven[:rank]]),
            hvd.broadcast(square, size - 1),
            hvd.alltoall(square),
            hvd.alltoall(parts, splits),
            hvd.reducescatter(uneven, op=hvd.Sum),
            hvd.grouped_reducescatter([square, uneven], postscale_factor=2.0),
            hvd.reducescatter(uneven, compression=hvd.Compression.fp16),
        ]

    found = carried_out(way, function, rows, square, uneven, parts, splits)
    gathered, grouped, sent, dealt, (received, counts), share, shares, halved = found
    same(gathered, np.concatenate([np.full((r + 1, 2), r) for r in range(size)]))
    same(grouped[0], gathered)
    same(grouped[1], np.concatenate([(np.arange(r) + 1) * (r + 1) for r in range(size)]))
    base = np.arange(2 * size).reshape(size, 2) + 1
    same(sent, base * size)
    same(dealt, np.stack([base[rank] * (r + 1) for r in range(size)]))
    same(received, np.concatenate([np.full(rank, rank + 100 * r) for r in range(size)]))
    same(counts, [rank] * size, "int32")
    mine = np.array_split(np.arange(size + 1) + 1, size)[rank]
    same(share, mine * ranks_sum(hvd))
    np.testing.assert_allclose(shares[0], base[rank : rank + 1] * ranks_sum(hvd) / size * 2)
    np.testing.assert_allclose(shares[1], mine * ranks_sum(hvd) / size * 2)
    np.testing.assert_allclose(halved, mine * ranks_sum(hvd) / size)


@pytest.mark.parametrize("way", WAYS)
def test_groups_of_many_sizes(hvd: Any, way: str) -> None:
    """Small ones are copied together and large ones are not; each dtype travels by itself."""
    shapes: list[tuple[int, ...]] = [(), (3,), (0,), (40, 33), (2, 0, 3), (9001,), (20011,), (1,), (300_000,)]
    given = [of_rank(hvd, *shape) for shape in shapes] + [
        of_rank(hvd, 5, dtype="int64"),
        of_rank(hvd, 7001, dtype="int64"),
    ]
    found = carried_out(way, lambda *tensors: hvd.grouped_allreduce(tensors, op=hvd.Sum, name="sizes"), *given)
    for x, y in zip(given, found, strict=True):
        same(y, x.astype(np.float64) / (hvd.rank() + 1) * ranks_sum(hvd), x.dtype)
    assert hvd.grouped_allreduce([]) == [] == hvd.grouped_allgather([]) == hvd.grouped_reducescatter([])


def test_shapes_that_are_known_only_when_the_function_runs(hvd: Any) -> None:
    unknown = [tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec(None, tf.float32), tf.TensorSpec([2], tf.float32)]

    @tf.function(input_signature=unknown)
    def function(x: Any, y: Any, z: Any) -> Any:
        sums = hvd.grouped_allreduce([x, y, z], op=hvd.Sum)
        assert [each.shape.as_list() if each.shape.rank is not None else None for each in sums] == [
            [None, 3],
            None,
            [2],
        ]
        gathered = hvd.allgather(x)
        assert gathered.shape.as_list() == [None, 3]
        return sums, gathered, hvd.broadcast(y, 0), hvd.reducescatter(x, op=hvd.Sum)

    for rows in (5, 2, 5000):
        x, y, z = of_rank(hvd, rows, 3), of_rank(hvd, 1, rows, 1), of_rank(hvd, 2)
        sums, gathered, sent, share = function(x, y, z)
        for given, found in zip((x, y, z), sums, strict=True):
            same(found.numpy(), given / (hvd.rank() + 1) * ranks_sum(hvd))
        same(gathered.numpy(), np.concatenate([x / (hvd.rank() + 1) * (rank + 1) for rank in range(hvd.size())]))
        same(sent.numpy(), y / (hvd.rank() + 1))
        same(share.numpy(), np.array_split(x / (hvd.rank() + 1) * ranks_sum(hvd), hvd.size())[hvd.rank()])


def test_anything_that_becomes_a_tensor(hvd: Any) -> None:
    rank, total = hvd.rank(), sum(range(hvd.size()))
    variable = tf.Variable([float(rank), 1.0])
    found = hvd.allreduce(variable, op=hvd.Sum)
    assert (
        isinstance(found, tf.Tensor)
        and found.numpy().tolist() == [total, hvd.size()]
        and variable.numpy().tolist() == [rank, 1.0]
    )
    number = hvd.allreduce(float(rank), op=hvd.Sum)
    assert number.dtype == tf.float32 and number.shape == () and float(number) == total
    array = hvd.allreduce(np.array([rank, 2], np.int64)[::-1], op=hvd.Sum)
    assert array.dtype == tf.int64 and array.numpy().tolist() == [2 * hvd.size(), total]
    assert tf.function(lambda: hvd.allreduce(variable, op=hvd.Max))().numpy().tolist() == [hvd.size() - 1, 1.0]
    big = tf.ones((600, 1000)) * (rank + 1)
    found = hvd.allreduce(big, op=hvd.Sum)  # its memory is the engine's
    found += 1
    assert np.all(found.numpy() == ranks_sum(hvd) + 1) and np.all(big.numpy() == rank + 1)


def test_results_do_not_share_memory_with_arguments(hvd: Any) -> None:
    x = tf.Variable(tf.ones([100_000]) * (hvd.rank() + 1))
    y = hvd.allreduce(x.read_value(), op=hvd.Sum)
    z = hvd.broadcast(x.read_value(), 0)
    x.assign_add(tf.ones([100_000]))
    assert np.all(y.numpy() == ranks_sum(hvd)) and np.all(z.numpy() == 1)


def test_compressors(hvd: Any) -> None:

    class Doubled:
        @staticmethod
        def compress(tensor: Any) -> Any:
            return tf.cast(tensor * 2, tf.float64), tensor.dtype

        @staticmethod
        def decompress(tensor: Any, context: Any) -> Any:
            return tf.cast(tensor, context) / 2

    x = of_rank(hvd, 50)
    for way in WAYS:
        for compression in (hvd.Compression.bf16, hvd.Compression.fp16, Doubled):
            found = carried_out(
                way, lambda x, how=compression: hvd.grouped_allreduce([x, x[:3]], compression=how, op=hvd.Max), x
            )
            same(found[0], (np.arange(50) + 1) * hvd.size(), "float32")
            same(found[1], (np.arange(3) + 1) * hvd.size(), "float32")


def test_process_sets(hvd: Any) -> None:
    last = hvd.add_process_set([hvd.size() - 1])
    everyone = hvd.add_process_set(range(hvd.size()))
    mine = [everyone, last] if last.included() else [everyone]
    for way in WAYS:
        found = carried_out(
            way,
            lambda x: [hvd.allreduce(x, op=hvd.Sum, process_set=each, name="sets") for each in mine],
            of_rank(hvd, 2),
        )
        same(found[0], np.arange(1, 3) * ranks_sum(hvd))
        if last.included():
            same(found[1], np.arange(1, 3) * hvd.size())
    if not last.included():
        with pytest.raises(ValueError, match="not in"):
            hvd.allreduce(tf.ones(2), process_set=last)
    included = [hvd.process_set_included_op(each.process_set_id).numpy() for each in (last, everyone)]
    assert included == [int(last.included()), 1] and hvd.process_set_included_op(99).numpy() == -3
    assert hvd.size_op(last.process_set_id).numpy() == 1
    assert hvd.remove_process_set(last) and hvd.remove_process_set(everyone)


@pytest.mark.parametrize("way", WAYS)
def test_questions(hvd: Any, way: str) -> None:
    questions = hvd.size_op, hvd.rank_op, hvd.local_size_op, hvd.local_rank_op, hvd.process_set_included_op
    found = carried_out(way, lambda: [question() for question in questions])
    assert [int(each) for each in found] == [hvd.size(), hvd.rank(), hvd.local_size(), hvd.local_rank(), 1]
    assert all(each.dtype == np.int32 for each in found)


@pytest.mark.parametrize("way", WAYS)
def test_join_and_barrier(hvd: Any, way: str) -> None:
    x = of_rank(hvd, 40_000)

    def function(x: Any) -> Any:
        # Only the last rank has data.
        reduced = [hvd.grouped_allreduce([x, x[:5], x[:7]], op=hvd.Sum)] if hvd.rank() == hvd.size() - 1 else []
        with tf.control_dependencies(tf.nest.flatten(reduced)):
            return reduced, hvd.join()

    reduced, joined = carried_out(way, function, x)
    assert 0 <= joined < hvd.size() and joined.dtype == np.int32
    for each in reduced:
        same(each[0], x)
        same(each[2], x[:7])
    assert hvd.barrier() is None


def test_a_mistake_on_one_rank_is_an_error_on_all(hvd: Any) -> None:
    last = hvd.rank() == hvd.size() - 1
    x = tf.ones(2)
    mistakes: Sequence[Callable[[bool], Any]] = [
        lambda wrong: hvd.allreduce(x, average=True if wrong else None, op=hvd.Sum),
        lambda wrong: hvd.allreduce(x, op="sum" if wrong else hvd.Sum),
        lambda wrong: hvd.allreduce(tf.constant(["text"]) if wrong else x),
        lambda wrong: hvd.allreduce(object() if wrong else x),
        lambda wrong: hvd.allreduce(x, prescale_factor="half" if wrong else 1.0),
        lambda wrong: hvd.reducescatter(x, postscale_factor=[1] if wrong else 1.0),
        lambda wrong: hvd.broadcast(x, 99 if wrong else 0),
        lambda wrong: hvd.alltoall(tf.ones([hvd.size()]), [99] * hvd.size() if wrong else [1] * hvd.size()),
        lambda wrong: hvd.alltoall(tf.ones([hvd.size()]), ["text"] if wrong else None),
        lambda wrong: hvd.allgather(x[0] if wrong else x),
        lambda wrong: hvd.reducescatter(x, compression=object() if wrong else hvd.Compression.none),
        lambda wrong: hvd.grouped_allreduce(x if wrong else [x]),
    ]
    for mistake in mistakes:
        with pytest.raises((ValueError, TypeError) if last else CollectivesError):
            mistake(last)
        assert hvd.allreduce(1.0, op=hvd.Sum).numpy() == hvd.size()


def test_horovods_habits(hvd: Any) -> None:
    assert (
        hvd.allreduce(tf.ones(2), None, "/cpu:0", "/cpu:0", hvd.Compression.none, hvd.Sum, 1.0, 1.0, "named")
        .numpy()
        .tolist()
        == [hvd.size()] * 2
    )
    assert [hvd.check_num_rank_power_of_2(n) for n in range(5)] == [False, True, True, False, True]
    assert hvd.gpu_available("tensorflow") is bool(tf.config.list_physical_devices("GPU"))
    with pytest.raises(ValueError, match="either average or op"):
        hvd.allreduce(tf.ones(1), average=True, op=hvd.Sum)
    with pytest.raises(TypeError, match="pass op=Sum"):
        hvd.allreduce(tf.ones(1), hvd.Sum)
    assert hvd.allreduce(1.0, op=hvd.Sum).numpy() == hvd.size()
