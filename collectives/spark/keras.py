"""`KerasEstimator`: trains a Keras model on a frame of Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

import collectives.keras
from collectives.spark.estimator import FrameEstimator, FrameModel
from collectives.spark.store import read_share


class KerasEstimator(FrameEstimator):
    """Trains a Keras model on a Spark frame, on several ranks, with `collectives.keras.DistributedOptimizer`.

    Each rank keeps its part of the rows in memory.

    Args:
        model: not compiled; its inputs are built.
        optimizer, loss: as for ``model.compile``.
        metrics: as for ``model.compile``.
        callbacks: on all ranks, of Keras's or of `collectives.keras.callbacks`.

    Other arguments are those of `collectives.spark.estimator.FrameEstimator`.

    Example:
        estimator = KerasEstimator(model=model, optimizer=keras.optimizers.SGD(0.1), loss="mse",
            store=Store.create("/shared/runs"), feature_cols=["features"], label_cols=["label"], epochs=3, num_proc=4)
        estimator.fit(frame).transform(frame).select("label", "label__output").show()
    """

    _WHAT = "KerasEstimator"

    def __init__(
        self, *, metrics: Sequence[Any] | None = None, callbacks: Sequence[Any] | None = None, **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self.metrics = metrics
        self.callbacks = list(callbacks or ())

    def _train(self, paths: Mapping[str, str], ranks: int) -> FrameModel:
        optimizer = keras.saving.serialize_keras_object(keras.optimizers.get(self.optimizer))
        settings = {"batch_size": self.batch_size, "epochs": self.epochs, "shuffle": self.shuffle}
        compiled = {"loss": self.loss, "metrics": self.metrics}
        args = (self.model, optimizer, compiled, settings, self.callbacks, self.verbose, dict(paths))
        weights, history, shapes = self._run(
            _train, (*args, self.feature_cols, self.label_cols), ranks, KERAS_BACKEND=keras.backend.backend()
        )
        model = keras.models.clone_model(self.model)
        model.set_weights(weights)
        return KerasModel(model, _predict, history, shapes, self, KERAS_BACKEND=keras.backend.backend())


class KerasModel(FrameModel):
    """A trained model that adds predictions to frames."""


def _predict(model: Any, inputs: list[np.ndarray[Any, Any]]) -> Sequence[np.ndarray[Any, Any]]:
    outputs = model.predict(_one_or_list(inputs), verbose=0)
    return outputs if isinstance(outputs, (list, tuple)) else [outputs]


def _train(
    model: Any,
    optimizer: dict[str, Any],
    compiled: dict[str, Any],
    settings: dict[str, Any],
    callbacks: list[Any],
    verbose: int,
    paths: Mapping[str, str],
    feature_cols: list[str],
    label_cols: list[str],
) -> tuple[list[Any], dict[str, list[float]], list[Any]]:
    """On a rank: returns the weights, the losses, and the shapes of an output's row."""
    collectives.init()
    rank = collectives.rank()
    data = {}
    for name, path in paths.items():
        values = read_share(path, feature_cols + label_cols, rank, collectives.size())
        data[name] = tuple(_one_or_list([values[column] for column in part]) for part in (feature_cols, label_cols))
    own = collectives.keras.DistributedOptimizer(keras.saving.deserialize_keras_object(optimizer))
    model.compile(optimizer=own, **compiled)
    ours = [
        collectives.keras.callbacks.BroadcastGlobalVariablesCallback(0),
        collectives.keras.callbacks.MetricAverageCallback(),
    ]
    inputs, labels = data["train"]
    fitted = model.fit(
        inputs,
        labels,
        validation_data=data.get("validation"),
        callbacks=[*ours, *callbacks],
        verbose=verbose if rank == 0 else 0,
        **settings,
    )
    outputs = _predict(model, [each[:1] for each in (inputs if isinstance(inputs, list) else [inputs])])
    history = {name: [float(value) for value in values] for name, values in fitted.history.items()}
    return model.get_weights(), history, [output.shape[1:] for output in outputs]


def _one_or_list(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values
