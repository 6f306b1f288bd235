"""Keras 2, which ``tf.keras`` is with TF_USE_LEGACY_KERAS=1: `collectives.tensorflow.keras` for its optimizers, old and
new."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.adapters.keras_training import BATCH, X, Y, check_bits, close, equal, keras, network, part, together, train

OPTIMIZERS = {
    "new sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5),
    "new adam": lambda: keras.optimizers.Adam(0.01),
    "old sgd": lambda: keras.optimizers.legacy.SGD(0.1, momentum=0.9, clipnorm=0.5),
    "old adam": lambda: keras.optimizers.legacy.Adam(0.01),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_fit_is_fit_with_the_global_batch(hvd: Any, kind: str) -> None:
    reference = network()
    expected = train(reference, OPTIMIZERS[kind](), X, Y, epochs=2)
    model, optimizer = network(seed=hvd.rank()), hvd.DistributedOptimizer(OPTIMIZERS[kind]())
    assert isinstance(optimizer, type(OPTIMIZERS[kind]())) and optimizer.get_config() == OPTIMIZERS[kind]().get_config()
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    history = together(hvd, model, optimizer, epochs=2, callbacks=callbacks)
    close(model, reference)
    if kind.startswith("new"):  # before their first step the old ones have no variables to broadcast
        np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-5)
    equal(hvd, model, optimizer)


def test_the_same_bits_on_one_rank_and_on_two(hvd: Any, pair: Any) -> None:
    check_bits(hvd, pair)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_gradients_of_several_passes_add_up(hvd: Any, kind: str) -> None:
    reference, model = network(), network()
    make = OPTIMIZERS[kind]
    if "adam" in kind:
        make = {"new adam": keras.optimizers.Adagrad, "old adam": keras.optimizers.legacy.Adagrad}[
            kind
        ]  # Adam counts iterations
    train(reference, make(), X, Y, batch=2 * BATCH)
    together(
        hvd,
        model,
        optimizer := hvd.DistributedOptimizer(make(), backward_passes_per_step=2, average_aggregated_gradients=True),
    )
    close(model, reference)
    assert int(optimizer.iterations) == 4


@pytest.mark.parametrize(
    ("kind", "format"), (("new adam", "keras"), ("new adam", "h5"), ("new adam", "tf"), ("old adam", "h5"))
)
def test_saved_models_load_with_and_without_ranks(hvd: Any, folder: Path, kind: str, format: str) -> None:
    model = network()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[kind]())
    together(hvd, model, optimizer)
    file = str(folder / (f"model.{format}" if format != "tf" else "model"))
    if hvd.rank() == 0:
        model.save(file, save_format=format)
    hvd.barrier()
    plain, loaded = keras.models.load_model(file), hvd.load_model(file, legacy_opts="old" in kind)
    assert not hasattr(plain.optimizer, "process_set")
    assert loaded.optimizer.process_set is hvd.global_process_set
    plain.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    loaded.fit(part(X, hvd), part(Y, hvd), batch_size=BATCH // hvd.size(), shuffle=False, verbose=0)
    close(loaded, plain)


def test_custom_objects_may_make_distributed_optimizers(hvd: Any, tmp_path: Path) -> None:
    class Own(keras.optimizers.legacy.SGD):
        pass

    model = network()
    train(model, Own(0.1), X[:BATCH], Y[:BATCH])
    model.save(file := str(tmp_path / "own.h5"))
    made = {"Own": lambda **keywords: hvd.DistributedOptimizer(Own(**keywords), op=hvd.Sum)}
    assert hvd.load_model(file, custom_objects=made).optimizer.reduction.options.op is hvd.Sum
    assert hvd.load_model(file, custom_optimizers=[Own]).optimizer.reduction.options.op is hvd.Average


def test_local_layers_train_alone(hvd: Any) -> None:
    model, alone, rows = network(), network(), BATCH // hvd.size()
    x, y = part(X, hvd)[:rows], part(Y, hvd)[:rows]
    train(alone, keras.optimizers.SGD(0.1), x, y, rows)
    train(model, hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=model.layers[1]), x, y, rows)
    for mine, expected, then in zip(
        model.get_weights()[2:], alone.get_weights()[2:], network().get_weights()[2:], strict=True
    ):
        np.testing.assert_allclose(mine - then, (expected - then) / hvd.size(), atol=1e-6)
    hvd.check_consistency(model.get_weights()[:2])


def test_the_adapter_of_keras_3_takes_it_too(hvd: Any, tmp_path: Path) -> None:
    """As ``import horovod.keras`` does beside ``tf.keras``."""
    import collectives.keras as other

    model, x, y, rows = network(), part(X, hvd), part(Y, hvd), BATCH // hvd.size()
    reference = network()
    train(reference, keras.optimizers.legacy.SGD(0.1), X, Y, epochs=2)
    best = other.callbacks.BestModelCheckpoint("loss")
    best.filepath = str(tmp_path / "best.keras")
    warmup = other.callbacks.LearningRateWarmupCallback(0.1 * hvd.size(), warmup_epochs=1)
    chosen = [other.callbacks.BroadcastGlobalVariablesCallback(0), other.callbacks.MetricAverageCallback(), best]
    train(model, other.DistributedOptimizer(keras.optimizers.legacy.SGD(0.1)), x, y, rows, epochs=2, callbacks=chosen)
    close(model, reference)
    assert Path(best.filepath).exists()
    history = train(model, other.DistributedOptimizer(keras.optimizers.SGD(0.1)), x, y, rows, callbacks=[warmup])
    assert history.history["lr"] == pytest.approx([0.1 * hvd.size()])
    local = network(seed=hvd.rank())
    local.build((None, 5))
    optimizer = other.PartialDistributedOptimizer(keras.optimizers.legacy.SGD(0.1), local_layers=local.layers[0])
    assert isinstance(optimizer, keras.optimizers.legacy.SGD)
    assert optimizer.process_set is hvd.global_process_set


def test_the_best_model_is_kept(hvd: Any, tmp_path: Path) -> None:
    best = hvd.callbacks.BestModelCheckpoint("loss", 0, False)
    best.filepath = str(tmp_path / "best.keras")
    together(hvd, network(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), callbacks=[best])
    assert hvd.load_model(best.filepath).optimizer is not None


def in_session(
    optimizer: Callable[[Any], Any], x: Any, y: Any, batch: int, seed: int, callbacks: Any
) -> tuple[Any, Any]:
    """Train in a graph, as after ``disable_v2_behavior()``; the weights and the history."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.keras.backend.set_session(session)
        model = network(seed)
        model.compile(optimizer=optimizer(keras.optimizers.legacy.SGD(0.2, momentum=0.9)), loss="mse")
        history = model.fit(x, y, batch_size=batch, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
        return model.get_weights(), history.history


def test_callbacks_in_sessions(hvd: Any, tmp_path: Path) -> None:
    file = tmp_path / "best.h5"

    def callbacks() -> list[Any]:
        best = hvd.callbacks.BestModelCheckpoint("loss")
        best.filepath = str(file)
        warmup = hvd.callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=1)
        schedule = hvd.callbacks.LearningRateScheduleCallback(0.2, 0.5, start_epoch=1)
        return [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            warmup,
            schedule,
            hvd.callbacks.MetricAverageCallback(),
            best,
        ]

    wanted, expected = in_session(lambda optimizer: optimizer, X, Y, BATCH, 0, callbacks()[1:])
    file.unlink()
    found, history = in_session(
        hvd.DistributedOptimizer, part(X, hvd), part(Y, hvd), BATCH // hvd.size(), hvd.rank(), callbacks()
    )
    assert file.exists()
    for name in ("loss", "lr"):
        np.testing.assert_allclose(history[name], expected[name], rtol=1e-4)
    for mine, reference in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, reference, rtol=1e-4, atol=1e-5)


def test_several_passes_in_sessions(hvd: Any) -> None:
    def wrap(optimizer: Any) -> Any:
        return hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2, average_aggregated_gradients=True)

    wanted, _ = in_session(lambda optimizer: optimizer, X, Y, 2 * BATCH, 0, [])
    found, _ = in_session(wrap, part(X, hvd), part(Y, hvd), BATCH // hvd.size(), 0, [])
    for mine, reference in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, reference, rtol=1e-4, atol=1e-5)


def test_values(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    assert float(hvd.allreduce(float(rank))) == pytest.approx((size - 1) / 2)
    np.testing.assert_allclose(hvd.allgather([[rank]]), [[each] for each in range(size)])
    np.testing.assert_allclose(hvd.broadcast([rank], size - 1), [size - 1])
    np.testing.assert_allclose(hvd.reducescatter([[1.0]] * size, op=hvd.Sum), [[size]])
    with tf.Graph().as_default():
        np.testing.assert_allclose(hvd.allreduce(np.full(2, float(rank)), op=hvd.Sum), np.full(2, sum(range(size))))
        assert isinstance(hvd.allgather([[rank]]), np.ndarray)
        assert hvd.broadcast([rank], size - 1).tolist() == [size - 1]
        assert hvd.reducescatter([[1.0]] * size, op=hvd.Sum).tolist() == [[size]]
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)


def test_what_it_refuses(hvd: Any) -> None:
    with pytest.raises(TypeError, match="expected a Keras 2 optimizer"):
        hvd.DistributedOptimizer("sgd")
    with pytest.raises(ValueError, match="wrapped already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD()))
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=0)
