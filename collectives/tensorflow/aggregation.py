"""Gradients that add up on a rank over several backward passes before they travel.

    pass 1, 2, ...     sums += gradients                          the gradients are given back as they are, to be left alone
    pass n             sums += gradients, combined over the ranks; sums = 0, and the optimizer applies what comes back

Where in this cycle a rank is, is in a variable, so that it works eagerly, in a ``tf.function`` and in a graph of
TensorFlow 1 alike; in the latter the variables are local ones (``tf.compat.v1.local_variables_initializer()``, which a
``MonitoredTrainingSession`` runs by itself).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from collectives.base.errors import InvalidArgumentError
from collectives.process_sets import ProcessSet
from collectives.tensorflow.autograph import unconverted
from collectives.tensorflow.gradients import key
from collectives.tensorflow.reduction_tracking import Notes, note_tensors

Reduce = Callable[[Sequence[Any], Sequence[Any]], list[Any]]
"""Combines the gradients of some variables over the ranks."""


def local_variable(value: Any, name: str) -> Any:
    """A variable of this rank's own that nobody trains, saves or broadcasts; it outlives the function that is being
    traced."""
    with tf.init_scope():
        if tf.executing_eagerly():
            return tf.Variable(value, trainable=False, name=name)
        collections = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
        return tf.compat.v1.Variable(value, trainable=False, name=name, collections=collections, use_resource=True)


class Aggregation:
    """Adds gradients up, and has them combined every so many passes.

    Args:
        passes: backward passes between two combinations.
        average: divide the combined gradients by ``passes``; by default the result is that of the sum over the passes.
        reduce: combines gradients, given with their variables; called for all ranks in the same pass.
        process_set: the ranks over which ``reduce`` combines.
        sparse_as_dense: add sparse gradients as dense ones; by default they are refused.
        made: called with each variable of the aggregation, for whoever initializes variables of graphs.

    Attributes:
        counter: a variable: the passes since the last combination; None before the first.
        added: there are gradients that `add` has taken and `apply` has not seen yet.

    Raises:
        InvalidArgumentError: ``passes`` is not positive.
    """

    def __init__(
        self,
        passes: int,
        average: bool,
        reduce: Reduce,
        process_set: ProcessSet,
        sparse_as_dense: bool = False,
        made: Callable[[Any], None] = lambda variable: None,
    ) -> None:
        if passes < 1:
            raise InvalidArgumentError(f"backward_passes_per_step: expected at least 1, got {passes}")
        self.passes = passes
        self._average = average
        self._reduce = reduce
        self._process_set = process_set
        self._sparse_as_dense = sparse_as_dense
        self._made = made
        self.counter: Any = None
        self.added = Notes()
        self._sums: dict[int, Any] = {}
        self._variables: list[Any] | None = None

    @unconverted
    def add(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """One backward pass has come.

        Args:
            grads: one for each variable, or None; the same are None in every pass.

        Returns:
            The combined gradients, in every ``passes``-th call; in others the gradients themselves, which must not be
            applied: see `apply`.

        Raises:
            ValueError: a sparse gradient, unless ``sparse_as_dense``.
        """
        dense = [self._dense(grad) for grad in grads]
        self._prepare(dense, variables)
        present = [at for at, grad in enumerate(dense) if grad is not None]
        added = [self._sums[at].assign_add(dense[at]) for at in present]
        with tf.control_dependencies([tf.group(*added, self.counter.assign_add(1))]):
            due = tf.equal(self.counter.read_value(), self.passes)

        def combine() -> list[Any]:
            sums = [None if grad is None else self._sums[at].read_value() for at, grad in enumerate(dense)]
            reduced = self._reduce(sums, variables)
            results = [reduced[at] / self.passes if self._average else reduced[at] for at in present]
            with tf.control_dependencies(results):
                zeroed = [self._sums[at].assign(tf.zeros_like(dense[at])) for at in present]
                begun = tf.group(*zeroed, self.counter.assign(0))
            with tf.control_dependencies([begun]):
                return [tf.identity(result) for result in results]

        def keep() -> list[Any]:
            return [tf.identity(dense[at]) for at in present]

        results = tf.cond(due, combine, keep)
        results = results if isinstance(results, (list, tuple)) else [results]  # TensorFlow 1 unpacks a list of one
        for at, result in zip(present, results, strict=True):
            dense[at] = result
        self.added.make()
        note_tensors(dense, self._process_set)
        return dense

    @unconverted
    def apply(self, grads: Sequence[Any], step: Callable[[], Any], skip: Callable[[], Any]) -> Any:
        """Do ``step`` if the gradients that `add` has given were combined, else ``skip``; an operation, or None where
        it runs eagerly.

        Raises:
            InvalidArgumentError: `add` has not taken these.
        """
        if not self.added:
            raise InvalidArgumentError(
                "backward_passes_per_step: gradients that this optimizer has not combined cannot be applied past the "
                "sums of the backward"
                " passes. Leave out skip_gradients_aggregation=True (experimental_aggregate_gradients=False), or "
                "backward_passes_per_step"
            )
        self.added.take_back()
        with tf.control_dependencies([grad for grad in grads if grad is not None]):
            combined = tf.equal(self.counter.read_value(), 0)

        def done(act: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                result = act()
                with tf.control_dependencies([] if result is None else [result]):
                    return tf.constant(True)

            return run

        return tf.group(tf.cond(combined, done(step), done(skip)))

    def _dense(self, grad: Any) -> Any:
        if not isinstance(grad, tf.IndexedSlices):
            return grad
        if not self._sparse_as_dense:
            raise InvalidArgumentError(
                "IndexedSlices are not supported when `backward_passes_per_step` > 1 and `sparse_as_dense` is False; "
                "pass sparse_as_dense=True"
            )
        return tf.convert_to_tensor(grad)

    def _prepare(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        keys = [key(variable) for variable in variables]
        if self._variables not in (None, keys):
            raise InvalidArgumentError(
                "backward_passes_per_step: expected the variables of the first backward pass, got others; make an "
                "optimizer for each list"
            )
        self._variables = keys
        if self.counter is None:
            self.counter = self._variable(0, "aggregation_counter")
        for at, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
            if grad is not None and at not in self._sums:
                dtype = grad.dtype
                with tf.init_scope():
                    zeros = tf.zeros(variable.shape, dtype)
                self._sums[at] = self._variable(zeros, f"aggregation_{at}")

    def _variable(self, value: Any, name: str) -> Any:
        variable = local_variable(value, name)
        with tf.init_scope():
            self._made(variable)
        return variable
