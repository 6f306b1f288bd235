"""The state of a Keras model and its optimizer, for Keras 3 on any backend and for ``tf_keras``; and of variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.base.errors import InvalidArgumentError
from collectives.elastic.object_state import ObjectState
from collectives.elastic.shadow import Part
from collectives.frontends import keras_variables

Variables = Sequence[Any]


def read(variables: Variables) -> list[npt.NDArray[Any]]:
    """The values of variables, where possible without a copy."""
    return [_array(variable) for variable in variables]


class VariablesPart(Part):
    """Variables of Keras or TensorFlow.

    Args:
        variables: returns them, as many and in the same order on every rank; their names may differ.
        read, write: access to their values as arrays; the arrays that are written must not be kept.
    """

    def __init__(
        self,
        variables: Callable[[], Variables],
        read: Callable[[Variables], Sequence[Any]] = read,
        write: Callable[[Variables, Sequence[Any]], None] = keras_variables.write,
    ) -> None:
        self._variables, self._read, self._write = variables, read, write

    def described(self) -> Mapping[str, str]:
        return keras_variables.described(self._variables())

    def read(self) -> tuple[Mapping[str, Any], bytes]:
        return {f"variable {at}": value for at, value in enumerate(self._read(self._variables()))}, b""

    def write(self, tensors: Mapping[str, Any], rest: bytes) -> None:
        # A backend may take an array's memory for the variable's.
        self._write(self._variables(), [view.copy() for view in tensors.values()])


class ModelState(ObjectState):
    """A state of a Keras model, its optimizer and plain attributes; see the adapters' classes.

    Args:
        model: a built model.
        optimizer: by default the one that the model was compiled with, if any. It is built if it is not.
        read, write: as of `VariablesPart`.

    Raises:
        InvalidArgumentError (a ValueError): the model is not built.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        read: Callable[[Variables], Sequence[Any]] = read,
        write: Callable[[Variables, Sequence[Any]], None] = keras_variables.write,
        **kwargs: Any,
    ) -> None:
        if not getattr(model, "built", True):
            raise InvalidArgumentError("Model must be built first. Run `model.build(input_shape)`. [E32]")
        self.model = model
        self.optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        self._access = read, write
        super().__init__(**kwargs)

    def _parts(self) -> Mapping[str, Part]:
        return {
            "model": VariablesPart(lambda: keras_variables.of_model(self.model), *self._access),
            "optimizer": VariablesPart(self._optimizer_variables, *self._access),
        }

    def _optimizer_variables(self) -> Variables:
        optimizer = self.optimizer
        # A newcomer may have taken no step. Those of ``tf.keras.optimizers.legacy`` have another name for it.
        build = getattr(optimizer, "build", None) or getattr(optimizer, "_create_all_weights", None)
        if build is not None and not getattr(optimizer, "built", False):
            build(self.model.trainable_variables)
        return keras_variables.of_optimizer(optimizer)

    def save(self) -> None:
        """Copy the state to host memory; see `ObjectState.save`."""
        # While it trains on JAX, Keras keeps the values elsewhere.
        if getattr(self.model, "_jax_state", None):
            self.model.jax_state_sync()
        super().save()

    def restore(self) -> None:
        """Return to what was saved last; see `ObjectState.restore`."""
        if getattr(self.model, "_jax_state", None):
            self.model._jax_state = None  # of the step that has failed
        super().restore()


def _array(variable: Any) -> npt.NDArray[Any]:
    value = getattr(variable, "value", None)
    value = variable if value is None or callable(value) else value
    if hasattr(value, "read_value"):  # TensorFlow's, whose numpy() copies
        with suppress(ValueError, TypeError):  # no buffer of this dtype, or on a GPU
            return np.asarray(memoryview(value.read_value()))
    array: npt.NDArray[Any] = np.asarray(variable)
    return array
