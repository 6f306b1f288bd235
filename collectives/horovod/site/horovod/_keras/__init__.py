"""Functions that Horovod's two Keras interfaces share, for custom adapters: each takes the Keras module to use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from collectives import global_process_set


def _adapter(keras: Any) -> Any:
    """Return `collectives.keras` for Keras 3, `collectives.tensorflow.keras` for ``tf.keras`` and tf_keras."""
    return importlib.import_module("collectives.keras" if keras.__name__ == "keras" else "collectives.tensorflow.keras")


def create_distributed_optimizer(
    keras: Any,
    optimizer: Any,
    name: str | None,
    device_dense: str,
    device_sparse: str,
    compression: Any,
    sparse_as_dense: bool,
    gradient_predivide_factor: float,
    op: Any,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Call the adapter's ``DistributedOptimizer``."""
    return _adapter(keras).DistributedOptimizer(
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
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )


def load_model(
    keras: Any,
    wrap_optimizer: Callable[[Any], Any],
    filepath: str,
    custom_optimizers: Sequence[Any] | None,
    custom_objects: Mapping[str, Any] | None,
    legacy_opts: bool = False,
) -> Any:
    """Call the adapter's ``load_model``, which wraps the optimizer itself; ``wrap_optimizer`` is not called."""
    load = _adapter(keras).load_model
    return load(filepath, custom_optimizers=custom_optimizers, custom_objects=custom_objects, legacy_opts=legacy_opts)


def _without_backend(name: str) -> Callable[..., Any]:
    """A function of `collectives.tensorflow.keras`, with an argument before the others that is ignored."""

    def call(backend: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module("collectives.tensorflow.keras"), name)(*args, **kwargs)

    call.__name__ = name
    return call


broadcast_global_variables = _without_backend("broadcast_global_variables")
allreduce = _without_backend("allreduce")
allgather = _without_backend("allgather")
broadcast = _without_backend("broadcast")
reducescatter = _without_backend("reducescatter")
