"""Local accumulation of gradients over several backward passes, before they are reduced over the ranks.

    pass 1, 2, ...     sums += gradients      returned: the gradients as they are, which are not applied
    pass n             sums += gradients      returned: the sums, reduced over the ranks; then sums = 0

The number of the pass is a variable, so this works eagerly, in a ``tf.function`` and in a graph of TensorFlow 1. There
the variables are local ones (``tf.compat.v1.local_variables_initializer()``, which a ``MonitoredTrainingSession`` runs
by itself).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from collectives.base.errors import InvalidArgumentError
from collectives.frontends.gradient_options import GradientOptions
from collectives.tensorflow.autograph import unconverted
from collectives.tensorflow.gradients import variable_key
from collectives.tensorflow.reduction_tracking import Mark, mark_tensors

Reduce = Callable[[Sequence[Any], Sequence[Any]], list[Any]]
"""Reduces the gradients of some variables over the ranks."""


def local_variable(value: Any, name: str) -> Any:
    """A variable of this rank that is not trained, saved or broadcast, and outlives the function being traced."""
    with tf.init_scope():
        if tf.executing_eagerly():
            return tf.Variable(value, trainable=False, name=name)
        collections = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
        return tf.compat.v1.Variable(value, trainable=False, name=name, collections=collections, use_resource=True)


class Aggregation:
    """Accumulates gradients, and reduces the sums every ``backward_passes_per_step`` passes.

    Args:
        options: of the optimizer. With ``average_aggregated_gradients`` the reduced gradients are divided by the number
            of passes; without ``sparse_as_dense`` sparse gradients are refused.
        reduce: reduces gradients, given with their variables; called in the same pass on all ranks.
        on_variable: called with each variable that is created, to initialize it in graphs.

    Attributes:
        counter: a variable: the passes since the last reduction; None before the first pass.
        added: whether gradients went through `add` that `apply` has not consumed.
    """

    def __init__(
        self,
        options: GradientOptions,
        reduce: Reduce,
        on_variable: Callable[[Any], None] = lambda variable: None,
    ) -> None:
        self._options = options
        self._passes = options.backward_passes_per_step
        self._reduce = reduce
        self._on_variable = on_variable
        self.counter: Any = None
        self.added = Mark()
        self._sums: dict[int, Any] = {}
        self._variables: list[Any] | None = None

    @unconverted
    def add(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Add the gradients of one backward pass to the sums.

        Args:
            grads: one for each variable, or None at the same positions in every pass.

        Returns:
            After the last pass the reduced sums, else the gradients, which must not be applied; see `apply`.

        Raises:
            InvalidArgumentError (a ValueError): a sparse gradient without ``sparse_as_dense``, or other variables than
                in the first pass.
        """
        dense = [self._dense(grad) for grad in grads]
        self._create_variables(dense, variables)
        present = [at for at, grad in enumerate(dense) if grad is not None]
        added = [self._sums[at].assign_add(dense[at]) for at in present]
        with tf.control_dependencies([tf.group(*added, self.counter.assign_add(1))]):
            due = tf.equal(self.counter.read_value(), self._passes)

        def reduce() -> list[Any]:
            sums = [None if grad is None else self._sums[at].read_value() for at, grad in enumerate(dense)]
            reduced = self._reduce(sums, variables)
            results = [
                reduced[at] / self._passes if self._options.average_aggregated_gradients else reduced[at]
                for at in present
            ]
            with tf.control_dependencies(results):
                zeroed = [self._sums[at].assign(tf.zeros_like(dense[at])) for at in present]
                reset = tf.group(*zeroed, self.counter.assign(0))
            with tf.control_dependencies([reset]):
                return [tf.identity(result) for result in results]

        def keep() -> list[Any]:
            return [tf.identity(dense[at]) for at in present]

        results = tf.cond(due, reduce, keep)
        results = results if isinstance(results, (list, tuple)) else [results]  # TensorFlow 1 unpacks a list of one
        for at, result in zip(present, results, strict=True):
            dense[at] = result
        self.added.set()
        mark_tensors(dense, self._options.process_set)
        return dense

    @unconverted
    def apply(self, grads: Sequence[Any], step: Callable[[], Any], skip: Callable[[], Any]) -> Any:
        """Call ``step`` if `add` has returned reduced gradients, else ``skip``; returns an operation, or None eagerly.

        Raises:
            InvalidArgumentError: the gradients did not go through `add`.
        """
        if not self.added:
            raise InvalidArgumentError(
                "backward_passes_per_step: gradients that this optimizer has not combined cannot be applied past the "
                "sums of the backward passes. Leave out skip_gradients_aggregation=True "
                "(experimental_aggregate_gradients=False), or backward_passes_per_step"
            )
        self.added.clear()
        with tf.control_dependencies([grad for grad in grads if grad is not None]):
            reduced = tf.equal(self.counter.read_value(), 0)

        def after(action: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                result = action()
                with tf.control_dependencies([] if result is None else [result]):
                    return tf.constant(True)

            return run

        return tf.group(tf.cond(reduced, after(step), after(skip)))

    def _dense(self, grad: Any) -> Any:
        if not isinstance(grad, tf.IndexedSlices):
            return grad
        if not self._options.sparse_as_dense:
            raise InvalidArgumentError(
                "IndexedSlices are not supported when `backward_passes_per_step` > 1 and `sparse_as_dense` is False; "
                "pass sparse_as_dense=True"
            )
        return tf.convert_to_tensor(grad)

    def _create_variables(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        """Create the counter and the sums that do not exist yet; every pass must come with the same variables."""
        keys = [variable_key(variable) for variable in variables]
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
            self._on_variable(variable)
        return variable
