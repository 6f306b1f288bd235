"""Callbacks for ``fit`` on several ranks: ``hvd.callbacks``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from collectives.frontends.keras_callbacks import Averaging, Broadcasting, KeepingBest, Scheduling, Warming
from collectives.process_sets import ProcessSet
from collectives.runtime import global_process_set


class _ForKeras2:
    """What ``tf_keras`` asks of a callback, so that its models take these, too."""

    def _implements_train_batch_hooks(self) -> bool:
        return isinstance(self, Broadcasting | Scheduling)

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


class BroadcastGlobalVariablesCallback(_ForKeras2, Broadcasting, keras.callbacks.Callback):  # type: ignore[misc]
    """Every rank begins with the root's model and optimizer, whether they are new or loaded.

    Broadcast are the model's variables (weights, statistics, random seeds) and the optimizer's (iterations, learning
    rate, moments), before the first step if all ranks have built their models, else after it; metrics are not. Where
    ranks differ in number, shapes or dtypes of variables, training ends with a `MismatchError` on all of them.
    """

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        local_variables: Any = None,
        *,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        """
        Args:
            root_rank: the rank whose variables they are.
            device: of Horovod's interface.
            local_variables: a variable or a collection of variables that keep their own values on every rank.
            process_set: the ranks that take part.
        """
        super().__init__()
        self.device = device
        self._begin(root_rank, local_variables, process_set)


class MetricAverageCallback(_ForKeras2, Averaging, keras.callbacks.Callback):  # type: ignore[misc]
    """At the end of an epoch metrics become their means over the ranks, those of the validation included.

    Put it before callbacks that use metrics, such as ``ReduceLROnPlateau``, ``EarlyStopping``, ``TensorBoard`` and
    checkpoints. Where ranks have different metrics, training ends with a `MismatchError` on all of them.
    """

    def __init__(self, device: str = "", *, process_set: ProcessSet = global_process_set) -> None:
        """
        Args:
            device: of Horovod's interface.
            process_set: the ranks that take part.
        """
        super().__init__()
        self.device = device
        self._members = process_set


class LearningRateScheduleCallback(_ForKeras2, Scheduling, keras.callbacks.Callback):  # type: ignore[misc]
    """From ``start_epoch`` to ``end_epoch`` the learning rate is ``initial_lr * multiplier``.

    With ``staircase`` it is set at the beginning of each epoch, by a whole number of epochs; else before each batch, by
    ``epoch + batch / steps_per_epoch``. At the end of an epoch ``logs["lr"]`` has it.
    """

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
        """
        Args:
            initial_lr: the learning rate to start from.
            multiplier: a function of the epoch; or a number m, for m to the power of the epochs since ``start_epoch``.
            start_epoch: the first epoch.
            end_epoch: the epoch after the last; None: no end.
            staircase: once per epoch, or for each batch.
            momentum_correction: what an optimizer with momentum has gathered is scaled as the learning rate is.
            steps_per_epoch: batches per epoch, if Keras does not know them.
        """
        super().__init__()
        self._begin(initial_lr, multiplier, start_epoch, end_epoch, staircase, momentum_correction, steps_per_epoch)


class LearningRateWarmupCallback(_ForKeras2, Warming, keras.callbacks.Callback):  # type: ignore[misc]
    """The learning rate grows evenly from ``initial_lr / size()`` to ``initial_lr``, batch by batch.

    After Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour" (2017): with ``e`` the epochs so
    far, with a fraction, ``lr(e) = initial_lr / size * (e * (size - 1) / warmup_epochs + 1)``.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        """
        Args:
            initial_lr: the learning rate at the end, as a rule that of one rank times ``size()``.
            warmup_epochs: how long it takes.
            momentum_correction, steps_per_epoch: as of `LearningRateScheduleCallback`.
            verbose: with 1, rank 0 says so at the end.
        """
        super().__init__()
        self._begin_warmup(initial_lr, warmup_epochs, momentum_correction, steps_per_epoch, verbose)


class BestModelCheckpoint(_ForKeras2, KeepingBest, keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Keras's ``ModelCheckpoint`` that keeps the best model only.

    As in Horovod, where to is no argument but an attribute: set ``filepath`` before training, on the rank that saves.
    """

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
        """
        Args:
            monitor, verbose, mode, save_freq, save_weights_only: as of ``ModelCheckpoint``.
            filepath: where to; may be set later.
        """
        self._begin(filepath, save_weights_only, monitor=monitor, verbose=verbose, mode=mode, save_freq=save_freq)
