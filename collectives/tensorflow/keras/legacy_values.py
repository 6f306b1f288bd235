"""Collectives on values, for Keras 2: numbers, lists, arrays and tensors. Results are TensorFlow's tensors.

In graphs, as after ``tf.compat.v1.disable_v2_behavior()``, Keras's session evaluates them, and results are arrays.
"""

from __future__ import annotations

from typing import Any, TypeVar

import tensorflow as tf

from collectives.base.reduce_op import Op
from collectives.tensorflow import functions, operations
from collectives.tensors.compression import Compression

Value = TypeVar("Value")
"""A tensor; other values, such as numbers, are returned as tensors."""


def allreduce(
    value: Value,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Op | None = None,
    compression: Any = Compression.none,
) -> Value:
    """Reduce the ranks' values element by element; see `collectives.tensorflow.allreduce`."""
    return _value(
        operations.allreduce(
            value,
            average=average,
            name=name,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            compression=compression,
        )
    )


def allgather(value: Value, name: str | None = None) -> Value:
    """Concatenate the ranks' values along the first dimension; see `collectives.tensorflow.allgather`."""
    return _value(operations.allgather(value, name=name))


def broadcast(value: Value, root_rank: int, name: str | None = None) -> Value:
    """Broadcast the root's value; see `collectives.tensorflow.broadcast`."""
    return _value(operations.broadcast(value, root_rank, name=name))


def reducescatter(value: Value, name: str | None = None, op: Op = Op.AVERAGE) -> Value:
    """Reduce the ranks' values, and return this rank's rows; see `collectives.tensorflow.reducescatter`."""
    return _value(operations.reducescatter(value, name=name, op=op))


def broadcast_global_variables(root_rank: int) -> None:
    """Broadcast the root's global variables, of a graph of TensorFlow 1 in Keras's session.

    Raises:
        RuntimeError: in eager execution; the message says what to use instead.
    """
    done = functions.broadcast_global_variables(root_rank)
    tf.compat.v1.keras.backend.get_session().run(done)


def _value(tensor: Any) -> Any:
    """Evaluate a tensor of a graph for sessions; return other tensors as they are, those of functions included."""
    if tf.compat.v1.executing_eagerly_outside_functions():
        return tensor
    return tf.compat.v1.keras.backend.get_session().run(tensor)
