"""Recipes of TensorFlow, each written once: on the ranks' shares of every batch, and in one process on the whole batches.

The rows of "Recipes" in docs/horovod.md; `tests.adapters.shares` says how the two runs are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from collectives import adasum
from tests.adapters.shares import CLASSES, FEATURES, ROWS, STEPS, TOKENS, WORDS, One, X, Y, compare, mine, share

keras, v1 = tf.keras, tf.compat.v1
pytestmark = pytest.mark.mpi
Result = dict[str, Any]
THREADS = v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)


class Dense:
    """A tape whose gradients are dense: of slices with a row that occurs twice, TensorFlow's norm and Keras's Adam are wrong."""

    def __init__(self, tape: Any) -> None:
        self._tape = tape

    def gradient(self, *arguments: Any) -> Any:
        return [tf.convert_to_tensor(grad) for grad in self._tape.gradient(*arguments)]


class Plain(One):
    """One process that trains with TensorFlow alone."""

    SyncBatchNormalization = staticmethod(keras.layers.BatchNormalization)

    def DistributedGradientTape(self, tape: Any, **keywords: Any) -> Any:
        return Dense(tape)


def recipe(program: Callable[[Any], Result]) -> Callable[..., None]:
    """A test: what the program finds on the ranks is what it finds in one process."""

    def test(hvd_tf: Any) -> None:
        compare(program(hvd_tf), program(Plain(hvd_tf.size())), 1e-7, 1e-9)

    test.__doc__ = program.__doc__
    return test


def network(hvd: Any, *middle: Any, dtype: Any = "float64", restarted: int = 0) -> Any:
    """Words and numbers in, numbers out; with other weights on every rank."""
    keras.utils.set_random_seed(hvd.rank() + 10 * restarted)
    words, numbers = keras.Input((2,), dtype="int64"), keras.Input((FEATURES,), dtype="float64")
    table = keras.layers.Flatten(dtype=dtype)(keras.layers.Embedding(WORDS, 3, dtype=dtype)(words))
    hidden = keras.layers.Dense(4, activation="tanh", dtype=dtype)(
        keras.layers.Concatenate(dtype=dtype)([table, numbers])
    )
    for layer in middle:
        hidden = layer(hidden)
    return keras.Model([words, numbers], keras.layers.Dense(CLASSES, dtype=dtype)(hidden))


def perceptron(given: int, wanted: int) -> Any:
    layers = [keras.layers.Dense(4, activation="tanh", dtype="float64"), keras.layers.Dense(wanted, dtype="float64")]
    return keras.Sequential([keras.Input((given,), dtype="float64"), *layers])


def sgd(rate: Any = 0.1) -> Any:
    return keras.optimizers.SGD(rate, momentum=0.9)


def loss_of(hvd: Any, model: Any, words: Any, x: Any, y: Any) -> Any:
    output = tf.cast(model([words, x], training=True), tf.float64)
    return tf.reduce_sum(tf.reduce_mean(tf.square(output - y), -1)) * hvd.size() / ROWS


def steps_of(hvd: Any, first: int = 0, last: int = STEPS) -> list[Any]:
    """This rank's words, numbers and targets of these steps."""
    return [tuple(map(tf.constant, step)) for step in zip(mine(hvd, TOKENS), mine(hvd, X), mine(hvd, Y), strict=True)][
        first:last
    ]


def begin(hvd: Any, model: Any, optimizer: Any) -> None:
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)


def step_of(
    hvd: Any, model: Any, optimizer: Any, change: Any = lambda grads: grads, graph: bool = True, **options: Any
) -> Any:
    def step(words: Any, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(hvd, model, words, x, y)
        tape = hvd.DistributedGradientTape(tape, **options)
        grads = change(tape.gradient(loss, model.trainable_variables))
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    return tf.function(step, reduce_retracing=True) if graph else step


def values(*owners: Any) -> Result:
    """All variables of models and optimizers."""
    return {
        f"{at}.{number}": each.numpy() for at, owner in enumerate(owners) for number, each in enumerate(owner.variables)
    }


def trained(hvd: Any, optimizer: Any, *middle: Any, **how: Any) -> Result:
    model = network(hvd, *middle)
    begin(hvd, model, optimizer)
    step = step_of(hvd, model, optimizer, **how)
    for feed in steps_of(hvd):
        step(*feed)
    return values(model, optimizer)


# ---- the tape --------------------------------------------------------------------------------------------------------------------------


test_tape = recipe(lambda hvd: trained(hvd, sgd(), graph=False))
test_tape_in_a_function = recipe(lambda hvd: trained(hvd, keras.optimizers.Adam(0.02)))
test_sparse_as_dense = recipe(lambda hvd: trained(hvd, sgd(), sparse_as_dense=True))
test_schedule = recipe(lambda hvd: trained(hvd, sgd(keras.optimizers.schedules.ExponentialDecay(0.2, 1, 0.6))))


def clipped(grads: Any) -> Any:
    found, norm = tf.clip_by_global_norm(grads, 0.05)
    tf.debugging.assert_greater(norm, tf.cast(0.05, norm.dtype))
    return found


test_clipping_after_the_tape = recipe(lambda hvd: trained(hvd, sgd(), change=clipped))
test_clipping_in_the_optimizer = recipe(
    lambda hvd: trained(hvd, keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.05))
)


@recipe
def test_sync_batch_normalization(hvd: Any) -> Result:
    return trained(hvd, sgd(), hvd.SyncBatchNormalization(dtype="float64", momentum=0.7))


@recipe
def test_freezing(hvd: Any) -> Result:
    """The embedding begins to learn halfway."""
    model, optimizer = network(hvd), sgd()
    begin(hvd, model, optimizer)
    frozen = next(layer for layer in model.layers if isinstance(layer, keras.layers.Embedding))
    for first, last, learns in ((0, 2, False), (2, STEPS, True)):
        frozen.trainable = learns
        step = step_of(hvd, model, optimizer)
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


@recipe
def test_passes_added_up_by_the_program(hvd: Any) -> Result:
    """Gradients of two passes are added up in the program, and the ranks' sums combined by one call."""
    model, optimizer = network(hvd), sgd()
    begin(hvd, model, optimizer)
    feeds = steps_of(hvd)
    for pair in zip(feeds[::2], feeds[1::2], strict=True):
        sums: list[Any] = []
        for feed in pair:
            with tf.GradientTape() as tape:
                loss = loss_of(hvd, model, *feed) / 2
            sums.append(Dense(tape).gradient(loss, model.trainable_variables))
        grads = hvd.grouped_allreduce([one + other for one, other in zip(*sums, strict=True)], name="sums")
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
    return values(model, optimizer)


# ---- mixed precision -------------------------------------------------------------------------------------------------------------------


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


def halves(hvd: Any, policy: str) -> Result:
    """The one process goes through the ranks' shares one after the other, since halves are rounded where a product ends."""
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


# ---- data ------------------------------------------------------------------------------------------------------------------------------


@recipe
def test_shards_of_a_dataset_and_join(hvd: Any) -> Result:
    """A dataset of 13 rows in shards and in batches of two: ranks have different numbers of batches, and the last one is short."""
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


# ---- checkpoints -----------------------------------------------------------------------------------------------------------------------


def resumed(hvd: Any, folder: Path) -> Result:
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
    """TensorFlow 1: a monitored session whose checkpoints rank 0 alone writes; in the middle the program starts again."""
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


@pytest.fixture
def folder(hvd_tf: Any, tmp_path_factory: Any) -> Path:
    """One for all ranks."""
    return Path(hvd_tf.broadcast_object(str(tmp_path_factory.mktemp("recipe")) if hvd_tf.rank() == 0 else None))


def test_checkpoint(hvd_tf: Any, folder: Path) -> None:
    compare(resumed(hvd_tf, folder), resumed(Plain(hvd_tf.size()), folder), 1e-7, 1e-9)


def test_session(hvd_tf: Any, folder: Path, tmp_path: Path) -> None:
    compare(in_session(hvd_tf, folder), in_session(Plain(hvd_tf.size()), tmp_path), 1e-7, 1e-9)


def test_mixed_bfloat16(hvd_tf: Any) -> None:
    compare(halves(hvd_tf, "mixed_bfloat16"), halves(Plain(hvd_tf.size()), "mixed_bfloat16"), 1e-3, 1e-4)


def test_mixed_float16(hvd_tf: Any) -> None:
    compare(halves(hvd_tf, "mixed_float16"), halves(Plain(hvd_tf.size()), "mixed_float16"), 1e-3, 1e-4)


def test_adasum(hvd_tf: Any) -> None:
    """The one process combines the gradients of the ranks' shares as the paper says."""
    size = hvd_tf.size()
    found = trained(hvd_tf, sgd(), sparse_as_dense=True, op=hvd_tf.Adasum)
    model, optimizer = network(Plain(size)), sgd()
    begin(Plain(size), model, optimizer)
    for number in range(STEPS):
        every = []
        for rows in (share(size, other) for other in range(size)):
            with tf.GradientTape() as tape:
                loss = loss_of(hvd_tf, model, TOKENS[number, rows], X[number, rows], Y[number, rows])
            every.append(Dense(tape).gradient(loss, model.trainable_variables))
        grads = [
            adasum.reference([grad.numpy().ravel() for grad in each]).reshape(each[0].shape)
            for each in zip(*every, strict=True)
        ]
        optimizer.apply_gradients(zip(map(tf.constant, grads), model.trainable_variables, strict=True))
    compare(found, values(model, optimizer), 1e-7, 1e-9)


def test_layers_of_a_rank(hvd_tf: Any) -> None:
    """The last layer is each rank's own. The one process has as many of them, and the mean of their losses is its loss."""
    rank, size = hvd_tf.rank(), hvd_tf.size()
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
                hvd_tf.PartialDistributedGradientTape(tape, local_layers=mine_only)
                if len(mine_only) < size or size == 1
                else tape
            )
            optimizer.apply_gradients(zip(used.gradient(loss, variables), variables, strict=True))
        runs.append((body.get_weights(), heads[rank].get_weights()))
    (shared, own), (wanted, wanted_own) = runs
    for one, other in zip(own, wanted_own, strict=True):
        np.testing.assert_allclose(one, other, 1e-9, 1e-12)
    compare(dict(enumerate(shared)), dict(enumerate(wanted)), 1e-9, 1e-12)
