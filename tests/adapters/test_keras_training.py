"""Keras: training on several ranks is training on one with the global batch; on whichever backend KERAS_BACKEND names."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import collectives
from tests.adapters.keras_training import BATCH, X, Y, close, equal, network, part, single, together, train, values

pytestmark = pytest.mark.mpi

BACKEND = keras.backend.backend()
OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.05),
    "adam": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True, ema_momentum=0.9),
    "accumulating": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_fit_is_fit_with_the_global_batch(hvd_keras: Any, kind: str) -> None:
    hvd = hvd_keras
    reference = network()
    expected = train(reference, OPTIMIZERS[kind](), X, Y, epochs=2)
    model, optimizer = network(seed=hvd.rank()), hvd.DistributedOptimizer(OPTIMIZERS[kind]())
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    history = together(hvd, model, optimizer, epochs=2, callbacks=callbacks)
    close(model, reference)
    equal(hvd, model, optimizer)
    np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-5)


@pytest.mark.parametrize("average", (True, False))
def test_gradients_of_several_passes_add_up(hvd_keras: Any, average: bool) -> None:
    hvd = hvd_keras
    make = {True: lambda: keras.optimizers.SGD(0.1, momentum=0.9), False: lambda: keras.optimizers.SGD(0.05, momentum=0.9)}
    reference = network()
    train(reference, keras.optimizers.SGD(0.1, momentum=0.9), X, Y, batch=2 * BATCH)
    model = network()
    optimizer = hvd.DistributedOptimizer(make[average](), backward_passes_per_step=2, average_aggregated_gradients=average)
    together(hvd, model, optimizer)
    close(model, reference)
    equal(hvd, model, optimizer)
    assert int(optimizer.iterations.numpy()) == 4


@pytest.mark.parametrize("passes", (1, 2))
def test_one_call_for_all_gradients(hvd_keras: Any, passes: int) -> None:
    """Four batches of a model with four variables."""
    hvd = hvd_keras
    if hvd.size() == 1:
        pytest.skip("needs two ranks")
    model = network()
    together(hvd, model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=passes))
    before = collectives.world().statistics.rounds
    model.fit(part(X, hvd), part(Y, hvd), batch_size=BATCH // hvd.size(), shuffle=False, verbose=0)
    assert collectives.world().statistics.rounds - before == 4 // passes


def test_between_two_communications_nothing_changes(hvd_keras: Any) -> None:
    hvd = hvd_keras
    model = network()
    before = model.get_weights()
    together(hvd, model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=5))
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)


@pytest.mark.parametrize(("place", "passes"), (("inside", 1), ("inside", 2), ("outside", 2), ("automatic", 1)))
def test_all_ranks_skip_a_step_in_which_one_overflows(hvd_keras: Any, place: str, passes: int) -> None:
    hvd = hvd_keras
    make = {
        "inside": lambda: hvd.DistributedOptimizer(
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0), backward_passes_per_step=passes
        ),
        "outside": lambda: keras.optimizers.LossScaleOptimizer(
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=passes), initial_scale=64.0
        ),
        "automatic": lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=passes),
    }
    keras.config.set_dtype_policy("mixed_float16" if place == "automatic" else "float32")
    try:
        model = network()
        before = model.get_weights()
        x, y, steps = part(X, hvd), part(Y, hvd), 2 * passes
        rows = BATCH // hvd.size()
        x, y = x[: steps * rows], y[: steps * rows].copy()
        if hvd.rank() == hvd.size() - 1:
            y[:rows] = np.inf
        optimizer = make[place]()
        train(model, optimizer, x[: passes * rows], y[: passes * rows], rows)
        for now, then in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(now, then)
        scale = float(model.optimizer.dynamic_scale.numpy())
        assert scale == (2.0**14 if place == "automatic" else 32.0)
        model.fit(x[passes * rows :], y[passes * rows :], batch_size=rows, shuffle=False, verbose=0)
        assert not np.array_equal(model.get_weights()[0], before[0])
        assert all(np.isfinite(value).all() for value in model.get_weights())
        equal(hvd, model, model.optimizer)
    finally:
        keras.config.set_dtype_policy("float32")


def test_mixed_precision(hvd_keras: Any) -> None:
    hvd = hvd_keras
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        reference, model = network(), network(seed=hvd.rank())
        train(reference, keras.optimizers.SGD(0.1), X, Y)
        together(
            hvd, model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        )
    finally:
        keras.config.set_dtype_policy("float32")
    for mine, expected in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0.05, atol=0.02)
    equal(hvd, model, model.optimizer)


def test_frozen_layers_stay(hvd_keras: Any) -> None:
    hvd = hvd_keras
    reference, model = network(), network()
    for each in (reference, model):
        each.get_layer("hidden").trainable = False
    train(reference, keras.optimizers.Adam(0.01), X, Y)
    together(hvd, model, hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    close(model, reference)
    np.testing.assert_array_equal(model.get_weights()[0], network().get_weights()[0])


def test_embeddings(hvd_keras: Any) -> None:
    """On TensorFlow their gradients are sparse, with rows that come several times: Keras's own Adam errs on one rank, but not here."""
    hvd = hvd_keras

    class Dense(keras.optimizers.Adam):
        def apply(self, grads: Any, variables: Any = None) -> None:
            super().apply([keras.ops.add(grad, keras.ops.zeros(grad.shape)) for grad in grads], variables)

    def words() -> Any:
        keras.utils.set_random_seed(1)
        layers = [keras.Input((2,), dtype="int32"), keras.layers.Embedding(9, 4), keras.layers.Flatten(), keras.layers.Dense(3)]
        return keras.Sequential(layers)

    numbers = np.random.default_rng(3).integers(0, 9, (len(X), 2)).astype("int32")
    reference = words()
    train(reference, Dense(0.01), numbers, Y)
    for as_dense in (False, True) if hvd.size() > 1 else (True,):
        model = words()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), sparse_as_dense=as_dense)
        train(model, optimizer, part(numbers, hvd), part(Y, hvd), BATCH // hvd.size())
        close(model, reference)
        equal(hvd, model, optimizer)


def test_a_loop_of_ones_own(hvd_keras: Any) -> None:
    hvd = hvd_keras
    model = network()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    rows, x, y = BATCH // hvd.size(), part(X, hvd), part(Y, hvd)
    optimizer.build(model.trainable_variables)
    step = _STEPS[BACKEND](model, optimizer)
    for at in range(0, len(x), rows):
        step(x[at : at + rows], y[at : at + rows])
    close(model, single(momentum=0.9))
    equal(hvd, model, optimizer)


def _with_tensorflow(model: Any, optimizer: Any) -> Any:
    import tensorflow as tf

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True))

    return step


def _with_torch(model: Any, optimizer: Any) -> Any:
    import torch

    def step(x: Any, y: Any) -> None:
        loss = ((model(torch.as_tensor(x), training=True) - torch.as_tensor(y)) ** 2).mean()
        grads = torch.autograd.grad(loss, [variable.value for variable in model.trainable_variables])
        kept = [grad.clone() for grad in grads]
        with torch.no_grad():
            optimizer.apply(list(grads), model.trainable_variables)
        assert all(torch.equal(grad, copy) for grad, copy in zip(grads, kept, strict=True))  # they are the caller's

    return step


def _with_jax(model: Any, optimizer: Any) -> Any:
    import jax

    def loss(trainable: Any, other: Any, x: Any, y: Any) -> Any:
        return ((model.stateless_call(trainable, other, x, training=True)[0] - y) ** 2).mean()

    @jax.jit
    def update(trainable: Any, other: Any, state: Any, x: Any, y: Any) -> Any:
        return optimizer.stateless_apply(state, jax.grad(loss)(trainable, other, x, y), trainable)

    def step(x: Any, y: Any) -> None:
        variables = [model.trainable_variables, model.non_trainable_variables, optimizer.variables]
        trainable, state = update(*([variable.value for variable in each] for each in variables), x, y)
        for variable, value in zip([*variables[0], *variables[2]], [*trainable, *state], strict=True):
            variable.assign(value)

    return step


_STEPS = {"tensorflow": _with_tensorflow, "torch": _with_torch, "jax": _with_jax}


def test_eagerly(hvd_keras: Any) -> None:
    hvd = hvd_keras
    model = network()
    together(hvd, model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), run_eagerly=True)
    close(model, single())


@pytest.mark.skipif(BACKEND == "torch", reason="Keras refuses it on this backend")
def test_several_steps_per_execution(hvd_keras: Any) -> None:
    hvd = hvd_keras
    model = network()
    together(hvd, model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), steps_per_execution=2)
    close(model, single())


def test_other_operations(hvd_keras: Any) -> None:
    """A sum at a rate divided by the number of ranks is a mean, and so is a mean that is divided in two places, or compressed."""
    hvd = hvd_keras
    for rate, keywords, tolerance in (
        (0.1 / hvd.size(), {"op": hvd.Sum}, 3e-6),
        (0.1, {"gradient_predivide_factor": 2.0, "groups": 2}, 3e-6),
        (0.1, {"compression": hvd.Compression.fp16}, 3e-3),
    ):
        model = network()
        together(hvd, model, hvd.DistributedOptimizer(keras.optimizers.SGD(rate), **keywords))
        for mine, expected in zip(model.get_weights(), single().get_weights(), strict=True):
            np.testing.assert_allclose(mine, expected, atol=tolerance)


def test_groups_of_variables(hvd_keras: Any) -> None:
    hvd = hvd_keras
    model = network()
    variables = model.trainable_variables
    together(hvd, model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), groups=[variables[:1], variables[2:]]))
    close(model, single())
    equal(hvd, model)


@pytest.mark.parametrize("scaled", (True, False))
def test_local_layers_train_alone(hvd_keras: Any, scaled: bool) -> None:
    hvd = hvd_keras
    model = network()
    layer = model.get_layer("last")
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=layer, scale_local_gradients=scaled)
    rows = BATCH // hvd.size()
    x, y = part(X, hvd)[:rows], part(Y, hvd)[:rows]
    alone = network()
    train(alone, keras.optimizers.SGD(0.1), x, y, rows)
    train(model, optimizer, x, y, rows)
    share = 1.0 / hvd.size() if scaled else 1.0
    for mine, expected, then in zip(layer.get_weights(), alone.get_layer("last").get_weights(), network().get_weights()[2:], strict=True):
        np.testing.assert_allclose(mine - then, share * (expected - then), atol=1e-6)
    equal(hvd, model.get_layer("hidden"))


def test_ranks_that_are_not_in_the_process_set_train_alone(hvd_keras: Any) -> None:
    hvd = hvd_keras
    members = hvd.add_process_set([0])
    try:
        rows, x, y = BATCH // hvd.size(), part(X, hvd), part(Y, hvd)
        alone, model = network(), network()
        train(alone, keras.optimizers.SGD(0.1), x, y, rows)
        train(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=members), x, y, rows)
        close(model, alone)
    finally:
        hvd.remove_process_set(members)


def test_two_models_take_turns(hvd_keras: Any) -> None:
    """As a GAN's two do; their optimizers are of the same class."""
    hvd = hvd_keras
    models, optimizers = [], []
    for width in (4, 6):
        keras.utils.set_random_seed(width)
        models.append(keras.Sequential([keras.Input((5,)), keras.layers.Dense(width), keras.layers.Dense(3)]))
        optimizers.append(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
        models[-1].compile(optimizer=optimizers[-1], loss="mse")
    rows, x, y = BATCH // hvd.size(), part(X, hvd), part(Y, hvd)
    for at in (0, rows, 2 * rows):
        for model in models:
            model.train_on_batch(x[at : at + rows], y[at : at + rows])
    equal(hvd, *models, *optimizers)
    assert all(np.isfinite(value).all() for value in values(*models))


@pytest.mark.skipif(BACKEND != "tensorflow", reason="only there XLA is in the way")
def test_xla_is_left_out_or_refused(hvd_keras: Any) -> None:
    hvd = hvd_keras
    model = network()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    assert model.jit_compile is False
    scaled = keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    with pytest.raises(ValueError, match=r"compile\(jit_compile=False\)"):
        model.compile(optimizer=scaled, loss="mse", jit_compile=True)
    model.compile(optimizer="sgd", loss="mse", jit_compile=True)
    assert model.jit_compile is True
    model.compile(optimizer=scaled, loss="mse")
    model.jit_compile = True
    if hvd.size() > 1:
        with pytest.raises(Exception, match="jit_compile=False"):
            model.fit(X[:4], Y[:4], verbose=0)
