"""Training on the ranks of a local world, and on one rank with all data.

    python -m tests.support.scenarios.local_worlds FRAMEWORK

Each framework has a process of its own, and as many emulated devices as ranks where it can emulate them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import collectives

RANKS = 2
STEPS = 5
_draw = np.random.default_rng(5)
INPUTS = _draw.normal(size=(8 * RANKS, 4)).astype(np.float32)
TARGETS = INPUTS @ np.arange(4, dtype=np.float32)
IMAGES = _draw.random((16 * RANKS, 12, 12, 1), np.float32)
LABELS = _draw.integers(0, 10, 16 * RANKS)
Train = Callable[[int, int], Any]
"""Trains as one of some ranks, and returns what is equal on all."""


def check(train: Train, runs: int = 1) -> None:
    def of_rank() -> Any:
        collectives.init()
        return train(collectives.rank(), collectives.size())

    alone = train(0, 1)
    with collectives.local_world(RANKS) as world:
        for _ in range(runs):
            for trained in world.run(of_rank, timeout=120):
                for own, expected in zip(trained, alone, strict=True):
                    np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-5)


def torch() -> None:
    import torch

    import collectives.torch as hvd

    inputs, targets = torch.from_numpy(INPUTS), torch.from_numpy(TARGETS)

    def train(rank: int, size: int) -> list[Any]:
        x, y = inputs[rank::size], targets[rank::size]
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) / 10 + number + rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
        if size > 1:
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        for _ in range(STEPS):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x)[:, 0], y).backward()
            optimizer.step()
        return [parameter.detach().numpy() for parameter in model.parameters()]

    check(train)


def jax() -> None:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={RANKS}"
    import jax
    import jax.numpy as jnp

    import collectives.jax as hvd

    @jax.jit
    def shared(x: Any) -> Any:  # every rank's program is its own
        return hvd.allreduce(x, op=hvd.Sum) + hvd.rank()

    def train(rank: int, size: int) -> list[Any]:
        x, y = INPUTS[rank::size], TARGETS[rank::size]
        parameters = jnp.full(4, 1.0 + rank)
        gradients_of = jax.grad(lambda parameters: jnp.mean((x @ parameters - y) ** 2))
        if size > 1:
            parameters = hvd.broadcast_parameters(parameters, root_rank=0)
            assert parameters.devices() == {jax.devices()[rank]}
            for call in (shared, hvd.allreduce):
                expected = size * (size + 1) / 2 + rank if call is shared else (size + 1) / 2
                np.testing.assert_array_equal(call(jnp.full(2, rank + 1.0)), expected)

        @jax.jit
        def step(parameters: Any) -> Any:
            gradients = gradients_of(parameters)
            return parameters - 0.1 * (hvd.allreduce(gradients) if size > 1 else gradients)

        for _ in range(STEPS):
            parameters = step(parameters)
        return [np.asarray(parameters)]

    check(train, runs=2)  # what the first has compiled is used again


def tensorflow() -> None:
    import tensorflow as tf

    import collectives.tensorflow as hvd

    emulate_tensorflow_devices()

    @tf.function
    def shared(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum), hvd.rank_op()

    def train(rank: int, size: int) -> list[Any]:
        x, y = tf.constant(INPUTS[rank::size]), tf.constant(TARGETS[rank::size])
        weights = tf.Variable(tf.fill([4, 1], 1.0 + rank))
        if size > 1:
            hvd.broadcast_variables([weights], root_rank=0)
            assert tf.ones(1).device.endswith(f"CPU:{rank}")
            check_graphs(rank, size)

        @tf.function
        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.matmul(x, weights)[:, 0] - y) ** 2)
            if size > 1:
                tape = hvd.DistributedGradientTape(tape)
            (gradient,) = tape.gradient(loss, [weights])
            weights.assign_sub(0.1 * gradient)

        for _ in range(STEPS):
            step()
        return [weights.numpy()]

    def check_graphs(rank: int, size: int) -> None:
        """Graphs run as the rank that calls them: shared, nested in branches and loops, and their gradients."""
        own_shared = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))

        @tf.function
        def nested(x: Any) -> Any:
            for _ in range(2):
                x = tf.cond(tf.reduce_sum(x) > 0, lambda: own_shared(x), lambda: x)  # noqa: B023
                _, x = tf.while_loop(lambda at, _: at < 2, lambda at, x: (at + 1, hvd.allreduce(x)), [0, x])
            return x

        x = tf.fill([2], 1.0 + rank)
        total, number = shared(x)
        np.testing.assert_array_equal(total, size * (size + 1) / 2)
        assert int(number) == rank
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = tf.reduce_sum(nested(x)) * (1.0 + rank)
        np.testing.assert_allclose(tape.gradient(result, x), size**2 * (1 + size) / 2)

    check(train)
    with collectives.local_world(RANKS) as world:
        world.run(lambda: shared(tf.ones(2)))
    for outside in (shared, tf.function(lambda x: hvd.allreduce(x))):
        try:
            outside(tf.ones(2))
        except Exception as error:
            assert "collectives has not been initialized" in str(error), error
        else:
            raise AssertionError("a graph ran outside of its local world")


def emulate_tensorflow_devices() -> None:
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * RANKS)


def keras() -> None:
    """The convolutional network of TensorFlow's tutorial of ``MirroredStrategy``, with fewer and smaller images: on the
    ranks, on one device, and under ``MirroredStrategy``."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import keras
    import tensorflow as tf

    import collectives.keras as hvd

    emulate_tensorflow_devices()
    batch, layers = 8 * RANKS, keras.layers

    def network() -> Any:
        return keras.Sequential(
            [
                keras.Input((12, 12, 1)),
                layers.Conv2D(8, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dense(16, activation="relu"),
                layers.Dense(10),
            ]
        )

    weights = network().get_weights()

    def fit(model: Any, optimizer: Any, rank: int = 0, size: int = 1, callbacks: Any = ()) -> list[Any]:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.set_weights([each + rank for each in weights])
        model.compile(loss=loss, optimizer=optimizer, metrics=["accuracy"])
        images, labels = IMAGES[rank::size], LABELS[rank::size]
        history = model.fit(images, labels, batch // size, 2, shuffle=False, verbose=0, callbacks=list(callbacks))
        return [history.history["loss"], history.history["accuracy"], *model.get_weights()]

    def train(rank: int, size: int) -> list[Any]:
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        if size == 1:
            return fit(network(), optimizer)
        callbacks = hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()
        return fit(network(), hvd.DistributedOptimizer(optimizer), rank, size, callbacks)

    check(train)
    with tf.distribute.MirroredStrategy([f"CPU:{rank}" for rank in range(RANKS)]).scope():
        mirrored = fit(network(), keras.optimizers.SGD(0.05, momentum=0.9))
    for own, expected in zip(train(0, 1), mirrored, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    {each.__name__: each for each in (torch, jax, tensorflow, keras)}[sys.argv[1]]()
    print("equal")
