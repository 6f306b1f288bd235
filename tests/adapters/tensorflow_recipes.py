"""A small model of TensorFlow, training it, and the test that compares ranks with one process."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.adapters.shares import CLASSES, FEATURES, ROWS, STEPS, TOKENS, WORDS, One, X, Y, mine, recipe_of

keras = tf.keras
Result = dict[str, Any]


class Dense:
    """A dense tape: of slices with a row that occurs twice, TensorFlow's norm and Keras's Adam are wrong."""

    def __init__(self, tape: Any) -> None:
        self._tape = tape

    def gradient(self, *arguments: Any) -> Any:
        return [tf.convert_to_tensor(grad) for grad in self._tape.gradient(*arguments)]


class Plain(One):
    """One process that trains with TensorFlow alone."""

    SyncBatchNormalization = staticmethod(keras.layers.BatchNormalization)

    def DistributedGradientTape(self, tape: Any, **keywords: Any) -> Any:
        return Dense(tape)


recipe = recipe_of(1e-7, 1e-9, Plain)


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
