"""Elastic training with ``tf.keras``, Keras 3 and Keras 2: ``hvd.elastic``; see `collectives.keras.elastic`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collectives.elastic import HostsUpdatedInterrupt, ObjectState, run
from collectives.elastic.keras_callbacks import CommitState, UpdateBatchState, UpdateEpochState
from collectives.tensorflow.elastic import TensorFlowKerasState
from collectives.tensorflow.keras_version import LEGACY

__all__ = [
    "CommitStateCallback",
    "HostsUpdatedInterrupt",
    "KerasState",
    "ObjectState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

_Callback: Any = tf.keras.callbacks.Callback


class KerasState(TensorFlowKerasState):
    """A state of a ``tf.keras`` model, its optimizer and plain attributes; see `collectives.keras.elastic.KerasState`.

    Args:
        model: a built model.
        optimizer: by default the one that the model was compiled with, if any.

    Example:
        state = hvd.elastic.KerasState(model, epoch=0, batch=0)
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, tf.keras.backend if LEGACY else None, **kwargs)


class CommitStateCallback(CommitState, _Callback):  # type: ignore[misc]
    __doc__ = CommitState.__doc__


class UpdateBatchStateCallback(UpdateBatchState, _Callback):  # type: ignore[misc]
    __doc__ = UpdateBatchState.__doc__


class UpdateEpochStateCallback(UpdateEpochState, _Callback):  # type: ignore[misc]
    __doc__ = UpdateEpochState.__doc__
