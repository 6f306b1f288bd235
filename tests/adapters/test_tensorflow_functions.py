"""The same start on every rank, with TensorFlow's variables and Keras's; sparse tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import collectives
from collectives.base.errors import CollectivesError, MismatchError
from collectives.tensorflow import packed_callbacks, sparse_rows

SHAPES: list[tuple[tuple[int, ...], str]] = [
    ((300, 70), "float32"),
    ((), "float32"),
    ((3,), "int64"),
    ((0, 2), "float32"),
    ((40_001,), "float64"),
    ((5,), "bfloat16"),
    ((), "bool"),
    ((4,), "float32"),
]


def of_rank(hvd: Any) -> list[Any]:
    return [
        np.full(shape, hvd.rank() + i + 1).astype(tf.as_dtype(dtype).as_numpy_dtype)
        for i, (shape, dtype) in enumerate(SHAPES)
    ]


def of_root(values: Any, root: int) -> None:
    for i, (value, (shape, dtype)) in enumerate(zip(values, SHAPES, strict=True)):
        kind = tf.as_dtype(dtype).as_numpy_dtype
        assert value.shape == shape and value.dtype == kind
        assert np.all(value == np.full(shape, root + i + 1).astype(kind))


@pytest.mark.parametrize("inplace", (False, True))
def test_broadcast_variables(hvd: Any, inplace: bool) -> None:
    root = hvd.size() - 1
    variables = [tf.Variable(value) for value in of_rank(hvd)]
    assert hvd.broadcast_variables(variables, root, inplace=inplace) is None
    of_root([variable.numpy() for variable in variables], root)
    variables[0].assign_add(tf.ones(SHAPES[0][0]))  # what it was given is its own
    assert np.all(variables[0].numpy() == root + 2) and np.all(variables[3].numpy() == root + 4)

    variables = [tf.Variable(value) for value in of_rank(hvd)]

    @tf.function
    def start(first: bool) -> Any:
        if first:
            hvd.broadcast_variables(variables, root_rank=0, inplace=inplace)
        return variables[1] * 2

    assert float(start(True)) == 4
    of_root([variable.numpy() for variable in variables], 0)
    assert hvd.broadcast_variables([], 0) is None


def test_broadcast_in_place_gives_values_back(hvd: Any) -> None:
    variables = [tf.Variable([float(hvd.rank())]), tf.Variable(hvd.rank())]
    assert [value.numpy().tolist() for value in hvd.broadcast_(variables, hvd.size() - 1)] == [
        [hvd.size() - 1],
        hvd.size() - 1,
    ]
    values = tf.function(lambda: hvd.broadcast_(variables, 0, "named"))()
    assert [value.numpy().tolist() for value in values] == [[hvd.size() - 1], hvd.size() - 1]


@pytest.mark.parametrize("resource", (True, False))
def test_global_variables_of_a_session(hvd: Any, resource: bool) -> None:
    root, values = hvd.size() - 1, of_rank(hvd)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        with tf.compat.v1.variable_scope("", use_resource=resource):
            variables = [tf.compat.v1.get_variable(f"v{i}", initializer=value) for i, value in enumerate(values)]
        started = hvd.broadcast_global_variables(root)
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(started)
        of_root(session.run(variables), root)
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)


def test_variables_that_differ(hvd: Any) -> None:
    last = hvd.rank() == hvd.size() - 1
    mine = [tf.Variable(tf.ones([3])), tf.Variable(tf.ones([2, 3] if last else [6]))]
    with pytest.raises(MismatchError, match=r"variable 1 is not the same on every rank: float32 of shape \(6,\) on"):
        hvd.broadcast_variables(mine, 0)
    with pytest.raises(
        tf.errors.OpError, match=r"MismatchError: rank \d: broadcast_variables: variable 1 is not the same"
    ):
        tf.function(lambda: hvd.broadcast_(mine, 0))()
    with pytest.raises(MismatchError, match="root_rank is not the same"):
        hvd.broadcast_variables(mine[:1], int(last))
    assert all(np.all(variable.numpy() == 1) for variable in mine)
    with pytest.raises(TypeError if last else CollectivesError):
        hvd.broadcast_variables([tf.Variable("text") if last else tf.Variable(1.0)], 0)
    with pytest.raises(ValueError if last else CollectivesError):
        hvd.broadcast_variables([3.0 if last else tf.Variable(1.0)], 0)
    assert hvd.allreduce(1.0, op=hvd.Sum).numpy() == hvd.size()


def test_objects(hvd: Any) -> None:
    root = hvd.size() - 1
    mine = {"rank": hvd.rank(), "tensor": tf.ones(2) * hvd.rank()}
    found = hvd.broadcast_object(mine, root, name="object")
    assert found["rank"] == root and found["tensor"].numpy().tolist() == [root] * 2
    assert hvd.broadcast_object_fn(root)(hvd.rank()) == root
    assert hvd.allgather_object(("rank", hvd.rank())) == [("rank", rank) for rank in range(hvd.size())]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        assert hvd.broadcast_object(hvd.rank(), root, session) == root
        assert hvd.broadcast_object_fn(root, session=session)(hvd.rank()) == root
        assert hvd.allgather_object(hvd.rank(), session) == list(range(hvd.size()))


# ---- sparse


def rows_of(hvd: Any, overlap: bool, indices: str = "int64", values: str = "float32") -> Any:
    """With an index several times, out of order; few or nearly all of the ranks' rows are the same."""
    own = [7, 0, 7, 3] if overlap else [7, 0, 7, 20 + hvd.rank(), 9]
    numbers = (np.arange(len(own) * 2).reshape(-1, 2) + 1) * (hvd.rank() + 1)
    return tf.IndexedSlices(tf.cast(numbers, values), tf.cast(own, indices), dense_shape=tf.constant([40, 2], indices))


@pytest.mark.parametrize("way", ("eager", "function", "session"))
@pytest.mark.parametrize("overlap", (False, True))
def test_sparse_rows(hvd: Any, way: str, overlap: bool) -> None:
    mine = rows_of(hvd, overlap, "int32" if overlap else "int64")
    dense = np.zeros((40, 2), np.float32)
    np.add.at(dense, mine.indices.numpy(), mine.values.numpy())
    total = hvd.allreduce(dense, op=hvd.Sum).numpy()

    def function() -> Any:
        slices = rows_of(hvd, overlap, "int32" if overlap else "int64")
        empty = tf.IndexedSlices(tf.zeros([0, 3]), tf.zeros([0], tf.int32), dense_shape=[5, 3])
        half = rows_of(hvd, overlap, values="bfloat16")
        sparse, small, whole, halved = hvd.grouped_allreduce(
            [slices, empty, tf.ones(3), half], op=hvd.Sum, name="mixed"
        )
        averaged = hvd.allreduce(slices, prescale_factor=2.0, postscale_factor=3.0)
        counted = hvd.allreduce(rows_of(hvd, overlap, values="int32"), op=hvd.Average)
        found = [tf.convert_to_tensor(each) for each in (sparse, averaged, halved, counted)]
        return found, sparse.indices, sparse.values, small.indices, whole

    if way == "session":
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            results = session.run(function())
    else:
        results = tf.nest.map_structure(
            lambda x: x.numpy(), tf.function(function)() if way == "function" else function()
        )
    (summed, averaged, halved, counted), indices, values, none, whole = results
    assert np.array_equal(summed, total)
    np.testing.assert_allclose(averaged, total * 6 / hvd.size(), rtol=1e-6)
    np.testing.assert_allclose(halved.astype(np.float32), total, rtol=0.02)
    np.testing.assert_allclose(counted, total / hvd.size(), rtol=1e-6)
    assert (
        indices.dtype == (np.int32 if overlap else np.int64)
        and indices.tolist() == np.flatnonzero(total.any(1)).tolist()
    )
    assert values.shape == (len(indices), 2) and none.shape == (0,) and whole.tolist() == [hvd.size()] * 3


def test_sparse_rows_that_some_ranks_have_not(hvd: Any) -> None:
    first = hvd.rank() == 0
    mine = tf.IndexedSlices(
        tf.ones([2, 3]) if first else tf.zeros([0, 3]), tf.constant([4, 4] if first else [], tf.int64)
    )
    found = hvd.allreduce(mine, op=hvd.Sum)
    assert found.indices.numpy().tolist() == [4] and found.values.numpy().tolist() == [[2.0] * 3]


@pytest.mark.parametrize("overlap", [True, False])
def test_what_one_rank_has_no_memory_for_is_told_to_all(
    hvd: Any, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:

    def none_left(*arguments: Any, **keywords: Any) -> Any:
        raise MemoryError("none left")

    variables = [tf.Variable(tf.fill([3], hvd.rank() + 1.0)), tf.Variable([hvd.rank()])]
    rows = np.arange(4) if overlap else np.arange(4) + 10 * hvd.rank()
    values = np.ones((4, 2), np.float32)
    for owner, name, call in (
        (packed_callbacks, "_memory", lambda: hvd.broadcast_variables(variables, root_rank=0)),
        (np, "unique", lambda: sparse_rows.allreduce(collectives.world(), [values, rows], False, "rows")),
    ):
        with monkeypatch.context() as patch:
            if hvd.rank() == 1:
                patch.setattr(owner, name, none_left)
            with pytest.raises(MemoryError if hvd.rank() == 1 else MismatchError, match="none left"):
                call()
        call()
    assert variables[0].numpy().tolist() == [1.0] * 3 and variables[1].numpy().tolist() == [0]
    assert hvd.allreduce(1.0, op=hvd.Sum).numpy() == hvd.size()


def test_a_rank_without_variables(hvd: Any) -> None:
    hvd.broadcast_variables([], root_rank=0)
    variables = [tf.Variable([1.0])] if hvd.rank() == 0 else []
    with pytest.raises(MismatchError, match="variable 0"):
        hvd.broadcast_variables(variables, root_rank=0)


def test_integer_slices_times_a_factor(hvd: Any) -> None:
    slices = tf.IndexedSlices(tf.constant([[4], [6]]), tf.constant([0, 2]), tf.constant([3, 1]))
    found = hvd.allreduce(slices, op=hvd.Sum, prescale_factor=0.5)
    assert found.values.numpy().tolist() == [[2 * hvd.size()], [3 * hvd.size()]]


@pytest.mark.parametrize("way", ("eager", "function"))
def test_the_average_of_integer_slices_is_a_division(hvd: Any, way: str) -> None:
    """In the dtypes of TensorFlow's division, where sums that overflow integers do not."""
    for dtype in (tf.uint8, tf.int8, tf.int16, tf.int32, tf.int64):
        slices = tf.IndexedSlices(tf.constant([[100], [101]], dtype), tf.constant([3, 3 + hvd.rank()]))
        average = (lambda s: hvd.allreduce(s, op=hvd.Average)) if way == "eager" else tf.function(hvd.allreduce)
        found = average(slices)
        expected = np.zeros(3 + hvd.size())
        expected[3] = 100.0
        expected[3:] += 101.0 / hvd.size()
        assert found.values.dtype == (slices.values / 2).dtype
        np.testing.assert_allclose(
            tf.math.unsorted_segment_sum(found.values, found.indices, 3 + hvd.size())[:, 0], expected, rtol=1e-6
        )


def test_a_root_that_is_a_tensor(hvd: Any) -> None:
    """As `join` returns it."""
    variable = tf.Variable(float(hvd.rank()))
    last = hvd.join()
    hvd.broadcast_variables([variable], root_rank=last)
    assert variable.numpy() == int(last)
    with pytest.raises(TypeError, match=r"root_rank: expected an int that is known .* pass a Python int"):
        tf.function(lambda root: hvd.broadcast(variable, root))(last)
