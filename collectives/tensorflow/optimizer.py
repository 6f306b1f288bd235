"""`DistributedOptimizer` for optimizers of TensorFlow 1; `collectives.tensorflow.keras` has the one for Keras."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.base.reduce_op import Op
from collectives.frontends.gradient_options import GradientOptions
from collectives.tensorflow.errors import unconverted
from collectives.tensorflow.gradients import GradientReduction, variable_key
from collectives.tensorflow.optimizer_reduction import OptimizerReduction, after, local_variable, true_after
from collectives.tensors.compression import Compression
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import global_process_set

Optimizer = TypeVar("Optimizer")


@unconverted
def DistributedOptimizer(
    optimizer: Optimizer,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Op = Op.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    algorithm: str | None = None,
) -> Optimizer:
    """Wrap an optimizer, so that it applies the gradients of all ranks.

    A ``tf.compat.v1.train.Optimizer`` reduces them in ``compute_gradients``, by one call, in a graph or eagerly; code
    that changes gradients, such as clipping, goes between that and ``apply_gradients``. An optimizer that scales the
    loss may be inside or outside. Keras optimizers are handed to `collectives.tensorflow.keras.DistributedOptimizer`.

    Args:
        optimizer: shares its state, slots and checkpoints with the result, which is of a subclass of its type.
        name: for Keras optimizers; others keep their own.
        use_locking: part of Horovod's interface; the optimizer's own setting applies.
        backward_passes_per_step: backward passes over which the rank accumulates gradients before they are reduced and
            applied. In the passes between, ``apply_gradients`` only increments ``global_step``.
        op: Average, Sum, Min, Max, Product; or Adasum, which reduces the change of the variables instead: each rank
            applies its own gradients, and after ``backward_passes_per_step`` steps the ranks combine the changes.
        average_aggregated_gradients: divide by ``backward_passes_per_step``, too.
        compression, ...: as for `collectives.frontends.gradient_options.GradientOptions`.

    Returns:
        The optimizer, with ``register_local_var(variable)`` for variables whose gradients stay on this rank.

    Raises:
        InvalidArgumentError (a ValueError): an invalid argument, or the optimizer is wrapped already.
        InvalidTypeError: not an optimizer, or ``compression`` is not a compressor.

    Example:
        optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.01 * hvd.size()))
    """
    if isinstance(optimizer, _WrappedOptimizer):
        raise InvalidArgumentError(
            "optimizer: expected an optimizer, got one that DistributedOptimizer has wrapped already; wrap it only "
            "once [F11]"
        )
    if op is Op.ADASUM and average_aggregated_gradients:
        raise InvalidArgumentError("Adasum does not support average_aggregated_gradients == True [F43]")
    options = GradientOptions.of(locals(), name="gradients")
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        mixin = _ReducesUpdates if op is Op.ADASUM else _ReducesGradients
        inner: Any = type(optimizer)
        result: Any = object.__new__(_subclass(mixin, inner))
        result.__dict__ = optimizer.__dict__  # both objects have one state
        result.begin(GradientReduction(options))
        return result
    if not any(parent.__module__.partition(".")[0] in ("keras", "tf_keras") for parent in type(optimizer).__mro__):
        raise InvalidTypeError(
            f"optimizer: expected a tf.compat.v1.train.Optimizer or a Keras optimizer, got "
            f"{type(optimizer).__name__} {optimizer!r} [F12]"
        )
    from collectives.tensorflow import keras

    return keras.DistributedOptimizer(optimizer, **{**vars(options), "name": name})


class _WrappedOptimizer:
    """Base of the classes that precede the optimizer's own among the bases of a wrapped optimizer. Their ``begin`` sets
    the object up, because its ``__init__`` is not called."""


class _ReducesGradients(_WrappedOptimizer):
    """Reduces gradients when they are computed, and those that were not when they are applied."""

    _reduction: OptimizerReduction

    def begin(self, reduction: GradientReduction) -> None:
        self._reduction = OptimizerReduction(reduction)

    def register_local_var(self, var: Any) -> None:
        """Keep the gradients of a variable on this rank, divided by ``size()`` if ``scale_local_gradients``."""
        self._reduction.register_local(var)

    @unconverted
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """As ``tf.compat.v1.train.Optimizer.compute_gradients``, with the gradients of all ranks.

        Raises:
            InvalidArgumentError (a ValueError): a sparse gradient with ``backward_passes_per_step`` above 1, unless
                ``sparse_as_dense``.
            MismatchError, RankFailedError, CollectiveTimeoutError: as for `collectives.allreduce`.
        """
        pairs = super().compute_gradients(*args, **kwargs)  # type: ignore[misc]
        grads, variables = [grad for grad, _ in pairs], [variable for _, variable in pairs]
        with tf.name_scope("DistributedOptimizer"):
            return list(zip(self._reduction.reduce(grads, variables), variables, strict=True))

    @unconverted
    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """As ``tf.compat.v1.train.Optimizer.apply_gradients``; before the last pass it only increments ``global_step``.

        Gradients that `compute_gradients` or a ``DistributedGradientTape`` has reduced are applied, clipped or not;
        others are reduced first.

        Raises:
            InvalidArgumentError: it cannot be decided whether gradients are reduced; see
                `collectives.tensorflow.reduction_tracking`.
            MismatchError, RankFailedError, CollectiveTimeoutError: as for `collectives.allreduce`.
        """
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        grads = self._reduction.before_apply([grad for grad, _ in pairs], variables)
        apply: Any = functools.partial(super().apply_gradients, global_step=global_step, name=name)  # type: ignore[misc]
        if not self._reduction.has_passes:
            return apply(list(zip(grads, variables, strict=True)))
        return self._reduction.apply_last_pass(grads, variables, apply, lambda: _incremented(global_step))


class _ReducesUpdates(_WrappedOptimizer):
    """Reduces the change of the variables by Adasum; S. Maleki et al., "Scaling Distributed Training with Adaptive
    Summation", MLSys 2021.

    start      = variables, before the first of ``passes`` steps
    step       each rank's optimizer applies its own gradients
    delta      = variables - start, after the last
    variables  = start + adasum(delta of every rank)

    Each rank keeps its own optimizer state, such as momentum.
    """

    _reduction: GradientReduction
    _local_vars: set[Any]
    _passes: int
    _starts: dict[Any, Any]
    _counter: Any

    def begin(self, reduction: GradientReduction) -> None:
        self._reduction, self._local_vars = reduction, set()
        self._passes = reduction.options.backward_passes_per_step
        self._starts, self._counter = {}, None

    def register_local_var(self, var: Any) -> None:
        """Leave the changes of a variable to this rank."""
        self._local_vars.add(variable_key(var))

    @unconverted
    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """As ``tf.compat.v1.train.Optimizer.apply_gradients`` on this rank; then reduce the updates of all ranks.
        Errors are those of `collectives.allreduce`."""
        pairs = list(grads_and_vars)
        moved = [
            variable for grad, variable in pairs if grad is not None and variable_key(variable) not in self._local_vars
        ]
        step = functools.partial(super().apply_gradients, pairs, global_step=global_step, name=name)  # type: ignore[misc]
        if self._passes > 1:
            return self._apply_pass(moved, step)
        starts = [_copy(variable) for variable in moved]
        with tf.control_dependencies(starts):
            stepped = step()
        with after(stepped):
            return self._reduce_updates(moved, starts)

    def _apply_pass(self, moved: list[Any], step: Callable[[], Any]) -> Any:
        """One of several steps: the first stores the variables' values, the last reduces the updates."""
        if self._counter is None:
            self._counter = local_variable(0, "adasum_counter")
        for number, variable in enumerate(moved):
            if variable_key(variable) not in self._starts:
                with tf.init_scope():
                    zeros = tf.zeros(variable.shape, variable.dtype.base_dtype)
                self._starts[variable_key(variable)] = local_variable(zeros, f"adasum_start_{number}")
        starts = [self._starts[variable_key(variable)] for variable in moved]

        def store() -> Any:
            stored = [start.assign(_copy(variable)) for start, variable in zip(starts, moved, strict=True)]
            return true_after(tf.group(*stored))

        stored = tf.cond(tf.equal(self._counter.read_value(), 0), store, lambda: tf.constant(True))
        with tf.control_dependencies([stored]):
            stepped = step()
        with after(stepped):
            counted = tf.group(self._counter.assign_add(1))
        with after(counted):
            due = tf.equal(self._counter.read_value(), self._passes)

        def reduce() -> Any:
            reduced = self._reduce_updates(moved, [start.read_value() for start in starts])
            with after(reduced):
                return true_after(tf.group(self._counter.assign(0)))

        return tf.group(tf.cond(due, reduce, lambda: tf.constant(True)))

    def _reduce_updates(self, moved: list[Any], starts: list[Any]) -> Any:
        deltas = [variable.read_value() - start for variable, start in zip(moved, starts, strict=True)]
        reduced = self._reduction.reduce(deltas, moved)
        ends = [start + delta for start, delta in zip(starts, reduced, strict=True)]
        return tf.group(*(tf.compat.v1.assign(variable, end) for variable, end in zip(moved, ends, strict=True)))


@functools.cache
def _subclass(mixin: type[_WrappedOptimizer], optimizer: Any) -> Any:
    """The class of a wrapped optimizer. Its own attributes are slots: the ``__dict__`` is shared with the optimizer."""
    names = ("_counter", "_local_vars", "_passes", "_reduction", "_starts")
    return type(optimizer.__name__, (mixin, optimizer), {"__slots__": names, "__module__": __name__})


def _copy(variable: Any) -> Any:
    """A copy of a variable's value: optimizers change variables of TensorFlow 1 in place.

    ``read_value()`` is the value now; in a graph of TensorFlow 1 a conversion to a tensor may be an earlier one.
    """
    return tf.raw_ops.DeepCopy(x=variable.read_value())


def _incremented(global_step: Any) -> Any:
    if global_step is None:
        return None
    return tf.group(tf.compat.v1.assign_add(global_step, tf.cast(1, global_step.dtype.base_dtype)))
