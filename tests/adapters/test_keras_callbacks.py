"""Keras 3 and Keras 2: the callbacks that change the learning rate, and metrics that ranks disagree about."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives.base.errors import MismatchError
from tests.adapters.keras_training import KERAS_2, keras, network, together

SGDS = (keras.optimizers.SGD, keras.optimizers.legacy.SGD) if KERAS_2 else (keras.optimizers.SGD,)


class Spy(keras.callbacks.Callback):
    """What training is like, as other callbacks see it."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []
        self.logs: list[dict[str, Any]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.rates.append(float(self.model.optimizer.learning_rate.numpy()))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.logs.append(dict(logs))


def test_other_metrics_on_other_ranks_are_an_error(hvd: Any) -> None:
    callback = hvd.callbacks.MetricAverageCallback()
    logs = {"loss": 1.0} if hvd.rank() else {"loss": 1.0, "mae": 2.0}
    with pytest.raises(
        MismatchError, match=r"metric 'mae' is not the same on every rank: shape \(\) on rank 0; absent on ranks? 1"
    ):
        callback.on_epoch_end(0, logs)
    logs = {"loss": 1.0 + hvd.rank(), "each": np.array([1.0, hvd.rank()])}
    callback.on_epoch_end(0, logs)
    assert logs["loss"] == pytest.approx((hvd.size() + 1) / 2)
    np.testing.assert_allclose(logs["each"], [1.0, (hvd.size() - 1) / 2])


def test_a_metric_that_is_no_number_is_an_error(hvd: Any) -> None:
    with pytest.raises(TypeError, match="metric 'mood': expected a number"):
        hvd.callbacks.MetricAverageCallback().on_epoch_end(0, {"mood": "good"})


@pytest.mark.parametrize("sgd", SGDS)
def test_warmup(hvd: Any, sgd: Any) -> None:
    size = hvd.size()
    spy = Spy()
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2, verbose=1)
    together(
        hvd,
        network(),
        hvd.DistributedOptimizer(sgd(0.4, momentum=0.9)),
        epochs=3,
        callbacks=[warmup, spy],
    )
    expected = [
        0.4 / size * ((epoch + (batch + 1) / 4) * (size - 1) / 2 + 1) for epoch in range(2) for batch in range(4)
    ]
    np.testing.assert_allclose(spy.rates, expected + [expected[-1]] * 4, rtol=1e-6)
    assert spy.rates[7] == pytest.approx(0.4)
    assert [logs["lr"] for logs in spy.logs] == pytest.approx([spy.rates[3], 0.4, 0.4])


@pytest.mark.parametrize("staircase", (True, False))
def test_schedule(hvd: Any, staircase: bool) -> None:
    spy = Spy()
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.8, 0.5, start_epoch=1, end_epoch=3, staircase=staircase)
    together(hvd, network(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.3)), epochs=4, callbacks=[schedule, spy])
    within = [0.8] * 4 + [0.4] * 4 if staircase else [0.8 * 0.5 ** (step / 4) for step in range(8)]
    np.testing.assert_allclose(spy.rates, [0.3] * 4 + within + within[-1:] * 4, rtol=1e-6)


@pytest.mark.parametrize("sgd", SGDS)
@pytest.mark.parametrize("correction", (True, False))
def test_momentum_is_corrected(hvd: Any, correction: bool, sgd: Any) -> None:
    """v = m * new / old * v - new * g, computed by hand for one weight and a constant gradient."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(optimizer=hvd.DistributedOptimizer(sgd(1.0, momentum=0.5)), loss=lambda y, output: output)
    schedule = hvd.callbacks.LearningRateScheduleCallback(1.0, lambda epoch: 0.1**epoch, momentum_correction=correction)
    model.fit(
        np.ones((2, 1), "float32"), np.ones((2, 1), "float32"), batch_size=1, epochs=2, verbose=0, callbacks=[schedule]
    )
    weight = velocity = 0.0
    for old, rate in ((1.0, 1.0), (1.0, 1.0), (1.0, 0.1), (0.1, 0.1)):
        velocity = 0.5 * (rate / old if correction else 1.0) * velocity - rate
        weight += velocity
    np.testing.assert_allclose(model.get_weights()[0], [[weight]], rtol=1e-5)


def test_steps_that_nobody_knows(hvd: Any) -> None:
    callback = hvd.callbacks.LearningRateWarmupCallback(0.1)
    callback.set_params({"steps": None})
    with pytest.raises(ValueError, match=r"steps_per_epoch parameter to the LearningRateWarmupCallback"):
        callback.on_train_begin()
    with pytest.raises(ValueError, match="initial_lr"):
        hvd.callbacks.LearningRateScheduleCallback(None, 0.5)
