"""The callbacks for Keras 2; their arguments are those of `collectives.keras.callbacks`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from collectives.frontends.keras_callbacks import (
    AverageMetrics,
    BroadcastVariables,
    CallbackMixin,
    KeepBestModel,
    ScheduleLearningRate,
    WarmUpLearningRate,
)

_callbacks: Any = tf.keras.callbacks


class _InSession(CallbackMixin):
    """Read and write variables by Keras's session where there is one: in graphs, as after
    ``tf.compat.v1.disable_v2_behavior()``."""

    def _read(self, variables: Sequence[Any]) -> Sequence[Any]:
        values: Sequence[Any] = tf.keras.backend.batch_get_value(list(variables))
        return values

    def _write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        tf.keras.backend.batch_set_value(list(zip(variables, values, strict=True)))


class BroadcastGlobalVariablesCallback(_InSession, BroadcastVariables, _callbacks.Callback):  # type: ignore[misc]
    __doc__ = BroadcastVariables.__doc__


class MetricAverageCallback(AverageMetrics, _callbacks.Callback):  # type: ignore[misc]
    __doc__ = AverageMetrics.__doc__


class LearningRateScheduleCallback(_InSession, ScheduleLearningRate, _callbacks.Callback):  # type: ignore[misc]
    __doc__ = ScheduleLearningRate.__doc__


class LearningRateWarmupCallback(_InSession, WarmUpLearningRate, _callbacks.Callback):  # type: ignore[misc]
    __doc__ = WarmUpLearningRate.__doc__


class BestModelCheckpoint(KeepBestModel, _callbacks.ModelCheckpoint):  # type: ignore[misc]
    __doc__ = KeepBestModel.__doc__

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
        *,
        filepath: Any = None,
    ) -> None:
        self._begin(filepath, save_weights_only, monitor=monitor, verbose=verbose, mode=mode, save_freq=save_freq)
