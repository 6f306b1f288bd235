"""Keras 3: the callbacks that broadcast, average and save, and the functions on values."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from collectives.base.errors import MismatchError
from tests.adapters.keras_training import BATCH, X, Y, equal, network, part, together, values
from tests.adapters.test_keras_callbacks import Spy


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
def test_broadcast_gives_all_ranks_the_roots_state(hvd: Any, late: bool) -> None:
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


def test_local_variables_are_left_alone(hvd: Any) -> None:
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


def test_an_optimizer_that_one_rank_cannot_build_is_told_to_all(hvd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, callback = network(), hvd.callbacks.BroadcastGlobalVariablesCallback(0)

    def none_left() -> Any:
        raise MemoryError("none left")

    if hvd.rank() == 1:
        monkeypatch.setattr(callback, "_ready", none_left)  # builds the optimizer where Keras has not
    with pytest.raises(MemoryError if hvd.rank() == 1 else MismatchError, match="none left"):
        together(hvd, model, keras.optimizers.SGD(0.0), callbacks=[callback])
    assert hvd.allreduce(np.float32(1), op=hvd.Sum) == hvd.size()


def test_other_models_on_other_ranks_are_an_error(hvd: Any) -> None:
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(3), keras.layers.Dense(3, use_bias=hvd.rank() == 0)]
    )
    text = (
        r"variable 3 is not the same on every rank: float32 of shape \(3,\) on rank 0; absent on ranks? "
        r"1.*Nothing was changed"
    )
    with pytest.raises(MismatchError, match=text):
        together(hvd, model, keras.optimizers.SGD(0.1), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])


def test_metrics_are_averaged_for_the_callbacks_behind(hvd: Any) -> None:
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


def test_where_the_best_model_is_kept(hvd: Any) -> None:
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    with pytest.raises(ValueError, match="set filepath"):
        best.on_train_begin()
    assert hvd.callbacks.BestModelCheckpoint(save_weights_only=True, filepath="x.weights.h5").filepath == "x.weights.h5"


def test_values(hvd: Any) -> None:
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
    with pytest.raises(ValueError, match="either average or op"):
        hvd.allreduce(mine, average=True, op=hvd.Sum)


def test_variables(hvd: Any) -> None:
    model = network(seed=hvd.rank())
    hvd.broadcast_variables(model.variables, root_rank=hvd.size() - 1)
    for mine, expected in zip(values(model), values(network(seed=hvd.size() - 1)), strict=True):
        np.testing.assert_array_equal(mine, expected)
    with pytest.raises((ValueError, RuntimeError), match=r"broadcast_variables\(model.variables"):
        hvd.broadcast_global_variables(0)


def _array(tensor: Any) -> Any:
    return keras.ops.convert_to_numpy(tensor)


def test_what_is_no_value_is_refused_on_every_rank(hvd: Any) -> None:
    wrong = hvd.rank() == 0
    with pytest.raises(TypeError if wrong else MismatchError, match="expected a number, an array or a tensor"):
        hvd.allreduce(object() if wrong else 1.0, name="value")
    with pytest.raises(TypeError if wrong else MismatchError, match="expected True, False or None"):
        hvd.allreduce(1.0, name="average", average=hvd.Sum if wrong else True)
    assert float(hvd.allreduce(1.0, average=0)) == hvd.size()
