"""The callbacks for Keras 2; see `collectives.keras.callbacks` for what they do and take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from collectives.frontends.keras_callbacks import Averaging, Broadcasting, KeepingBest, Part, Scheduling, Warming
from collectives.process_sets import ProcessSet
from collectives.runtime import global_process_set

_callbacks: Any = tf.keras.callbacks


class _InSessions(Part):
    """Reads and writes variables by Keras's session, if there is one: in graphs, as after
    ``tf.compat.v1.disable_v2_behavior()``."""

    def _read(self, found: Sequence[Any]) -> Sequence[Any]:
        values: Sequence[Any] = tf.keras.backend.batch_get_value(list(found))
        return values

    def _write(self, found: Sequence[Any], values: Sequence[Any]) -> None:
        tf.keras.backend.batch_set_value(list(zip(found, values, strict=True)))


class BroadcastGlobalVariablesCallback(_InSessions, Broadcasting, _callbacks.Callback):  # type: ignore[misc]
    """Every rank begins with the root's model and optimizer, whether they are new or loaded."""

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        local_variables: Any = None,
        *,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__()
        self.device = device
        self._begin(root_rank, local_variables, process_set)


class MetricAverageCallback(Averaging, _callbacks.Callback):  # type: ignore[misc]
    """At the end of an epoch metrics become their means over the ranks."""

    def __init__(self, device: str = "", *, process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self.device = device
        self._members = process_set


class LearningRateScheduleCallback(_InSessions, Scheduling, _callbacks.Callback):  # type: ignore[misc]
    """From ``start_epoch`` to ``end_epoch`` the learning rate is ``initial_lr * multiplier``."""

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[Any], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self._begin(initial_lr, multiplier, start_epoch, end_epoch, staircase, momentum_correction, steps_per_epoch)


class LearningRateWarmupCallback(_InSessions, Warming, _callbacks.Callback):  # type: ignore[misc]
    """The learning rate grows evenly from ``initial_lr / size()`` to ``initial_lr``, batch by batch."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__()
        self._begin_warmup(initial_lr, warmup_epochs, momentum_correction, steps_per_epoch, verbose)


class BestModelCheckpoint(KeepingBest, _callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Keras's ``ModelCheckpoint`` that keeps the best model only; set ``filepath`` before training."""

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
