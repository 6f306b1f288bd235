"""Operations that return the rank, sizes and membership when a graph runs, not when it is built."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from collectives.base.errors import InvalidArgumentError, NotInitializedError
from collectives.tensorflow import local_ranks
from collectives.tensorflow.errors import unconverted
from collectives.worlds import runtime
from collectives.worlds.process_sets import ProcessSet

__all__ = [
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "size_op",
]

_NOT_INITIALIZED, _UNKNOWN_SET = -1, -3
"""Horovod's codes."""


@unconverted
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """The number of ranks when the graph runs, in a process set: an int32 scalar.

    Example:
        >>> int(hvd.size_op()) == hvd.size()
        True
    """
    return query("members", process_set_id, name)


@unconverted
def rank_op(name: str | None = None) -> tf.Tensor:
    """This rank when the graph runs: an int32 scalar.

    Example:
        >>> int(hvd.rank_op()) == hvd.rank()
        True
    """
    return query("rank", None, name)


@unconverted
def local_size_op(name: str | None = None) -> tf.Tensor:
    """The number of ranks on this host when the graph runs: an int32 scalar.

    Example:
        >>> int(hvd.local_size_op()) == hvd.local_size()
        True
    """
    return query("local_size", None, name)


@unconverted
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """This rank among those of its host when the graph runs: an int32 scalar.

    Example:
        >>> int(hvd.local_rank_op()) == hvd.local_rank()
        True
    """
    return query("local_rank", None, name)


@unconverted
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Whether this rank is in a process set when the graph runs: an int32 scalar, 1 or 0.

    -1 if `collectives.init` has not been called, -3 if there is no process set with that id.

    Example:
        >>> int(hvd.process_set_included_op())
        1
    """
    return query("included", process_set_id, name)


def query(what: str, process_set: ProcessSet | int | None = None, name: str | None = None) -> tf.Tensor:
    """Evaluate one of `_ANSWERS`, eagerly or when the graph runs, as an int32 scalar."""
    answer = _callback(what, process_set)
    if tf.executing_eagerly():
        return tf.constant(answer())
    rank = local_ranks.of_call(tf.compat.v1.get_default_graph())
    with tf.device("CPU:0"):
        answer, inputs = local_ranks.as_rank_of_call(rank, answer, [])
        result = tf.numpy_function(answer, inputs, tf.int32, name=name or f"collectives_{what}")
    result.set_shape(())
    return result


@functools.cache
def _callback(what: str, process_set: ProcessSet | int | None) -> Callable[[], Any]:
    """One callback for equal queries, never evicted: TensorFlow retains its callbacks."""
    return lambda: np.int32(_ANSWERS[what](process_set))


def _included(process_set: Any) -> int:
    try:
        return int(runtime.process_set_of(process_set).included())
    except NotInitializedError:
        return _NOT_INITIALIZED
    except InvalidArgumentError:
        return _UNKNOWN_SET


_ANSWERS: dict[str, Callable[[Any], int]] = {
    "rank": lambda _: runtime.rank(),
    "size": lambda process_set: runtime.world_of(process_set).size,
    "local_rank": lambda _: runtime.local_rank(),
    "local_size": lambda _: runtime.local_size(),
    "members": lambda number: runtime.process_set_of(number).size(),
    "included": _included,
}
