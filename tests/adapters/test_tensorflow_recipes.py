"""Recipes of TensorFlow with the tape, on the ranks' shares of every batch, and in one process on whole batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from collectives.engine import adasum
from tests.adapters.shares import CLASSES, FEATURES, ROWS, STEPS, TOKENS, One, X, Y, compare, share
from tests.adapters.tensorflow_recipes import (
    Dense,
    Plain,
    Result,
    begin,
    loss_of,
    network,
    perceptron,
    recipe,
    sgd,
    step_of,
    steps_of,
    trained,
    values,
)

keras, v1 = tf.keras, tf.compat.v1


test_tape = recipe(lambda hvd: trained(hvd, sgd(keras.optimizers.schedules.ExponentialDecay(0.2, 1, 0.6)), graph=False))
test_tape_in_a_function = recipe(lambda hvd: trained(hvd, keras.optimizers.Adam(0.02)))
test_sparse_as_dense = recipe(lambda hvd: trained(hvd, sgd(), sparse_as_dense=True))


def clipped(grads: Any) -> Any:
    found, norm = tf.clip_by_global_norm(grads, 0.05)
    tf.debugging.assert_greater(norm, tf.cast(0.05, norm.dtype))
    return found


test_clipping_after_the_tape = recipe(lambda hvd: trained(hvd, sgd(), change=clipped))
test_clipping_in_the_optimizer = recipe(
    lambda hvd: trained(hvd, keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.05), graph=False)
)


@recipe
def test_sync_batch_normalization(hvd: Any) -> Result:
    first, second = (hvd.SyncBatchNormalization(dtype="float64", momentum=momentum) for momentum in (0.7, 0.9))
    return trained(hvd, sgd(), first, keras.layers.Activation("tanh", dtype="float64"), second)


@recipe
def test_freezing(hvd: Any) -> Result:
    """The embedding begins to learn halfway."""
    model, optimizer = network(hvd), sgd()
    begin(hvd, model, optimizer)
    frozen = next(layer for layer in model.layers if isinstance(layer, keras.layers.Embedding))
    for first, last, learns in ((0, 2, False), (2, STEPS, True)):
        frozen.trainable = learns
        step = step_of(hvd, model, optimizer, graph=False)
        for feed in steps_of(hvd, first, last):
            step(*feed)
    return values(model, optimizer)


@recipe
def test_gan(hvd: Any) -> Result:
    """Two networks that learn from one persistent tape, with a penalty on the gradient of the critic."""
    keras.utils.set_random_seed(hvd.rank())
    maker, critic = perceptron(FEATURES, CLASSES), perceptron(CLASSES, 1)
    optimizers = keras.optimizers.Adam(0.01, beta_1=0.5), sgd()
    for model, optimizer in zip((maker, critic), optimizers, strict=True):
        begin(hvd, model, optimizer)

    @tf.function
    def step(_: Any, noise: Any, real: Any) -> None:
        with tf.GradientTape(persistent=True) as tape:
            made = maker(noise, training=True)
            with tf.GradientTape() as inner:
                inner.watch(made)
                judged = critic(made, training=True)
            slopes = inner.gradient(judged, made)
            share = tf.constant(hvd.size() / ROWS, tf.float64)
            penalty = tf.reduce_sum(tf.square(tf.norm(slopes, axis=1) - 1.0)) * share
            losses = (
                -tf.reduce_sum(judged) * share,
                tf.reduce_sum(judged - critic(real, training=True)) * share + 10.0 * penalty,
            )
        tape = hvd.DistributedGradientTape(tape)
        for model, optimizer, loss in zip((maker, critic), optimizers, losses, strict=True):
            optimizer.apply_gradients(
                zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
            )

    for feed in steps_of(hvd):
        step(*feed)
    return values(maker, critic, *optimizers)


@recipe
def test_contrastive_loss(hvd: Any) -> Result:
    """Each row is told from all rows of all ranks; the gradient comes back to the rank that has the row."""
    model, optimizer = network(hvd), sgd()
    begin(hvd, model, optimizer)
    rows = share(hvd.size(), hvd.rank())

    @tf.function
    def step(words: Any, x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            queries, keys = model([words, x]), tf.nn.tanh(model([words, y @ tf.ones((CLASSES, FEATURES), tf.float64)]))
            everyone = hvd.allgather(keys, name="keys")
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(
                tf.range(rows.start, rows.stop), queries @ tf.transpose(everyone)
            )
            loss = tf.reduce_sum(each) / ROWS
        tape = hvd.DistributedGradientTape(tape, op=getattr(hvd, "Sum", None))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )

    for feed in steps_of(hvd):
        step(*feed)
    return values(model, optimizer)


@recipe
def test_backward_passes_per_step(hvd: Any) -> Result:
    """The optimizer adds up two backward passes before it communicates."""
    model, optimizer = network(hvd), sgd()
    begin(hvd, model, optimizer)
    if isinstance(hvd, One):
        both = [
            tuple(tf.concat(parts, 0) for parts in zip(*pair, strict=True))
            for pair in zip(*[iter(steps_of(hvd))] * 2, strict=True)
        ]
        step = step_of(hvd, model, optimizer, lambda grads: [grad / 2 for grad in grads])
        for feed in both:
            step(*feed)
        return values(model)
    optimizer = hvd.DistributedOptimizer(
        optimizer, backward_passes_per_step=2, average_aggregated_gradients=True, sparse_as_dense=True
    )

    @tf.function(reduce_retracing=True)
    def passed(words: Any, x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(hvd, model, words, x, y)
        grads = Dense(tape).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    for feed in steps_of(hvd):
        passed(*feed)
    return values(model)


def test_adasum(hvd: Any) -> None:
    """The one process combines the gradients of the ranks' shares as the paper says."""
    size = hvd.size()
    found = trained(hvd, sgd(), sparse_as_dense=True, op=hvd.Adasum)
    model, optimizer = network(Plain(size)), sgd()
    begin(Plain(size), model, optimizer)
    for number in range(STEPS):
        every = []
        for rows in (share(size, other) for other in range(size)):
            with tf.GradientTape() as tape:
                loss = loss_of(hvd, model, TOKENS[number, rows], X[number, rows], Y[number, rows])
            every.append(Dense(tape).gradient(loss, model.trainable_variables))
        grads = [
            adasum.reference([grad.numpy().ravel() for grad in each]).reshape(each[0].shape)
            for each in zip(*every, strict=True)
        ]
        optimizer.apply_gradients(zip(map(tf.constant, grads), model.trainable_variables, strict=True))
    compare(found, values(model, optimizer), 1e-7, 1e-9)


def test_layers_of_a_rank(hvd: Any) -> None:
    """The last layer is each rank's own. The one process has all of them, and its loss is the mean of theirs."""
    rank, size = hvd.rank(), hvd.size()
    body, heads = perceptron(FEATURES, 4), [perceptron(4, CLASSES) for _ in range(size)]
    draw = np.random.default_rng(5)
    start = [draw.normal(size=weight.shape) for weight in body.trainable_variables]
    heads_start = [[draw.normal(size=weight.shape) for weight in head.trainable_variables] for head in heads]
    runs = []
    for ranks in ([rank], range(size)):
        body.set_weights(start)
        for head, weights in zip(heads, heads_start, strict=True):
            head.set_weights(weights)
        mine_only = [heads[other] for other in ranks]
        variables = [*body.trainable_variables, *(weight for head in mine_only for weight in head.trainable_variables)]
        optimizer = sgd()
        for number in range(STEPS):
            with tf.GradientTape() as tape:
                losses = [
                    tf.reduce_mean(
                        tf.square(heads[other](body(X[number, share(size, other)])) - Y[number, share(size, other)])
                    )
                    for other in ranks
                ]
                loss = tf.add_n(losses) / len(losses)
            used = (
                hvd.PartialDistributedGradientTape(tape, local_layers=mine_only)
                if len(mine_only) < size or size == 1
                else tape
            )
            optimizer.apply_gradients(zip(used.gradient(loss, variables), variables, strict=True))
        runs.append((body.get_weights(), heads[rank].get_weights()))
    (shared, own), (wanted, wanted_own) = runs
    for one, other in zip(own, wanted_own, strict=True):
        np.testing.assert_allclose(one, other, 1e-9, 1e-12)
    compare(dict(enumerate(shared)), dict(enumerate(wanted)), 1e-9, 1e-12)
