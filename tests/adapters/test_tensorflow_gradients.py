"""Gradients through the collectives of TensorFlow, over ranks: compared with finite differences of the sum of all
ranks' losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from collectives.base.errors import MismatchError
from tests.adapters import differences

Function = Callable[..., Sequence[Any]]


def number(hvd: Any, *shape: int, seed: int = 0, dtype: str = "float64") -> np.ndarray[Any, Any]:
    """Distinct on every rank, and away from zero."""
    drawn = np.random.default_rng(1000 * seed + hvd.rank()).normal(size=shape)
    drawn = drawn + np.sign(drawn) / 2
    return (drawn * (1 + 0.5j) if dtype.startswith("complex") else drawn).astype(dtype)


def loss(outputs: Sequence[Any], weights: Sequence[Any]) -> Any:
    return tf.add_n(
        [tf.reduce_sum(tf.math.real(tf.math.conj(weight) * y)) for weight, y in zip(weights, outputs, strict=True)]
    )


def check(
    hvd: Any, function: Function, *inputs: np.ndarray[Any, Any], way: str = "function", again: bool = False
) -> None:
    """Compare gradients with central differences.

    Args:
        function: of the inputs; a sequence of outputs.
        inputs: this rank's, in float64 or complex128.
        way: "eager", "function", or "session".
        again: the function itself asks for gradients.
    """
    outputs = [y.numpy() for y in function(*map(tf.constant, inputs))]
    weights = [number(hvd, *y.shape, seed=77 + i, dtype=y.dtype.name) for i, y in enumerate(outputs)]
    found = gradients(way, function, weights, inputs)

    def value(moved: list[Any]) -> float:
        return float(loss(function(*map(tf.constant, moved)), weights))

    differences.compare(found, inputs, value, 3, 1e-5 if again else 1e-6)


def gradients(way: str, function: Function, weights: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    if way == "session":
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            tensors = [tf.constant(x) for x in inputs]
            return session.run(tf.gradients(loss(function(*tensors), weights), tensors))

    def gradient(*tensors: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            value = loss(function(*tensors), weights)
        return tape.gradient(value, tensors)

    if way == "function":
        gradient = tf.function(gradient)
    return [x.numpy() for x in gradient(*map(tf.constant, inputs))]


OPS = ("Sum", "Average", "Min", "Max", "Product", "Adasum")
WAYS = ("eager", "function", "session")


@pytest.mark.parametrize(
    ("op", "way"),
    [
        *((op, "function") for op in OPS),
        ("Average", "eager"),
        ("Max", "eager"),
        ("Sum", "session"),
        ("Product", "session"),
    ],
)
def test_allreduce(hvd: Any, op: str, way: str) -> None:
    how = {"op": getattr(hvd, op), "prescale_factor": 0.5, "postscale_factor": 3.0, "name": f"gradient of {op}"}
    check(hvd, lambda x, y: hvd.grouped_allreduce([x, y], **how), number(hvd, 2, 2), number(hvd, 1, seed=1), way=way)


@pytest.mark.parametrize("op", OPS[:-1])
def test_reducescatter(hvd: Any, op: str) -> None:
    x = number(hvd, hvd.size() + 1, 2)
    check(hvd, lambda x: [hvd.reducescatter(x, op=getattr(hvd, op), prescale_factor=2.0, postscale_factor=0.25)], x)


@pytest.mark.parametrize("way", WAYS)
def test_what_only_moves(hvd: Any, way: str) -> None:
    rank, size = hvd.rank(), hvd.size()

    def function(uneven: Any, even: Any, square: Any) -> Any:
        splits = tf.constant([r + rank % 2 for r in range(size)], tf.int32)
        rows = tf.concat([uneven] * (size + 1), 0)[: size * (size - 1) // 2 + size * (rank % 2)]
        received, _ = hvd.alltoall(rows, splits, name="dealt")
        return [
            hvd.allgather(uneven, name="uneven"),
            *hvd.grouped_allgather([even, uneven[:1]], name="grouped"),
            hvd.broadcast(even, size - 1, name="sent"),
            hvd.alltoall(square, name="square"),
            received,
            hvd.reducescatter(square, op=hvd.Average, name="share"),
        ]

    check(hvd, function, number(hvd, rank + size, 1), number(hvd, 2, seed=1), number(hvd, size, 2, seed=2), way=way)


def test_unnamed_rows_that_differ(hvd: Any) -> None:
    rows = tf.Variable(tf.ones((hvd.rank() + 1, 2)))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(hvd.allgather(rows) * (hvd.rank() + 1.0))
    assert (tape.gradient(loss, rows).numpy() == sum(range(1, hvd.size() + 1))).all()


def test_unnamed_gradients_after_a_mistake_and_a_join(hvd: Any) -> None:
    x = tf.Variable([1.0, 2.0])

    def checked() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum))
        assert tape.gradient(loss, x).numpy().tolist() == [hvd.size()] * 2

    with tf.GradientTape(), pytest.raises((MismatchError, TypeError)):
        hvd.allreduce("no number" if hvd.rank() == 0 else x, op=hvd.Sum)
    checked()
    if hvd.rank() == 0:
        for _ in range(3):
            hvd.allreduce(x, op=hvd.Sum)
    hvd.join()
    checked()


def test_branches_of_tensorflow_1(hvd: Any) -> None:
    tf.compat.v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            chosen = tf.compat.v1.placeholder(tf.bool, ())
            x = tf.constant([hvd.rank() + 1.0])
            branch = tf.compat.v1.cond(
                chosen, lambda: hvd.allreduce(x, op=hvd.Sum, name="within"), lambda: tf.identity(x)
            )
            after = hvd.allreduce(x, op=hvd.Sum, name="after")
            total = sum(range(1, hvd.size() + 1))
            assert session.run([branch, after], {chosen: False}) == [[hvd.rank() + 1], [total]]
            assert session.run([branch, after], {chosen: True}) == [[total], [total]]
    finally:
        tf.compat.v1.enable_control_flow_v2()


def test_complex_numbers(hvd: Any) -> None:
    x = number(hvd, hvd.size(), 2, dtype="complex128")
    check(
        hvd,
        lambda x: [
            hvd.allreduce(x, op=hvd.Sum),
            hvd.allgather(x),
            hvd.allreduce(x, op=hvd.Product),
            hvd.broadcast(x, 0),
        ],
        x,
    )


@pytest.mark.parametrize("way", ("eager", "function"))
def test_gradients_of_gradients(hvd: Any, way: str) -> None:

    def function(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = hvd.allreduce(x * x, op=hvd.Average) * hvd.broadcast(x, 0) ** 2
            z = (
                tf.reduce_sum(y)
                + tf.reduce_sum(hvd.allgather(x) ** 3)
                + tf.reduce_sum(hvd.reducescatter(x * x, op=hvd.Sum) ** 2)
            )
            z += tf.reduce_sum(hvd.allreduce(x, op=hvd.Product) ** 2)
        return [tape.gradient(z, x)]

    check(hvd, function, number(hvd, hvd.size() + 1), way=way, again=True)


def test_sparse_rows(hvd: Any) -> None:
    indices = np.array([5, hvd.rank(), 5, 2 * hvd.rank() + 1])

    def function(values: Any) -> Any:
        found = hvd.allreduce(tf.IndexedSlices(values, indices, dense_shape=[9, 2]), op=hvd.Average)
        return [tf.convert_to_tensor(found)]

    check(hvd, function, number(hvd, 4, 2))


def test_compression_and_variables(hvd: Any) -> None:
    variable = tf.Variable([1.0, 2.0])
    unknown = tf.Variable([3])
    with tf.GradientTape() as tape:
        y = hvd.allreduce(variable * (hvd.rank() + 1.0), op=hvd.Sum, compression=hvd.Compression.fp16)
        counted = hvd.allreduce(unknown, op=hvd.Sum)
        value = tf.reduce_sum(y * y) + tf.cast(counted[0], tf.float32)
    total = sum(rank + 1 for rank in range(hvd.size()))
    gradient = tape.gradient(value, variable)
    # d/dv of the sum of all ranks' losses, times how much of y this rank's variable makes.
    np.testing.assert_allclose(
        gradient.numpy(), 2 * np.array([1, 2]) * total * hvd.size() * (hvd.rank() + 1), rtol=1e-3
    )


def test_several_targets(hvd: Any) -> None:
    """A rank that has made more tensors than the others comes to the gradients in the same order; each finds its
    own."""
    x = [tf.Variable(float(hvd.rank() + k)) for k in range(6)]
    with tf.GradientTape() as tape:
        y = []
        for k, v in enumerate(x):
            y.append(hvd.allreduce(v, op=hvd.Sum) * float(k + 1))
            for _ in range(13 * k * hvd.rank()):
                v + 1
    found = tape.gradient(y, x)
    assert [float(g) for g in found] == [float(hvd.size() * (k + 1)) for k in range(6)]


def test_the_gradient_of_a_function_from_outside(hvd: Any) -> None:
    """Backward is then a function of its own, with an order of its own."""

    @tf.function
    def function(x: Any) -> Any:
        y = tf.add_n([hvd.allreduce(x * float(k), op=hvd.Sum) * float(k) for k in range(4)])
        if x > 0:
            y += hvd.allreduce(x, op=hvd.Sum) * hvd.allreduce(x, op=hvd.Average)
        else:
            y += x
        return y

    x = tf.Variable(float(hvd.rank() + 1))
    for _ in range(2):
        with tf.GradientTape() as tape:
            y = function(x)
        found = tape.gradient(y, x)
        size, total = hvd.size(), sum(rank + 1 for rank in range(hvd.size()))
        np.testing.assert_allclose(found.numpy(), 14 * size + total + total / size * size, rtol=1e-6)


def test_control_flow(hvd: Any) -> None:

    def function(x: Any) -> Any:
        _, y = tf.while_loop(
            lambda i, y: i < 2,
            lambda i, y: (i + 1, hvd.allreduce(y, op=hvd.Average) * x + hvd.allreduce(x * x, op=hvd.Average)),
            [0, x],
        )
        return [
            y,
            tf.cond(
                x[0] > -100, lambda: hvd.allreduce(x * y, op=hvd.Sum) * hvd.allreduce(x + y, op=hvd.Sum), lambda: x
            ),
        ]

    check(hvd, function, number(hvd, 2))


# ---- Horovod's, where COLLECTIVES_GRADIENTS says so


def given(rank: int, *shape: int) -> np.ndarray[Any, Any]:
    """An array of a rank's, known to all."""
    return np.random.default_rng(rank).normal(size=shape) + rank


def back(
    way: str, function: Callable[[Any], Any], x: np.ndarray[Any, Any], gradient: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    (found,) = gradients(way, lambda tensor: [function(tensor)], [gradient], [x])
    return np.asarray(found)


@pytest.mark.parametrize("way", WAYS)
def test_horovods_gradient_of_allgather_and_broadcast_is_the_mean(hvd: Any, as_horovod: None, way: str) -> None:
    size, rank = hvd.size(), hvd.rank()
    for rows in ([1] * size, [(2 * peer) % 3 for peer in range(size)]):
        upstream = [given(peer, sum(rows), 2) for peer in range(size)]
        found = back(way, hvd.allgather, np.ones((rows[rank], 2)), upstream[rank])
        np.testing.assert_allclose(found, (sum(upstream) / size)[sum(rows[:rank]) :][: rows[rank]])
    upstream = [given(peer, 3) for peer in range(size)]
    found = back(way, lambda x: hvd.broadcast(x, size - 1), np.ones(3), upstream[rank])
    np.testing.assert_allclose(found, sum(upstream) / size * (rank == size - 1))


@pytest.mark.parametrize(("op", "way"), [("Sum", "function"), ("Average", "function"), ("Sum", "eager")])
def test_horovods_gradient_of_reducescatter_is_size_times_the_adjoint(
    hvd: Any, as_horovod: None, op: str, way: str
) -> None:
    size, rank = hvd.size(), hvd.rank()
    upstream = [given(peer, 2) for peer in range(size)]
    how = {"op": getattr(hvd, op), "prescale_factor": 0.5, "postscale_factor": 3.0}
    found = back(way, lambda x: hvd.reducescatter(x, **how), given(rank, 2 * size), upstream[rank])
    np.testing.assert_allclose(found, np.concatenate(upstream) * 1.5 * (size if op == "Sum" else 1))


@pytest.mark.parametrize("op", OPS)
def test_horovods_gradient_of_allreduce_is_reduced_by_the_same_operation(hvd: Any, as_horovod: None, op: str) -> None:
    how = {"op": getattr(hvd, op), "prescale_factor": 0.5, "postscale_factor": 3.0}
    gradient = given(hvd.rank(), 4)
    way = "function" if op in ("Average", "Max") else "eager"  # whose rules are the same, and which is quicker
    found = back(way, lambda x: hvd.allreduce(x, **how), given(hvd.rank() + 9, 4), gradient)
    np.testing.assert_allclose(found, hvd.allreduce(gradient, **how).numpy())


def test_horovods_gradients_of_groups_and_of_a_gradient(hvd: Any, as_horovod: None) -> None:
    size = hvd.size()
    x = tf.ones(size)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        total = tf.add_n([tf.reduce_sum(y) for y in hvd.grouped_allgather([x, x])])
        parts = tf.add_n([tf.reduce_sum(y) for y in hvd.grouped_reducescatter([x, x], op=hvd.Sum)])
        with tf.GradientTape() as inner:
            inner.watch(x)
            squares = tf.reduce_sum(hvd.allgather(x) ** 2)
        first = inner.gradient(squares, x)
    assert tape.gradient(total, x).numpy().tolist() == [2.0] * size
    assert tape.gradient(parts, x).numpy().tolist() == [2.0 * size] * size
    # The adjoint of the mean is exact, and followed by the mean once more.
    assert first.numpy().tolist() == [2.0] * size
    np.testing.assert_allclose(tape.gradient(first, x).numpy(), [2.0 / size] * size)
