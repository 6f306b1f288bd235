"""The part that the distributed optimizers of TensorFlow 1 and of Keras 2 share: when gradients are reduced.

passes per step     compute_gradients                apply_gradients
1                   reduces, and marks the results   reduces what is not marked, and applies
several             accumulates, and reduces the     applies the reduced sums after the last pass,
                    sums in the last pass            skips the step after the others

The number of the pass is a variable, so this works eagerly, in a ``tf.function`` and in a graph of TensorFlow 1. There
the variables are local ones (``tf.compat.v1.local_variables_initializer()``, which a ``MonitoredTrainingSession`` runs
by itself).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from collectives.base.errors import InvalidArgumentError
from collectives.frontends.gradient_options import GradientOptions
from collectives.schedules.registry import REPRODUCIBLE
from collectives.tensorflow.errors import unconverted
from collectives.tensorflow.gradients import GradientReduction, variable_key
from collectives.tensorflow.reduction_tracking import Mark, confirm_reduced, mark, mark_tensors, reduce_remaining


def local_variable(value: Any, name: str) -> Any:
    """A variable of this rank that is not trained, saved or broadcast, and outlives the function being traced."""
    with tf.init_scope():
        if tf.executing_eagerly():
            return tf.Variable(value, trainable=False, name=name)
        collections = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
        return tf.compat.v1.Variable(value, trainable=False, name=name, collections=collections, use_resource=True)


def after(operation: Any) -> Any:
    """A context whose operations run after an operation, which is None in eager execution."""
    return tf.control_dependencies([] if operation is None else [operation])


def true_after(operation: Any) -> Any:
    """A constant that is computed after an operation, so that `tf.cond` can return it."""
    with after(operation):
        return tf.constant(True)


def densified(grads: Sequence[Any], options: GradientOptions) -> list[Any]:
    """Gradients without sparse ones, which are made dense if ``sparse_as_dense``, else refused."""
    if not options.sparse_as_dense and any(isinstance(grad, tf.IndexedSlices) for grad in grads):
        raise InvalidArgumentError(
            "IndexedSlices are not supported when `backward_passes_per_step` > 1 and `sparse_as_dense` is False; "
            "pass sparse_as_dense=True [F44]"
        )
    return [tf.convert_to_tensor(grad) if isinstance(grad, tf.IndexedSlices) else grad for grad in grads]


class OptimizerReduction:
    """Reduces the gradients of one optimizer, each once; with several passes per step their sums.

    Args:
        reduction: how gradients are reduced. With several passes ``average_aggregated_gradients`` divides the reduced
            sums by their number, and without ``sparse_as_dense`` sparse gradients are refused.
        on_variable: called with each variable that is created, to initialize it in graphs.

    Attributes:
        counter: a variable: the passes since the last reduction; None before the first pass.
    """

    def __init__(
        self, reduction: GradientReduction, on_variable: Callable[[Any], None] = lambda variable: None
    ) -> None:
        self._reduction = reduction
        self._local: set[Any] = set()
        self._on_variable = on_variable
        self._passes = reduction.options.backward_passes_per_step
        self.counter: Any = None
        self._accumulated = Mark()  # gradients that `apply_last_pass` has not consumed
        self._sums: dict[int, list[Any]] = {}
        self._variables: list[Any] | None = None

    @property
    def has_passes(self) -> bool:
        """Whether a step has several passes."""
        return self._passes > 1

    def register_local(self, variable: Any) -> None:
        """Keep the gradients of a variable on this rank."""
        self._local.add(variable_key(variable))

    @unconverted
    def reduce(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduce gradients that were just computed, or accumulate them; both mark the results.

        Args:
            grads: one for each variable, or None at the same positions in every pass.

        Returns:
            The reduced gradients; of several passes, after the last the reduced sums, before it zeros, in which no
            rank's loss scaling sees an overflow of its own.

        Raises:
            InvalidArgumentError (a ValueError): of several passes, a sparse gradient without ``sparse_as_dense``, or
                other variables than in the first pass.
        """
        if self.has_passes:
            return self._accumulate(grads, variables)
        reduced = self._reduction.reduce(grads, variables, self._local)
        mark(reduced, variables, self._reduction.process_set)
        return reduced

    @unconverted
    def before_apply(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients to apply: reduced, or accumulated, unless `reduce` has done so."""
        if not self.has_passes:
            return reduce_remaining(grads, variables, self._reduction, self._local)
        return list(grads) if self._accumulated else self._accumulate(grads, variables)

    @unconverted
    def apply_last_pass(
        self,
        grads: Sequence[Any],
        variables: Sequence[Any],
        apply: Callable[[list[tuple[Any, Any]]], Any],
        skip: Callable[[], Any],
    ) -> Any:
        """With several passes: call ``apply`` with pairs after the last one, else ``skip``.

        Returns:
            An operation; None eagerly.

        Raises:
            InvalidArgumentError: the gradients were not accumulated.
        """
        if not self._accumulated:
            raise InvalidArgumentError(
                "backward_passes_per_step: this optimizer sums the gradients of several passes, so it cannot apply "
                "gradients that it has not combined itself; leave out skip_gradients_aggregation=True "
                "(experimental_aggregate_gradients=False), or backward_passes_per_step [F18]"
            )
        self._accumulated.clear()
        with tf.control_dependencies([grad for grad in grads if grad is not None]):
            reduced = tf.equal(self.counter.read_value(), 0)

        def step() -> Any:
            confirmed = confirm_reduced(grads, variables, self._reduction, self._local)
            return apply(list(zip(confirmed, variables, strict=True)))

        return tf.group(tf.cond(reduced, lambda: true_after(step()), lambda: true_after(skip())))

    def _accumulate(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        options = self._reduction.options
        dense = densified(grads, options)
        self._create_variables(dense, variables)
        if options.algorithm == REPRODUCIBLE:  # each pass overwrites its places in the tree
            for at, sums in self._sums.items():
                dense[at] = tf.zeros_like(sums[0]) if dense[at] is None else dense[at]
        present = [at for at, grad in enumerate(dense) if grad is not None]
        with after(self._add({at: dense[at] for at in present})):
            counted = tf.group(self.counter.assign_add(1))
        with after(counted):
            due = tf.equal(self.counter.read_value(), self._passes)

        def reduce() -> list[Any]:
            sums = [None if grad is None else self._sums[at][-1].read_value() for at, grad in enumerate(dense)]
            reduced = reduce_remaining(sums, variables, self._reduction, self._local)
            results = [
                reduced[at] / self._passes if options.average_aggregated_gradients else reduced[at] for at in present
            ]
            with tf.control_dependencies(results):
                zeroed = [self._sums[at][-1].assign(tf.zeros_like(dense[at])) for at in present]
                reset = tf.group(*zeroed, self.counter.assign(0))
            with tf.control_dependencies([reset]):
                return [tf.identity(result) for result in results]

        def keep() -> list[Any]:
            return [tf.zeros_like(dense[at]) for at in present]

        results = tf.cond(due, reduce, keep)
        results = results if isinstance(results, (list, tuple)) else [results]  # TensorFlow 1 unpacks a list of one
        for at, result in zip(present, results, strict=True):
            dense[at] = result
        self._accumulated.set()
        mark_tensors(dense, options.process_set)
        return dense

    def _add(self, grads: dict[int, Any]) -> Any:
        """Add one pass's gradients to the sums; the tensor that is returned is computed afterwards.

        Each addition is an ``assign_add``: in graphs TensorFlow may join sums of tensors to one of another order.
        """
        carries = self._reduction.options.carries

        def add(carry: int) -> Any:
            stored = []
            for at, grad in grads.items():
                carried = grad
                for total in self._sums[at][:carry]:
                    carried = total.assign_add(carried)
                if carry < carries[-1]:
                    carried = self._sums[at][carry].assign(carried)
                stored.append(carried)
            return true_after(tf.group(*stored))

        if len(set(carries)) == 1:
            return add(carries[0])
        branches = [functools.partial(add, carry) for carry in range(carries[-1] + 1)]
        return tf.switch_case(tf.gather(carries, self.counter.read_value()), branches)

    def _create_variables(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        """Create the counter and the sums that do not exist yet; every pass must come with the same variables."""
        keys = [variable_key(variable) for variable in variables]
        if self._variables not in (None, keys):
            raise InvalidArgumentError(
                "backward_passes_per_step: expected the same variables in every backward pass, got others than in "
                "the first; make one optimizer for each list of variables [F19]"
            )
        self._variables = keys
        if self.counter is None:
            self.counter = self._variable(0, "aggregation_counter")
        for at, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
            if grad is not None and at not in self._sums:
                with tf.init_scope():
                    zeros = tf.zeros(variable.shape, grad.dtype)
                carries = self._reduction.options.carries
                self._sums[at] = [self._variable(zeros, f"aggregation_{at}") for _ in range(carries[-1])]

    def _variable(self, value: Any, name: str) -> Any:
        variable = local_variable(value, name)
        with tf.init_scope():
            self._on_variable(variable)
        return variable
