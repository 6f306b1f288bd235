"""Training on the ranks of a local world, and on one rank with all data; with "reproducible", to the bit.

    python -m tests.support.scenarios.local_worlds FRAMEWORK

Each framework has a process of its own, and as many emulated devices as ranks where it can emulate them.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import RankFailedError

RANKS = 2
STEPS = 5
_draw = np.random.default_rng(5)
INPUTS = _draw.normal(size=(8 * RANKS, 4)).astype(np.float32)
TARGETS = INPUTS @ np.arange(4, dtype=np.float32)
IMAGES = _draw.random((16 * RANKS, 12, 12, 1), np.float32)
LABELS = _draw.integers(0, 10, 16 * RANKS)
Train = Callable[[int, int], Any]
"""Trains as one of some ranks, and returns what is equal on all."""

PARTS = 8
"""Micro-batches of a step, whichever ranks have them: of 3 rows each."""
PART_INPUTS = _draw.normal(size=(4, PARTS, 3, 4)).astype(np.float32)
"""By step."""
PART_TARGETS = PART_INPUTS.sum(-1)
BEGIN = [_draw.normal(size=shape).astype(np.float32) for shape in ((4, 16), (16,), (16, 1), (1,))]
"""The weights of two layers, each (inputs, outputs), and their biases."""
Continue = Callable[[Any, Sequence[int], range], tuple[list[Any], Any]]
"""Trains from a state, None for `BEGIN`, for some steps, with this rank's parts of each; returns the weights, and the
state to continue from."""


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


def check_bits(train: Continue) -> None:
    """Four steps have the same weights, to the bit, on one rank, and on 4 ranks that 2 follow after two steps."""

    def on(ranks: int, state: Any, steps: range) -> tuple[Any, str]:
        each = PARTS // ranks

        def of_rank() -> tuple[list[Any], Any]:
            collectives.init()
            first = collectives.rank() * each
            return train(state, range(first, first + each), steps)

        with collectives.local_world(ranks) as world:
            trained = world.run(of_rank, timeout=120)
        digests = {hashlib.sha256(b"".join(map(np.ndarray.tobytes, weights))).hexdigest() for weights, _ in trained}
        assert len(digests) == 1, f"ranks differ, of {ranks}"
        return trained[0][1], digests.pop()

    _, alone = on(1, None, range(4))
    followed, _ = on(4, None, range(2))
    assert on(2, followed, range(2, 4))[1] == alone


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

    def train_parts(state: Any, parts: Sequence[int], steps: range) -> tuple[list[Any], Any]:
        model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if state:
            model.load_state_dict(state[0])
            plain.load_state_dict(copy.deepcopy(state[1]))  # torch would have the ranks share it
        else:
            with torch.no_grad():
                for parameter, values in zip(model.parameters(), BEGIN, strict=True):
                    parameter.copy_(torch.tensor(values.T))
        optimizer = hvd.DistributedOptimizer(
            plain, model.named_parameters(), backward_passes_per_step=len(parts), algorithm="reproducible"
        )
        for step in steps:
            optimizer.zero_grad()
            for part in parts:
                x, y = (torch.from_numpy(each[step, part]) for each in (PART_INPUTS, PART_TARGETS))
                (torch.nn.functional.mse_loss(model(x)[:, 0], y) / len(parts)).backward()
            optimizer.step()
        return [parameter.detach().numpy() for parameter in model.parameters()], (
            model.state_dict(),
            optimizer.state_dict(),
        )

    check_bits(train_parts)


def jax() -> None:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"  # one for each rank
    import jax
    import jax.numpy as jnp

    import collectives.jax as hvd
    from collectives.jax.optimizer import GradientTransformation

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
    with (
        collectives.local_world(5) as world,
        pytest.raises(RankFailedError, match=r"expected a device of JAX for each of 5 ranks, found 4.*W65"),
    ):
        world.run(lambda: shared(jnp.ones(2)))

    def train_parts(state: Any, parts: Sequence[int], steps: range) -> tuple[list[Any], Any]:
        optimizer = hvd.DistributedOptimizer(
            momentum,
            backward_passes_per_step=len(parts),
            average_aggregated_gradients=True,
            algorithm="reproducible",
        )

        @jax.jit
        def gradients_of(parameters: Any, x: Any, y: Any) -> Any:
            return jax.grad(lambda parameters: jnp.mean((network(parameters, x) - y) ** 2))(parameters)

        @jax.jit
        def apply(gradients: Any, state: Any, parameters: Any) -> Any:
            updates, state = optimizer.update(gradients, state, parameters)
            return jax.tree_util.tree_map(jnp.add, parameters, updates), state

        parameters, velocities = state or (list(map(jnp.asarray, BEGIN)), None)
        state = optimizer.init(parameters)
        if velocities:
            state = state._replace(inner=velocities) if len(parts) > 1 else velocities
        for step in steps:
            for part in parts:
                gradients = gradients_of(parameters, PART_INPUTS[step, part], PART_TARGETS[step, part])
                parameters, state = apply(gradients, state, parameters)
        state = getattr(state, "inner", state)
        return list(map(np.asarray, parameters)), jax.tree_util.tree_map(np.asarray, (parameters, state))

    def network(parameters: Any, x: Any) -> Any:
        return (jnp.tanh(x @ parameters[0] + parameters[1]) @ parameters[2] + parameters[3])[:, 0]

    def accelerated(gradients: Any, velocities: Any, parameters: Any = None) -> tuple[Any, Any]:
        velocities = jax.tree_util.tree_map(lambda old, gradient: 0.9 * old + gradient, velocities, gradients)
        return jax.tree_util.tree_map(lambda velocity: -0.1 * velocity, velocities), velocities

    momentum = GradientTransformation(
        lambda parameters: jax.tree_util.tree_map(jnp.zeros_like, parameters), accelerated
    )
    check_bits(train_parts)


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

    def train_parts(state: Any, parts: Sequence[int], steps: range) -> tuple[list[Any], Any]:
        variables = [tf.Variable(values) for values in state or BEGIN]
        optimizer = hvd.DistributedOptimizer(
            tf.compat.v1.train.GradientDescentOptimizer(0.1),
            backward_passes_per_step=len(parts),
            average_aggregated_gradients=True,
            algorithm="reproducible",
        )

        @tf.function
        def train_part(x: Any, y: Any) -> None:
            first, first_bias, second, second_bias = variables

            def loss() -> Any:
                output = tf.tanh(x @ first + first_bias) @ second + second_bias
                return tf.reduce_mean((output[:, 0] - y) ** 2)

            optimizer.minimize(loss, var_list=variables)

        for step in steps:
            for part in parts:
                train_part(tf.constant(PART_INPUTS[step, part]), tf.constant(PART_TARGETS[step, part]))
        weights = [variable.numpy() for variable in variables]
        return weights, weights

    check_bits(train_parts)
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
    check_bits(functools.partial(train_parts_with_keras, keras, hvd.DistributedOptimizer))


def train_parts_with_keras(
    keras: Any, wrap: Callable[..., Any], state: Any, parts: Sequence[int], steps: range
) -> tuple[list[Any], Any]:
    """`Continue` by the ``fit`` of Keras 2 or 3, on any backend."""
    layers = [keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    optimizer = wrap(
        keras.optimizers.SGD(0.1, momentum=0.9),
        backward_passes_per_step=len(parts),
        average_aggregated_gradients=True,
        algorithm="reproducible",
    )
    model.compile(optimizer, "mse")
    weights, velocities = state or (BEGIN, [np.zeros_like(each) for each in BEGIN])
    model.set_weights(weights)
    optimizer.build(model.trainable_variables)
    for variable, values in zip(optimizer.momentums, velocities, strict=True):
        variable.assign(values)
    chosen = np.ix_(steps, parts)
    x, y = PART_INPUTS[chosen].reshape(-1, 4), PART_TARGETS[chosen].reshape(-1, 1)
    model.fit(x, y, batch_size=3, shuffle=False, verbose=0)
    return model.get_weights(), (model.get_weights(), [np.array(each.numpy()) for each in optimizer.momentums])


if __name__ == "__main__":
    {each.__name__: each for each in (torch, jax, tensorflow, keras)}[sys.argv[1]]()
    print("equal")
