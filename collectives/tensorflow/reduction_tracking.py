"""Records of which gradients are reduced, so that an optimizer reduces each gradient exactly once.

    compute_gradients, get_gradients, DistributedGradientTape.gradient     mark what they return
    apply_gradients                                                        reduces what is not marked

    gradient                                                                        is
    marked, or computed in the graph from marked gradients alone                    reduced
    another one, of a variable whose gradient was marked and not applied since      doubtful: usually clipped eagerly
    another one                                                                     this rank's own

Reduced gradients are equal on all ranks. So the ranks compare two numbers of each doubtful gradient; gradients that
differ are the ranks' own. A graph cannot branch on that: with Average, Min, Max and Adasum it reduces them again, which
changes nothing, and with Sum and Product it asserts that they are equal.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from collectives.base.errors import InvalidArgumentError
from collectives.tensorflow import operations
from collectives.tensorflow.gradients import GradientReduction, variable_key
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import communicates

_REDUCED_OVER = "_collectives_reduced_over"  # attribute of tensors: a process set
_PENDING = "_collectives_pending"  # attribute of variables: the `Mark` of a reduced gradient that is not applied yet
_READS = frozenset({"ReadVariableOp", "Variable", "VariableV2", "VarHandleOp"})
_TOLERANCE = 1e-3
"""Relative to a gradient's norm: far above the differences between kernels of different processors, and far below those
between gradients of different data."""


class Mark:
    """A flag set eagerly or by a graph. A graph may run again at any time, so only that graph removes its flag."""

    def __init__(self) -> None:
        self._eagerly = False
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    def __bool__(self) -> bool:
        return self._eagerly or len(self._graphs) > 0

    def set(self) -> None:
        """Set the flag, eagerly or for the graph that is being built."""
        if tf.executing_eagerly():
            self._eagerly = True
        else:
            self._graphs.add(tf.compat.v1.get_default_graph())

    def clear(self) -> None:
        """Remove flags set eagerly, by the graph that is being built, or by a graph around it."""
        self._eagerly = False
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        while graph is not None:
            self._graphs.discard(graph)
            graph = getattr(graph, "outer_graph", None)


def mark_tensors(grads: Sequence[Any], process_set: ProcessSet) -> None:
    """Mark gradients as reduced over a process set."""
    for grad in grads:
        if grad is not None:
            setattr(_values(grad), _REDUCED_OVER, process_set)


def mark(grads: Sequence[Any], variables: Sequence[Any], process_set: ProcessSet) -> None:
    """Mark gradients as reduced over a process set, and their variables as waiting for these to be applied."""
    mark_tensors(grads, process_set)
    for grad, variable in zip(grads, variables, strict=True):
        if grad is not None:
            inner = variable_key(variable).deref()
            if getattr(inner, _PENDING, None) is None:
                setattr(inner, _PENDING, Mark())
            getattr(inner, _PENDING).set()


def clear_pending(variables: Sequence[Any]) -> None:
    """Record that the gradients of these variables are about to be applied."""
    for variable in variables:
        pending = getattr(variable_key(variable).deref(), _PENDING, None)
        if pending:
            pending.clear()


def reduce_remaining(
    grads: Sequence[Any], variables: Sequence[Any], reduction: GradientReduction, local: Collection[Any] = ()
) -> list[Any]:
    """`GradientReduction.reduce` of the gradients that are not reduced yet, before all of them are applied.

    Raises:
        InvalidArgumentError: doubtful gradients that cannot be reduced again differ between ranks; in a graph a
            ``tf.errors.InvalidArgumentError`` when it runs.
    """
    gradients = list(grads)
    if len(gradients) != len(variables) or not communicates(reduction.process_set):
        return reduction.reduce(gradients, variables, local)
    states = [_state(grad, variable, reduction) for grad, variable in zip(gradients, variables, strict=True)]
    clear_pending(variables)
    own = [at for at, state in enumerate(states) if state == "own"]
    doubtful = [
        at for at, state in enumerate(states) if state == "doubtful" and variable_key(variables[at]) not in local
    ]
    if doubtful:
        suspects = [gradients[at] for at in doubtful]
        if not reduction.options.op.idempotent or len(doubtful) < states.count("doubtful"):
            confirmed = confirm_reduced(suspects, [variables[at] for at in doubtful], reduction)
            for at, grad in zip(doubtful, confirmed, strict=True):
                gradients[at] = grad
        elif not (tf.executing_eagerly() and bool(_equal_on_all_ranks(suspects, reduction))):
            own = sorted([*own, *doubtful])
    if own:
        reduced = reduction.reduce([gradients[at] for at in own], [variables[at] for at in own], local)
        for at, grad in zip(own, reduced, strict=True):
            gradients[at] = grad
    return gradients


def confirm_reduced(
    grads: Sequence[Any], variables: Sequence[Any], reduction: GradientReduction, local: Collection[Any] = ()
) -> list[Any]:
    """Check that doubtful gradients are equal on all ranks, as reduced ones are; in a graph, when it runs.

    Returns:
        The gradients; in a graph they depend on the check.
    """
    gradients = list(grads)
    doubtful = [
        at
        for at, variable in enumerate(variables)
        if variable_key(variable) not in local
        and gradients[at] is not None
        and not is_reduced(gradients[at], reduction)
    ]
    if not doubtful or not communicates(reduction.process_set):
        return gradients
    text = (
        "apply_gradients: the ranks' gradients differ, but compute_gradients or a DistributedGradientTape has "
        "combined gradients of the same variables that were not applied. Apply the gradients that it returned; or, "
        "to apply gradients of this rank alone, do not combine gradients of the same variables first [M14]"
    )
    equal = _equal_on_all_ranks([gradients[at] for at in doubtful], reduction)
    if tf.executing_eagerly():
        if not bool(equal):
            raise InvalidArgumentError(text)
        return gradients
    with tf.control_dependencies([tf.debugging.Assert(equal, [text])]):
        for at in doubtful:
            grad = gradients[at]
            gradients[at] = tf.nest.map_structure(tf.identity, grad, expand_composites=True)
    return gradients


def is_reduced(grad: Any, reduction: GradientReduction) -> bool:
    """Whether a gradient is marked, or its graph computes it from marked ones, constants, variables and fed scalars
    alone."""
    tensor = _values(grad)
    if _is_marked(tensor, reduction):
        return True
    if not hasattr(tensor, "graph"):  # eager tensors do not record their inputs
        return False
    seen, ahead, marked = {tensor.op}, [tensor.op], False
    while ahead:
        operation = ahead.pop()
        if operation.type in _READS or (
            operation.type.startswith("Placeholder") and operation.outputs[0].shape.rank == 0
        ):
            continue
        if operation.op_def.is_stateful or operation.type.startswith("Placeholder"):
            return False
        for source in operation.inputs:
            if _is_marked(source, reduction):
                marked = True
            elif source.op not in seen:
                seen.add(source.op)
                ahead.append(source.op)
    return marked


def _state(grad: Any, variable: Any, reduction: GradientReduction) -> str:
    """ "own", "reduced" or "doubtful"; see the module's table."""
    if grad is None:
        return "own"
    if _is_marked(_values(grad), reduction):
        return "reduced"
    if hasattr(_values(grad), _REDUCED_OVER) or not getattr(variable_key(variable).deref(), _PENDING, None):
        return "own"
    return "reduced" if is_reduced(grad, reduction) else "doubtful"


def _is_marked(tensor: Any, reduction: GradientReduction) -> bool:
    """Whether a tensor is reduced over the process set or a superset; over fewer ranks, it must be reduced further."""
    over = getattr(tensor, _REDUCED_OVER, None)
    return over is reduction.process_set or (
        over is not None and set(over.ranks or ()).issuperset(reduction.process_set.ranks or ())
    )


def _equal_on_all_ranks(grads: Sequence[Any], reduction: GradientReduction) -> Any:
    """A boolean tensor: whether each gradient's fingerprint is the same on all ranks, to rounding."""
    prints = tf.stack([_fingerprint(grad) for grad in grads])[tf.newaxis]
    every = operations.allgather(
        prints, name=f"{reduction.options.name}.alike", ignore_name_scope=True, process_set=reduction.process_set
    )
    spread = tf.reduce_max(every, 0) - tf.reduce_min(every, 0)
    norms = tf.reduce_max(every[:, :, 1:], 0)
    apart = tf.reduce_any(spread > _TOLERANCE * norms)  # False for infinities and NaN, which the next line compares
    finite = tf.math.is_finite(every)
    return ~apart & tf.reduce_all(finite == finite[:1])


def _fingerprint(grad: Any) -> Any:
    """A weighted sum of a gradient's elements, and their Euclidean norm, in float64.

    Equal weights would not tell gradients apart: those of a softmax layer sum to zero for any data, and those of a
    large layer nearly so.
    """
    values = _values(grad)
    if values.dtype.is_complex:
        values = tf.stack([tf.math.real(values), tf.math.imag(values)], -1)
    values = tf.cast(values, tf.float32) if values.dtype.size < 4 else values
    flat = tf.reshape(values, [-1])
    weights = tf.reshape(_weights(tf.range(tf.size(flat)), values.dtype), tf.shape(values))
    if isinstance(grad, tf.IndexedSlices):
        rows = _weights(grad.indices, values.dtype)
        weights *= tf.reshape(rows, tf.concat([tf.shape(rows), tf.ones([tf.rank(values) - 1], tf.int32)], 0))
    largest = tf.maximum(tf.reduce_max(tf.abs(flat)), 0)  # the maximum of an empty tensor is minus infinity
    norm = largest * tf.norm(tf.math.divide_no_nan(flat, largest))  # squares might overflow
    return tf.cast(tf.stack([tf.reduce_sum(weights * values), norm]), tf.float64)


def _weights(numbers: Any, dtype: Any) -> Any:
    """Weights of both signs, without a pattern that gradients could follow."""
    return tf.cast(tf.cos(tf.cast(numbers, tf.float64) + 1), dtype)


def _values(grad: Any) -> Any:
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad
