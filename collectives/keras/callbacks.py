"""Callbacks for ``fit`` on several ranks: ``hvd.callbacks``."""

from __future__ import annotations

from typing import Any

import keras

from collectives.frontends.keras_callbacks import (
    AverageMetrics,
    BroadcastVariables,
    KeepBestModel,
    ScheduleLearningRate,
    WarmUpLearningRate,
)


class _ForKeras2:
    """The methods that ``tf_keras`` calls on a callback, so that its models accept these as well."""

    def _implements_train_batch_hooks(self) -> bool:
        return isinstance(self, BroadcastVariables | ScheduleLearningRate)

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


class BroadcastGlobalVariablesCallback(_ForKeras2, BroadcastVariables, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = BroadcastVariables.__doc__


class MetricAverageCallback(_ForKeras2, AverageMetrics, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = AverageMetrics.__doc__


class LearningRateScheduleCallback(_ForKeras2, ScheduleLearningRate, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = ScheduleLearningRate.__doc__


class LearningRateWarmupCallback(_ForKeras2, WarmUpLearningRate, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = WarmUpLearningRate.__doc__


class BestModelCheckpoint(_ForKeras2, KeepBestModel, keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    __doc__ = KeepBestModel.__doc__

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: Any = "epoch",
        *,
        save_weights_only: bool = False,
        filepath: Any = None,
    ) -> None:
        self._begin(filepath, save_weights_only, monitor=monitor, verbose=verbose, mode=mode, save_freq=save_freq)
