"""Broadcasts of variables and objects, for an equal initial state on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from collectives import api
from collectives.base import dtypes
from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.tensorflow import packed_callbacks
from collectives.tensorflow.conversion import refusing
from collectives.tensorflow.errors import unconverted
from collectives.tensorflow.graph_call import GraphCall
from collectives.tensors import detection
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import global_process_set, root_in, world_of

__all__ = [
    "BroadcastGlobalVariablesHook",
    "allgather_object",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]

Object = TypeVar("Object")

# ---- variables


@unconverted
def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> tf.Operation | None:
    """Broadcast the root's variables by one call, after the ranks have compared shapes and dtypes.

    Args:
        variables: TensorFlow's, in a graph for sessions also reference variables, or Keras's; equal shapes and dtypes
            in the same order on every rank. Names may differ.
        root_rank: the root, as a rank of the world.
        inplace: part of Horovod's interface, where it saves memory. Here the root writes nothing, and the other ranks'
            variables take over the received memory.

    Returns:
        None; in a graph the operation that assigns the variables, which a session must run.

    Raises:
        InvalidArgumentError: not a variable.
        InvalidTypeError: a variable whose dtype the engine does not support.
        MismatchError: the ranks' variables or roots differ; raised on every rank, names the first difference, and
            leaves the variables untouched.

    Example:
        >>> variable = tf.Variable([1.0 + hvd.rank()])
        >>> hvd.broadcast_variables([variable], root_rank=1)
        >>> variable.numpy()
        array([2.], dtype=float32)
    """
    assigned = _broadcast(list(variables), root_rank, None, process_set)
    return None if tf.executing_eagerly() else tf.group(*assigned)


@unconverted
def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """`broadcast_variables`; returns the variables' new values.

    Example:
        >>> hvd.broadcast_([tf.Variable([1.0 + hvd.rank()])], root_rank=1)[0].numpy()
        array([2.], dtype=float32)
    """
    assigned = _broadcast(list(variables), root_rank, name, process_set)
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(_value(variable)) for variable in variables]
    return assigned


def _broadcast(variables: list[Any], root_rank: int, name: str | None, process_set: ProcessSet) -> list[Any]:
    label = name or "broadcast_variables"
    with refusing(label, process_set):
        tensors = [_read(variable, number) for number, variable in enumerate(variables)]
    if not tensors and not tf.executing_eagerly():
        return []
    # Eagerly also without variables: if another rank has some, that is a mismatch.
    call = GraphCall("broadcast", label, process_set, root=root_rank)
    results = packed_callbacks.broadcast(call, tensors)
    if tf.executing_eagerly() and world_of(process_set).rank == root_in(process_set, root_rank):
        return []
    return [variable.assign(result) for variable, result in zip(variables, results, strict=True)]


def _read(variable: Any, number: int) -> Any:
    if not hasattr(variable, "assign"):
        raise InvalidArgumentError(
            f"variables: expected variables, got a {detection.describe(variable)} at index {number} [F50]"
        )
    value = tf.convert_to_tensor(_value(variable))
    if value.dtype.name not in (*dtypes.NAMES, *dtypes.FLOAT8):
        raise InvalidTypeError(f"variables: {variable.name} has dtype {value.dtype.name}; {dtypes.OFFER} [F51]")
    return value


def _value(variable: Any) -> Any:
    """The TensorFlow variable; Keras's variables contain one."""
    return variable if isinstance(variable, tf.Variable) else variable.value


@unconverted
def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """Return an operation that broadcasts the root's global variables, for a session to run.

    Raises:
        RuntimeError: in eager execution, which has no global variables; use `broadcast_variables` there.

    Example:
        session.run(hvd.broadcast_global_variables(0))
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() works only in TensorFlow 1 graphs (sessions), because eager execution "
            "keeps no list of variables; call hvd.broadcast_variables(model.variables, root_rank), and the same for "
            "optimizer.variables [F74]"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Broadcasts the root's global variables, by one call, after a session was created.

    For a ``tf.compat.v1.train.MonitoredTrainingSession`` of a TensorFlow 1 graph, whether its variables are initialized
    or restored from a checkpoint; also after a lost session is created again.

    Args:
        root_rank: the root, as a rank of the world.
        process_set: the ranks that train together; the hook does nothing on others.

    Raises (after the session was created):
        tf.errors.OpError: there is no rank ``root_rank``, or the ranks' variables differ; on every rank, with our
            message.
    """

    def __init__(self, root_rank: int, device: str = "", *, process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.bcast_op: Any = None
        self.device = device
        self.process_set = process_set

    def begin(self) -> None:
        graph = tf.compat.v1.get_default_graph()
        if self.process_set.included() and (self.bcast_op is None or self.bcast_op.graph is not graph):
            with tf.device(self.device):
                self.bcast_op = broadcast_variables(tf.compat.v1.global_variables(), self.root_rank, self.process_set)

    def after_create_session(self, session: Any, coord: Any) -> None:
        if self.bcast_op is not None:
            session.run(self.bcast_op)


# ---- objects


@unconverted
def broadcast_object(
    obj: Object,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Object:
    """Broadcast the root's object, immediately, also while a graph is being built.

    Args:
        obj: an object that pickle or cloudpickle supports; ignored on other ranks.
        root_rank: the root, as a rank of the world.
        session: part of Horovod's interface; not used.
        name: of the operation; unnamed calls are matched by their order.

    Returns:
        The object; on the root the same object that was passed.

    Raises:
        InvalidTypeError: the object cannot be pickled.

    Example:
        >>> hvd.broadcast_object({"from": hvd.rank()}, root_rank=1)
        {'from': 1}
    """
    return api.broadcast_object(obj, root_rank, name=name, process_set=process_set)


@unconverted
def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Object], Object]:
    """`broadcast_object` as a function of the object alone.

    Example:
        >>> hvd.broadcast_object_fn(root_rank=1)({"from": hvd.rank()})
        {'from': 1}
    """
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


@unconverted
def allgather_object(
    obj: Object, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Object]:
    """Gather the ranks' objects, as a list in rank order; arguments and errors as for `broadcast_object`.

    Example:
        >>> hvd.allgather_object(hvd.rank())
        [0, 1]
    """
    return api.allgather_object(obj, name=name, process_set=process_set)
