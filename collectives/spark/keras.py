"""`KerasEstimator`: trains a Keras model on a frame of Spark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

import collectives.keras
from collectives.spark.estimator import FrameEstimator, FrameModel
from collectives.spark.runner import run
from collectives.spark.store import Share

_SETTINGS = ["loss", "metrics", "callbacks", "feature_cols", "label_cols", "batch_size", "epochs", "shuffle", "verbose"]
"""What ranks need of the estimator, whose optimizer is not pickled."""


class KerasEstimator(FrameEstimator):
    """Trains a Keras model on a Spark frame, on several ranks, with `collectives.keras.DistributedOptimizer`.

    Args:
        model: built and not compiled, with one output.
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
        env = {"KERAS_BACKEND": keras.backend.backend()}
        settings = {name: value for name, value in vars(self).items() if name in _SETTINGS}
        args = (self.model, optimizer, settings, dict(paths))
        weights, history = run(_train, args, num_proc=ranks, env=env)[0]
        model = keras.models.clone_model(self.model)
        model.set_weights(weights)
        return KerasModel(model, _predict, history, np.prod(model.output_shape[1:]) > 1, self, **env)


KerasModel = FrameModel


def _predict(model: Any, inputs: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    return np.asarray(model.predict_on_batch(_one_or_tuple(inputs)))


def _train(
    model: Any, optimizer: dict[str, Any], settings: dict[str, Any], paths: Mapping[str, str]
) -> tuple[list[Any], dict[str, list[float]]]:
    """On a rank: returns the weights, and the losses."""
    collectives.init()
    rank, batch_size = collectives.rank(), settings["batch_size"]
    columns = settings["feature_cols"] + settings["label_cols"]
    shares = {name: Share(path, columns, rank, collectives.size()) for name, path in paths.items()}
    steps = {name: -(-share.rows // batch_size) for name, share in shares.items()}

    def batches(name: str) -> Iterator[Any]:
        random = np.random.default_rng(rank) if settings["shuffle"] and name == "train" else None
        while True:
            for *features, label in shares[name].epoch(batch_size, random):
                yield _one_or_tuple(features), label

    own = collectives.keras.DistributedOptimizer(keras.saving.deserialize_keras_object(optimizer))
    model.compile(optimizer=own, loss=settings["loss"], metrics=settings["metrics"])
    ours = [
        collectives.keras.callbacks.BroadcastGlobalVariablesCallback(0),
        collectives.keras.callbacks.MetricAverageCallback(),
    ]
    fitted = model.fit(
        batches("train"),
        steps_per_epoch=steps["train"],
        validation_data=batches("validation") if "validation" in shares else None,
        validation_steps=steps.get("validation"),
        epochs=settings["epochs"],
        callbacks=[*ours, *settings["callbacks"]],
        verbose=settings["verbose"] if rank == 0 else 0,
    )
    history = {name: [float(value) for value in values] for name, values in fitted.history.items()}
    return model.get_weights(), history


def _one_or_tuple(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)
