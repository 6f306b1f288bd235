"""Ranks that are threads (`collectives.worlds.local_world`): which of them runs a graph, and its device.

TensorFlow calls callbacks in threads of its own, and several ranks may run one function. So each function that has
collectives has the rank's number as an input, which TensorFlow evaluates in the thread that calls the function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from collectives.base.errors import InvalidArgumentError
from collectives.worlds import local_world

_KEY = "collectives_rank"
_of_forward: ContextVar[Any] = ContextVar("collectives_rank_of_forward", default=None)
"""The rank that has called the function whose gradient is being built; a gradient gets no inputs from its caller."""


def of_call(graph: Any) -> Any:
    """The number of the rank that calls the function whose graph is being built, as a tensor; None without a local
    world.

    Raises:
        InvalidArgumentError: it is no function's graph.
    """
    if not local_world.number_of_rank():
        return None
    rank = _of_forward.get()
    if rank is not None:
        return rank
    function = graph
    while "FuncGraph" in type(function).__name__ and type(function).__name__ != "FuncGraph":  # of a branch or a loop
        function = function.outer_graph
    if not hasattr(function, "capture_call_time_value"):
        raise InvalidArgumentError(
            "collectives.local_world: TensorFlow 1 graphs (sessions) do not say which rank runs them; use "
            "tf.function [W9]"
        )
    rank = function.capture_call_time_value(_of_caller, tf.TensorSpec((), tf.int64), key=_KEY)
    # TensorFlow's own closure expects the input of a branch or a loop that calls the function. Not public.
    function._function_captures.by_ref_external[_KEY] = _of_caller
    return rank if function is graph else graph.capture(rank)


def _of_caller() -> Any:
    """The number of the calling thread's rank; in a function that is being traced, of the rank that calls that."""
    if tf.executing_eagerly():
        return tf.constant(local_world.number_of_rank(), tf.int64)
    return of_call(tf.compat.v1.get_default_graph())


_of_caller.output_spec = tf.TensorSpec((), tf.int64)  # type: ignore[attr-defined]


@contextmanager
def in_gradient(rank: Any) -> Iterator[None]:
    """Build the gradient of a call that ``rank``, as of `of_call`, makes."""
    token = _of_forward.set(rank)
    try:
        yield
    finally:
        _of_forward.reset(token)


def as_rank_of_call(
    rank: Any, callback: Callable[..., Any], tensors: Sequence[Any]
) -> tuple[Callable[..., Any], list[Any]]:
    """A callback that belongs to the rank of `of_call`, and its arguments."""
    return (callback, list(tensors)) if rank is None else (_AsRank(callback), [rank, *tensors])


@dataclass(frozen=True)
class _AsRank:
    callback: Callable[..., Any]

    def __call__(self, rank: Any, *arrays: Any) -> Any:
        with local_world.as_rank(int(rank)):
            return self.callback(*arrays)


@contextmanager
def _on_own_device(number: int, rank: int) -> Iterator[None]:
    """Have a rank's operations run on the logical device of its number: on GPUs if there are any."""
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    with tf.device(devices[rank % len(devices)].name):
        yield


local_world.entering.append(_on_own_device)
