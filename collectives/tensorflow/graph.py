"""How a collective gets into a graph: as one callback, which TensorFlow calls with arrays when it runs the graph.

A callback blocks a thread of TensorFlow until the other ranks have come. Several that block at a time, in other orders
on other ranks, would use up a small pool of threads and wait for each other for ever. There are two ways around it:

    in the order of the program   in a ``tf.function`` that the main thread traces. Every callback is put between two writes to one variable
                                  of this process; TensorFlow keeps a function's writes in the order of the program,
                                  through nested functions, ``tf.cond`` and ``tf.while_loop``. So one callback blocks at
                                  a time, in the same order on every rank, and the thread that waits drives the engine.
                                  Costs about 20 us.
    on a thread of its own        wherever TensorFlow keeps no order: in graphs for sessions, of which any part may be run; in the gradients
                                  of control flow; and in functions that another thread traces, since several may then
                                  run at a time. The callback is the function of a dataset of one element, which has a
                                  thread of its own, so that the pool's threads stay free. Costs about 130 us.

In the first way unnamed operations are matched by their order, as eager ones are. In the second every one has a name
that is the same on ranks that build the same graph. Two threads that at the same time run functions that the main
thread has traced must name their operations, and need a thread of the pool
(``tf.config.threading.set_inter_op_parallelism_threads``) for each.

Arrays that a callback is given are TensorFlow's own memory; what it returns becomes a tensor without a copy if it is
aligned to 64 bytes. Tensors on a GPU are copied to the host and back by TensorFlow.
"""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from collectives.base.errors import InvalidArgumentError
from collectives.tensorflow import status

Callback = Callable[..., Any]
"""Takes arrays, returns a list of arrays; must not keep either."""

_order: Any = None
"""The variable that puts callbacks in the order of the program."""


def call(
    make: Callable[[str | None], Callback],
    collective: str,
    tensors: Sequence[Any],
    types: Sequence[Any],
    shapes: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
) -> list[Any]:
    """Have a callback called when the graph that is being built runs.

    Args:
        make: the callback for an operation of this name. The same one for the same arguments, please: TensorFlow keeps
            what it has been given for as long as the process lives.
        collective: what messages call it.
        tensors: the callback's arguments.
        types, shapes: of its results; shapes as far as they are known.
        name: that was given to the operation.
        ignore_name_scope: whether that is the whole name.

    Raises:
        InvalidArgumentError: XLA is to compile this graph.
    """
    graph = tf.compat.v1.get_default_graph()
    label = name or (f"{collective}_{tensors[0].name}" if tensors else collective)
    if _compiled_by_xla(graph):
        raise InvalidArgumentError(
            f"{label}: XLA cannot compile a collective, which is a call to another process; leave jit_compile out of "
            f"the tf.function that"
            " calls it, or set it to False. In Keras: model.compile(..., jit_compile=False)"
        )
    types, shapes = list(types), [tf.TensorShape(shape) for shape in shapes]
    with tf.device("CPU:0"):
        if keeps_order(graph):
            results = _in_order(
                make(name and scoped(name, ignore_name_scope)), _legal(label), list(tensors), types, shapes
            )
        else:
            results = _on_own_thread(
                make(_unique(graph, label, ignore_name_scope)), _legal(label), list(tensors), types, shapes
            )
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return results


def scoped(name: str, ignore_name_scope: bool) -> str:
    """A name that was given to an operation, within the name scopes of the graph, as Horovod has it."""
    scope = "" if ignore_name_scope or tf.executing_eagerly() else tf.get_current_name_scope()
    return f"{scope}/{name}" if scope else name


def outermost(graph: Any) -> Any:
    """The graph that a graph is part of: that of a session, or the outermost function's."""
    with tf.init_scope():
        eager = tf.executing_eagerly()
    while True:
        outer = getattr(graph, "outer_graph", None)
        # Around functions that are called eagerly there is a graph of TensorFlow's own, the same for all of them.
        if outer is None or (eager and not hasattr(outer, "outer_graph")):
            return graph
        graph = outer


def keeps_order(graph: Any) -> bool:
    """Whether stateful operations of a graph that is being built are carried out in the order of the program."""
    if threading.current_thread() is not threading.main_thread():
        return False
    # Neither is public. Without the first, functions would be told from other graphs; the second is what gradients of
    # control flow have, which refuse a variable that their forward parts have not used.
    if not getattr(graph, "_add_control_dependencies", graph.building_function) or hasattr(graph, "_forward_graph"):
        return False
    with tf.init_scope():
        return bool(tf.executing_eagerly())


def _unique(graph: Any, label: str, ignore_name_scope: bool) -> str:
    """A name that no other operation of the graph has, and that is the same wherever the same graph is built."""
    root = outermost(graph)
    if ignore_name_scope:
        with root.name_scope(None):
            name = root.unique_name(label)
    else:
        name = root.unique_name(label)
    if not root.building_function:
        return str(name)
    # Other functions may run at the same time. The number that tells functions of one name apart is another on every
    # rank.
    return f"{re.sub('_[0-9]+$', '', root.name)}/{name}"


def _legal(label: str) -> str:
    """As TensorFlow's operations may be called."""
    return re.sub(r"[^A-Za-z0-9_.\\/>-]", "_", label).lstrip("_") or "collective"


def _in_order(callback: Callback, label: str, tensors: list[Any], types: list[Any], shapes: list[Any]) -> list[Any]:
    global _order
    if _order is None:
        with tf.init_scope(), tf.device("CPU:0"):
            _order = tf.Variable(0, trainable=False, dtype=tf.int64, name="collectives_order")
    callback, types, _ = status.returning(callback, types, shapes)
    with tf.control_dependencies([_order.assign_add(1, read_value=False)]):
        results = status.checked(tf.numpy_function(callback, tensors, types, name=label), label)
    with tf.control_dependencies(results):
        _order.assign_add(1, read_value=False)
    return results


def _on_own_thread(
    callback: Callback, label: str, tensors: list[Any], types: list[Any], shapes: list[Any]
) -> list[Any]:
    given = len(tensors)
    callback, types, shapes = status.returning(callback, types, shapes)
    tensors = tensors or [tf.zeros((), tf.int32)]  # a dataset needs an element

    @tf.function(input_signature=[tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors], autograph=False)  # type: ignore[untyped-decorator]
    def called(*inputs: Any) -> Any:
        results = tf.numpy_function(callback, inputs[:given], types)
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
        # Not public: how tf.function(jit_compile=True) marks what it traces. Without it, XLA itself refuses the
        # callback when it compiles.
        flow = importlib.import_module("tensorflow.python.ops.control_flow_util")
        return bool(flow.GraphOrParentsInXlaContext(graph))
    except (ImportError, AttributeError):
        return False
