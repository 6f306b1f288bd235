"""`load_model`: continue the training of a saved model on several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras

from collectives.base.errors import InvalidArgumentError
from collectives.keras.optimizer import DistributedOptimizer
from collectives.keras.optimizer_mixin import DistributedMixin
from collectives.tensors.compression import Compression


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
    """
    if legacy_opts:
        raise InvalidArgumentError(
            "legacy_opts: Keras 3 has no legacy optimizers; set TF_USE_LEGACY_KERAS=1, and import "
            "collectives.tensorflow.keras"
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
