"""The training through the distributed optimizers of frameworks, a class for each.

Every parameter is a number times its pattern, and so is its velocity in a gradient descent without friction: a step
adds the mean of what the ranks give to the velocity, and the velocity to the parameter. One more parameter carries
whether a rank wants to stop.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from benchmarks.chaos.training import LAYERS

Array = np.ndarray[Any, Any]
PATTERNS = [1.0 + np.arange(count) % 5 for count in LAYERS]


class Model(Protocol):
    """A model and its optimizer.

    Attributes:
        state_class: the framework's elastic state, whose keywords are ``state_of``.
    """

    state_class: Any
    state_of: dict[str, Any]

    def step(self, state: Any, share: float, stop: float) -> None:
        """Train with what this rank gives."""

    def values(self, state: Any) -> tuple[list[Array], list[Array]]:
        """The velocities and the parameters, the one that stops the training last."""


class Torch:
    """``torch.optim.SGD``, whose gradients are combined by hooks."""

    def __init__(self) -> None:
        import torch

        import collectives.torch as hvd

        torch.set_num_threads(1)
        self._parameters = [torch.nn.Parameter(torch.zeros(count, dtype=torch.float64)) for count in (*LAYERS, 1)]
        self._factors = [torch.from_numpy(pattern) for pattern in PATTERNS]
        model = torch.nn.ParameterList(self._parameters)
        optimizer = torch.optim.SGD(self._parameters, lr=1.0, momentum=1.0)
        self._optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        self.state_class: Any = hvd.elastic.TorchState
        self.state_of: dict[str, Any] = {"model": model, "optimizer": self._optimizer}

    def step(self, state: Any, share: float, stop: float) -> None:
        *weights, flag = self._parameters
        self._optimizer.zero_grad()
        sums = [(weight * factor).sum() for weight, factor in zip(weights, self._factors, strict=True)]
        (-share * sum(sums) - stop * flag.sum()).backward()
        self._optimizer.step()

    def values(self, state: Any) -> tuple[list[Array], list[Array]]:
        slots = [self._optimizer.state.get(parameter, {}).get("momentum_buffer") for parameter in self._parameters]
        weights = [parameter.detach().numpy() for parameter in self._parameters]
        pairs = zip(slots, weights, strict=True)
        return [np.zeros_like(weight) if slot is None else -slot.numpy() for slot, weight in pairs], weights


class TensorFlow:
    """A ``DistributedGradientTape`` in a ``tf.function``."""

    def __init__(self) -> None:
        import tensorflow as tf

        import collectives.tensorflow as hvd

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        self._layer, self._optimizer = _keras_layer(tf.keras), _keras_optimizer(tf.keras)
        self._optimizer.build(self._layer.trainable_variables)
        factors = [tf.constant(pattern) for pattern in PATTERNS]

        def step(share: Any, stop: Any) -> None:
            variables = self._layer.trainable_variables
            with tf.GradientTape() as tape:
                *weights, flag = [tf.convert_to_tensor(variable) for variable in variables]
                sums = [tf.reduce_sum(weight * factor) for weight, factor in zip(weights, factors, strict=True)]
                loss = -share * tf.add_n(sums) - stop * tf.reduce_sum(flag)
            gradients = hvd.DistributedGradientTape(tape).gradient(loss, variables)
            self._optimizer.apply_gradients(zip(gradients, variables, strict=True))

        self._step, self._constant = tf.function(step), tf.constant
        self.state_class: Any = hvd.elastic.TensorFlowKerasState
        self.state_of: dict[str, Any] = {"model": self._layer, "optimizer": self._optimizer}

    def step(self, state: Any, share: float, stop: float) -> None:
        self._step(self._constant(share, "float64"), self._constant(stop, "float64"))

    def values(self, state: Any) -> tuple[list[Array], list[Array]]:
        return _keras_values(self._layer, self._optimizer)


class Keras:
    """The ``DistributedOptimizer`` of Keras 3, on its present backend."""

    def __init__(self) -> None:
        import keras

        import collectives.keras as hvd

        self._layer = _keras_layer(keras)
        self._optimizer = hvd.DistributedOptimizer(_keras_optimizer(keras))
        self._optimizer.build(self._layer.trainable_variables)
        self._tensor = keras.ops.convert_to_tensor
        self.state_class: Any = hvd.elastic.KerasState
        self.state_of: dict[str, Any] = {"model": self._layer, "optimizer": self._optimizer}

    def step(self, state: Any, share: float, stop: float) -> None:
        gradients = [*(-share * pattern for pattern in PATTERNS), np.full(1, -stop)]
        self._optimizer.apply([self._tensor(gradient) for gradient in gradients], self._layer.trainable_variables)

    def values(self, state: Any) -> tuple[list[Array], list[Array]]:
        return _keras_values(self._layer, self._optimizer)


class Jax:
    """The ``DistributedOptimizer`` of Optax in a compiled step."""

    def __init__(self) -> None:
        import jax
        import optax

        import collectives.jax as hvd

        jax.config.update("jax_enable_x64", True)
        optimizer = hvd.DistributedOptimizer(optax.sgd(1.0, momentum=1.0))
        parameters = [jax.numpy.zeros(count, "float64") for count in (*LAYERS, 1)]

        def loss(parameters: Any, share: Any, stop: Any) -> Any:
            *weights, flag = parameters
            sums = [(weight * pattern).sum() for weight, pattern in zip(weights, PATTERNS, strict=True)]
            return -share * sum(sums) - stop * flag.sum()

        @jax.jit
        def step(parameters: Any, slots: Any, share: Any, stop: Any) -> Any:
            updates, slots = optimizer.update(jax.grad(loss)(parameters, share, stop), slots, parameters)
            return optax.apply_updates(parameters, updates), slots

        self._step, self._leaves = step, jax.tree_util.tree_leaves
        self.state_class: Any = hvd.elastic.JaxState
        self.state_of: dict[str, Any] = {"parameters": parameters, "slots": optimizer.init(parameters)}

    def step(self, state: Any, share: float, stop: float) -> None:
        state.parameters, state.slots = self._step(state.parameters, state.slots, share, stop)

    def values(self, state: Any) -> tuple[list[Array], list[Array]]:
        return [-np.asarray(slot) for slot in self._leaves(state.slots)], [*map(np.asarray, state.parameters)]


def _keras_layer(keras: Any) -> Any:
    layer = keras.layers.Layer()
    for count in (*LAYERS, 1):
        layer.add_weight(shape=(count,), dtype="float64", initializer="zeros")
    layer.built = True
    return layer


def _keras_optimizer(keras: Any) -> Any:
    return keras.optimizers.SGD(1.0, momentum=1.0)


def _keras_values(layer: Any, optimizer: Any) -> tuple[list[Array], list[Array]]:
    read = [[variable.numpy() for variable in some] for some in (optimizer.momentums, layer.trainable_variables)]
    return read[0], read[1]


FRAMEWORKS: dict[str, type[Model]] = {"torch": Torch, "tensorflow": TensorFlow, "keras": Keras, "jax": Jax}
