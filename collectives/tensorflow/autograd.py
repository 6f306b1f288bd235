"""Gradients through the collectives: each is carried out by the engine, and its adjoint by other collectives.

The loss is the SUM of the ranks' losses: a rank's gradient says how that sum changes with the rank's input. With gy the
gradients of the ranks' outputs, `f` a reduction with its scale factors, and rows as a reduce-scatter divides them:

    allreduce (Sum)       gx = allreduce(gy, Sum)
    allreduce (Average)   gx = allreduce(gy, Average)
    allreduce (else)      gx = the adjoint of reducescatter, of reducescatter(gy, Sum)
    reducescatter (Sum)   gx = allgather(gy)                                      Average: divided by the number of ranks
    reducescatter (else)  every rank's version of my rows comes here (alltoall), f is differentiated there, and each
    goes back (alltoall) allgather             gx = my rows of the sum of gy: a reduce-scatter, or where ranks differ in rows an alltoall and a local sum
    broadcast             gx = allreduce(gy, Sum) on the root, zeros elsewhere
    alltoall              gx = alltoall(gy), with the rows received as splits
    Adasum                every rank's tensor comes here (allgather), its tree is differentiated, with allreduce(gy, Sum)

Linear ones are scaled by both factors. Of Min and Max, equal extreme values share the gradient evenly; Product
multiplies the other ranks' elements, so that zeros do no harm; Adasum takes the coefficient of a vector of zeros for
the constant that it is taken for in forward. Complex tensors follow TensorFlow's convention (the conjugate of what
multiplies). Tensors of integers and bools have no gradient.

An adjoint is made of the same differentiable collectives, so that it can be differentiated again.

With ``COLLECTIVES_GRADIENTS=horovod`` the gradients are those of Horovod, where these differ:

    allreduce (else)      gx = allreduce(gy), by the same operation and with the same factors
    reducescatter         size() times the adjoint, of Sum and Average; Horovod has no others
    allgather, broadcast  the adjoint divided by size()

Every rank must use the outputs of the same calls in its backward pass, because their adjoints need all ranks. Adjoints
run in the reverse order of the calls, and pair up by name: a rank that leaves one out keeps the others waiting (and all
get an error), but is never taken for a later one.
"""

from __future__ import annotations

import importlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from collectives.base.reduce_op import Op
from collectives.engine import adasum
from collectives.process_sets import ProcessSet
from collectives.runtime import world_of
from collectives.tensorflow import graph, graph_call, rank_queries
from collectives.tensorflow.graph_call import GraphCall

_Adjoint = Callable[[list[Any], list[Any], list[Any]], Sequence[Any]]
"""The gradients of outputs, the inputs, and all outputs, to the gradients of inputs."""

_SLOTS = 64
"""Names of the gradients of unnamed eager calls of one kind: the engine remembers what it has done under a name, so
that new ones forever would be slow; and one rank is never as many calls ahead of another in backward, where each is
waited for."""

_OF_ROWS = ("allgather", "alltoall", "merge")

_counts: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()
"""How many unnamed calls of each kind a world, or a graph, has seen."""


def run(call: GraphCall, tensors: Sequence[Any]) -> list[Any]:
    """Carry out a call, or put it into a graph, differentiably; arguments and results as for `graph_call.run`.

    All tensors of a group get gradients, or none: all ranks' adjoints must be about the same ones, and another rank may
    need one that is not needed here.
    """
    back = gradient_of(call, tensors)
    adjoint = _ADJOINTS[call.collective]
    try:
        return attach(lambda inputs: graph_call.run(call, inputs), lambda *about: adjoint(back, *about), tensors)
    except Exception:
        _take_back(call, back)
        raise


def attach(function: Callable[[Sequence[Any]], list[Any]], adjoint: _Adjoint, tensors: Sequence[Any]) -> list[Any]:
    """What a function makes of tensors, with an adjoint of the part of it that is about numbers with gradients.

    Whatever has been recorded becomes one chain, by a token that each takes from the one before: a tape with several
    targets visits what does not depend on each other in an order of its own, which is another on every rank, and each
    adjoint would wait for a different one.
    """
    if not _is_recorded() or not any(map(has_gradient, tensors)):
        return function(tensors)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def attached(token: Any, *inputs: Any) -> Any:
        results = function(inputs)

        def gradient(_: Any, *upstream: Any) -> Any:
            chosen = [i for i, tensor in enumerate(inputs) if has_gradient(tensor)]
            given = [tf.cast(tf.convert_to_tensor(upstream[i]), results[i].dtype) for i in chosen]
            found: list[Any] = [None] * len(inputs)
            for i, each in zip(chosen, adjoint(given, [inputs[i] for i in chosen], results), strict=True):
                found[i] = each
            return [None, *found]

        return [token, *results], gradient

    token, *results = attached(_last_token(), *tensors)
    _keep_token(token)
    return list(results)


class _Eager(threading.local):
    token: Any = None
    """Of what this thread has recorded last."""


_eager = _Eager()
_tokens_of_graphs: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""By their names: a tensor would keep its graph alive."""


def _last_token() -> Any:
    if tf.executing_eagerly():
        return tf.zeros(()) if _eager.token is None else _eager.token
    graph = tf.compat.v1.get_default_graph()
    if _in_control_flow(graph):
        return tf.zeros(())
    name = _tokens_of_graphs.get(graph)
    return tf.zeros(()) if name is None else graph.get_tensor_by_name(name)


def _keep_token(token: Any) -> None:
    if tf.executing_eagerly():
        _eager.token = token
    elif not _in_control_flow(token.graph):
        _tokens_of_graphs[token.graph] = token.name


def _in_control_flow(graph: Any) -> bool:
    """Whether this is the body of a branch or loop of TensorFlow 1's: part of the graph, but a token of it would not be
    there outside."""
    context = getattr(graph, "_get_control_flow_context", None)  # not public
    return context is not None and context() is not None


def has_gradient(tensor: Any) -> bool:
    """Whether its numbers have one."""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _is_recorded() -> bool:
    """Whether a gradient may be asked for: always of a graph, eagerly only under a tape."""
    if not tf.executing_eagerly():
        return True
    try:
        # Not public. It saves the copies of all results that custom_gradient makes; without it, they are always made.
        return bool(importlib.import_module("tensorflow.python.eager.record").could_possibly_record())
    except (ImportError, AttributeError):
        return True


def gradient_of(call: GraphCall, tensors: Sequence[Any]) -> GraphCall:
    """The call by the name of its gradient, which is alike on all ranks: by the number of an unnamed call."""
    if call.name is not None:
        return replace(call, name=f"{graph.scoped(call.name, call.ignore_name_scope)}.gradient", ignore_name_scope=True)
    kind = f"{call.collective}.{len(tensors)}"
    if tf.executing_eagerly():
        shape = tensors[0].shape.as_list()
        # Ranks may differ in rows.
        alike = shape[1:] if call.collective in _OF_ROWS else shape
        kind += f".{tensors[0].dtype.name}{alike}"
        counts = _counts.setdefault(call.world, Counter())
        number = counts[kind] % _SLOTS
    else:
        counts = _counts.setdefault(graph.outermost(tf.compat.v1.get_default_graph()), Counter())
        number = counts[kind]
    counts[kind] += 1
    return replace(call, name=f"{kind}.{number}.gradient", ignore_name_scope=True)


def _take_back(call: GraphCall, back: GraphCall) -> None:
    """Its number, of a call that has failed: a rank that refused it has not counted it at all."""
    if call.name is None and tf.executing_eagerly() and back.name is not None:
        _counts[call.world][back.name.rsplit(".", 2)[0]] -= 1


def begin_anew(process_set: ProcessSet) -> None:
    """Number unnamed calls from 0: after a rank has joined, while others went on."""
    _counts.pop(world_of(process_set), None)


# ---- adjoints
# ------------------------------------------------------------------------------------------------------------ Each
# takes the call, by the name of its gradient, the gradients of outputs, the inputs and all outputs.


def _allreduce(call: GraphCall, gradients: list[Any], inputs: list[Any], outputs: list[Any]) -> list[Any]:
    if call.linear or _as_horovod(call):
        return run(call, gradients)
    return [
        _of_one(call, number, gradient, x) for number, (gradient, x) in enumerate(zip(gradients, inputs, strict=True))
    ]


def _of_one(call: GraphCall, number: int, gradient: Any, x: Any) -> Any:
    call = replace(call, name=f"{call.name}.{number}")
    if call.op is Op.ADASUM:
        return _through_adasum(call, x, gradient)
    (share,) = run(call.other("reducescatter", ".sum", op=Op.SUM), [tf.reshape(gradient, [-1])])
    return tf.reshape(_through_rows(call, tf.reshape(x, [-1]), share), tf.shape(x))


def _reducescatter(call: GraphCall, gradients: list[Any], inputs: list[Any], outputs: list[Any]) -> list[Any]:
    if call.linear:
        back = run(
            call.other("allgather"), [scaled(gradient, call.prescale * call.postscale) for gradient in gradients]
        )
        if (call.op is Op.AVERAGE) is _as_horovod(call):
            return back
        size = rank_queries.query("size", call.process_set)
        return [
            gradient * tf.cast(size, gradient.dtype) if call.op is Op.SUM else _divided(gradient, size)
            for gradient in back
        ]
    pairs = enumerate(zip(gradients, inputs, strict=True))
    return [_through_rows(replace(call, name=f"{call.name}.{number}"), x, gradient) for number, (gradient, x) in pairs]


def _allgather(call: GraphCall, gradients: list[Any], inputs: list[Any], outputs: list[Any]) -> list[Any]:
    rows = tf.stack([tf.shape(x, out_type=tf.int64)[0] for x in inputs])
    return _for_rank(call, run(call.other("own_rows"), [*gradients, rows]))


def _own_rows(call: GraphCall, gradients: list[Any], inputs: list[Any], outputs: list[Any]) -> list[Any]:
    return run(call.other("allgather"), gradients)


def _broadcast(call: GraphCall, gradients: list[Any], inputs: list[Any], outputs: list[Any]) -> list[Any]:
    return _for_rank(call, run(call.other("at_root", root=call.root), gradients))


def _at_root(call: GraphCall, gradients: list[Any], inputs: list[Any], outputs: list[Any]) -> list[Any]:
    return run(call.other("broadcast", root=call.root), gradients)


def _alltoall(call: GraphCall, gradients: list[Any], inputs: list[Any], outputs: list[Any]) -> list[Any]:
    return run(call.other("alltoall"), [gradients[0], outputs[1]])[:1]


def _as_horovod(call: GraphCall) -> bool:
    return not call.exact and call.world.config.gradients == "horovod"


def _for_rank(call: GraphCall, gradients: list[Any]) -> list[Any]:
    """Sums over the ranks as they are, or Horovod's means."""
    if not _as_horovod(call):
        return gradients
    size = rank_queries.query("size", call.process_set)
    return [_divided(gradient, size) for gradient in gradients]


def _divided(gradient: Any, size: Any) -> Any:
    return gradient / tf.cast(size, gradient.dtype)


_ADJOINTS: dict[str, Callable[[GraphCall, list[Any], list[Any], list[Any]], list[Any]]] = {
    "allreduce": _allreduce,
    "reducescatter": _reducescatter,
    "allgather": _allgather,
    "own_rows": _own_rows,
    "broadcast": _broadcast,
    "at_root": _at_root,
    "alltoall": _alltoall,
}


# ---- what is not linear
# --------------------------------------------------------------------------------------------------


def _through_rows(call: GraphCall, x: Any, gradient: Any) -> Any:
    """The gradient of ``x``, given that of this rank's rows of its reduction."""
    size = rank_queries.query("size", call.process_set)
    rows = tf.shape(x)[0]
    shares = (rows + size - 1 - tf.range(size)) // size  # as `partition.rows`
    own = tf.shape(gradient)[0]
    versions, _ = run(call.other("alltoall", ".rows"), [x, shares])
    wide = scaled(_widened(tf.reshape(versions, tf.concat([[size], tf.shape(gradient)], 0))), call.prescale)
    upstream = scaled(tf.cast(gradient, wide.dtype), call.postscale)
    if call.op is Op.PRODUCT:
        others = tf.math.cumprod(wide, exclusive=True) * tf.math.cumprod(wide, exclusive=True, reverse=True)
        back = upstream * (tf.math.conj(others) if others.dtype.is_complex else others)
    else:
        extreme = tf.cast(tf.equal(wide, (tf.reduce_max if call.op is Op.MAX else tf.reduce_min)(wide, 0)), wide.dtype)
        back = upstream * extreme / tf.reduce_sum(extreme, 0)
    back = tf.reshape(tf.cast(scaled(back, call.prescale), x.dtype), tf.shape(versions))
    return run(call.other("alltoall", ".back"), [back, tf.fill([size], own)])[0]


def _through_adasum(call: GraphCall, x: Any, gradient: Any) -> Any:
    """The adjoint of Adasum, computed in float64 as its sums are. Takes memory for every rank's tensor."""
    (rows,) = run(call.other("allgather", ".rows"), [tf.reshape(x, [1, -1])])
    (total,) = run(call.other("allreduce", ".sum", op=Op.SUM), [tf.reshape(gradient, [-1])])
    world = call.world
    vectors = [scaled(tf.cast(row, tf.float64), call.prescale) for row in tf.split(rows, world.size)]
    vectors = [tf.reshape(vector, [-1]) for vector in vectors]
    back = scaled(tf.cast(total, tf.float64), call.postscale)
    # From this rank's leaf of the tree to its root, and with the gradient from there back to the leaf.
    at, path = world.rank, []
    for level in adasum.tree(world.size):
        for i, j in level:
            a, b = vectors[i], vectors[j]
            if at in (i, j):
                path.append((a, b) if at == i else (b, a))
                at = i
            vectors[i] = _coefficient(a, b) * a + _coefficient(b, a) * b
    for own, other in reversed(path):
        product, square = _dot(own, other), _square(own)
        along_own, along_other = _dot(back, own), _dot(back, other)
        to_product = -(along_own / square + along_other / _square(other)) / 2
        back = _coefficient(own, other) * back + to_product * other + along_own * product / square**2 * own
    return tf.reshape(tf.cast(scaled(back, call.prescale), x.dtype), tf.shape(x))


def _coefficient(a: Any, b: Any) -> Any:
    return 1 - _dot(a, b) / _square(a) / 2


def _square(a: Any) -> Any:
    """Of a vector of zeros 1: the coefficient is the constant 1 there."""
    square = _dot(a, a)
    return tf.where(square == 0, tf.ones_like(square), square)


def _dot(a: Any, b: Any) -> Any:
    return tf.reduce_sum(a * b)


def _widened(tensor: Any) -> Any:
    return tf.cast(tensor, tf.float32) if tensor.dtype in (tf.float16, tf.bfloat16) else tensor


def scaled(tensor: Any, factor: float) -> Any:
    """A tensor times a number, in its own dtype."""
    if factor == 1.0:
        return tensor
    if tensor.dtype.is_integer:
        return tf.cast(tf.cast(tensor, tf.float64) * factor, tensor.dtype)
    return tensor * tf.cast(factor, tensor.dtype)
