"""`DistributedOptimizer` for Keras 2 (``tf_keras``): its optimizers, and the older ones in
``tf.keras.optimizers.legacy``.

Both call ``aggregate_gradients`` (older ones ``_aggregate_gradients``) once per step to combine the gradients of
replicas, before these are clipped and applied; that method reduces them over the ranks. A ``LossScaleOptimizer`` calls
its inner optimizer's before it checks for overflow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import tensorflow as tf

from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.base.reduce_op import Op
from collectives.frontends.gradient_options import GradientOptions
from collectives.frontends.keras_optimizer import distributed_class, local_weights
from collectives.tensorflow.gradients import GradientReduction
from collectives.tensorflow.optimizer_reduction import OptimizerReduction
from collectives.tensorflow.reduction_tracking import clear_pending, mark_tensors
from collectives.tensors import detection
from collectives.tensors.compression import Compression
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import global_process_set

Optimizer = TypeVar("Optimizer")

_OLDER = tf.keras.optimizers.legacy.Optimizer
_SCALING = tf.keras.mixed_precision.LossScaleOptimizer
_REDUCTION = "_collectives_reduction"


class LegacyDistributedMixin:
    """Precedes the optimizer's own class among the bases of a wrapped optimizer, a class made for each."""

    reduction: GradientReduction

    @property
    def process_set(self) -> ProcessSet:
        return self.reduction.process_set

    def register_local_var(self, var: Any) -> None:
        """Keep the gradients of a variable on this rank."""
        self._own_reduction.register_local(var)

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[tuple[Any, Any]]:
        """Pairs of gradients and variables, with the gradients of all ranks; before the last of several passes, with
        this rank's."""
        return self._compute_gradients(loss, var_list, tape=tape)

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        """`compute_gradients`, as older optimizers call it."""
        if isinstance(self, _OLDER):
            pairs = super()._compute_gradients(loss, var_list, grad_loss, tape)  # type: ignore[misc]
        else:
            pairs = super().compute_gradients(loss, var_list, tape)  # type: ignore[misc]
        variables = [variable for _, variable in pairs]
        return list(zip(self._allreduce([grad for grad, _ in pairs], variables), variables, strict=True))

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        """The gradients of all ranks; of older optimizers, in graphs for sessions."""
        return self._allreduce(super().get_gradients(loss, params), tf.nest.flatten(params))  # type: ignore[misc]

    def _allreduce(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Horovod's name."""
        return self._own_reduction.reduce(grads, variables)

    def aggregate_gradients(self, grads_and_vars: Iterable[Any]) -> list[Any]:
        """Pairs with the gradients of all ranks; those that `compute_gradients` has reduced stay as they are."""
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        grads = self._own_reduction.before_apply([grad for grad, _ in pairs], variables)
        if not self._own_reduction.has_passes:
            mark_tensors(grads, self.process_set)
        return list(zip(grads, variables, strict=True))

    _aggregate_gradients = aggregate_gradients

    def apply_gradients(self, grads_and_vars: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        """As the optimizer's. Of several passes only the last one changes anything but the number of iterations.

        Gradients that `compute_gradients` or a ``DistributedGradientTape`` has reduced are applied, clipped or not;
        others are reduced first. With ``skip_gradients_aggregation=True`` (``experimental_aggregate_gradients=False``)
        all are applied as they are.

        Raises:
            InvalidArgumentError: it cannot be decided whether gradients are reduced; see
                `collectives.tensorflow.reduction_tracking`.
        """
        apply: Any = super().apply_gradients  # type: ignore[misc]
        pairs = list(grads_and_vars)
        if not self._own_reduction.has_passes:
            result = apply(pairs, *args, **kwargs)
            clear_pending([variable for _, variable in pairs])
            return result
        done = "experimental_aggregate_gradients" if isinstance(self, _OLDER) else "skip_gradients_aggregation"
        if not kwargs.pop("skip_gradients_aggregation", False) and kwargs.pop("experimental_aggregate_gradients", True):
            pairs = self.aggregate_gradients(pairs)
        kwargs[done] = done == "skip_gradients_aggregation"
        grads, variables = [grad for grad, _ in pairs], [variable for _, variable in pairs]
        iterations: Any = self.iterations  # type: ignore[attr-defined]
        return self._own_reduction.apply_last_pass(
            grads,
            variables,
            lambda pairs: _in_graph(apply(pairs, *args, **kwargs)),
            lambda: _in_graph(iterations.assign_add(1)),
        )

    @property
    def _own_reduction(self) -> OptimizerReduction:
        """This object's, put into ``__dict__`` directly, because Keras tracks attributes."""
        own = vars(self)
        if _REDUCTION not in own:
            own[_REDUCTION] = OptimizerReduction(self.reduction, _initialize)
        reduction: OptimizerReduction = own[_REDUCTION]
        return reduction

    @property
    def _agg_helper(self) -> OptimizerReduction | None:
        """Horovod's name, whose ``counter`` programs read; None with one pass per step."""
        return self._own_reduction if self._own_reduction.has_passes else None


def DistributedOptimizer(
    optimizer: Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Op = Op.AVERAGE,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    algorithm: str | None = None,
) -> Optimizer:
    """Wrap an optimizer of Keras 2, so that it applies the gradients of all ranks.

    Args:
        optimizer: of ``tf.keras.optimizers`` or ``tf.keras.optimizers.legacy``, or a ``LossScaleOptimizer`` of either.
        name, ...: as for `collectives.keras.DistributedOptimizer`; with several passes sparse gradients need
            ``sparse_as_dense``.

    Returns:
        An optimizer of the same class, which shares the other's variables and replaces it; of a ``LossScaleOptimizer``
        that object, with its inner optimizer wrapped. It is saved with a model as the optimizer that it wraps.

    Raises:
        InvalidArgumentError (a ValueError), InvalidTypeError: an invalid argument, the optimizer is wrapped already, or
            not one of Keras 2.
    """
    return _wrapped(optimizer, GradientOptions.of(locals(), name=name or ""))


def PartialDistributedOptimizer(
    optimizer: Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Op = Op.AVERAGE,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Optimizer:
    """`DistributedOptimizer` for a model with layers of this rank alone; see
    `collectives.keras.PartialDistributedOptimizer`."""
    weights = local_weights(local_layers, tf.keras.layers.Layer)
    result = _wrapped(optimizer, GradientOptions.of(locals(), name=name or ""))
    inner: Any = result.inner_optimizer if isinstance(result, _SCALING) else result
    for variable in weights:
        inner.register_local_var(variable)
    return result


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> tf.keras.Model:
    """Load a model with its optimizer's state, and make the optimizer a `DistributedOptimizer`; see
    `collectives.keras.load_model`.

    Args:
        custom_objects: may create distributed optimizers, which stay as they are.
        legacy_opts: part of Horovod's interface; the file tells the two kinds of optimizers apart.
    """
    objects = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = tf.keras.models.load_model(filepath, custom_objects=objects)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not isinstance(
        getattr(optimizer, "inner_optimizer", optimizer), LegacyDistributedMixin
    ):
        model.optimizer = DistributedOptimizer(optimizer, compression=compression)
    return model


def _wrapped(optimizer: Any, options: GradientOptions) -> Any:
    if isinstance(optimizer, _SCALING):
        inner = optimizer.inner_optimizer
    elif isinstance(optimizer, tf.keras.optimizers.Optimizer | _OLDER):
        inner = optimizer
    else:
        raise InvalidTypeError(
            f"optimizer: expected a Keras 2 optimizer (TF_USE_LEGACY_KERAS=1), got {detection.describe(optimizer)}; "
            "for Keras 3, import collectives.keras [F9]"
        )
    if isinstance(inner, LegacyDistributedMixin):
        raise InvalidArgumentError(
            "optimizer: expected a Keras optimizer, got one that DistributedOptimizer has wrapped already; wrap it "
            "only once [F10]"
        )
    kind = type(inner)
    options = replace(options, name=options.name or f"Distributed{kind.__name__}")
    attributes = {"reduction": GradientReduction(options)}
    wrapped: Any = object.__new__(distributed_class(LegacyDistributedMixin, kind, attributes))
    vars(wrapped).update(vars(inner))
    if inner is optimizer:
        return wrapped
    vars(optimizer)["_optimizer"] = wrapped  # not public
    return optimizer


def _initialize(variable: Any) -> None:
    """Have Keras's session initialize a variable of a graph."""
    if not tf.executing_eagerly():
        tf.keras.__internal__.backend.track_variable(variable)
        tf.compat.v1.keras.backend.get_session(op_input_list=())


def _in_graph(result: Any) -> Any:
    """The operation of a step, as `OptimizerReduction.apply_last_pass` expects it; None in eager execution."""
    return None if tf.executing_eagerly() else result
