"""Collectives on values: numbers, lists, arrays, and tensors and variables of the backend. The result is a tensor of
the backend."""

from __future__ import annotations

from typing import Any, TypeVar

import keras
import numpy as np

from collectives import api
from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.base.reduce_op import Op
from collectives.frontends import keras_variables as of_keras
from collectives.process_sets import ProcessSet
from collectives.runtime import global_process_set, world
from collectives.tensors import detection
from collectives.tensors.compression import Compression

Value = TypeVar("Value")
"""A tensor of the backend; what is none, such as a number, comes back as one."""


def allreduce(
    value: Value,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Op | None = None,
    compression: Any = Compression.none,
) -> Value:
    """Combine the ranks' values element by element.

    Args:
        value: equal shape and dtype on every rank.
        average: the older way to say ``op``: True for Average, False for Sum.
        op: `Average` (the default), `Sum`, `Min`, `Max`, `Product` or `Adasum`.
        name, prescale_factor, postscale_factor, compression: as of `collectives.allreduce`.

    Raises:
        InvalidArgumentError: both ``average`` and ``op``; and all that `collectives.allreduce` raises.
    """
    compression = None if compression is Compression.none else compression
    how = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor, "compression": compression}
    return _tensor(api.allreduce(_array(value, name), average, op=op, name=name, **how))


def allgather(value: Value, name: str | None = None) -> Value:
    """Put the ranks' values one below the other; see `collectives.allgather`."""
    return _tensor(api.allgather(_array(value, name), name=name))


def broadcast(value: Value, root_rank: int, name: str | None = None) -> Value:
    """Give every rank the root's value; see `collectives.broadcast`."""
    return _tensor(api.broadcast(_array(value, name), root_rank, name=name))


def reducescatter(value: Value, name: str | None = None, op: Op = Op.AVERAGE) -> Value:
    """Combine the ranks' values, and give each rank a part of the rows; see `collectives.reducescatter`."""
    return _tensor(api.reducescatter(_array(value, name), op, name=name))


def broadcast_global_variables(root_rank: int) -> None:
    """Give every rank the root's global variables: of TensorFlow 1, which is why Keras 3 has none.

    Raises:
        InvalidArgumentError: always, with what to use instead; on TensorFlow where there is no graph a RuntimeError, as
            Horovod's.
    """
    if keras.backend.backend() == "tensorflow":
        from collectives.tensorflow.functions import broadcast_global_variables as of_tensorflow

        of_tensorflow(root_rank)
        return
    raise InvalidArgumentError(
        f"broadcast_global_variables({root_rank}): Keras 3 keeps no list of all variables; use"
        f" BroadcastGlobalVariablesCallback({root_rank}) with fit, or broadcast_variables(model.variables, "
        f"root_rank={root_rank})"
    )


def broadcast_variables(variables: Any, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Give every rank the root's values of these variables, in place: ``model.variables``, ``optimizer.variables``.

    Args:
        variables: an iterable of Keras's variables; equally many on every rank, of equal shapes and dtypes in the same
            order.
        root_rank: the rank whose values they are, by its number among all ranks.
        process_set: the ranks that take part.

    Raises:
        MismatchError: the ranks' variables or roots differ; raised on every rank, and names the first that does.
            Nothing was touched.
    """
    of_keras.broadcast(list(variables), root_rank, process_set, "broadcast_variables")


def _array(value: Any, name: str | None) -> Any:
    """A value as NumPy has it; Python's numbers in Keras's precision, as every tensor of Keras."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value
    try:
        return keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(value))
    except (TypeError, ValueError) as error:
        text = f"value: expected a number, an array or a tensor, got {detection.describe(value)}: {error}"
        raise world().refused(InvalidTypeError(text), name) from None


def _tensor(array: Any) -> Any:
    return keras.ops.convert_to_tensor(array)
