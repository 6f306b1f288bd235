"""A small Keras model, its data, and training it on one rank or on all: for the tests of the Keras adapters."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import numpy as np

from tests.support.scenarios.local_worlds import PARTS, train_parts_with_keras

KERAS_2 = "TF_USE_LEGACY_KERAS" in os.environ
keras = importlib.import_module("tensorflow").keras if KERAS_2 else importlib.import_module("keras")

if keras.backend.backend() == "jax":
    import jax

    jax.config.update("jax_disable_most_optimizations", True)  # what takes time here is to compile

BATCH = 12
"""Rows of a global batch, on as many ranks as there are."""
_draw = np.random.default_rng(7)
X = _draw.normal(size=(4 * BATCH, 5)).astype("float32")
Y = _draw.normal(size=(4 * BATCH, 3)).astype("float32")


def network(seed: int = 0, **last: Any) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(7, activation="tanh", name="hidden"), keras.layers.Dense(3, name="last", **last)]
    return keras.Sequential([keras.Input((5,)), *layers])


def part(rows: Any, hvd: Any) -> Any:
    """This rank's part of each global batch."""
    mine = BATCH // hvd.size()
    return np.concatenate(
        [rows[at : at + BATCH][hvd.rank() * mine : (hvd.rank() + 1) * mine] for at in range(0, len(rows), BATCH)]
    )


def train(model: Any, optimizer: Any, x: Any, y: Any, batch: int = BATCH, epochs: int = 1, **keywords: Any) -> Any:
    """Fit without shuffling; the history."""
    compiling = {
        key: keywords.pop(key)
        for key in ("jit_compile", "run_eagerly", "metrics", "steps_per_execution")
        if key in keywords
    }
    model.compile(optimizer=optimizer, loss=keywords.pop("loss", "mse"), **compiling)
    return model.fit(x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0, **keywords)


@functools.cache
def single() -> Any:
    """The model after one epoch of SGD with the global batch."""
    model = network()
    train(model, keras.optimizers.SGD(0.1), X, Y)
    return model


def together(hvd: Any, model: Any, optimizer: Any, **keywords: Any) -> Any:
    """Fit on this rank's part of the data; the history."""
    return train(model, optimizer, part(X, hvd), part(Y, hvd), BATCH // hvd.size(), **keywords)


def values(*owners: Any) -> list[Any]:
    """Of all variables of models and optimizers."""
    variables = [
        variable
        for owner in owners
        for variable in (owner.variables() if callable(owner.variables) else owner.variables)
    ]
    return [np.array(variable.numpy()) for variable in variables]


def check_bits(hvd: Any, pair: Any) -> None:
    """With "reproducible", 8 parts a step have the same weights on one rank, and on one that follows two."""
    alone = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    if pair.included():
        half = range(pair.rank() * PARTS // 2, (pair.rank() + 1) * PARTS // 2)

        def on(members: Any, state: Any, parts: range, steps: range) -> Any:
            wrap = functools.partial(hvd.DistributedOptimizer, process_set=members)
            return train_parts_with_keras(keras, wrap, state, parts, steps)

        own = alone[hvd.rank()]
        wanted, _ = on(own, None, range(PARTS), range(4))
        _, begun = on(pair, None, half, range(2))
        found, _ = on(own, begun, range(PARTS), range(2, 4))
        assert [each.tobytes() for each in found] == [each.tobytes() for each in wanted]
    for each in alone:
        hvd.remove_process_set(each)


def close(model: Any, reference: Any) -> None:
    for mine, expected in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=3e-5, atol=3e-6)


def equal(hvd: Any, *owners: Any) -> None:
    """All ranks have the same values, bit for bit."""
    found = values(*owners)
    everyone = hvd.allgather_object([value.tobytes() for value in found])
    differing = [at for at, value in enumerate(found) if any(each[at] != everyone[0][at] for each in everyone)]
    assert not differing, f"variables {differing} differ"
