"""`DistributedOptimizer`: any Keras 3 optimizer, whose gradients are combined over the ranks before they are
applied."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

import keras

from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.base.reduce_op import Op
from collectives.keras.gradient_reducer import GradientSettings, reducer
from collectives.keras.optimizer_mixin import DistributedMixin, distributed
from collectives.keras.patches import extend_keras
from collectives.process_sets import ProcessSet
from collectives.runtime import global_process_set, world_of
from collectives.tensors import detection
from collectives.tensors.compression import Compression

Optimizer = TypeVar("Optimizer", bound=keras.optimizers.Optimizer)


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
    """Wrap an optimizer, so that it applies the gradients of all ranks: in ``fit`` and in loops of one's own.

    Gradients are combined in one call per step, before they are clipped, scaled back, accumulated or looked at in any
    other way, so that every rank decides and updates alike. A `keras.optimizers.LossScaleOptimizer` may be inside or
    outside; ``compile`` puts one around by itself with ``mixed_float16``.

    With ``backward_passes_per_step``, gradients add up on the rank; the steps between change nothing but
    ``iterations``, which counts passes. On the TensorFlow backend models are compiled without XLA, whose programs
    cannot communicate; on JAX inside ``jit``.

    Args:
        optimizer: a ``keras.optimizers.Optimizer``. The result is of its class, shares its variables, and takes its
            place. One of ``tf_keras`` is handed to `collectives.tensorflow.keras`, where TF_USE_LEGACY_KERAS=1.
        name: what the operations are called by; "Distributed" and the optimizer's class by default.
        device_dense, device_sparse: of Horovod's interface; tensors are combined where they are.
        compression: `Compression.none`, ``fp16``, ``bf16``, or an own class with ``compress`` and ``decompress``.
        sparse_as_dense: sparse gradients (TensorFlow) become dense; by default values and indices are gathered.
        gradient_predivide_factor: f divides by f before the sum and by size/f afterwards; for Average only.
        op: `Average`, `Sum`, `Min`, `Max`, `Product` or `Adasum`.
        backward_passes_per_step: backward passes whose gradients add up before they are combined.
        average_aggregated_gradients: divide that sum by the number of passes.
        num_groups: Horovod's older name of ``groups``.
        groups: a number of lists of about equal length, or the lists of variables, whose gradients travel together. By
            default all do.
        process_set: the ranks that train together; the others step on their own.
        scale_local_gradients: divide the gradients of local variables by the number of ranks; see
            `PartialDistributedOptimizer`.

    Returns:
        The optimizer. Saved with a model it is what it was before; `load_model` wraps it again.

    Raises:
        ValueError: an argument makes no sense, it is wrapped already, or ``backward_passes_per_step`` and Keras's own
            ``gradient_accumulation_steps`` are both given.
        InvalidTypeError: not an optimizer of Keras 3, or ``compression`` is no compressor.
        NotInitializedError: before `init`.
    """
    of_keras_2 = _adapter_of_keras_2(optimizer)
    if of_keras_2 is not None:
        return of_keras_2.DistributedOptimizer(
            optimizer,
            name=name,
            device_dense=device_dense,
            device_sparse=device_sparse,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=gradient_predivide_factor,
            op=op,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            num_groups=num_groups,
            groups=groups,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )
    if num_groups != 0:
        warnings.warn("num_groups: use groups instead, which takes a number as well", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    _check(optimizer)
    settings = GradientSettings(
        name=name or f"Distributed{type(optimizer).__name__}",
        op=op,
        compression=Compression.none if compression is None else compression,
        sparse_as_dense=sparse_as_dense,
        predivide=gradient_predivide_factor,
        groups=groups,
        process_set=process_set,
        scale_local=scale_local_gradients,
        passes=backward_passes_per_step,
        average_passes=average_aggregated_gradients,
        device_dense=device_dense,
        device_sparse=device_sparse,
    )
    reduces = reducer(settings, keras.backend.backend())
    if settings.passes > 1 and _accumulates(optimizer):
        raise InvalidArgumentError(
            "backward_passes_per_step: the optimizer accumulates gradients by itself (gradient_accumulation_steps); "
            "give one of the two."
            " backward_passes_per_step communicates once in all these passes, gradient_accumulation_steps in each of "
            "them"
        )
    if process_set.included():
        world_of(process_set)  # raises before init()
    extend_keras()
    return distributed(optimizer, settings, reduces)


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
    """`DistributedOptimizer` for a model some of whose layers are this rank's own.

    Args:
        local_layers: a layer or a collection of layers, which are built: their gradients stay on this rank. Other ranks
            need not have them.
        scale_local_gradients: divide these gradients by the number of ranks, as befits a loss that is the mean over
            them.
        optimizer, name, ...: as of `DistributedOptimizer`.

    Raises:
        ValueError: what is no layer, or one without variables yet; and all that `DistributedOptimizer` raises.
    """
    of_keras_2 = _adapter_of_keras_2(optimizer)
    if of_keras_2 is not None:
        return of_keras_2.PartialDistributedOptimizer(
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
            local_layers=local_layers,
            scale_local_gradients=scale_local_gradients,
        )
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else list(local_layers or ())
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise InvalidArgumentError(
                f"local_layers: all local layers must be of keras.layers.Layer type, got {detection.describe(layer)}"
            )
        if not layer.built:
            raise InvalidArgumentError(
                f"local_layers: {layer.name} has no variables yet; build it, or the model, before the optimizer"
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
    for layer in layers:
        for variable in layer.trainable_weights:
            result.register_local_var(variable)
    return result


def _check(optimizer: Any) -> None:
    """Refuse what cannot be wrapped."""
    if isinstance(optimizer, DistributedMixin):
        raise InvalidArgumentError(
            "optimizer: expected a Keras optimizer, got one that DistributedOptimizer has wrapped already"
        )
    if isinstance(optimizer, keras.optimizers.Optimizer):
        inner = getattr(optimizer, "inner_optimizer", None)
        if isinstance(inner, DistributedMixin):
            raise InvalidArgumentError(
                "optimizer: its inner optimizer is a DistributedOptimizer already; wrap one of the two"
            )
        return
    raise InvalidTypeError(f"optimizer: expected a keras.optimizers.Optimizer, got {detection.describe(optimizer)}")


def _adapter_of_keras_2(optimizer: Any) -> Any:
    """The adapter that takes this optimizer if it is one of ``tf_keras``, else None."""
    tf_keras = sys.modules.get("tf_keras")
    if tf_keras is None or not isinstance(
        optimizer, tf_keras.optimizers.Optimizer | tf_keras.optimizers.legacy.Optimizer
    ):
        return None
    from collectives.tensorflow import keras_version

    if not keras_version.LEGACY:
        raise InvalidTypeError(
            "optimizer: expected one of Keras 3 (import keras), got one of tf_keras; for that set "
            "TF_USE_LEGACY_KERAS=1 in the environment"
        )
    from collectives.tensorflow.keras import legacy

    return legacy


def _accumulates(optimizer: Any) -> bool:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return bool(inner.gradient_accumulation_steps)
