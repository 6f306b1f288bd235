"""Collectives on values (numbers, lists, arrays, tensors and variables of the backend) with tensors as results."""

from __future__ import annotations

from typing import Any, TypeVar

import keras
import numpy as np

from collectives import api
from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.base.reduce_op import Op
from collectives.frontends import keras_variables as of_keras
from collectives.tensors import detection
from collectives.tensors.compression import Compression
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import global_process_set, world

__all__ = [
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "reducescatter",
]

Value = TypeVar("Value")
"""A tensor of the backend; values of other kinds are returned as one."""


def allreduce(
    value: Value,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Op | None = None,
    compression: Any = Compression.none,
) -> Value:
    """Reduce the ranks' values element by element.

    Args:
        value: of equal shape and dtype on every rank.
        average: the older spelling of ``op``: True for Average, False for Sum.
        op: `Average` (the default), `Sum`, `Min`, `Max`, `Product` or `Adasum`.
        name, prescale_factor, postscale_factor, compression: as for `collectives.allreduce`.

    Raises:
        InvalidArgumentError: both ``average`` and ``op``; and all that `collectives.allreduce` raises.

    Example:
        >>> keras.ops.convert_to_numpy(hvd.allreduce([hvd.rank(), 4.0]))
        array([0.5, 4. ], dtype=float32)
    """
    how = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor, "compression": compression}
    return _tensor(api.allreduce(_array(value, name), average, op=op, name=name, **how))


def allgather(value: Value, name: str | None = None) -> Value:
    """Concatenate the ranks' values along the first dimension; see `collectives.allgather`.

    Example:
        >>> keras.ops.convert_to_numpy(hvd.allgather([float(hvd.rank())]))
        array([0., 1.], dtype=float32)
    """
    return _tensor(api.allgather(_array(value, name), name=name))


def broadcast(value: Value, root_rank: int, name: str | None = None) -> Value:
    """Copy the root's value to every rank; see `collectives.broadcast`.

    Example:
        >>> keras.ops.convert_to_numpy(hvd.broadcast([float(hvd.rank())], root_rank=1))
        array([1.], dtype=float32)
    """
    return _tensor(api.broadcast(_array(value, name), root_rank, name=name))


def reducescatter(value: Value, name: str | None = None, op: Op = Op.AVERAGE) -> Value:
    """Reduce the ranks' values and give each rank its share of the rows; see `collectives.reducescatter`.

    Example:
        >>> keras.ops.convert_to_numpy(hvd.reducescatter([1.0, 1.0], op=hvd.Sum))
        array([2.], dtype=float32)
    """
    return _tensor(api.reducescatter(_array(value, name), op, name=name))


def broadcast_global_variables(root_rank: int) -> None:
    """Broadcast the global variables of a TensorFlow 1 graph; Keras 3 has none.

    Raises:
        InvalidArgumentError: always, with what to use instead; on TensorFlow without a graph a RuntimeError, as in
            Horovod.

    Example:
        session.run(hvd.broadcast_global_variables(0))                # only with TensorFlow 1's graphs
    """
    if keras.backend.backend() == "tensorflow":
        from collectives.tensorflow.functions import broadcast_global_variables as of_tensorflow

        of_tensorflow(root_rank)
        return
    raise InvalidArgumentError(
        f"broadcast_global_variables({root_rank}): Keras 3 keeps no list of all variables; pass "
        f"BroadcastGlobalVariablesCallback({root_rank}) to fit, or call broadcast_variables(model.variables, "
        f"root_rank={root_rank}) [F73]"
    )


def broadcast_variables(variables: Any, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Copy the root's values of variables to every rank, in place: ``model.variables``, ``optimizer.variables``.

    Args:
        variables: an iterable of Keras's variables; the same number on every rank, of equal shapes and dtypes in the
            same order.
        root_rank: the root, by its number among all ranks.

    Raises:
        MismatchError: the ranks' variables or roots differ; raised on every rank before anything is changed, and names
            the first difference.

    Example:
        >>> variable = keras.Variable([float(hvd.rank())])
        >>> hvd.broadcast_variables([variable], root_rank=1)
        >>> keras.ops.convert_to_numpy(variable)
        array([1.], dtype=float32)
    """
    of_keras.broadcast(list(variables), root_rank, process_set, "broadcast_variables")


def _array(value: Any, name: str | None) -> Any:
    """Return a value as a NumPy array; Python's numbers in Keras's precision."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value
    try:
        return keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(value))
    except (TypeError, ValueError) as error:
        text = f"value: expected a number, an array or a tensor, got {detection.describe(value)}: {error} [T4]"
        raise world().refused(InvalidTypeError(text), name) from None


def _tensor(array: Any) -> Any:
    return keras.ops.convert_to_tensor(array)
