"""Keras: what a distributed optimizer is, apart from training: its class, its state, how it is saved and what it
refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from collectives.base.errors import MismatchError
from collectives.engine import callers
from tests.adapters.keras_training import BATCH, X, Y, close, equal, network, part, together, train, values

BACKEND = keras.backend.backend()


@keras.saving.register_keras_serializable("own")
class Halving(keras.optimizers.SGD):
    """A user's optimizer."""

    def __init__(self, learning_rate: Any = 0.01, factor: float = 0.5, **keywords: Any) -> None:
        super().__init__(learning_rate, **keywords)
        self.factor = factor

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient * self.factor, variable, learning_rate)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "factor": self.factor}


@pytest.mark.parametrize(
    "make",
    (keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.Lion, Halving),
    ids=lambda kind: kind.__name__,
)
def test_it_is_of_the_class_of_the_optimizer(hvd: Any, make: Any) -> None:
    original = make(0.125)
    optimizer = hvd.DistributedOptimizer(original)
    assert isinstance(optimizer, make) and optimizer.__class__ is type(original)
    assert keras.saving.serialize_keras_object(optimizer) == keras.saving.serialize_keras_object(original)
    assert keras.optimizers.get(optimizer) is optimizer
    assert optimizer.learning_rate is original.learning_rate
    again = type(optimizer).from_config(optimizer.get_config())
    assert type(again) is type(optimizer) and float(again.learning_rate.numpy()) == 0.125
    bare = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    assert type(bare) is type(original) and float(bare.learning_rate.numpy()) == 0.125


def test_it_keeps_what_the_optimizer_has_gathered(hvd: Any) -> None:
    reference, model = network(), network()
    train(reference, keras.optimizers.Adam(0.01), X, Y, epochs=2)
    plain = keras.optimizers.Adam(0.01)
    train(model, plain, X, Y)  # alone; each rank the same
    together(hvd, model, hvd.DistributedOptimizer(plain))
    close(model, reference)
    equal(hvd, model, model.optimizer)


@pytest.mark.parametrize("passes", (1, 2))
def test_saved_models_load_with_and_without_ranks(hvd: Any, folder: Path, passes: int) -> None:
    model = network()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), backward_passes_per_step=passes)
    together(hvd, model, optimizer)
    file = folder / "model.keras"
    if hvd.rank() == 0:
        model.save(file)
    hvd.barrier()
    plain, wrapped = keras.saving.load_model(file), hvd.load_model(file, compression=hvd.Compression.none)
    assert type(plain.optimizer) is type(keras.optimizers.Adam())
    assert isinstance(wrapped.optimizer, keras.optimizers.Adam) and type(wrapped.optimizer) is not type(plain.optimizer)
    saved = values(model, plain.optimizer)[: len(model.variables)] + values(plain.optimizer)
    for mine, expected in zip(values(wrapped, wrapped.optimizer), saved, strict=True):
        np.testing.assert_array_equal(mine, expected)
    if passes == 1:
        for mine, expected in zip(values(wrapped.optimizer), values(optimizer), strict=True):
            np.testing.assert_array_equal(mine, expected)
        rows = BATCH // hvd.size()
        for each in (model, wrapped):
            each.fit(part(X, hvd), part(Y, hvd), batch_size=rows, shuffle=False, verbose=0)
        close(wrapped, model)
        equal(hvd, wrapped, wrapped.optimizer)


def test_own_optimizers_and_none_load(hvd: Any, folder: Path) -> None:
    model = network()
    together(hvd, model, hvd.DistributedOptimizer(Halving(0.1, factor=0.25)))
    if hvd.rank() == 0:
        model.save(folder / "own.keras")
        network().save(folder / "bare.keras")
    hvd.barrier()
    loaded = hvd.load_model(folder / "own.keras", custom_optimizers=[Halving])
    assert isinstance(loaded.optimizer, Halving) and loaded.optimizer.factor == 0.25
    assert hasattr(loaded.optimizer, "process_set")
    assert getattr(hvd.load_model(folder / "bare.keras"), "optimizer", None) is None


def test_only_the_adapter_of_the_backend_is_imported(hvd: Any) -> None:
    hvd.DistributedOptimizer(keras.optimizers.SGD())
    adapters = {name.split(".")[1] for name in sys.modules if name.startswith("collectives.")} & {
        "tensorflow",
        "jax",
        "torch",
    }
    assert adapters == {BACKEND}


def test_what_it_refuses(hvd: Any) -> None:
    sgd = keras.optimizers.SGD
    with pytest.raises(TypeError, match=r"expected a keras\.optimizers\.Optimizer, got str"):
        hvd.DistributedOptimizer("sgd")
    with pytest.raises(ValueError, match="wrapped already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd()))
    with pytest.raises(ValueError, match="wrapped already"):
        hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(sgd())))
    with pytest.raises(ValueError, match="op != Average"):
        hvd.DistributedOptimizer(sgd(), op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        hvd.DistributedOptimizer(sgd(), backward_passes_per_step=0)
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        hvd.DistributedOptimizer(sgd(gradient_accumulation_steps=2), backward_passes_per_step=2)
    with pytest.raises(ValueError, match="groups should be"):
        hvd.DistributedOptimizer(sgd(), groups=-1)
    with pytest.raises(TypeError, match="op: expected"):
        hvd.DistributedOptimizer(sgd(), op="mean")
    with pytest.raises(ValueError, match="no variables yet"):
        hvd.PartialDistributedOptimizer(sgd(), local_layers=[keras.layers.Dense(2)])
    with pytest.raises(ValueError, match=r"keras\.layers\.Layer type"):
        hvd.PartialDistributedOptimizer(sgd(), local_layers=[3])
    with pytest.warns(DeprecationWarning, match="num_groups"):
        hvd.DistributedOptimizer(sgd(), num_groups=2)


@pytest.mark.mpi(min_size=2)
def test_ranks_with_other_models_get_an_error(hvd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From what runs eagerly the engine's own; from within a compiled step the framework's, with the engine's words in
    it."""
    monkeypatch.setattr(callers, "STUCK_AFTER", 1.0)  # JAX's threads have called, and might again
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3 + hvd.rank())])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), name="differing")
    grads = [keras.ops.ones(variable.shape) for variable in model.trainable_variables]
    with pytest.raises(MismatchError, match="rank"):
        optimizer.apply(grads, model.trainable_variables)
    with pytest.raises(Exception, match=r"the ranks disagree|deadlock"):
        together(hvd, model, optimizer, loss=lambda y, output: output)
    after = hvd.allreduce(np.array([hvd.rank()], "float32"), op=hvd.Sum)  # the ranks go on
    assert float(after[0]) == sum(range(hvd.size()))
