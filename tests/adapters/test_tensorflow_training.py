"""Whole trainings with the distributed tape, in full and mixed precision, and the hook for sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

v1 = tf.compat.v1
pytestmark = pytest.mark.mpi

ROWS, STEPS, WORDS = 4, 4, 9
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: tf.keras.optimizers.Adam(0.01),
}


def data(rank: int, step: int) -> tuple[Any, Any]:
    draw = np.random.default_rng(100 * rank + step)
    return draw.integers(0, WORDS, (ROWS, 2)), draw.standard_normal((ROWS, 1)).astype(np.float32)


def whole(size: int, step: int) -> tuple[Any, Any]:
    words, targets = zip(*(data(rank, step) for rank in range(size)), strict=True)
    return np.concatenate(words), np.concatenate(targets)


def model(rank: int = 0, dtype: Any = "float64") -> Any:
    """An embedding, whose gradients are sparse, and layers. It begins with other weights on every rank, and has one that is never used."""
    tf.keras.utils.set_random_seed(20 + rank)
    layers = [tf.keras.layers.Embedding(WORDS, 3, dtype=dtype), tf.keras.layers.Flatten(dtype=dtype)]
    layers += [tf.keras.layers.Dense(4, activation="tanh", dtype=dtype), tf.keras.layers.Dense(1, dtype=dtype)]
    return tf.keras.Sequential([tf.keras.layers.Input((2,), dtype="int64"), *layers])


def train(
    trained: Any,
    optimizer: Any,
    feeds: list[Any],
    wrap: Any = lambda tape: tape,
    first: Any = lambda: None,
    graph: bool = True,
    tape_of: Any = tf.GradientTape,
) -> Any:
    """The weights after some steps, as in Horovod's examples."""

    def step(words: Any, targets: Any) -> Any:
        with tape_of() as tape:
            output = trained(words, training=True)
            loss = tf.reduce_mean(tf.square(output - tf.cast(targets, output.dtype)))
        tape = wrap(tape)
        gradients = tape.gradient(loss, trained.trainable_variables)
        optimizer.apply_gradients(zip(gradients, trained.trainable_variables, strict=True))

    run = tf.function(step) if graph else step
    for number, feed in enumerate(feeds):
        if number == 0:
            first()
        run(*map(tf.constant, feed))
    return [variable.numpy() for variable in trained.trainable_variables]


class Dense(tf.GradientTape):
    """A tape whose gradients are dense: Keras's Adam squares the slices of one row before it adds them up."""

    def gradient(self, *args: Any, **kwargs: Any) -> Any:
        return [tf.convert_to_tensor(grad) for grad in super().gradient(*args, **kwargs)]


def alike(hvd: Any, arrays: list[Any]) -> None:
    everyone = hvd.allgather_object([array.tobytes() for array in arrays])
    assert all(each == everyone[0] for each in everyone)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_one_rank_with_the_whole_batch(hvd_tf: Any, name: str) -> None:
    rank, size = hvd_tf.rank(), hvd_tf.size()
    wanted = train(model(), OPTIMIZERS[name](), [whole(size, step) for step in range(STEPS)], graph=False, tape_of=Dense)
    for graph in (True, False) if name == "sgd" else (True,):
        mine, optimizer = model(rank), OPTIMIZERS[name]()
        optimizer.build(mine.trainable_variables)

        def same(mine: Any = mine, optimizer: Any = optimizer) -> None:
            hvd_tf.broadcast_variables(mine.variables, root_rank=0)
            hvd_tf.broadcast_variables(optimizer.variables, root_rank=0)

        feeds = [data(rank, step) for step in range(STEPS)]
        found = train(mine, optimizer, feeds, hvd_tf.DistributedGradientTape, same, graph)
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, 1e-7 if name == "adam" else 1e-10, 1e-9)
        alike(hvd_tf, found)


def test_a_rank_that_runs_out_of_data_joins(hvd_tf: Any) -> None:
    rank, size = hvd_tf.rank(), hvd_tf.size()
    variable, unused = tf.Variable([1.0, 2.0]), tf.Variable(1.0)

    @tf.function
    def step(factor: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable) * factor
        return hvd_tf.DistributedGradientTape(tape).gradient(loss, [variable, unused])

    for number in range(size - rank):  # the last rank has one batch, the first has most
        still = range(size - number)
        found, none = step(tf.constant(rank + 1.0))
        assert none is None
        np.testing.assert_allclose(found, [sum(other + 1 for other in still) / size] * 2)
    assert hvd_tf.join() == 0


@pytest.mark.parametrize("dtype", ("mixed_float16", "mixed_bfloat16"))
def test_mixed_precision(hvd_tf: Any, dtype: str) -> None:
    """With the loss scaled by Keras's LossScaleOptimizer: a rank whose gradients overflow makes all of them skip the step."""
    rank, size = hvd_tf.rank(), hvd_tf.size()
    mine = model(0, dtype)
    optimizer = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1), initial_scale=64.0, dynamic_growth_steps=100)
    legacy = hasattr(optimizer, "get_scaled_loss")
    scale_loss = optimizer.get_scaled_loss if legacy else optimizer.scale_loss
    unscaled = optimizer.get_unscaled_gradients if legacy else list  # Keras 3 does so itself

    @tf.function
    def step(words: Any, targets: Any, factor: Any) -> Any:
        with tf.GradientTape() as tape:
            output = mine(words, training=True)
            loss = scale_loss(tf.reduce_mean(tf.square(tf.cast(output, tf.float32) - targets)) * factor)
        gradients = hvd_tf.DistributedGradientTape(tape).gradient(loss, mine.trainable_variables)
        optimizer.apply_gradients(zip(unscaled(gradients), mine.trainable_variables, strict=True))

    reference = model(0, "float32")
    wanted = train(reference, tf.keras.optimizers.SGD(0.1), [whole(size, number) for number in range(2)], graph=False)
    for number in range(2):
        step(*map(tf.constant, data(rank, number)), tf.constant(1.0))
    for one, other in zip(mine.trainable_variables, wanted, strict=True):
        np.testing.assert_allclose(one.numpy(), other, 0.05, 0.02)
    before = [variable.numpy() for variable in mine.trainable_variables]
    step(*map(tf.constant, data(rank, 2)), tf.constant(np.inf if rank == size - 1 else 1.0, tf.float32))
    after = [variable.numpy() for variable in mine.trainable_variables]
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
    assert float(tf.convert_to_tensor(optimizer.loss_scale if legacy else optimizer.dynamic_scale)) == 32.0
    step(*map(tf.constant, data(rank, 3)), tf.constant(1.0))
    assert any(not np.array_equal(variable.numpy(), other) for variable, other in zip(mine.trainable_variables, after, strict=True))
    alike(hvd_tf, [variable.numpy() for variable in mine.trainable_variables])


@pytest.mark.parametrize("outside", (True, False), ids=("scales outside", "scales inside"))
def test_a_scaling_optimizer_of_tensorflow_1(hvd_tf: Any, outside: bool) -> None:
    rank, size = hvd_tf.rank(), hvd_tf.size()
    scaling = v1.mixed_precision.MixedPrecisionLossScaleOptimizer
    with tf.Graph().as_default():
        scale = v1.mixed_precision.DynamicLossScale(initial_loss_scale=64.0, increment_period=100)
        slope = v1.placeholder(tf.float32, [])
        variable = v1.get_variable("v", initializer=np.float32(3.0), use_resource=True)
        plain = v1.train.GradientDescentOptimizer(1.0)
        optimizer = scaling(hvd_tf.DistributedOptimizer(plain), scale) if outside else hvd_tf.DistributedOptimizer(scaling(plain, scale))
        train_op = optimizer.minimize(slope * variable)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            session.run(train_op, {slope: rank + 1.0})
            np.testing.assert_allclose(session.run(variable), 3.0 - (size + 1) / 2)
            session.run(train_op, {slope: np.inf if rank == size - 1 else 1.0})
            np.testing.assert_allclose(session.run(variable), 3.0 - (size + 1) / 2)


def test_the_hook_broadcasts(hvd_tf: Any) -> None:
    rank, size = hvd_tf.rank(), hvd_tf.size()
    root = size - 1
    hook = hvd_tf.BroadcastGlobalVariablesHook(root)
    for _ in range(2):  # a hook serves another graph, too
        with tf.Graph().as_default():
            variables = [v1.get_variable(f"v{at}", initializer=np.arange(3.0) + 10 * rank + at) for at in range(3)]
            count = v1.train.get_or_create_global_step()
            local = v1.get_variable("l", initializer=np.float64(rank), collections=[v1.GraphKeys.LOCAL_VARIABLES])
            with v1.train.MonitoredTrainingSession(hooks=[hook], config=v1.ConfigProto(inter_op_parallelism_threads=1)) as session:
                found = session.run([*variables, count, local])
        for at, value in enumerate(found[:3]):
            np.testing.assert_array_equal(value, np.arange(3.0) + 10 * root + at)
        assert found[4] == rank


def test_the_hook_of_a_process_set(hvd_tf: Any) -> None:
    rank, size = hvd_tf.rank(), hvd_tf.size()
    if size == 1:
        return
    others = hvd_tf.add_process_set(range(1, size))
    hook = hvd_tf.BroadcastGlobalVariablesHook(size - 1, process_set=others)
    with tf.Graph().as_default():
        variable = v1.get_variable("v", initializer=np.float64(rank))
        v1.train.get_or_create_global_step()
        with v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
            assert session.run(variable) == (size - 1 if rank else 0)
    hvd_tf.remove_process_set(others)
