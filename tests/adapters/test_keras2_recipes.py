"""Recipes of Keras 2 (tf_keras), on the ranks' shares of every batch, and in one process on the whole batches.

The rows of "Recipes" in docs/horovod.md; `tests.adapters.shares` says how the two runs are compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import collectives.tensorflow
from tests.adapters.shares import CLASSES, FEATURES, ROWS, STEPS, One, X, Y, compare, mine, recipe_of, share

keras = tf.keras
Result = dict[str, Any]


recipe = recipe_of(3e-5, 3e-6)
both = pytest.mark.parametrize("older", (False, True), ids=("new", "legacy"))
"""The two kinds of optimizers that Keras 2 has."""


def network(seed: int = 0) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(4, activation="tanh", input_shape=(FEATURES,)), keras.layers.Dense(CLASSES)]
    return keras.Sequential(layers)


def sgd(older: bool = False, **keywords: Any) -> Any:
    return (keras.optimizers.legacy if older else keras.optimizers).SGD(0.1, momentum=0.9, **keywords)


def starting(hvd: Any) -> list[Any]:
    return [] if isinstance(hvd, One) else [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]


def fit(hvd: Any, model: Any, x: Any = X, y: Any = Y) -> None:
    """An epoch on uneven shares; weights make of the mean over a share its part of the mean over the batch."""
    own = [mine(hvd, rows).reshape(-1, rows.shape[-1]).astype("float32") for rows in (x, y)]
    rows = len(own[0]) // STEPS
    weights = np.full(len(own[0]), rows * hvd.size() / ROWS, "float32")
    model.fit(*own, batch_size=rows, sample_weight=weights, shuffle=False, verbose=0, callbacks=starting(hvd))


def fitted(hvd: Any, optimizer: Any, y: Any = Y) -> Any:
    model = network(hvd.rank())
    model.compile(optimizer=optimizer, loss="mse")
    fit(hvd, model, y=y)
    return model


def named(model: Any) -> Result:
    return {str(number): value for number, value in enumerate(model.get_weights())}


@both
@recipe
def test_clipping_between(hvd: Any, older: bool) -> Result:
    """A loop that gets gradients from the optimizer, clips those of all ranks, and applies them as they are."""
    model, optimizer = network(), hvd.DistributedOptimizer(sgd(older))
    variables = model.trainable_variables
    compute = optimizer._compute_gradients if older else optimizer.compute_gradients
    as_they_are = {"experimental_aggregate_gradients" if older else "skip_gradients_aggregation": not older}
    for x, y in zip(mine(hvd, X).astype("float32"), mine(hvd, Y).astype("float32"), strict=True):

        def loss(x: Any = x, y: Any = y) -> Any:
            return tf.reduce_sum(tf.reduce_mean(tf.square(model(x) - y), -1)) * hvd.size() / ROWS

        grads, norm = tf.clip_by_global_norm([grad for grad, _ in compute(loss, variables)], 0.05)
        assert float(norm) > 0.05
        optimizer.apply_gradients(zip(grads, variables, strict=True), **as_they_are)
    return named(model)


@pytest.mark.parametrize("inside", (False, True))
@both
@recipe
def test_loss_scale(hvd: Any, older: bool, inside: bool) -> Result:
    """In the second step the last row, which one rank has, overflows: no rank takes that step."""
    scaling = keras.mixed_precision.LossScaleOptimizer
    if inside:
        optimizer = hvd.DistributedOptimizer(scaling(sgd(older), initial_scale=64))
    else:
        optimizer = scaling(hvd.DistributedOptimizer(sgd(older)), initial_scale=64)
    targets = Y.copy()
    targets[1, -1] = np.inf
    model = fitted(hvd, optimizer, y=targets)
    assert all(np.isfinite(value).all() for value in model.get_weights())
    return {**named(model), "scale": np.float32(optimizer.loss_scale)}


@both
@recipe
def test_checkpoint(hvd: Any, folder: Path, older: bool) -> Result:
    """Rank 0 alone saves and loads the model; the others begin with another one, and get what it has."""
    adam = (keras.optimizers.legacy if older else keras.optimizers).Adam
    model = fitted(hvd, hvd.DistributedOptimizer(adam(0.02)))
    if not isinstance(hvd, One):
        file = str(folder / "checkpoint.h5")
        if hvd.rank() == 0:
            model.save(file)
            model = hvd.load_model(file, legacy_opts=older)
        else:
            model = network(5)
            model.compile(optimizer=hvd.DistributedOptimizer(adam(0.02)), loss="mse")
    fit(hvd, model)
    return named(model)


@both
@recipe
def test_uneven_shares(hvd: Any, older: bool) -> Result:
    return named(fitted(hvd, hvd.DistributedOptimizer(sgd(older))))


@pytest.mark.parametrize("policy", ("mixed_bfloat16", "mixed_float16"))
def test_mixed_precision(hvd: Any, policy: str) -> None:
    """The one process goes through the ranks' shares one by one, since halves are rounded where a product ends."""
    size = hvd.size()
    keras.mixed_precision.set_global_policy(policy)
    try:
        found, wanted = network(), network()
    finally:
        keras.mixed_precision.set_global_policy("float32")
    for model, parts in ((found, [share(size, hvd.rank())]), (wanted, [share(size, rank) for rank in range(size)])):
        optimizer = keras.mixed_precision.LossScaleOptimizer(sgd(), initial_scale=64)
        for x, y in zip(X.astype("float32"), Y.astype("float32"), strict=True):
            every = []
            for rows in parts:
                with tf.GradientTape() as tape:
                    squares = tf.square(tf.cast(model(x[rows], training=True), tf.float32) - y[rows])
                    loss = optimizer.get_scaled_loss(tf.reduce_sum(tf.reduce_mean(squares, -1)) * size / ROWS)
                tape = collectives.tensorflow.DistributedGradientTape(tape) if model is found else tape
                every.append(optimizer.get_unscaled_gradients(tape.gradient(loss, model.trainable_variables)))
            grads = [tf.add_n(list(each)) / len(parts) for each in zip(*every, strict=True)]
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
    compare(named(found), named(wanted), 1e-3, 1e-4)
