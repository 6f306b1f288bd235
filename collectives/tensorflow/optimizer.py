"""`DistributedOptimizer`: a TensorFlow or Keras optimizer, whose gradients are combined over the ranks before they are
applied."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.base.reduce_op import Op
from collectives.process_sets import ProcessSet
from collectives.runtime import global_process_set
from collectives.tensorflow.aggregation import Aggregation, local_variable
from collectives.tensorflow.autograph import unconverted
from collectives.tensorflow.gradients import Way, key, settle
from collectives.tensorflow.reduction_tracking import combine_rest, confirmed, note
from collectives.tensors.compression import Compression

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
) -> Optimizer:
    """Wrap an optimizer, so that it applies the gradients of all ranks.

    A ``tf.compat.v1.train.Optimizer`` combines them in ``compute_gradients``, in one call, in a graph or eagerly; what
    changes gradients, such as clipping, comes between that and ``apply_gradients``. An optimizer that scales the loss
    may be inside or outside. Keras optimizers are handed to `collectives.tensorflow.keras.DistributedOptimizer`.

    Args:
        optimizer: shares its state, slots and checkpoints with the result, which is of a subclass of its type.
        name: for Keras optimizers; others keep their own.
        use_locking: of Horovod's interface; the optimizer's own decides.
        backward_passes_per_step: backward passes over which gradients add up on the rank before they are combined and
            applied. ``apply_gradients`` does nothing in between, apart from counting ``global_step``.
        op: Average, Sum, Min, Max, Product; or Adasum, which combines what the optimizer did to the variables on each
            rank instead: every rank steps by itself, and after ``backward_passes_per_step`` steps the ranks combine how
            far they have come.
        average_aggregated_gradients: divide by ``backward_passes_per_step``, too.
        device_dense, ...: see `collectives.tensorflow.gradients.settle`.

    Returns:
        The optimizer, with ``register_local_var(variable)`` for variables whose gradients stay on this rank.

    Raises:
        ValueError: an argument makes no sense, or it is wrapped already.
        InvalidTypeError: no optimizer, or ``compression`` is no compressor.
    """
    if isinstance(optimizer, _Distributed):
        raise InvalidArgumentError(
            "optimizer: expected an optimizer, got one that DistributedOptimizer has wrapped already"
        )
    if op is Op.ADASUM and average_aggregated_gradients:
        raise InvalidArgumentError("Adasum does not support average_aggregated_gradients == True")
    shared = {
        "compression": compression,
        "sparse_as_dense": sparse_as_dense,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "num_groups": num_groups,
        "groups": groups,
        "process_set": process_set,
        "scale_local_gradients": scale_local_gradients,
        "device_dense": device_dense,
        "device_sparse": device_sparse,
    }
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        way = settle(**shared)
        kind = _Adasum if op is Op.ADASUM else _Averaging
        inner: Any = type(optimizer)
        result: Any = object.__new__(_distributed(kind, inner))
        result.__dict__ = optimizer.__dict__  # one state, whichever of the two is asked
        result.begin(way, backward_passes_per_step, average_aggregated_gradients)
        return result
    if not any(parent.__module__.partition(".")[0] in ("keras", "tf_keras") for parent in type(optimizer).__mro__):
        raise InvalidTypeError(
            f"optimizer: expected a tf.compat.v1.train.Optimizer or a Keras optimizer, got "
            f"{type(optimizer).__name__} {optimizer!r}"
        )
    import collectives.tensorflow.keras

    return collectives.tensorflow.keras.DistributedOptimizer(
        optimizer,
        name=name,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        **shared,
    )


class _Distributed:
    """What is put before an optimizer's class."""

    _local_vars: set[Any]

    def register_local_var(self, var: Any) -> None:
        """The gradients of a variable stay on this rank, divided by the number of ranks if
        ``scale_local_gradients``."""
        self._local_vars.add(key(var))


class _Averaging(_Distributed):
    """Combines gradients."""

    _way: Way
    _aggregation: Aggregation | None

    def begin(self, way: Way, passes: int, average: bool) -> None:
        """Set up."""
        self._way, self._local_vars = way, set()
        aggregation = Aggregation(passes, average, self._rest, way.process_set, way.sparse_as_dense)
        self._aggregation = aggregation if passes > 1 else None

    def _rest(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        return combine_rest(grads, variables, self._way, self._local_vars)

    @unconverted
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """The gradients of all ranks; as ``tf.compat.v1.train.Optimizer.compute_gradients``.

        Raises:
            ValueError: a sparse gradient with ``backward_passes_per_step`` above 1, unless ``sparse_as_dense``.
            MismatchError, RankFailedError, CollectiveTimeoutError: as for `collectives.allreduce`.
        """
        pairs = super().compute_gradients(*args, **kwargs)  # type: ignore[misc]
        grads, variables = [grad for grad, _ in pairs], [variable for _, variable in pairs]
        with tf.name_scope("DistributedOptimizer"):
            if self._aggregation is not None:
                combined = self._aggregation.add(grads, variables)
            else:
                combined = self._way.reduce(grads, variables, self._local_vars)
                note(combined, variables, self._way.process_set)
            return list(zip(combined, variables, strict=True))

    @unconverted
    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """As ``tf.compat.v1.train.Optimizer.apply_gradients``; between combinations only ``global_step`` counts.

        Gradients that `compute_gradients` or a ``DistributedGradientTape`` has combined are applied, clipped or not;
        others are combined before.

        Raises:
            InvalidArgumentError: it cannot be told which gradients these are; see `collectives.tensorflow.reduction_tracking`.
            MismatchError, RankFailedError, CollectiveTimeoutError: as for `collectives.allreduce`.
        """
        pairs = list(grads_and_vars)
        grads, variables = [grad for grad, _ in pairs], [variable for _, variable in pairs]
        apply: Any = functools.partial(super().apply_gradients, global_step=global_step, name=name)  # type: ignore[misc]
        if self._aggregation is None:
            return apply(list(zip(self._rest(grads, variables), variables, strict=True)))
        if not self._aggregation.added:
            grads = self._aggregation.add(grads, variables)

        def step() -> Any:
            return apply(list(zip(confirmed(grads, variables, self._way, self._local_vars), variables, strict=True)))

        return self._aggregation.apply(grads, step, lambda: _counted(global_step))


class _Adasum(_Distributed):
    """Combines what steps did to the variables; S. Maleki et al., "Scaling Distributed Training with Adaptive
    Summation", MLSys 2021.

    start      = variables, before the first of ``passes`` steps
    step       each rank's optimizer applies its own gradients
    delta      = variables - start, after the last
    variables  = start + adasum(delta of every rank)

    The optimizer's state, momentum and the like, is each rank's own.
    """

    _way: Way
    _passes: int
    _starts: dict[Any, Any]
    _counter: Any

    def begin(self, way: Way, passes: int, average: bool) -> None:
        """Set up."""
        if passes < 1:
            raise InvalidArgumentError(f"backward_passes_per_step: expected at least 1, got {passes}")
        self._way, self._passes, self._local_vars = way, passes, set()
        self._starts, self._counter = {}, None

    @unconverted
    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Step on this rank, and combine the steps of all; as ``tf.compat.v1.train.Optimizer.apply_gradients``.

        Raises:
            MismatchError, RankFailedError, CollectiveTimeoutError: as for `collectives.allreduce`.
        """
        pairs = list(grads_and_vars)
        moved = [variable for grad, variable in pairs if grad is not None and key(variable) not in self._local_vars]
        step = functools.partial(super().apply_gradients, pairs, global_step=global_step, name=name)  # type: ignore[misc]
        if self._passes > 1:
            return self._apply_after_several(moved, step)
        starts = [_copied(variable) for variable in moved]
        with tf.control_dependencies(starts):
            stepped = step()
        with tf.control_dependencies([] if stepped is None else [stepped]):
            return self._combine(moved, starts)

    def _apply_after_several(self, moved: list[Any], step: Callable[[], Any]) -> Any:
        if self._counter is None:
            self._counter = local_variable(0, "adasum_counter")
        for number, variable in enumerate(moved):
            if key(variable) not in self._starts:
                with tf.init_scope():
                    zeros = tf.zeros(variable.shape, variable.dtype.base_dtype)
                self._starts[key(variable)] = local_variable(zeros, f"adasum_start_{number}")
        starts = [self._starts[key(variable)] for variable in moved]

        def begin() -> Any:
            noted = [start.assign(_copied(variable)) for start, variable in zip(starts, moved, strict=True)]
            return _after(tf.group(*noted))

        begun = tf.cond(tf.equal(self._counter.read_value(), 0), begin, lambda: tf.constant(True))
        with tf.control_dependencies([begun]):
            stepped = step()
        with tf.control_dependencies([] if stepped is None else [stepped]):
            counted = tf.group(self._counter.assign_add(1))
        with tf.control_dependencies([] if counted is None else [counted]):
            due = tf.equal(self._counter.read_value(), self._passes)

        def end() -> Any:
            combined = self._combine(moved, [start.read_value() for start in starts])
            with tf.control_dependencies([] if combined is None else [combined]):
                return _after(tf.group(self._counter.assign(0)))

        return tf.group(tf.cond(due, end, lambda: tf.constant(True)))

    def _combine(self, moved: list[Any], starts: list[Any]) -> Any:
        deltas = [_value(variable) - start for variable, start in zip(moved, starts, strict=True)]
        combined = self._way.reduce(deltas, moved)
        ends = [start + delta for start, delta in zip(starts, combined, strict=True)]
        return tf.group(*(tf.compat.v1.assign(variable, end) for variable, end in zip(moved, ends, strict=True)))


@functools.cache
def _distributed(kind: type[_Distributed], optimizer: Any) -> Any:
    """The class of a wrapped optimizer; what it adds is in slots, because its ``__dict__`` is the wrapped one's own."""
    names = ("_aggregation", "_counter", "_local_vars", "_passes", "_starts", "_way")
    return type(optimizer.__name__, (kind, optimizer), {"__slots__": names, "__module__": __name__})


def _copied(variable: Any) -> Any:
    """The variable's elements in memory of their own: optimizers change variables of TensorFlow 1 where they are."""
    return tf.raw_ops.DeepCopy(x=_value(variable))


def _value(variable: Any) -> Any:
    """The variable as it is now, also in a graph of TensorFlow 1, where a conversion to a tensor may give what was read
    before."""
    return variable.read_value()


def _after(operation: Any) -> Any:
    """A tensor that is there when an operation is done."""
    with tf.control_dependencies([] if operation is None else [operation]):
        return tf.constant(True)


def _counted(global_step: Any) -> Any:
    return (
        None
        if global_step is None
        else tf.group(tf.compat.v1.assign_add(global_step, tf.cast(1, global_step.dtype.base_dtype)))
    )
