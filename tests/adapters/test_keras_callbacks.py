"""Keras: the callbacks, and the functions on values."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from collectives.base.errors import MismatchError
from tests.adapters.keras_training import BATCH, X, Y, equal, network, part, together, values


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


class Late(keras.Model):
    """Has no variables before it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(7)
        self.dropout = keras.layers.Dropout(0.5)
        self.normal = keras.layers.BatchNormalization()
        self.last = keras.layers.Dense(3)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.last(self.normal(self.dropout(self.hidden(x), training=training), training=training))


@pytest.mark.parametrize("late", (False, True))
def test_broadcast_gives_all_ranks_the_roots_state(hvd_keras: Any, late: bool) -> None:
    hvd = hvd_keras
    root = hvd.size() - 1
    keras.utils.set_random_seed(hvd.rank())
    model = Late()
    if not late:
        model(X[:2])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01 * (1 + hvd.rank())))
    rows = BATCH // hvd.size()
    model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(root)
    model.fit(part(X, hvd)[:rows], part(Y, hvd)[:rows], batch_size=rows, verbose=0, shuffle=False, callbacks=[callback])
    assert callback.broadcast_done
    equal(hvd, optimizer)
    assert float(optimizer.learning_rate.numpy()) == pytest.approx(0.01 * (1 + root))
    statistics = {id(variable) for variable in model.normal.non_trainable_variables}
    shared = [
        np.array(each.numpy()) for each in model.variables if id(each) not in statistics
    ]  # those are of this rank's rows
    hvd.check_consistency(shared)


def test_before_the_first_step_if_it_can_be(hvd_keras: Any) -> None:
    """A learning rate of zero leaves what was there before the first step."""
    hvd = hvd_keras
    model = network(seed=hvd.rank())
    together(
        hvd,
        model,
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)),
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    )
    for mine, expected in zip(model.get_weights(), network(seed=0).get_weights(), strict=True):
        np.testing.assert_array_equal(mine, expected)


def test_local_variables_are_left_alone(hvd_keras: Any) -> None:
    hvd = hvd_keras
    model = network(seed=hvd.rank())
    mine = model.get_layer("last").trainable_weights
    before = [np.array(variable.numpy()) for variable in mine]
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=mine)
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.0), local_layers=[model.get_layer("last")])
    together(hvd, model, optimizer, callbacks=[callback])
    for variable, value in zip(mine, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    equal(hvd, model.get_layer("hidden"))
    with pytest.raises(ValueError, match="local_variables"):
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=["kernel"])


def test_an_optimizer_that_one_rank_cannot_build_is_told_to_all(
    hvd_keras: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hvd = hvd_keras
    model, callback = network(), hvd.callbacks.BroadcastGlobalVariablesCallback(0)

    def none_left() -> Any:
        raise MemoryError("none left")

    if hvd.rank() == 1:
        monkeypatch.setattr(callback, "_ready", none_left)  # builds the optimizer where Keras has not
    with pytest.raises(MemoryError if hvd.rank() == 1 else MismatchError, match="none left"):
        together(hvd, model, keras.optimizers.SGD(0.0), callbacks=[callback])
    assert hvd.allreduce(np.float32(1), op=hvd.Sum) == hvd.size()


def test_other_models_on_other_ranks_are_an_error(hvd_keras: Any) -> None:
    hvd = hvd_keras
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(3), keras.layers.Dense(3, use_bias=hvd.rank() == 0)]
    )
    text = (
        r"variable 3 is not the same on every rank: float32 of shape \(3,\) on rank 0; absent on ranks? "
        r"1.*Nothing was changed"
    )
    with pytest.raises(MismatchError, match=text):
        together(hvd, model, keras.optimizers.SGD(0.1), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])


def test_metrics_are_averaged_for_the_callbacks_behind(hvd_keras: Any) -> None:
    hvd = hvd_keras
    before, behind = Spy(), Spy()
    rows = BATCH // hvd.size()
    model = network()
    model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse", metrics=["mae"])
    history = model.fit(
        part(X, hvd),
        part(Y, hvd),
        batch_size=rows,
        verbose=0,
        validation_data=(part(X, hvd)[:rows], part(Y, hvd)[:rows]),
        callbacks=[before, hvd.callbacks.MetricAverageCallback(), behind],
    )
    everyone = hvd.allgather_object(before.logs[0])
    assert set(behind.logs[0]) == {"loss", "mae", "val_loss", "val_mae"}
    for name, value in behind.logs[0].items():
        assert value == pytest.approx(np.mean([each[name] for each in everyone]), rel=1e-6)
        assert history.history[name] == [value]
    assert all(each == behind.logs[0] for each in hvd.allgather_object(behind.logs[0]))


def test_other_metrics_on_other_ranks_are_an_error(hvd_keras: Any) -> None:
    hvd = hvd_keras
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


def test_a_metric_that_is_no_number_is_an_error(hvd_keras: Any) -> None:
    with pytest.raises(TypeError, match="metric 'mood': expected a number"):
        hvd_keras.callbacks.MetricAverageCallback().on_epoch_end(0, {"mood": "good"})


def test_warmup(hvd_keras: Any) -> None:
    hvd, size = hvd_keras, hvd_keras.size()
    spy = Spy()
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2, verbose=1)
    together(
        hvd,
        network(),
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.4, momentum=0.9)),
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
def test_schedule(hvd_keras: Any, staircase: bool) -> None:
    hvd = hvd_keras
    spy = Spy()
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.8, 0.5, start_epoch=1, end_epoch=3, staircase=staircase)
    together(hvd, network(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.3)), epochs=4, callbacks=[schedule, spy])
    within = [0.8] * 4 + [0.4] * 4 if staircase else [0.8 * 0.5 ** (step / 4) for step in range(8)]
    np.testing.assert_allclose(spy.rates, [0.3] * 4 + within + within[-1:] * 4, rtol=1e-6)


@pytest.mark.parametrize("correction", (True, False))
def test_momentum_is_corrected(hvd_keras: Any, correction: bool) -> None:
    """v = m * new / old * v - new * g, computed by hand for one weight and a constant gradient."""
    hvd = hvd_keras
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5)), loss=lambda y, output: output
    )
    schedule = hvd.callbacks.LearningRateScheduleCallback(1.0, lambda epoch: 0.1**epoch, momentum_correction=correction)
    model.fit(
        np.ones((2, 1), "float32"), np.ones((2, 1), "float32"), batch_size=1, epochs=2, verbose=0, callbacks=[schedule]
    )
    weight = velocity = 0.0
    for old, rate in ((1.0, 1.0), (1.0, 1.0), (1.0, 0.1), (0.1, 0.1)):
        velocity = 0.5 * (rate / old if correction else 1.0) * velocity - rate
        weight += velocity
    np.testing.assert_allclose(model.get_weights()[0], [[weight]], rtol=1e-5)


def test_steps_that_nobody_knows(hvd_keras: Any) -> None:
    hvd = hvd_keras
    callback = hvd.callbacks.LearningRateWarmupCallback(0.1)
    callback.set_params({"steps": None})
    with pytest.raises(ValueError, match=r"steps_per_epoch parameter to the LearningRateWarmupCallback"):
        callback.on_train_begin()
    with pytest.raises(ValueError, match="initial_lr"):
        hvd.callbacks.LearningRateScheduleCallback(None, 0.5)


def test_where_the_best_model_is_kept(hvd_keras: Any) -> None:
    hvd = hvd_keras
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    with pytest.raises(ValueError, match="Set its filepath"):
        best.on_train_begin()
    assert hvd.callbacks.BestModelCheckpoint(save_weights_only=True, filepath="x.weights.h5").filepath == "x.weights.h5"


def test_values(hvd_keras: Any) -> None:
    hvd = hvd_keras
    rank, size = hvd.rank(), hvd.size()
    mine = np.array([[1.0, 2.0]], "float32") * (rank + 1)
    total = size * (size + 1) / 2
    np.testing.assert_allclose(_array(hvd.allreduce(mine)), [[total / size, 2 * total / size]])
    np.testing.assert_allclose(_array(hvd.allreduce(mine.tolist(), average=False)), [[total, 2 * total]])
    np.testing.assert_allclose(_array(hvd.allreduce(keras.ops.convert_to_tensor(mine), op=hvd.Max)), [[size, 2 * size]])
    assert float(hvd.allreduce(float(rank))) == pytest.approx((size - 1) / 2)
    assert keras.ops.is_tensor(hvd.allreduce(1.0))
    np.testing.assert_allclose(_array(hvd.allgather(mine)), [[each + 1, 2 * each + 2] for each in range(size)])
    np.testing.assert_allclose(_array(hvd.broadcast(mine, size - 1)), [[size, 2 * size]])
    rows = np.arange(2.0 * size, dtype="float32").reshape(size, 2) * (rank + 1)
    np.testing.assert_allclose(
        _array(hvd.reducescatter(rows, op=hvd.Sum)), [[2 * rank * total, (2 * rank + 1) * total]]
    )
    with pytest.raises(ValueError, match="op supersedes"):
        hvd.allreduce(mine, average=True, op=hvd.Sum)


def test_variables(hvd_keras: Any) -> None:
    hvd = hvd_keras
    model = network(seed=hvd.rank())
    hvd.broadcast_variables(model.variables, root_rank=hvd.size() - 1)
    for mine, expected in zip(values(model), values(network(seed=hvd.size() - 1)), strict=True):
        np.testing.assert_array_equal(mine, expected)
    with pytest.raises((ValueError, RuntimeError), match=r"broadcast_variables\(model.variables"):
        hvd.broadcast_global_variables(0)


def _array(tensor: Any) -> Any:
    return keras.ops.convert_to_numpy(tensor)


def test_what_is_no_value_is_refused_on_every_rank(hvd_keras: Any) -> None:
    hvd = hvd_keras
    wrong = hvd.rank() == 0
    with pytest.raises(TypeError if wrong else MismatchError, match="expected a number, an array or a tensor"):
        hvd.allreduce(object() if wrong else 1.0, name="value")
    with pytest.raises(TypeError if wrong else MismatchError, match="expected True, False or None"):
        hvd.allreduce(1.0, name="average", average=hvd.Sum if wrong else True)
    assert float(hvd.allreduce(1.0, average=0)) == hvd.size()
