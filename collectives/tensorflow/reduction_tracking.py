"""Which gradients are combined over the ranks already, so that no optimizer combines them a second time, and none
forgets to.

    compute_gradients, get_gradients, DistributedGradientTape.gradient     note what they return
    apply_gradients                                                        combines what was not noted

    a gradient that is noted itself, or computed in the graph from noted ones alone     is combined
    another one, of a variable whose gradient was noted and not applied since           is doubtful: clipped eagerly, as a rule
    of a variable without a note                                                        is this rank's own

Combined gradients are alike on all ranks. So of doubtful ones the ranks compare two numbers each; where these differ,
they are this rank's own. In a graph, which cannot turn back on that, they are combined again, which changes nothing
with Average, Min, Max and Adasum, and with Sum and Product the graph asserts that they are alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from collectives.base.errors import InvalidArgumentError
from collectives.base.reduce_op import Op
from collectives.process_sets import ProcessSet
from collectives.tensorflow import operations
from collectives.tensorflow.gradients import Way, key

_NOTED = "_collectives_combined"  # of tensors: the process set over which they are combined
_NOTES = "_collectives_notes"  # of variables
_READS = frozenset({"ReadVariableOp", "Variable", "VariableV2", "VarHandleOp"})
_IDEMPOTENT = frozenset({Op.AVERAGE, Op.MIN, Op.MAX, Op.ADASUM})
_TOLERANCE = 1e-3
"""Of a gradient's norm: far above what kernels of different processors make of the same numbers, and far below how
gradients of different data differ."""


class Notes:
    """That something was done eagerly, or by a graph. What a graph does may come again at any time: only that graph
    takes its note back."""

    def __init__(self) -> None:
        self._eagerly = False
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    def __bool__(self) -> bool:
        return self._eagerly or len(self._graphs) > 0

    def make(self) -> None:
        """Note it of what runs now, or of the graph that is being built."""
        if tf.executing_eagerly():
            self._eagerly = True
        else:
            self._graphs.add(tf.compat.v1.get_default_graph())

    def take_back(self) -> None:
        """Whatever was noted eagerly, or by the graph that is being built or one around it."""
        self._eagerly = False
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        while graph is not None:
            self._graphs.discard(graph)
            graph = getattr(graph, "outer_graph", None)


def note_tensors(grads: Sequence[Any], process_set: ProcessSet) -> None:
    """These gradients are combined over these ranks."""
    for grad in grads:
        if grad is not None:
            setattr(_values(grad), _NOTED, process_set)


def note(grads: Sequence[Any], variables: Sequence[Any], process_set: ProcessSet) -> None:
    """These gradients of these variables are combined over these ranks, and will be applied."""
    note_tensors(grads, process_set)
    for grad, variable in zip(grads, variables, strict=True):
        if grad is not None:
            inner = key(variable).deref()
            notes = getattr(inner, _NOTES, None)
            if notes is None:
                notes = Notes()
                setattr(inner, _NOTES, notes)
            notes.make()


def spend(variables: Sequence[Any]) -> None:
    """The gradients of these variables are about to be applied."""
    for variable in variables:
        notes = getattr(key(variable).deref(), _NOTES, None)
        if notes:
            notes.take_back()


def combine_rest(grads: Sequence[Any], variables: Sequence[Any], way: Way, local: Collection[Any] = ()) -> list[Any]:
    """Combine those gradients that are not combined yet, to apply all of them.

    Args:
        local: the `key` of each variable whose gradient stays on this rank.

    Raises:
        InvalidArgumentError: gradients of variables whose combined gradients were to be applied, which are not alike on
            all ranks; in a graph a ``tf.errors.InvalidArgumentError`` when it runs.
        MismatchError, RankFailedError, CollectiveTimeoutError: as for `collectives.allreduce`.
    """
    found = list(grads)
    if len(found) != len(variables) or not way.process_set.included() or way.process_set.size() == 1:
        return way.reduce(found, variables, local)
    kinds = [_kind(grad, variable, way) for grad, variable in zip(found, variables, strict=True)]
    spend(variables)
    rest = [at for at, kind in enumerate(kinds) if kind == "own"]
    doubtful = [at for at, kind in enumerate(kinds) if kind == "doubtful" and key(variables[at]) not in local]
    again = way.op in _IDEMPOTENT and len(doubtful) == kinds.count("doubtful")
    if doubtful and again and not (tf.executing_eagerly() and bool(_alike([found[at] for at in doubtful], way))):
        rest = sorted([*rest, *doubtful])
    elif doubtful and not again:
        for at, grad in zip(
            doubtful, confirmed([found[at] for at in doubtful], [variables[at] for at in doubtful], way), strict=True
        ):
            found[at] = grad
    if rest:
        for at, grad in zip(
            rest, way.reduce([found[at] for at in rest], [variables[at] for at in rest], local), strict=True
        ):
            found[at] = grad
    return found


def confirmed(grads: Sequence[Any], variables: Sequence[Any], way: Way, local: Collection[Any] = ()) -> list[Any]:
    """Gradients of which the doubtful ones are alike on all ranks, as combined ones are, or else an error: now, or when
    the graph runs."""
    found = list(grads)
    global_ = [at for at, variable in enumerate(variables) if key(variable) not in local]
    present = [at for at in global_ if found[at] is not None and not is_combined(found[at], way)]
    if not present or not way.process_set.included() or way.process_set.size() == 1:
        return found
    text = (
        "apply_gradients: the ranks' gradients differ, although compute_gradients, or a DistributedGradientTape, has "
        "combined gradients of"
        " the same variables that were not applied. Apply what they have returned; or where gradients are this "
        "rank's own, do not compute"
        " combined ones of the same variables before"
    )
    alike = _alike([found[at] for at in present], way)
    if tf.executing_eagerly():
        if not bool(alike):
            raise InvalidArgumentError(text)
        return found
    with tf.control_dependencies([tf.debugging.Assert(alike, [text])]):
        for at in present:
            grad = found[at]
            same = tf.identity(_values(grad))
            found[at] = (
                tf.IndexedSlices(same, grad.indices, grad.dense_shape) if isinstance(grad, tf.IndexedSlices) else same
            )
    return found


def is_combined(grad: Any, way: Way) -> bool:
    """Whether a gradient is noted, or was computed in its graph from noted ones, constants, variables and fed numbers
    alone."""
    tensor = _values(grad)
    if _is_noted(tensor, way):
        return True
    if not hasattr(tensor, "graph"):  # an eager tensor does not know what it was computed from
        return False
    seen, ahead, noted = {tensor.op}, [tensor.op], False
    while ahead:
        operation = ahead.pop()
        if operation.type in _READS or (
            operation.type.startswith("Placeholder") and operation.outputs[0].shape.rank == 0
        ):
            continue
        if operation.op_def.is_stateful or operation.type.startswith("Placeholder"):
            return False
        for source in operation.inputs:
            if _is_noted(source, way):
                noted = True
            elif source.op not in seen:
                seen.add(source.op)
                ahead.append(source.op)
    return noted


def _kind(grad: Any, variable: Any, way: Way) -> str:
    if grad is None:
        return "own"
    if _is_noted(_values(grad), way):
        return "combined"
    if hasattr(_values(grad), _NOTED) or not getattr(key(variable).deref(), _NOTES, None):
        return "own"
    return "combined" if is_combined(grad, way) else "doubtful"


def _is_noted(tensor: Any, way: Way) -> bool:
    """Whether it is combined over these ranks, or over more; where it was combined over fewer, there is more to
    combine."""
    over = getattr(tensor, _NOTED, None)
    return over is way.process_set or (
        over is not None and set(over.ranks or ()).issuperset(way.process_set.ranks or ())
    )


def _alike(grads: Sequence[Any], way: Way) -> Any:
    """A tensor: whether each gradient is the same on all ranks, to rounding, as far as two numbers of each tell."""
    prints = tf.stack([_print(grad) for grad in grads])[tf.newaxis]
    every = operations.allgather(prints, name=f"{way.name}.alike", ignore_name_scope=True, process_set=way.process_set)
    spread = tf.reduce_max(every, 0) - tf.reduce_min(every, 0)
    norms = tf.reduce_max(every[:, :, 1:], 0)
    apart = tf.reduce_any(spread > _TOLERANCE * norms)  # not where they are infinite or no numbers, which is this:
    finite = tf.math.is_finite(every)
    return ~apart & tf.reduce_all(finite == finite[:1])


def _print(grad: Any) -> Any:
    """A weighted sum of a gradient's elements, and their Euclidean norm.

    Equal weights would not do: the gradients of a softmax layer add up to zero whatever the data, and those of a large
    layer nearly so.
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
    largest = tf.maximum(tf.reduce_max(tf.abs(flat)), 0)  # of nothing it is minus infinity
    norm = largest * tf.norm(tf.math.divide_no_nan(flat, largest))  # squares might overflow
    return tf.cast(tf.stack([tf.reduce_sum(weights * values), norm]), tf.float64)


def _weights(numbers: Any, dtype: Any) -> Any:
    """Of both signs, in no pattern that gradients have."""
    return tf.cast(tf.cos(tf.cast(numbers, tf.float64) + 1), dtype)


def _values(grad: Any) -> Any:
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad
