"""Automatic differentiation of the collectives; `collectives.frontends.adjoints` has the rules.

Complex gradients follow TensorFlow's convention (the conjugate of the factor).

All ranks take part in an adjoint, so every rank must use the outputs of the same calls in its backward pass. Adjoints
run in the reverse order of the calls and are matched by name: if a rank leaves one out, the others wait (and all ranks
get an error), but it is never matched with a later one.
"""

from __future__ import annotations

import importlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from collectives.base.reduce_op import Op
from collectives.frontends import adjoints
from collectives.tensorflow import graph, graph_call, local_ranks, rank_queries
from collectives.tensorflow.graph_call import GraphCall
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import world_of

_Adjoint = Callable[[list[Any], list[Any], list[Any]], Sequence[Any]]
"""Maps the gradients of outputs, the inputs, and all outputs, to the gradients of the inputs."""

_SLOTS = 64
"""Names of the gradients of unnamed eager calls of one kind. The engine remembers each name, so an unbounded number of
them would be slow. In backward each adjoint is waited for, so ranks are never this many calls apart."""

_RANKS_MAY_DIFFER_IN_ROWS = ("allgather", "alltoall", "merge")

_counts: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()
"""For each world or graph, the number of unnamed calls of each kind."""


def run(call: GraphCall, tensors: Sequence[Any]) -> list[Any]:
    """Run a call, or add it to the graph, differentiably; arguments and results as for `graph_call.run`.

    All tensors of a group get gradients, or none: the ranks' adjoints must cover the same tensors, and another rank may
    need a gradient that is not needed here.
    """
    back = gradient_call(call, tensors)
    adjoint = _ADJOINTS[call.collective]

    def derive(gradients: list[Any], inputs: list[Any], outputs: list[Any]) -> Sequence[Any]:
        return adjoint(_AdjointCall(back, inputs, outputs), gradients)

    try:
        return attach(lambda inputs: graph_call.run(call, inputs), derive, tensors)
    except Exception:
        _uncount(call, back)
        raise


def attach(function: Callable[[Sequence[Any]], list[Any]], adjoint: _Adjoint, tensors: Sequence[Any]) -> list[Any]:
    """Call a function of tensors, with an adjoint for those tensors that have gradients.

    Each call takes a token from the previous one, so all recorded calls form one chain: a tape with several targets
    visits independent calls in an order that differs between ranks, so each rank would wait in a different adjoint.
    """
    if not _is_recorded() or not any(map(has_gradient, tensors)):
        return function(tensors)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def attached(token: Any, *inputs: Any) -> Any:
        results = function(inputs)
        rank = None if tf.executing_eagerly() else local_ranks.of_call(tf.compat.v1.get_default_graph())

        def gradient(_: Any, *upstream: Any) -> Any:
            chosen = [i for i, tensor in enumerate(inputs) if has_gradient(tensor)]
            cotangents = [tf.cast(tf.convert_to_tensor(upstream[i]), results[i].dtype) for i in chosen]
            gradients: list[Any] = [None] * len(inputs)
            with local_ranks.in_gradient(rank):
                adjoints_of_chosen = adjoint(cotangents, [inputs[i] for i in chosen], results)
            for i, each in zip(chosen, adjoints_of_chosen, strict=True):
                gradients[i] = each
            return [None, *gradients]

        return [token, *results], gradient

    token, *results = attached(_last_token(), *tensors)
    _keep_token(token)
    return list(results)


class _Eager(threading.local):
    token: Any = None
    """The token of the last call that this thread has recorded."""


_eager = _Eager()
_tokens_of_graphs: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""For each graph the name of its last token: the tensor itself would keep the graph alive."""


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
    """Whether a branch or loop of TensorFlow 1 is being built, whose tokens are not valid in the rest of the graph."""
    context = getattr(graph, "_get_control_flow_context", None)  # not public
    return context is not None and context() is not None


def has_gradient(tensor: Any) -> bool:
    """Whether a tensor's dtype is differentiable."""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _is_recorded() -> bool:
    """Whether a gradient may be computed later: always in a graph, eagerly only under a tape."""
    if not tf.executing_eagerly():
        return True
    try:
        # Not public. It avoids the copies of all results that custom_gradient makes; without it, they are always made.
        return bool(importlib.import_module("tensorflow.python.eager.record").could_possibly_record())
    except (ImportError, AttributeError):
        return True


def gradient_call(call: GraphCall, tensors: Sequence[Any]) -> GraphCall:
    """The call by the name of its gradient, equal on all ranks; for an unnamed call it contains the call's number."""
    if call.name is not None:
        return replace(call, name=f"{graph.scoped(call.name, call.ignore_name_scope)}.gradient", ignore_name_scope=True)
    kind = f"{call.collective}.{len(tensors)}"
    if tf.executing_eagerly():
        shape = tensors[0].shape.as_list()
        kind += f".{tensors[0].dtype.name}{shape[1:] if call.collective in _RANKS_MAY_DIFFER_IN_ROWS else shape}"
        counts = _counts.setdefault(call.world, Counter())
        number = counts[kind] % _SLOTS
    else:
        counts = _counts.setdefault(graph.outermost(tf.compat.v1.get_default_graph()), Counter())
        number = counts[kind]
    counts[kind] += 1
    return replace(call, name=f"{kind}.{number}.gradient", ignore_name_scope=True)


def _uncount(call: GraphCall, back: GraphCall) -> None:
    """Take back the number of a call that has failed: a rank that refused its arguments has not counted it."""
    if call.name is None and tf.executing_eagerly() and back.name is not None:
        _counts[call.world][back.name.rsplit(".", 2)[0]] -= 1


def reset_numbering(process_set: ProcessSet) -> None:
    """Restart the numbers of unnamed calls: joined ranks have made fewer."""
    _counts.pop(world_of(process_set), None)


# ---- adjoints


class _Arithmetic:
    """`adjoints.Arithmetic` on tensors, eager or of a graph, whose shapes may be unknown."""

    def flat(self, tensor: Any) -> Any:
        return tf.reshape(tensor, [-1])

    def restored(self, tensor: Any, like: Any) -> Any:
        return tf.reshape(tf.cast(tensor, like.dtype), tf.shape(like))

    def widened(self, tensor: Any) -> Any:
        return tf.cast(tensor, tf.float32) if tensor.dtype in (tf.float16, tf.bfloat16) else tensor

    def cast(self, tensor: Any, like: Any) -> Any:
        return tf.cast(tensor, like.dtype)

    def conj(self, tensor: Any) -> Any:
        return tf.math.conj(tensor)

    def sum(self, tensor: Any) -> Any:
        return tf.reduce_sum(tensor, 0)

    def extreme(self, tensor: Any, op: Op) -> Any:
        reduce = tf.reduce_max if op is Op.MAX else tf.reduce_min
        return tf.cast(tf.equal(tensor, reduce(tensor, 0)), tensor.dtype)

    def products_of_others(self, tensor: Any) -> Any:
        return tf.math.cumprod(tensor, exclusive=True) * tf.math.cumprod(tensor, exclusive=True, reverse=True)

    def dot(self, a: Any, b: Any) -> Any:
        return tf.reduce_sum(a * b)

    def nonzero(self, scalar: Any) -> Any:
        return tf.where(scalar == 0, tf.ones_like(scalar), scalar)


def scaled(tensor: Any, factor: float) -> Any:
    """A tensor times a number, in its own dtype; integers are multiplied in float64."""
    if factor == 1.0:
        return tensor
    if tensor.dtype.is_integer:
        return tf.cast(tf.cast(tensor, tf.float64) * factor, tensor.dtype)
    return tensor * tf.cast(factor, tensor.dtype)


@dataclass(frozen=True)
class _AdjointCall:
    """The collectives that the adjoint of a call is made of; `adjoints.ReductionCall`.

    Attributes:
        call: by the name of its gradient.
        inputs, outputs: those tensors of the call that have gradients, and all its results.
    """

    call: GraphCall
    inputs: Sequence[Any]
    outputs: Sequence[Any]

    arithmetic = _Arithmetic()

    @property
    def op(self) -> Op | None:
        return self.call.op

    @property
    def factors(self) -> tuple[float, float]:
        return self.call.prescale, self.call.postscale

    @property
    def as_horovod(self) -> bool:
        return not self.call.exact and bool(self.call.world.config.gradients == "horovod")

    @property
    def rank(self) -> int:
        return self.call.world.rank

    def numbered(self, number: int) -> _AdjointCall:
        return replace(self, call=replace(self.call, name=f"{self.call.name}.{number}"))

    def scaled(self, tensor: Any, factor: float, power: int = 0) -> Any:
        tensor = scaled(tensor, factor)
        if not power:
            return tensor
        size = tf.cast(rank_queries.query("size", self.call.process_set), tensor.dtype)
        return tensor * size if power > 0 else tensor / size

    def repeat(self, tensors: Sequence[Any]) -> list[Any]:
        return run(self.call, tensors)

    def allgather(self, tensors: Sequence[Any]) -> list[Any]:
        return run(self.call.other("allgather"), tensors)

    def broadcast(self, tensors: Sequence[Any]) -> list[Any]:
        """The adjoint of `at_root`."""
        return run(self.call.other("broadcast", root=self.call.root), tensors)

    def own_rows(self, tensors: Sequence[Any], op: Op) -> list[Any]:
        rows = tf.stack([tf.shape(x, out_type=tf.int64)[0] for x in self.inputs])
        return self._averaged(run(self.call.other("own_rows"), [*tensors, rows]), op)

    def at_root(self, tensors: Sequence[Any], op: Op) -> list[Any]:
        return self._averaged(run(self.call.other("at_root", root=self.call.root), tensors), op)

    def send_back(self, tensors: Sequence[Any]) -> list[Any]:
        return run(self.call.other("alltoall"), [tensors[0], self.outputs[1]])[:1]

    def summed(self, tensor: Any) -> Any:
        return run(self.call.other("allreduce", ".sum", op=Op.SUM), [tensor])[0]

    def summed_share(self, tensor: Any) -> Any:
        return run(self.call.other("reducescatter", ".sum", op=Op.SUM), [tensor])[0]

    def versions(self, tensor: Any) -> Any:
        size, rows = rank_queries.query("size", self.call.process_set), tf.shape(tensor)[0]
        shares = (rows + size - 1 - tf.range(size)) // size  # as `partition.rows`
        received, _ = run(self.call.other("alltoall", ".rows"), [tensor, shares])
        return tf.reshape(received, tf.concat([[size, tf.shape(received)[0] // size], tf.shape(tensor)[1:]], 0))

    def return_versions(self, versions: Any) -> Any:
        shape = tf.shape(versions)
        rows = tf.reshape(versions, tf.concat([[shape[0] * shape[1]], shape[2:]], 0))
        return run(self.call.other("alltoall", ".back"), [rows, tf.fill([shape[0]], shape[1])])[0]

    def vectors(self, tensor: Any) -> list[Any]:
        (rows,) = run(self.call.other("allgather", ".rows"), [tf.reshape(tensor, [1, -1])])
        return [tf.reshape(tf.cast(row, tf.float64), [-1]) for row in tf.split(rows, self.call.world.size)]

    def _averaged(self, sums: list[Any], op: Op) -> list[Any]:
        return [self.scaled(each, 1.0, -1) for each in sums] if op is Op.AVERAGE else sums


_ADJOINTS: dict[str, Callable[[_AdjointCall, list[Any]], Sequence[Any]]] = {
    "allreduce": lambda call, gradients: adjoints.allreduce(call, gradients, call.inputs),
    "reducescatter": lambda call, gradients: adjoints.reducescatter(call, gradients, call.inputs),
    "allgather": adjoints.allgather,
    "own_rows": _AdjointCall.allgather,
    "broadcast": adjoints.broadcast,
    "at_root": _AdjointCall.broadcast,
    "alltoall": adjoints.alltoall,
}
