"""`DistributedOptimizer` for Keras 3: an optimizer that applies gradients combined over the ranks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import keras

from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.base.reduce_op import Op
from collectives.frontends.gradient_options import GradientOptions
from collectives.frontends.keras_optimizer import local_weights
from collectives.keras.gradient_reducer import gradient_reducer
from collectives.keras.optimizer_mixin import DistributedMixin, distributed
from collectives.keras.patches import extend_keras
from collectives.tensors import detection
from collectives.tensors.compression import Compression
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import global_process_set, world_of

Function = TypeVar("Function", bound=Callable[..., Any])
Optimizer = TypeVar("Optimizer", bound=keras.optimizers.Optimizer)


def _or_of_keras_2(function: Function) -> Function:
    """Hand calls with an optimizer of ``tf_keras`` to the function of the same name for Keras 2."""

    @functools.wraps(function)
    def dispatch(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        adapter = _adapter_of_keras_2(optimizer)
        chosen = function if adapter is None else getattr(adapter, function.__name__)
        return chosen(optimizer, *args, **kwargs)

    return cast(Function, dispatch)


def _adapter_of_keras_2(optimizer: Any) -> Any:
    """Return the adapter for an optimizer of ``tf_keras``; None for any other."""
    tf_keras = sys.modules.get("tf_keras")
    if tf_keras is None or not isinstance(
        optimizer, tf_keras.optimizers.Optimizer | tf_keras.optimizers.legacy.Optimizer
    ):
        return None
    from collectives.tensorflow import keras_version

    if not keras_version.LEGACY:
        raise InvalidTypeError(
            "optimizer: expected a Keras 3 optimizer (import keras), got one of tf_keras; to use tf_keras, set "
            "TF_USE_LEGACY_KERAS=1 in the environment [F3]"
        )
    from collectives.tensorflow.keras import legacy

    return legacy


@_or_of_keras_2
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
    """Wrap an optimizer so that it applies the gradients of all ranks, in ``fit`` and in custom training loops.

    Gradients are combined in one call per step, before they are clipped, unscaled, accumulated or inspected in another
    way, so that every rank decides and updates alike. A `keras.optimizers.LossScaleOptimizer` may be inside or outside;
    ``compile`` adds one outside with ``mixed_float16``.

    With ``backward_passes_per_step`` gradients are summed on the rank; the steps in between change nothing but
    ``iterations``, which counts passes. On the TensorFlow backend models are compiled without XLA, whose programs
    cannot communicate; on JAX inside ``jit``.

    Args:
        optimizer: a ``keras.optimizers.Optimizer``. The result is of its class, shares its variables, and replaces it.
            One of ``tf_keras`` is passed on to `collectives.tensorflow.keras`, where TF_USE_LEGACY_KERAS=1.
        name: prefix of the operations' names; "Distributed" and the optimizer's class by default.
        process_set: the ranks that train together; the others step on their own.
        compression, ...: as for `collectives.frontends.gradient_options.GradientOptions`. By default all gradients are
            combined together. Only TensorFlow's may be sparse.

    Returns:
        The optimizer. Saved with a model it is saved as the optimizer that was wrapped; `load_model` wraps it again.

    Raises:
        ValueError: an invalid argument, an optimizer that is wrapped already, or both ``backward_passes_per_step`` and
            Keras's own ``gradient_accumulation_steps``.
        InvalidTypeError: not an optimizer of Keras 3, or ``compression`` is not a compressor.
        NotInitializedError: before `init`.

    Example:
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size())), "mse")
    """
    return _wrapped(optimizer, GradientOptions.of(locals(), name=name or ""))


@_or_of_keras_2
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
    """`DistributedOptimizer` for a model with layers that each rank trains on its own.

    Args:
        local_layers: a layer or a collection of layers, which are built: their gradients stay on this rank. Other ranks
            need not have them.
        optimizer, name, ...: as for `DistributedOptimizer`.

    Raises:
        ValueError: not a layer, or one without variables; and all that `DistributedOptimizer` raises.

    Example:
        optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.01), local_layers=[model.layers[0]])
    """
    weights = local_weights(local_layers, keras.layers.Layer)
    result = _wrapped(optimizer, GradientOptions.of(locals(), name=name or ""))
    for variable in weights:
        result.register_local_var(variable)
    return result


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """Load a model with its optimizer's state, and wrap the optimizer in a `DistributedOptimizer`.

    ``keras.saving.load_model`` loads the same file with the plain optimizer.

    Args:
        filepath: as for ``keras.saving.load_model``.
        custom_optimizers: optimizer classes that are not Keras's own.
        custom_objects: other classes and functions by name; optimizers that they wrap already are kept.
        compression: as for `DistributedOptimizer`.
        legacy_opts: for Keras 2 only, see `collectives.tensorflow.keras`.

    Returns:
        The model; compiled if it was saved compiled.

    Raises:
        ValueError: not a model, or ``legacy_opts`` with Keras 3; and all that Keras raises.

    Example:
        model = hvd.load_model("checkpoint.keras")
    """
    if legacy_opts:
        raise InvalidArgumentError(
            "legacy_opts: Keras 3 has no legacy optimizers; set TF_USE_LEGACY_KERAS=1, and import "
            "collectives.tensorflow.keras [F4]"
        )
    objects = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=objects)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        if not isinstance(getattr(optimizer, "inner_optimizer", optimizer), DistributedMixin):
            model.optimizer = DistributedOptimizer(optimizer, compression=compression)
        if keras.backend.backend() == "tensorflow":
            model.jit_compile = False
    return model


def _wrapped(optimizer: Any, options: GradientOptions) -> Any:
    if isinstance(optimizer, DistributedMixin):
        raise InvalidArgumentError(
            "optimizer: expected a Keras optimizer, got one that DistributedOptimizer has wrapped already; wrap it "
            "only once [F5]"
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise InvalidTypeError(
            f"optimizer: expected a keras.optimizers.Optimizer, got {detection.describe(optimizer)} [F6]"
        )
    if isinstance(getattr(optimizer, "inner_optimizer", None), DistributedMixin):
        raise InvalidArgumentError(
            "optimizer: its inner optimizer is already a DistributedOptimizer; wrap either the inner or the outer "
            "one [F7]"
        )
    options = replace(options, name=options.name or f"Distributed{type(optimizer).__name__}")
    reducer = gradient_reducer(options, keras.backend.backend())
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if options.backward_passes_per_step > 1 and inner.gradient_accumulation_steps:
        raise InvalidArgumentError(
            "backward_passes_per_step: the optimizer already accumulates gradients (gradient_accumulation_steps); "
            "set only one of the two. backward_passes_per_step communicates once for all these passes, "
            "gradient_accumulation_steps in each of them [F42]"
        )
    if options.process_set.included():
        world_of(options.process_set)  # raises before init()
    extend_keras()
    return distributed(optimizer, options, reducer)
