"""`DistributedOptimizer` for Keras 2 (``tf_keras``): its optimizers, and the older ones in
``tf.keras.optimizers.legacy``.

Both kinds ask ``aggregate_gradients`` (``_aggregate_gradients``, in the older ones) to combine gradients of replicas,
once per step, before they are clipped and applied; this is where those of the ranks are combined. A
``LossScaleOptimizer`` asks its inner optimizer, before it looks for overflow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.base.reduce_op import Op
from collectives.process_sets import ProcessSet
from collectives.runtime import global_process_set
from collectives.tensorflow.aggregation import Aggregation
from collectives.tensorflow.gradients import Way, key, settle
from collectives.tensorflow.reduction_tracking import combine_rest, confirmed, note, note_tensors, spend
from collectives.tensorflow.tape import trainable_weights
from collectives.tensors import detection
from collectives.tensors.compression import Compression

Optimizer = TypeVar("Optimizer")

_OLDER = tf.keras.optimizers.legacy.Optimizer
_SCALING = tf.keras.mixed_precision.LossScaleOptimizer


class Distributed:
    """Comes before the class of the optimizer that is wrapped; what it knows is of the class made of both."""

    way: Way
    passes: int
    average: bool
    sparse_as_dense: bool

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that train together."""
        return self.way.process_set

    def register_local_var(self, var: Any) -> None:
        """From now on the gradients of this variable stay on this rank."""
        self._local.add(key(var))

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[tuple[Any, Any]]:
        """Pairs of gradients and variables, with the gradients of all ranks; or, before the last of several passes,
        with this rank's."""
        return self._compute_gradients(loss, var_list, tape=tape)

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        """`compute_gradients`, as the older optimizers have it."""
        if isinstance(self, _OLDER):
            pairs = super()._compute_gradients(loss, var_list, grad_loss, tape)  # type: ignore[misc]
        else:
            pairs = super().compute_gradients(loss, var_list, tape)  # type: ignore[misc]
        variables = [variable for _, variable in pairs]
        return list(zip(self._combined([grad for grad, _ in pairs], variables), variables, strict=True))

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        """The gradients of all ranks: of the older optimizers, in graphs for sessions."""
        return self._combined(super().get_gradients(loss, params), tf.nest.flatten(params))  # type: ignore[misc]

    def _combined(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """This rank's gradients, combined, to be applied."""
        if self.passes > 1:
            return self._aggregation.add(grads, variables)
        combined = self.way.reduce(grads, variables, self._local)
        note(combined, variables, self.way.process_set)
        return combined

    _allreduce = _combined  # by Horovod's name

    def aggregate_gradients(self, grads_and_vars: Iterable[Any]) -> list[Any]:
        """As `compute_gradients`, of gradients that are given; what `compute_gradients` has combined stays as it is."""
        pairs = list(grads_and_vars)
        grads, variables = [grad for grad, _ in pairs], [variable for _, variable in pairs]
        if self.passes == 1:
            grads = self._rest(grads, variables)
            note_tensors(grads, self.way.process_set)
        elif not self._aggregation.added:
            grads = self._aggregation.add(grads, variables)
        return list(zip(grads, variables, strict=True))

    _aggregate_gradients = aggregate_gradients

    def apply_gradients(self, grads_and_vars: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        """As the optimizer's. Of several passes only the last one changes anything but the number of iterations.

        Gradients that `compute_gradients` or a ``DistributedGradientTape`` has combined are applied, clipped or not;
        others are combined before. With ``skip_gradients_aggregation=True``
        (``experimental_aggregate_gradients=False``) all are applied as they are.

        Raises:
            InvalidArgumentError: it cannot be told which gradients these are; see `collectives.tensorflow.reduction_tracking`.
        """
        apply: Any = super().apply_gradients  # type: ignore[misc]
        pairs = list(grads_and_vars)
        if self.passes == 1:
            result = apply(pairs, *args, **kwargs)
            spend([variable for _, variable in pairs])
            return result
        done = "experimental_aggregate_gradients" if isinstance(self, _OLDER) else "skip_gradients_aggregation"
        if not kwargs.pop("skip_gradients_aggregation", False) and kwargs.pop("experimental_aggregate_gradients", True):
            pairs = self.aggregate_gradients(pairs)
        kwargs[done] = done == "skip_gradients_aggregation"
        grads, variables = [grad for grad, _ in pairs], [variable for _, variable in pairs]

        def step() -> Any:
            return _nothing(
                apply(
                    list(zip(confirmed(grads, variables, self.way, self._local), variables, strict=True)),
                    *args,
                    **kwargs,
                )
            )

        iterations: Any = self.iterations  # type: ignore[attr-defined]
        return self._aggregation.apply(grads, step, lambda: _nothing(iterations.assign_add(1)))

    def _rest(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        return combine_rest(grads, variables, self.way, self._local)

    @property
    def _local(self) -> set[Any]:
        found: set[Any] = self._own("_local", set())
        return found

    @property
    def _aggregation(self) -> Aggregation:
        how = (self.passes, self.average, self._rest, self.process_set, self.sparse_as_dense, _initialize)
        found: Aggregation = self._own("_sums", Aggregation(*how))
        return found

    @property
    def _agg_helper(self) -> Aggregation | None:
        """By Horovod's name: programs read its ``counter``."""
        return self._aggregation if self.passes > 1 else None

    def _own(self, name: str, default: Any) -> Any:
        """What is kept past Keras, which would track it."""
        return vars(self).setdefault(f"_collectives{name}", default)


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
) -> Optimizer:
    """Wrap an optimizer of Keras 2, so that it applies the gradients of all ranks.

    Args:
        optimizer: of ``tf.keras.optimizers`` or ``tf.keras.optimizers.legacy``, or a ``LossScaleOptimizer`` of either.
        name, ...: as of `collectives.keras.DistributedOptimizer`; with several passes sparse gradients need
            ``sparse_as_dense``.

    Returns:
        The optimizer, of the same class, which shares the other's variables and takes its place; a
        ``LossScaleOptimizer`` is itself, with its inner optimizer wrapped. Saved with a model it is what it was before.

    Raises:
        ValueError, InvalidTypeError: an argument makes no sense, it is wrapped already, or no optimizer of Keras 2.
    """
    if isinstance(optimizer, _SCALING):
        inner = optimizer.inner_optimizer
    elif isinstance(optimizer, tf.keras.optimizers.Optimizer | _OLDER):
        inner = optimizer
    else:
        raise InvalidTypeError(
            f"optimizer: expected one of Keras 2 (TF_USE_LEGACY_KERAS=1), got {detection.describe(optimizer)}; those "
            f"of Keras 3 are for"
            " collectives.keras"
        )
    if isinstance(inner, Distributed):
        raise InvalidArgumentError(
            "optimizer: expected a Keras optimizer, got one that DistributedOptimizer has wrapped already"
        )
    if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
        raise InvalidArgumentError(
            f"backward_passes_per_step: expected an integer of at least 1, got {backward_passes_per_step!r}"
        )
    kind = type(inner)
    members = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__class__": property(lambda self: kind),  # what Keras writes down
        "passes": backward_passes_per_step,
        "average": average_aggregated_gradients,
        "sparse_as_dense": sparse_as_dense,
        "way": settle(
            op=op,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=gradient_predivide_factor,
            groups=groups,
            num_groups=num_groups,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
            device_dense=device_dense,
            device_sparse=device_sparse,
            name=name or f"Distributed{kind.__name__}",
        ),
    }
    wrapped: Any = object.__new__(type(kind.__name__, (Distributed, kind), members))
    vars(wrapped).update(vars(inner))
    if inner is optimizer:
        return wrapped
    vars(optimizer)["_optimizer"] = wrapped  # there is no public way to exchange it
    return optimizer


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
    """`DistributedOptimizer` for a model some of whose layers are this rank's own; see
    `collectives.keras.PartialDistributedOptimizer`."""
    layers = [local_layers] if isinstance(local_layers, tf.keras.layers.Layer) else list(local_layers or ())
    for layer in layers:
        if not isinstance(layer, tf.keras.layers.Layer):
            kind = detection.describe(layer)
            raise InvalidArgumentError(
                f"local_layers: all local layers must be of tf.keras.layers.Layer type, got {kind}"
            )
    result = DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    inner: Any = result.inner_optimizer if isinstance(result, _SCALING) else result
    for layer in layers:
        for variable in trainable_weights(layer):
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
        custom_objects: may make distributed optimizers, which stay as they are.
        legacy_opts: of Horovod's interface; both kinds of optimizers are known from the file.
    """
    objects = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = tf.keras.models.load_model(filepath, custom_objects=objects)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not isinstance(getattr(optimizer, "inner_optimizer", optimizer), Distributed):
        model.optimizer = DistributedOptimizer(optimizer, compression=compression)
    return model


def _initialize(variable: Any) -> None:
    """Have Keras's session initialize a variable; eagerly it is."""
    if not tf.executing_eagerly():
        tf.keras.__internal__.backend.track_variable(variable)
        tf.compat.v1.keras.backend.get_session(op_input_list=())


def _nothing(result: Any) -> Any:
    """What a step gives back, as `Aggregation.apply` takes it: an operation in a graph."""
    return None if tf.executing_eagerly() else result
