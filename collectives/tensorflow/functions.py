"""The same start on every rank: variables and objects as one rank has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from collectives import api
from collectives.base import dtypes
from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.process_sets import ProcessSet
from collectives.runtime import global_process_set, root_in, world_of
from collectives.tensorflow import packed_callbacks
from collectives.tensorflow.autograph import unconverted
from collectives.tensorflow.graph_call import GraphCall
from collectives.tensors import detection

Object = TypeVar("Object")

# ---- variables
# -----------------------------------------------------------------------------------------------------------


@unconverted
def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> tf.Operation | None:
    """Give every rank the root's variables, by one call for all of them; the ranks first compare what they have.

    Args:
        variables: TensorFlow's, in a graph for sessions also reference variables, or Keras's; of equal shapes and
            dtypes in equal order on every rank, whatever they are called.
        root_rank: the rank whose variables they are, by its number among all ranks.
        process_set: the ranks that take part.
        inplace: of Horovod's interface, where it saves memory. Here the root writes nothing, and the others' variables
            take over the memory that was received.

    Returns:
        None; in a graph the operation that assigns them, which a session must run.

    Raises:
        InvalidTypeError: a variable that holds no numbers.
        MismatchError: the ranks' variables or roots differ; raised on every rank, and names the first that does.
            Nothing was touched.
    """
    assigned = _broadcast(list(variables), root_rank, None, process_set)
    return None if tf.executing_eagerly() else tf.group(*assigned)


@unconverted
def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """`broadcast_variables`, and the variables' values afterwards."""
    assigned = _broadcast(list(variables), root_rank, name, process_set)
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(_value(variable)) for variable in variables]
    return assigned


def _broadcast(variables: list[Any], root_rank: int, name: str | None, process_set: ProcessSet) -> list[Any]:
    label = name or "broadcast_variables"
    try:
        tensors = [_read(variable, number) for number, variable in enumerate(variables)]
    except Exception as error:
        raise world_of(process_set).refused(error, label) from None
    if not tensors and not tf.executing_eagerly():
        return []
    # Eagerly also without any: another rank may have some, and is told so.
    call = GraphCall("broadcast", label, process_set, root=root_rank)
    results = packed_callbacks.broadcast(call, tensors)
    if tf.executing_eagerly() and world_of(process_set).rank == root_in(process_set, root_rank):
        return []
    return [variable.assign(result) for variable, result in zip(variables, results, strict=True)]


def _read(variable: Any, number: int) -> Any:
    if not hasattr(variable, "assign"):
        raise InvalidArgumentError(
            f"variables: expected variables, got a {detection.describe(variable)} as number {number}"
        )
    value = tf.convert_to_tensor(_value(variable))
    if value.dtype.name not in dtypes.NAMES:
        raise InvalidTypeError(
            f"variables: {variable.name} has dtype {value.dtype.name}; expected one of {', '.join(dtypes.NAMES)}"
        )
    return value


def _value(variable: Any) -> Any:
    """What TensorFlow can read: Keras's variables hold one of its own."""
    return variable if isinstance(variable, tf.Variable) else variable.value


@unconverted
def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """Give every rank the root's global variables of a graph for sessions, when the session runs the operation that
    this returns.

    Raises:
        RuntimeError: eager execution has no global variables; pass `broadcast_variables` the model's and the
            optimizer's.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() works in graphs for sessions only, since eager execution keeps no list "
            "of variables;"
            " use hvd.broadcast_variables(model.variables, root_rank) and (optimizer.variables, root_rank)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


# ---- objects
# -------------------------------------------------------------------------------------------------------------


@unconverted
def broadcast_object(
    obj: Object,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Object:
    """Give every rank the root's object, now, also while a graph is being built.

    Args:
        obj: anything that pickle or cloudpickle takes; what other ranks pass is ignored.
        root_rank: the rank whose object it is, by its number among all ranks.
        session: of Horovod's interface; none is needed.
        name: of the operation; calls without names are matched by their order.
        process_set: the ranks that take part.

    Returns:
        The object; on the root the very one that was passed.

    Raises:
        InvalidTypeError: the object cannot be pickled.
    """
    return api.broadcast_object(obj, root_rank, name=name, process_set=process_set)


@unconverted
def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Object], Object]:
    """`broadcast_object` as a function of the object alone."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


@unconverted
def allgather_object(
    obj: Object, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Object]:
    """Give every rank every rank's object, as a list in rank order; arguments and errors as for `broadcast_object`."""
    return api.allgather_object(obj, name=name, process_set=process_set)
