"""Recipes of TensorFlow around the step: mixed precision, datasets, checkpoints and sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.adapters.shares import (
    CLASSES,
    FEATURES,
    ROWS,
    STEPS,
    TOKENS,
    WORDS,
    One,
    X,
    Y,
    compare,
    mine,
    recipe_of,
    share,
)
from tests.adapters.tensorflow_recipes import (
    Plain,
    Result,
    begin,
    network,
    recipe,
    sgd,
    step_of,
    steps_of,
    values,
)

keras, v1 = tf.keras, tf.compat.v1
THREADS = v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)


# ---- mixed precision ------------------------------------------------------------------------------------------------


@recipe
def test_loss_scale(hvd: Any) -> Result:
    """A loss scale for the gradients; in the second step the last row, which one rank has, overflows."""
    model = network(hvd)
    optimizer = keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=64.0, dynamic_growth_steps=2)
    begin(hvd, model, optimizer)
    factors = np.ones((STEPS, ROWS))
    factors[1, -1] = np.inf

    @tf.function
    def step(words: Any, x: Any, y: Any, factor: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.reduce_mean(tf.square(model([words, x]) - y), -1) * factor) * hvd.size() / ROWS
            scaled = optimizer.scale_loss(loss)
        grads = hvd.DistributedGradientTape(tape).gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    scales = []
    for feed, factor in zip(steps_of(hvd), mine(hvd, factors), strict=True):
        step(*feed, tf.constant(factor))
        scales.append(float(optimizer.dynamic_scale.numpy()))
    assert scales == [64.0, 32.0, 32.0, 64.0]
    return values(model, optimizer)


@pytest.mark.parametrize("policy", ("mixed_bfloat16", "mixed_float16"))
@recipe_of(1e-3, 1e-4, Plain, eagerly=False)
def test_mixed_precision(hvd: Any, policy: str) -> Result:
    """The one process goes through the ranks' shares one by one, since halves are rounded where a product ends."""
    model = network(hvd, dtype=policy)
    optimizer = keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=64.0)
    begin(hvd, model, optimizer)
    parts = (
        [share(hvd.ranks, rank) for rank in range(hvd.ranks)]
        if isinstance(hvd, One)
        else [share(hvd.size(), hvd.rank())]
    )
    size = hvd.ranks if isinstance(hvd, One) else hvd.size()

    @tf.function(reduce_retracing=True)
    def grads_of(words: Any, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            output = tf.cast(model([words, x], training=True), tf.float32)
            loss = optimizer.scale_loss(
                tf.reduce_sum(tf.reduce_mean(tf.square(output - tf.cast(y, tf.float32)), -1)) * size / ROWS
            )
        return hvd.DistributedGradientTape(tape, sparse_as_dense=True).gradient(loss, model.trainable_variables)

    for number in range(STEPS):
        every = [grads_of(TOKENS[number, rows], X[number, rows], Y[number, rows]) for rows in parts]
        grads = [tf.add_n(list(each)) / len(parts) for each in zip(*every, strict=True)]
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
    return values(model)


# ---- data -----------------------------------------------------------------------------------------------------------


@recipe
def test_shards_of_a_dataset_and_join(hvd: Any) -> Result:
    """13 rows in shards and in batches of two: some ranks have more batches, and the last one is short."""
    model, optimizer, size, batch = network(hvd), sgd(), getattr(hvd, "ranks", hvd.size()), 2
    begin(hvd, model, optimizer)
    rows = [part.reshape(-1, part.shape[-1])[:13] for part in (TOKENS, X, Y)]

    @tf.function(reduce_retracing=True)
    def step(words: Any, x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            output = model([words, x], training=True)
            loss = (
                tf.reduce_sum(tf.reduce_mean(tf.square(output - y), -1)) / batch / (size if isinstance(hvd, One) else 1)
            )
        grads = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    for _ in range(2):
        if isinstance(hvd, One):
            for first in range(0, 13, batch * size):
                # Shards take turns row by row, so that the ranks' batches of a step are one piece of the whole.
                step(*(tf.constant(part[first : first + batch * size]) for part in rows))
            continue
        for feed in tf.data.Dataset.from_tensor_slices(tuple(rows)).shard(size, hvd.rank()).batch(batch):
            step(*feed)
        last = hvd.join()
        hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=last)
    return values(model, optimizer)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@recipe
def test_checkpoint(hvd: Any, folder: Path) -> Result:
    """Rank 0 alone saves and restores; the others begin with something else, and get what it has."""
    model, optimizer = network(hvd), keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.02, 1, 0.7))
    begin(hvd, model, optimizer)
    step = step_of(hvd, model, optimizer)
    for feed in steps_of(hvd, last=2):
        step(*feed)
    if not isinstance(hvd, One):
        if hvd.rank() == 0:
            tf.train.Checkpoint(model=model, optimizer=optimizer).save(str(folder / "training"))
        model = network(hvd, restarted=1)
        optimizer = keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.02, 1, 0.7))
        optimizer.build(model.trainable_variables)
        if hvd.rank() == 0:
            tf.train.Checkpoint(model=model, optimizer=optimizer).restore(
                tf.train.latest_checkpoint(str(folder))
            ).assert_consumed()
        begin(hvd, model, optimizer)
        step = step_of(hvd, model, optimizer)
    for feed in steps_of(hvd, first=2):
        step(*feed)
    return values(model, optimizer)


def fetched(run: Any, tensors: Any) -> Any:
    """Without the hooks."""
    return run.run_step_fn(lambda step_context: step_context.session.run(tensors))


def in_session(hvd: Any, folder: Path) -> Result:
    """TensorFlow 1: a monitored session; rank 0 alone writes checkpoints, and the program starts again midway."""
    for first, last in ((0, 2), (2, STEPS)):
        with tf.Graph().as_default():
            given = [
                v1.placeholder(tf.int64, [None, 2]),
                v1.placeholder(tf.float64, [None, FEATURES]),
                v1.placeholder(tf.float64, [None, CLASSES]),
            ]
            draw = np.random.default_rng(100 * last + hvd.rank())
            table, kernel, out = (
                v1.get_variable(name, initializer=draw.normal(size=shape), use_resource=True)
                for name, shape in (("table", (WORDS, 3)), ("kernel", (6 + FEATURES, 4)), ("out", (4, CLASSES)))
            )
            hidden = tf.concat([tf.reshape(tf.gather(table, given[0]), [-1, 6]), given[1]], 1) @ kernel
            loss = tf.reduce_sum(tf.reduce_mean(tf.square(tf.tanh(hidden) @ out - given[2]), -1)) * hvd.size() / ROWS
            count = v1.train.get_or_create_global_step()
            rate = v1.train.exponential_decay(0.3, count, 1, 0.8)
            optimizer = hvd.DistributedOptimizer(v1.train.MomentumOptimizer(rate, 0.9))
            pairs = [(tf.convert_to_tensor(grad), variable) for grad, variable in optimizer.compute_gradients(loss)]
            grads, norm = tf.clip_by_global_norm([grad for grad, _ in pairs], 0.2)
            train = optimizer.apply_gradients(
                zip(grads, [variable for _, variable in pairs], strict=True), global_step=count
            )
            hooks = [] if isinstance(hvd, One) else [hvd.BroadcastGlobalVariablesHook(0)]
            checkpoints = str(folder) if hvd.rank() == 0 else None
            variables = v1.global_variables()
            with v1.train.MonitoredTrainingSession(checkpoint_dir=checkpoints, hooks=hooks, config=THREADS) as run:
                assert fetched(run, count) == first
                for number in range(first, last):
                    feed = [mine(hvd, part)[number] for part in (TOKENS, X, Y)]
                    assert run.run([train, norm], dict(zip(given, feed, strict=True)))[1] > 0.2
                found = fetched(run, variables)
    return {variable.name: value for variable, value in zip(variables, found, strict=True)}


def test_session(hvd: Any, folder: Path, tmp_path: Path) -> None:
    compare(in_session(hvd, folder), in_session(Plain(hvd.size()), tmp_path), 1e-7, 1e-9)
