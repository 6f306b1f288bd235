"""Callbacks for ``fit`` on several ranks: ``hvd.callbacks``, for the Keras that ``tf.keras`` is."""

from collectives.tensorflow.keras_version import LEGACY

if LEGACY:
    from collectives.tensorflow.keras.legacy_callbacks import (
        BestModelCheckpoint,
        BroadcastGlobalVariablesCallback,
        LearningRateScheduleCallback,
        LearningRateWarmupCallback,
        MetricAverageCallback,
    )
else:
    from collectives.keras.callbacks import (  # type: ignore[assignment]
        BestModelCheckpoint,
        BroadcastGlobalVariablesCallback,
        LearningRateScheduleCallback,
        LearningRateWarmupCallback,
        MetricAverageCallback,
    )

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
