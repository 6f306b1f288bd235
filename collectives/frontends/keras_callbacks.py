"""What the callbacks do, without a base class.

`collectives.keras.callbacks` puts Keras's behind them, `collectives.tensorflow.keras.callbacks` that of ``tf_keras``
where Keras is that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from collectives import runtime
from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.frontends import keras_variables
from collectives.frontends.agreement import agree
from collectives.process_sets import ProcessSet
from collectives.runtime import global_process_set, world_of

Logs = dict[str, Any] | None


class Part:
    """What Keras gives to a callback. On JAX, reading `model` puts the values of the training function back into its
    variables."""

    model: Any
    params: dict[str, Any]

    def _read(self, found: Sequence[Any]) -> Sequence[Any]:
        """Values of variables, as arrays."""
        return keras_variables.read(found)

    def _write(self, found: Sequence[Any], values: Sequence[Any]) -> None:
        """Give variables these values."""
        keras_variables.write(found, values)


class Broadcasting(Part):
    """See `collectives.keras.callbacks.BroadcastGlobalVariablesCallback`."""

    def _begin(self, root_rank: int, local_variables: Any, process_set: ProcessSet) -> None:
        self.root_rank = root_rank
        self.broadcast_done = False
        self._members = process_set
        given = [] if local_variables is None else local_variables
        self._local: list[Any] = []
        for variable in given if isinstance(given, Collection) else [given]:
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """From now on this variable keeps its own value on every rank."""
        if not (hasattr(var, "assign") and hasattr(var, "shape")):
            raise InvalidArgumentError(
                f"local_variables: all local variables must be variables of Keras or TensorFlow, got {var!r}"
            )
        self._local.append(var)

    def on_train_begin(self, logs: Logs = None) -> None:
        if self.broadcast_done or not self._members.included():
            return
        world, name = world_of(self._members), "BroadcastGlobalVariablesCallback.ready"
        with world.ahead_of(f"{name}.length"):
            ready = self._ready()
        everyone = world.allgather_object(ready, name=name)
        if all(model for model, _ in everyone):
            self._broadcast("model", keras_variables.of_model(self.model))
            if all(optimizer for _, optimizer in everyone):
                self._broadcast("optimizer", keras_variables.of_optimizer(self.model.optimizer))
                self.broadcast_done = True

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self.broadcast_done or not self._members.included():
            return
        self._broadcast("model", keras_variables.of_model(self.model))
        self._broadcast("optimizer", keras_variables.of_optimizer(self.model.optimizer))
        self.broadcast_done = True

    def _ready(self) -> tuple[bool, bool]:
        """Whether the model has its variables, and the optimizer."""
        model, optimizer = self.model, getattr(self.model, "optimizer", None)
        if not (model.built and model.variables):
            return False, False
        build = getattr(optimizer, "build", None)  # optimizers of Keras 2 have none, and are built by their first step
        if build is not None and not getattr(optimizer, "built", False):
            build(model.trainable_variables)
        return True, build is not None or optimizer is None

    def _broadcast(self, of: str, found: Sequence[Any]) -> None:
        label = f"BroadcastGlobalVariablesCallback.{of}"
        keras_variables.broadcast(
            keras_variables.without(found, self._local), self.root_rank, self._members, label, self._read, self._write
        )


class Averaging(Part):
    """See `collectives.keras.callbacks.MetricAverageCallback`."""

    _members: ProcessSet

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if logs is not None and self._members.included():
            logs.update(averaged(logs, self._members))


def averaged(logs: dict[str, Any], process_set: ProcessSet = global_process_set) -> dict[str, Any]:
    """The means of metrics over the ranks, in the order of ``logs``; the same on every rank, bit for bit.

    Raises:
        InvalidTypeError: a value that is no number or array of numbers.
        MismatchError: the ranks have different metrics; on every rank, and names the first.
    """
    world, label = world_of(process_set), "MetricAverageCallback"
    try:
        mine = {name: _numbers(name, value) for name, value in logs.items()}
    except Exception as error:
        raise world.refused(error, f"{label}.length") from None
    everyone = world.allgather_object(mine, name=label)
    shapes = [{f"metric {name!r}": f"shape {value.shape}" for name, value in sorted(each.items())} for each in everyone]
    if any(each != shapes[0] for each in shapes):
        agree(world, label, shapes[world.rank])
    means = {name: np.mean([each[name] for each in everyone], axis=0) for name in mine}
    return {name: float(mean) if mean.ndim == 0 else mean for name, mean in means.items()}


def _numbers(name: str, value: Any) -> Any:
    array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    if array.dtype.kind not in "biuf":
        raise InvalidTypeError(
            f"metric {name!r}: expected a number, got {value!r}; only numbers can be averaged over the ranks"
        )
    return array.astype(np.float64)


class Scheduling(Part):
    """See `collectives.keras.callbacks.LearningRateScheduleCallback`."""

    def _begin(
        self,
        initial_lr: float,
        multiplier: float | Callable[[Any], float],
        start_epoch: int,
        end_epoch: int | None,
        staircase: bool,
        momentum_correction: bool,
        steps_per_epoch: int | None,
    ) -> None:
        if initial_lr is None:
            raise InvalidArgumentError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = start_epoch
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)

    def on_train_begin(self, logs: Logs = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self._detected_steps()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        if self.current_epoch < self.start_epoch or (
            self.end_epoch is not None and self.current_epoch >= self.end_epoch
        ):
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._adjust(self.current_epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._adjust(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if logs is not None:
            logs["lr"] = self._learning_rate()

    def _detected_steps(self) -> int:
        params = self.params
        if params.get("steps"):
            return int(params["steps"])
        if params.get("samples") and params.get("batch_size"):
            return int(params["samples"] // params["batch_size"])
        raise InvalidArgumentError(
            "Could not autodetect the number of steps per epoch. Please specify the steps_per_epoch parameter to the"
            f" {type(self).__name__}()."
        )

    def _learning_rate(self) -> float:
        rate = self.model.optimizer.learning_rate
        return float(self._read([rate])[0] if hasattr(rate, "assign") else rate)

    def _adjust(self, epoch: float) -> None:
        """Set the learning rate, and scale what momentum has gathered, so that it is worth what it would have been at
        this rate.

        Goyal et al., "Accurate, Large Minibatch SGD", remark 3: v(t) = m * new/old * v(t-1) + new * g. Here v itself is
        scaled by new/old: m is part of compiled training steps and cannot change.
        """
        optimizer = self.model.optimizer
        old, new = self._learning_rate(), float(self.initial_lr * self.multiplier(epoch))
        optimizer.learning_rate = new
        if self.momentum_correction and old and new != old:
            velocities = _velocities(getattr(optimizer, "inner_optimizer", optimizer), self.model)
            self._write(velocities, [velocity * (new / old) for velocity in self._read(velocities)])


def _velocities(optimizer: Any, model: Any) -> list[Any]:
    """What an optimizer with momentum has gathered: of SGD and RMSprop, which say ``momentum``, in Keras 3 and 2."""
    if not hasattr(optimizer, "momentum"):
        return []
    for attribute in ("momentums", "_momentums"):
        if hasattr(optimizer, attribute):
            return (
                [velocity for velocity in getattr(optimizer, attribute) if velocity is not None]
                if optimizer.momentum
                else []
            )
    slots = (
        optimizer.get_slot_names() if hasattr(optimizer, "get_slot_names") else ()
    )  # of older optimizers, where momentum is a variable
    return (
        [optimizer.get_slot(variable, "momentum") for variable in model.trainable_variables]
        if "momentum" in slots
        else []
    )


class Warming(Scheduling):
    """See `collectives.keras.callbacks.LearningRateWarmupCallback`."""

    def _begin_warmup(
        self, initial_lr: float, epochs: int, momentum_correction: bool, steps_per_epoch: int | None, verbose: int
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            # One step more, so that an epoch ends with a round figure.
            size = runtime.size()
            return ((epoch + 1.0 / self.steps_per_epoch) * (size - 1) / epochs + 1) / size

        self.verbose = verbose
        self._begin(initial_lr, multiplier, 0, epochs, False, momentum_correction, steps_per_epoch)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0 and runtime.rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._learning_rate():g}.")


class KeepingBest(Part):
    """See `collectives.keras.callbacks.BestModelCheckpoint`; comes before Keras's ``ModelCheckpoint``."""

    filepath: Any

    def _begin(self, filepath: Any, save_weights_only: bool, **keywords: Any) -> None:
        # ModelCheckpoint looks at how the path ends.
        late = "late.weights.h5" if save_weights_only else "late.keras"
        checkpoint: Any = super()
        checkpoint.__init__(
            late if filepath is None else filepath, save_best_only=True, save_weights_only=save_weights_only, **keywords
        )
        if filepath is None:
            self.filepath = None

    def on_train_begin(self, logs: Logs = None) -> None:
        if self.filepath is None:
            raise InvalidArgumentError("BestModelCheckpoint: where to? Set its filepath before training")
        checkpoint: Any = super()
        checkpoint.on_train_begin(logs)
