"""Recipes of Keras 3: ``fit`` on the ranks' shares of every batch, and in one process on the whole batches.

The rows of "Recipes" in docs/horovod.md, on whichever backend KERAS_BACKEND names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests.adapters.keras_training import BATCH, X, Y, network, part, together, train
from tests.adapters.shares import One, alone, compare, recipe_of, share

BACKEND = keras.backend.backend()
Result = dict[str, Any]


recipe = recipe_of(3e-5, 3e-6)


def momentum(rate: Any = 0.1, **keywords: Any) -> Any:
    return keras.optimizers.SGD(rate, momentum=0.9, **keywords)


def starting(hvd: Any) -> list[Any]:
    """The callbacks of every program on several ranks."""
    if isinstance(hvd, One):
        return []
    return [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]


def named(*owners: Any) -> Result:
    """All variables of models and optimizers."""
    return {
        f"{at}.{n}": np.array(each.numpy()) for at, owner in enumerate(owners) for n, each in enumerate(owner.variables)
    }


def fitted(hvd: Any, optimizer: Any) -> Result:
    """Two epochs, from other weights on every rank."""
    model, optimizer = network(seed=hvd.rank()), hvd.DistributedOptimizer(optimizer)
    history = together(hvd, model, optimizer, epochs=2, callbacks=starting(hvd))
    return {**named(model, optimizer), "loss": history.history["loss"]}


test_global_clipnorm = recipe(lambda hvd: fitted(hvd, momentum(global_clipnorm=0.05)))
test_gradient_accumulation_steps = recipe(lambda hvd: fitted(hvd, momentum(gradient_accumulation_steps=2)))


@recipe
def test_schedule_and_averages(hvd: Any) -> Result:
    """A schedule, weight decay and moving averages of the weights."""
    rate = keras.optimizers.schedules.CosineDecay(0.02, 8)
    return fitted(hvd, keras.optimizers.AdamW(rate, weight_decay=0.1, use_ema=True, ema_momentum=0.9))


def adding_up(hvd: Any, average: bool) -> Result:
    """Gradients of two passes travel together; Keras's own accumulation does the same in one process."""
    model, single = network(), isinstance(hvd, One)
    rate = 0.1 if average or single else 0.05
    options = {"backward_passes_per_step": 2, "average_aggregated_gradients": average}
    optimizer = hvd.DistributedOptimizer(momentum(rate, gradient_accumulation_steps=2 if single else None), **options)
    together(hvd, model, optimizer)
    assert single or int(optimizer.iterations.numpy()) == 4
    return named(model)


def test_backward_passes_per_step(hvd: Any) -> None:
    wanted = alone(adding_up, One(hvd.size()), average=True)
    for average in (True, False):
        compare(adding_up(hvd, average), wanted, 3e-5, 3e-6)


def overflowing(hvd: Any, place: str, passes: int) -> Result:
    """The last row of the first batch, which one rank has, overflows: all skip the step, and lower the scale."""
    scaling, single = keras.optimizers.LossScaleOptimizer, isinstance(hvd, One)
    options = {} if single else {"backward_passes_per_step": passes, "average_aggregated_gradients": True}
    if place == "inside":
        optimizer = hvd.DistributedOptimizer(scaling(momentum(), initial_scale=64.0), **options)
    else:
        optimizer = hvd.DistributedOptimizer(momentum(), **options)
    if place == "outside":
        optimizer = scaling(optimizer, initial_scale=64.0)
    targets = Y.copy()
    targets[BATCH - 1] = np.inf
    model, rows = network(), BATCH // hvd.size() * (passes if single else 1)
    train(model, optimizer, part(X, hvd), part(targets, hvd), rows)
    assert all(np.isfinite(value).all() for value in model.get_weights())
    return {**named(model), "scale": np.array(model.optimizer.dynamic_scale.numpy())}


@recipe_of(0.05, 0.01)
def test_overflow_under_a_policy(hvd: Any) -> Result:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return overflowing(hvd, "automatic", 1)
    finally:
        keras.config.set_dtype_policy("float32")


def test_loss_scale_and_two_passes(hvd: Any) -> None:
    wanted = alone(overflowing, One(hvd.size()), place="inside", passes=2)
    for place in ("inside", "outside"):
        compare(overflowing(hvd, place, 2), wanted, 3e-5, 3e-6)


@pytest.mark.parametrize("policy", ("mixed_bfloat16", "mixed_float16"))
@recipe_of(1e-3, 1e-4, eagerly=False)
def test_mixed_precision(hvd: Any, policy: str) -> Result:
    """The one process goes through the ranks' shares one by one, since halves are rounded where a product ends."""
    keras.config.set_dtype_policy(policy)
    try:
        model = network()
        if isinstance(hvd, One):
            optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=hvd.ranks if hvd.ranks > 1 else None)
            train(model, optimizer, X, Y, BATCH // hvd.ranks)
        else:
            together(hvd, model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
        assert type(model.optimizer).__name__ == ("LossScaleOptimizer" if policy == "mixed_float16" else "SGD")
        return named(model)
    finally:
        keras.config.set_dtype_policy("float32")


@recipe
def test_uneven_shares(hvd: Any) -> Result:
    """Shares that differ in length; weights make of the mean over a share its part of the mean over the batch."""
    own = share(hvd.size(), hvd.rank())
    x, y = (np.concatenate([rows[at : at + BATCH][own] for at in range(0, len(rows), BATCH)]) for rows in (X, Y))
    rows = own.stop - own.start
    weights = np.full(len(x), rows * hvd.size() / BATCH, "float32")
    model, optimizer = network(seed=hvd.rank()), hvd.DistributedOptimizer(momentum())
    train(model, optimizer, x, y, rows, sample_weight=weights, callbacks=starting(hvd))
    return named(model, optimizer)


@recipe
def test_freezing(hvd: Any) -> Result:
    """One layer begins to learn in the second epoch."""
    model = network(seed=hvd.rank())
    for learns in (False, True):
        model.get_layer("hidden").trainable = learns
        together(hvd, model, hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), callbacks=starting(hvd))
    return named(model)


def embedding(hvd: Any, **options: Any) -> Result:
    """On TensorFlow its gradients are sparse; where rows come several times, Keras's own Adam errs."""

    class Dense(keras.optimizers.Adam):
        def apply(self, grads: Any, variables: Any = None) -> None:
            super().apply([keras.ops.add(grad, keras.ops.zeros(grad.shape)) for grad in grads], variables)

    keras.utils.set_random_seed(1)
    layers = [
        keras.Input((2,), dtype="int32"),
        keras.layers.Embedding(9, 4),
        keras.layers.Flatten(),
        keras.layers.Dense(3),
    ]
    model = keras.Sequential(layers)
    numbers = np.random.default_rng(3).integers(0, 9, (len(X), 2)).astype("int32")
    optimizer = (
        Dense(0.01) if isinstance(hvd, One) else hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), **options)
    )
    train(model, optimizer, part(numbers, hvd), part(Y, hvd), BATCH // hvd.size())
    return named(model)


def test_embedding(hvd: Any) -> None:
    wanted = alone(embedding, One(hvd.size()))
    for as_dense in (False, True):
        compare(embedding(hvd, sparse_as_dense=as_dense), wanted, 3e-5, 3e-6)


@recipe
def test_two_models_in_turn(hvd: Any) -> Result:
    """Two models in turn, whose optimizers are of one class."""
    models = []
    for width in (4, 6):
        keras.utils.set_random_seed(width)
        models.append(keras.Sequential([keras.Input((5,)), keras.layers.Dense(width), keras.layers.Dense(3)]))
        models[-1].compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    rows, x, y = BATCH // hvd.size(), part(X, hvd), part(Y, hvd)
    for at in range(0, len(x), rows):
        for model in models:
            model.train_on_batch(x[at : at + rows], y[at : at + rows])
    return named(*models)


@recipe
def test_checkpoint(hvd: Any, folder: Path) -> Result:
    """Rank 0 alone saves and loads the model; the others begin with another one, and get what it has."""
    model, schedule = network(), keras.optimizers.schedules.ExponentialDecay(0.02, 4, 0.5)
    together(hvd, model, hvd.DistributedOptimizer(keras.optimizers.Adam(schedule)))
    if not isinstance(hvd, One):
        file = folder / "checkpoint.keras"
        if hvd.rank() == 0:
            model.save(file)
            model = hvd.load_model(file)
        else:
            model = network(seed=5)
            model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(schedule)), loss="mse")
    rows = BATCH // hvd.size()
    model.fit(part(X, hvd), part(Y, hvd), batch_size=rows, shuffle=False, verbose=0, callbacks=starting(hvd))
    return named(model, model.optimizer)


class Plan(keras.callbacks.Callback):
    """In one process: the rates of the warm-up, batch by batch, as its documentation gives them."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.batches = ranks, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        epochs = min(self.batches, 4) / 4
        self.model.optimizer.learning_rate = 0.2 / self.ranks * (epochs * (self.ranks - 1) + 1)


@recipe
def test_warm_up(hvd: Any) -> Result:
    model, optimizer = network(), hvd.DistributedOptimizer(momentum(0.2))
    if isinstance(hvd, One):
        callbacks: list[Any] = [Plan(hvd.ranks)]
    else:
        callbacks = [hvd.callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=1, momentum_correction=False)]
    together(hvd, model, optimizer, epochs=2, callbacks=callbacks)
    return named(model)


def chosen(hvd: Any, folder: Path) -> Result:
    """What metrics decide is decided alike: the rate falls at the same epoch, and rank 0 keeps the best model."""
    model, optimizer = network(), hvd.DistributedOptimizer(keras.optimizers.SGD(1.5))
    file = str(folder / "best.keras")
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_delta=0.0)
    if isinstance(hvd, One):
        best = keras.callbacks.ModelCheckpoint(file, save_best_only=True)
    else:
        best = hvd.callbacks.BestModelCheckpoint(filepath=file)
    held = part(X[:BATCH], hvd), part(-Y[:BATCH], hvd)
    callbacks = [*starting(hvd), plateau, *([best] if hvd.rank() == 0 else [])]
    history = together(hvd, model, optimizer, epochs=4, callbacks=callbacks, validation_data=held)
    hvd.barrier()
    losses = history.history["val_loss"]
    rates = [*history.history["learning_rate"], float(optimizer.learning_rate.numpy())]
    assert np.argmin(losses) < 3 and rates[-1] < rates[0]
    kept = keras.saving.load_model(file, compile=False)
    return {**named(model, kept), "rates": rates, "losses": losses}


def _with_tensorflow(model: Any, optimizer: Any) -> Any:
    import tensorflow as tf

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )

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


@recipe
def test_loop_of_ones_own(hvd: Any) -> Result:
    """Without ``fit``: a function of TensorFlow, PyTorch's autograd, a compiled step of JAX."""
    model = network()
    optimizer = hvd.DistributedOptimizer(momentum())
    rows, x, y = BATCH // hvd.size(), part(X, hvd), part(Y, hvd)
    optimizer.build(model.trainable_variables)
    step = _STEPS[BACKEND](model, optimizer)
    for at in range(0, len(x), rows):
        step(x[at : at + rows], y[at : at + rows])
    return named(model, optimizer)


def test_best_model_and_plateau(hvd: Any, folder: Path, tmp_path: Path) -> None:
    compare(chosen(hvd, folder), alone(chosen, One(hvd.size()), folder=tmp_path), 3e-5, 3e-6)


def test_layers_of_a_rank(hvd: Any) -> None:
    """The last layer is each rank's own. The one process has all of them, and its loss is the mean of theirs."""
    rank, size = hvd.rank(), hvd.size()
    mine = BATCH // size
    model = network()
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=model.get_layer("last"))
    together(hvd, model, optimizer)
    shared = keras.layers.Dense(7, activation="tanh")
    heads, given = [keras.layers.Dense(3) for _ in range(size)], [keras.Input((5,)) for _ in range(size)]
    whole = keras.Model(given, [head(shared(each)) for head, each in zip(heads, given, strict=True)])
    start = network().get_weights()
    shared.set_weights(start[:2])
    for head in heads:
        head.set_weights(start[2:])
    whole.compile(optimizer=keras.optimizers.SGD(0.1), loss=["mse"] * size, loss_weights=[1.0 / size] * size)
    x, y = (
        [rows.reshape(-1, size, mine, rows.shape[1])[:, at].reshape(-1, rows.shape[1]) for at in range(size)]
        for rows in (X, Y)
    )
    whole.fit(x, y, batch_size=mine, shuffle=False, verbose=0)
    for found, wanted in zip(model.get_weights()[2:], heads[rank].get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, 3e-5, 3e-6)
    compare(dict(enumerate(model.get_weights()[:2])), dict(enumerate(shared.get_weights())), 3e-5, 3e-6)
