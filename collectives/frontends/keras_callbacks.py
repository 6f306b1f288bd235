"""The behaviour of Keras's distributed callbacks, as mixins without Keras.

`collectives.keras.callbacks` combines them with the base classes of Keras 3, `collectives.tensorflow.keras.callbacks`
with those of ``tf_keras``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.frontends import keras_variables
from collectives.frontends.agreement import agree
from collectives.worlds import runtime
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import global_process_set, world_of

Logs = dict[str, Any] | None


class CallbackMixin:
    """The attributes that Keras sets on a callback, and access to variables.

    On JAX, reading `model` copies the values of the training function back into its variables.
    """

    model: Any
    params: dict[str, Any]

    def _read(self, variables: Sequence[Any]) -> Sequence[Any]:
        return keras_variables.read(variables)

    def _write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        keras_variables.write(variables, values)


class BroadcastVariables(CallbackMixin):
    """Start every rank with the root's model and optimizer, whether they are new or loaded.

    The model's variables (weights, statistics, random seeds) and the optimizer's (iterations, learning rate, moments)
    are broadcast before the first step if all ranks have built their models, else after it; metrics are not. If the
    number, shapes or dtypes of variables differ between ranks, training ends with a `MismatchError` on all of them.
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
            root_rank: the rank whose variables are broadcast.
            device: part of Horovod's interface; ignored.
            local_variables: a variable or a collection of variables that keep their own values on every rank.
            process_set: the ranks that take part.
        """
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._process_set = process_set
        local = [] if local_variables is None else local_variables
        self._local: list[Any] = []
        for variable in local if isinstance(local, Collection) else [local]:
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Exclude a variable from the broadcast, so that it keeps its own value on every rank."""
        if not (hasattr(var, "assign") and hasattr(var, "shape")):
            raise InvalidArgumentError(
                f"local_variables: all local variables must be variables of Keras or TensorFlow, got {var!r} [F46]"
            )
        self._local.append(var)

    def on_train_begin(self, logs: Logs = None) -> None:
        if self.broadcast_done or not self._process_set.included():
            return
        world, name = world_of(self._process_set), "BroadcastGlobalVariablesCallback.ready"
        with world.ahead_of(f"{name}.length"):
            ready = self._ready()
        all_ready = world.allgather_object(ready, name=name)
        if all(model for model, _ in all_ready):
            self._broadcast("model", keras_variables.of_model(self.model))
            if all(optimizer for _, optimizer in all_ready):
                self._broadcast("optimizer", keras_variables.of_optimizer(self.model.optimizer))
                self.broadcast_done = True

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self.broadcast_done or not self._process_set.included():
            return
        self._broadcast("model", keras_variables.of_model(self.model))
        self._broadcast("optimizer", keras_variables.of_optimizer(self.model.optimizer))
        self.broadcast_done = True

    def _ready(self) -> tuple[bool, bool]:
        """Whether the model and whether the optimizer have their variables."""
        model, optimizer = self.model, getattr(self.model, "optimizer", None)
        if not (model.built and model.variables):
            return False, False
        build = getattr(optimizer, "build", None)  # Keras 2's optimizers have none; their first step builds them
        if build is not None and not getattr(optimizer, "built", False):
            build(model.trainable_variables)
        return True, build is not None or optimizer is None

    def _broadcast(self, kind: str, variables: Sequence[Any]) -> None:
        label = f"BroadcastGlobalVariablesCallback.{kind}"
        shared = keras_variables.without(variables, self._local)
        keras_variables.broadcast(shared, self.root_rank, self._process_set, label, self._read, self._write)


class AverageMetrics(CallbackMixin):
    """Replace metrics at the end of an epoch by their means over the ranks, validation metrics included.

    Place it before callbacks that use metrics, such as ``ReduceLROnPlateau``, ``EarlyStopping``, ``TensorBoard`` and
    checkpoints. If ranks have different metrics, training ends with a `MismatchError` on all of them.
    """

    def __init__(self, device: str = "", *, process_set: ProcessSet = global_process_set) -> None:
        """
        Args:
            device: part of Horovod's interface; ignored.
            process_set: the ranks that take part.
        """
        super().__init__()
        self.device = device
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if logs is not None and self._process_set.included():
            logs.update(averaged(logs, self._process_set))


def averaged(logs: dict[str, Any], process_set: ProcessSet = global_process_set) -> dict[str, Any]:
    """Return the means of metrics over the ranks, in the order of ``logs`` and identical on every rank.

    Raises:
        InvalidTypeError: a value is not a number or an array of numbers.
        MismatchError: the ranks have different metrics; raised on every rank, and names the first that differs.
    """
    world, label = world_of(process_set), "MetricAverageCallback"
    with world.refusing(f"{label}.length"):
        own = {name: _numbers(name, value) for name, value in logs.items()}
    gathered = world.allgather_object(own, name=label)
    shapes = [{f"metric {name!r}": f"shape {value.shape}" for name, value in sorted(each.items())} for each in gathered]
    if any(each != shapes[0] for each in shapes):
        agree(world, label, shapes[world.rank])
    means = {name: np.mean([each[name] for each in gathered], axis=0) for name in own}
    return {name: float(mean) if mean.ndim == 0 else mean for name, mean in means.items()}


def _numbers(name: str, value: Any) -> Any:
    array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    if array.dtype.kind not in "biuf":
        raise InvalidTypeError(
            f"metric {name!r}: expected a number, got {value!r}; only numbers can be averaged over the ranks [F91]"
        )
    return array.astype(np.float64)


class ScheduleLearningRate(CallbackMixin):
    """Set the learning rate to ``initial_lr * multiplier`` from ``start_epoch`` to ``end_epoch``.

    With ``staircase`` it is set at the beginning of each epoch, for a whole number of epochs; else before each batch,
    for ``epoch + batch / steps_per_epoch``. At the end of an epoch it is reported as ``logs["lr"]``.
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
            multiplier: a function of the epoch, or a number that is raised to the power of the epochs since
                ``start_epoch``.
            end_epoch: the epoch after the last; None: no end.
            momentum_correction: scale the accumulated momentum with the learning rate.
            steps_per_epoch: batches per epoch, if Keras does not know them.
        """
        super().__init__()
        if initial_lr is None:
            raise InvalidArgumentError("Parameter `initial_lr` is required [F92]")
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
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._adjust(epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._adjust(epoch)

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
            f" {type(self).__name__}(). [F93]"
        )

    def _learning_rate(self) -> float:
        rate = self.model.optimizer.learning_rate
        return float(self._read([rate])[0] if hasattr(rate, "assign") else rate)

    def _adjust(self, epoch: float) -> None:
        """Set the learning rate, and scale the accumulated momentum to match it.

        Goyal et al., "Accurate, Large Minibatch SGD", remark 3: v(t) = m * new/old * v(t-1) + new * g. Here v itself is
        scaled by new/old, because m is a constant of compiled training steps.
        """
        optimizer = self.model.optimizer
        old, new = self._learning_rate(), float(self.initial_lr * self.multiplier(epoch))
        optimizer.learning_rate = new
        if self.momentum_correction and old and new != old:
            velocities = _velocities(getattr(optimizer, "inner_optimizer", optimizer), self.model)
            self._write(velocities, [velocity * (new / old) for velocity in self._read(velocities)])


def _velocities(optimizer: Any, model: Any) -> list[Any]:
    """Return the momentum accumulators of SGD and RMSprop in Keras 3 and 2; empty for other optimizers."""
    if not hasattr(optimizer, "momentum"):
        return []
    for attribute in ("momentums", "_momentums"):
        if hasattr(optimizer, attribute):
            return [each for each in getattr(optimizer, attribute) if each is not None] if optimizer.momentum else []
    # tf.keras.optimizers.legacy keeps them in slots; there momentum is a variable, and always true.
    if "momentum" not in (optimizer.get_slot_names() if hasattr(optimizer, "get_slot_names") else ()):
        return []
    return [optimizer.get_slot(variable, "momentum") for variable in model.trainable_variables]


class WarmUpLearningRate(ScheduleLearningRate):
    """Increase the learning rate linearly from ``initial_lr / size()`` to ``initial_lr``, batch by batch.

    After Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour" (2017): with ``e`` the fractional
    number of epochs so far, ``lr(e) = initial_lr / size * (e * (size - 1) / warmup_epochs + 1)``.
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
            initial_lr: the final learning rate, usually that of one rank times ``size()``.
            warmup_epochs: the number of epochs to increase it over.
            momentum_correction, steps_per_epoch: as for ``LearningRateScheduleCallback``.
            verbose: if 1, rank 0 prints a line at the end.
        """

        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            # One step ahead, so that the last step of an epoch reaches that epoch's end.
            size = runtime.size()
            return ((epoch + 1.0 / self.steps_per_epoch) * (size - 1) / warmup_epochs + 1) / size

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0 and runtime.rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._learning_rate():g}.")


class KeepBestModel(CallbackMixin):
    """Save only the best model, as Keras's ``ModelCheckpoint``, which is the next of the bases.

    As in Horovod, ``filepath`` may be an attribute to set before training, on the rank that saves.
    """

    filepath: Any

    def _begin(self, filepath: Any, save_weights_only: bool, **keywords: Any) -> None:
        # ModelCheckpoint checks the path's suffix, so it needs a valid one even where the path is set later.
        placeholder = "late.weights.h5" if save_weights_only else "late.keras"
        path = placeholder if filepath is None else filepath
        checkpoint: Any = super()
        checkpoint.__init__(path, save_best_only=True, save_weights_only=save_weights_only, **keywords)
        if filepath is None:
            self.filepath = None

    def on_train_begin(self, logs: Logs = None) -> None:
        if self.filepath is None:
            raise InvalidArgumentError(
                "BestModelCheckpoint: expected a filepath, got None; set filepath before training starts [F94]"
            )
        checkpoint: Any = super()
        checkpoint.on_train_begin(logs)
