"""Elastic training with Keras 3: ``hvd.elastic``; see `collectives.elastic`.

Example:
    import collectives.keras as hvd

    hvd.init()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.001)), loss="mse")
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)

    @hvd.elastic.run
    def train(state):
        model.fit(dataset, epochs=10 - state.epoch, callbacks=[
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.CommitStateCallback(state),
        ])

    train(state)
"""

from __future__ import annotations

import importlib
from typing import Any

import keras

from collectives.elastic import HostsUpdatedInterrupt, ObjectState, run
from collectives.elastic.keras_callbacks import CommitState, UpdateBatchState, UpdateEpochState
from collectives.elastic.model_state import ModelState

__all__ = [
    "CommitStateCallback",
    "HostsUpdatedInterrupt",
    "KerasState",
    "ObjectState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(ModelState):
    """A state of a Keras model, its optimizer and plain attributes, on the TensorFlow, JAX and PyTorch backends.

    The model's variables (weights, statistics, random seeds) and the optimizer's (iterations, learning rate, moments)
    are saved, and restored in place; metrics are not. Each keyword becomes an attribute, as in `ObjectState`.

    Args:
        model: a built model.
        optimizer: by default the one that the model was compiled with, if any. It is built if it is not.

    Raises:
        InvalidArgumentError (a ValueError): the model is not built.

    Example:
        state = hvd.elastic.KerasState(model, epoch=0, batch=0)
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)

    def reset(self) -> None:
        """On JAX, drop compiled programs; see `collectives.jax.elastic.forget_programs`."""
        if keras.backend.backend() == "jax":
            importlib.import_module("collectives.jax.elastic").forget_programs()


class CommitStateCallback(CommitState, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = CommitState.__doc__


class UpdateBatchStateCallback(UpdateBatchState, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = UpdateBatchState.__doc__


class UpdateEpochStateCallback(UpdateEpochState, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = UpdateEpochState.__doc__
