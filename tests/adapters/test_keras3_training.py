"""Keras: options of training on several ranks, on whichever backend KERAS_BACKEND names; recipes are in
test_keras3_recipes.py."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import collectives
from tests.adapters.keras_training import BATCH, X, Y, check_bits, close, equal, network, part, single, together, train

BACKEND = keras.backend.backend()


@pytest.mark.parametrize("passes", (1, 2))
@pytest.mark.mpi(min_size=2)
def test_one_call_for_all_gradients(hvd: Any, passes: int) -> None:
    """Four batches of a model with four variables."""
    model = network()
    together(hvd, model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=passes))
    before = collectives.world().statistics.rounds
    model.fit(part(X, hvd), part(Y, hvd), batch_size=BATCH // hvd.size(), shuffle=False, verbose=0)
    assert collectives.world().statistics.rounds - before == 4 // passes


@pytest.mark.mpi(min_size=2)
def test_the_same_bits_on_one_rank_and_on_two(hvd: Any, pair: Any) -> None:
    check_bits(hvd, pair)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="only there gradients may be sparse")
def test_sparse_gradients_of_the_tree_are_refused_or_made_dense(hvd: Any) -> None:
    import tensorflow as tf

    variable, grad = keras.Variable(np.zeros((2, 1))), tf.IndexedSlices(tf.ones([2, 1]), [1, 1], [2, 1])
    options = {"backward_passes_per_step": 2, "algorithm": "reproducible"}
    with pytest.raises(ValueError, match="sparse_as_dense"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options).apply([grad], [variable])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), sparse_as_dense=True, **options)
    for _ in range(2):
        optimizer.apply([grad], [variable])
    np.testing.assert_array_equal(variable.numpy(), [[0.0], [-4.0]])


@pytest.mark.skipif(BACKEND == "jax", reason="there all variables have gradients")
def test_a_variable_without_a_gradient_in_a_pass(hvd: Any) -> None:
    """With "reproducible" too, where the place of that pass in the tree has another step's gradients."""
    for algorithm in (None, "reproducible"):
        always, mostly = keras.Variable(0.0), keras.Variable(0.0)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=4, algorithm=algorithm)
        for number in range(8):
            grad = keras.ops.convert_to_tensor(10.0**number)
            optimizer.apply([grad, None if number in (2, 4) else grad], [always, mostly])
        values = [float(keras.ops.convert_to_numpy(each)) for each in (always, mostly)]
        assert values == [-11_111_111.0, -11_101_011.0], algorithm


def test_eagerly(hvd: Any) -> None:
    model = network()
    together(hvd, model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), run_eagerly=True)
    close(model, single())


@pytest.mark.skipif(BACKEND == "torch", reason="Keras refuses it on this backend")
def test_several_steps_per_execution(hvd: Any) -> None:
    model = network()
    together(hvd, model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), steps_per_execution=2)
    close(model, single())


def test_other_operations(hvd: Any) -> None:
    """A sum at a rate divided by the number of ranks is a mean, and so is a mean that is divided in two places, in
    groups, or compressed."""
    for rate, keywords, tolerance in (
        (0.1 / hvd.size(), {"op": hvd.Sum}, 3e-6),
        (0.1, {"gradient_predivide_factor": 2.0, "groups": 2}, 3e-6),
        (0.1, {"groups": ((0, 1), (2, 4))}, 3e-6),
        (0.1, {"compression": hvd.Compression.fp16}, 3e-3),
    ):
        model = network()
        if isinstance(groups := keywords.get("groups"), tuple):
            keywords["groups"] = [model.trainable_variables[slice(*each)] for each in groups]
        together(hvd, model, hvd.DistributedOptimizer(keras.optimizers.SGD(rate), **keywords))
        for mine, expected in zip(model.get_weights(), single().get_weights(), strict=True):
            np.testing.assert_allclose(mine, expected, atol=tolerance)


def test_local_layers_without_a_factor(hvd: Any) -> None:
    model = network()
    layer = model.get_layer("last")
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), local_layers=layer, scale_local_gradients=False
    )
    rows = BATCH // hvd.size()
    x, y = part(X, hvd)[:rows], part(Y, hvd)[:rows]
    alone = network()
    train(alone, keras.optimizers.SGD(0.1), x, y, rows)
    train(model, optimizer, x, y, rows)
    for mine, expected, then in zip(
        layer.get_weights(), alone.get_layer("last").get_weights(), network().get_weights()[2:], strict=True
    ):
        np.testing.assert_allclose(mine - then, expected - then, atol=1e-6)
    equal(hvd, model.get_layer("hidden"))


def test_ranks_that_are_not_in_the_process_set_train_alone(hvd: Any) -> None:
    members = hvd.add_process_set([0])
    try:
        rows, x, y = BATCH // hvd.size(), part(X, hvd), part(Y, hvd)
        alone, model = network(), network()
        train(alone, keras.optimizers.SGD(0.1), x, y, rows)
        train(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=members), x, y, rows)
        close(model, alone)
    finally:
        hvd.remove_process_set(members)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="only there XLA is in the way")
def test_xla_is_left_out_or_refused(hvd: Any) -> None:
    model = network()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    assert model.jit_compile is False
    scaled = keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    with pytest.raises(ValueError, match="pass jit_compile=False or leave it out"):
        model.compile(optimizer=scaled, loss="mse", jit_compile=True)
    model.compile(optimizer="sgd", loss="mse", jit_compile=True)
    assert model.jit_compile is True
    model.compile(optimizer=scaled, loss="mse")
    model.jit_compile = True
    if hvd.size() > 1:
        with pytest.raises(Exception, match="jit_compile=False"):
            model.fit(X[:4], Y[:4], verbose=0)
