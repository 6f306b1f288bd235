"""Collectives in a graph: each is one callback, which TensorFlow calls with arrays when it runs the graph.

A callback blocks one of TensorFlow's threads until the other ranks arrive. Several blocked callbacks, in different
orders on different ranks, could occupy all threads of a small pool and deadlock. There are two ways to avoid that:

    in program order      In a ``tf.function`` that the main thread traces. Every callback stands between two writes to
                          one variable of this process; TensorFlow keeps a function's writes in program order, through
                          nested functions, ``tf.cond`` and ``tf.while_loop``. So one callback blocks at a time, in the
                          same order on every rank, and the waiting thread drives the engine. Costs about 20 us.
    on its own thread     Where TensorFlow keeps no order: in graphs for sessions, which may run any part; in gradients
                          of control flow; and in functions that another thread traces, since several may run at a time.
                          The callback is the function of a dataset with one element, which has its own thread, so the
                          pool's threads stay free. Costs about 130 us.

In program order, unnamed operations are matched by their order, as eager ones are. Otherwise every operation has a name
that is equal on ranks that build the same graph. Two threads that run functions traced by the main thread at the same
time must name their operations, and need one pool thread each
(``tf.config.threading.set_inter_op_parallelism_threads``).

The arrays passed to a callback are TensorFlow's memory; an array that it returns becomes a tensor without a copy if it
is aligned to 64 bytes. TensorFlow copies tensors on a GPU to the host and back.
"""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from collectives.base.errors import InvalidArgumentError
from collectives.tensorflow import local_ranks, status

Callback = Callable[..., Any]
"""Takes arrays, returns a list of arrays; must not keep references to either."""

_order: Any = None
"""The variable whose writes keep callbacks in program order."""


def call(
    make: Callable[[str | None], Callback],
    collective: str,
    tensors: Sequence[Any],
    types: Sequence[Any],
    shapes: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
) -> list[Any]:
    """Add a callback to the graph that is being built.

    Args:
        make: returns the callback for an operation of the given name. Callbacks of equal names compare equal, so that
            one object serves all: TensorFlow never releases callbacks.
        collective: its name in messages.
        tensors: the callback's arguments.
        types, shapes: of its results; shapes may be partially known.
        name: given by the user, or None.
        ignore_name_scope: whether ``name`` is used without the graph's name scopes.

    Raises:
        InvalidArgumentError: XLA compiles this graph.
    """
    graph = tf.compat.v1.get_default_graph()
    label = name or (f"{collective}_{tensors[0].name}" if tensors else collective)
    if _compiled_by_xla(graph):
        raise InvalidArgumentError(
            f"{label}: XLA cannot compile a collective, because a collective communicates with other processes; "
            "remove jit_compile=True from the tf.function that calls it. In Keras, pass jit_compile=False to "
            "model.compile() [F75]"
        )
    types, shapes = list(types), [tf.TensorShape(shape) for shape in shapes]
    rank = local_ranks.of_call(graph)
    if keeps_order(graph):
        add, full_name = _in_order, name and scoped(name, ignore_name_scope)
    else:
        add, full_name = _on_own_thread, _unique(graph, label, ignore_name_scope)
    with tf.device("CPU:0"):
        callback, inputs = local_ranks.as_rank_of_call(rank, make(full_name), tensors)
        results = add(callback, _legal(label), inputs, types, shapes)
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return results


def scoped(name: str, ignore_name_scope: bool) -> str:
    """Prefix an operation's name by the graph's name scopes, as Horovod does."""
    scope = "" if ignore_name_scope or tf.executing_eagerly() else tf.get_current_name_scope()
    return f"{scope}/{name}" if scope else name


def outermost(graph: Any) -> Any:
    """The outermost graph around a graph: a session's, or a function's."""
    with tf.init_scope():
        eager = tf.executing_eagerly()
    while True:
        outer = getattr(graph, "outer_graph", None)
        # Functions that are called eagerly share an outer graph of TensorFlow's own.
        if outer is None or (eager and not hasattr(outer, "outer_graph")):
            return graph
        graph = outer


def keeps_order(graph: Any) -> bool:
    """Whether stateful operations of a graph that is being built run in program order."""
    if threading.current_thread() is not threading.main_thread():
        return False
    # Neither attribute is public. Without the first, any function counts as ordered. The second marks gradients of
    # control flow, which refuse a variable that their forward parts do not use.
    if not getattr(graph, "_add_control_dependencies", graph.building_function) or hasattr(graph, "_forward_graph"):
        return False
    with tf.init_scope():
        return bool(tf.executing_eagerly())


def _unique(graph: Any, label: str, ignore_name_scope: bool) -> str:
    """A name that is unique in the graph, and equal on all ranks that build the same graph."""
    root = outermost(graph)
    if ignore_name_scope:
        with root.name_scope(None):
            name = root.unique_name(label)
    else:
        name = root.unique_name(label)
    if not root.building_function:
        return str(name)
    # Other functions may run at the same time. The number that TensorFlow appends to a function's name differs between
    # ranks.
    return f"{re.sub('_[0-9]+$', '', root.name)}/{name}"


def _legal(label: str) -> str:
    """Replace characters that names of TensorFlow's operations may not contain."""
    return re.sub(r"[^A-Za-z0-9_.\\/>-]", "_", label).lstrip("_") or "collective"


def _in_order(callback: Callback, label: str, tensors: list[Any], types: list[Any], shapes: list[Any]) -> list[Any]:
    if _order is None:
        # A function that is traced again refuses new variables, outside of itself too, but not those of other threads.
        creating = threading.Thread(target=_create_order)
        creating.start()
        creating.join()
    callback, types, _ = status.returning(callback, types, shapes)
    with tf.control_dependencies([_order.assign_add(1, read_value=False)]):
        results = status.checked(tf.numpy_function(callback, tensors, types, name=label), label)
    with tf.control_dependencies(results):
        _order.assign_add(1, read_value=False)
    return results


def _create_order() -> None:
    global _order
    with tf.device("CPU:0"):
        _order = tf.Variable(0, trainable=False, dtype=tf.int64, name="collectives_order")


def _on_own_thread(
    callback: Callback, label: str, tensors: list[Any], types: list[Any], shapes: list[Any]
) -> list[Any]:
    inputs_count = len(tensors)
    callback, types, shapes = status.returning(callback, types, shapes)
    tensors = tensors or [tf.zeros((), tf.int32)]  # a dataset needs a component

    @tf.function(input_signature=[tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors], autograph=False)  # type: ignore[untyped-decorator]
    def called(*inputs: Any) -> Any:
        results = tf.numpy_function(callback, inputs[:inputs_count], types)
        for result, shape in zip(results, shapes, strict=True):
            result.set_shape(shape)
        return results

    outputs = {"output_types": types, "output_shapes": shapes}
    dataset = tf.raw_ops.TensorDataset(components=tensors, output_shapes=[tensor.shape for tensor in tensors])
    dataset = tf.raw_ops.MapDataset(
        input_dataset=dataset,
        other_arguments=[],
        f=called.get_concrete_function(),
        use_inter_op_parallelism=False,
        preserve_cardinality=True,
        **outputs,
    )
    return status.checked(tf.raw_ops.DatasetToSingleElement(dataset=dataset, name=label, **outputs), label)


def _compiled_by_xla(graph: Any) -> bool:
    try:
        # Not public: tells whether tf.function(jit_compile=True) traces this graph. Without it, XLA itself refuses the
        # callback when it compiles.
        flow = importlib.import_module("tensorflow.python.ops.control_flow_util")
        return bool(flow.GraphOrParentsInXlaContext(graph))
    except (ImportError, AttributeError):
        return False
