"""A scaling optimizer of TensorFlow 1, and the hook for sessions; whole trainings are in test_tensorflow_recipes.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

v1 = tf.compat.v1


@pytest.mark.parametrize("outside", (True, False), ids=("scales outside", "scales inside"))
def test_a_scaling_optimizer_of_tensorflow_1(hvd: Any, outside: bool) -> None:
    rank, size = hvd.rank(), hvd.size()
    scaling = v1.mixed_precision.MixedPrecisionLossScaleOptimizer
    with tf.Graph().as_default():
        scale = v1.mixed_precision.DynamicLossScale(initial_loss_scale=64.0, increment_period=100)
        slope = v1.placeholder(tf.float32, [])
        variable = v1.get_variable("v", initializer=np.float32(3.0), use_resource=True)
        plain = v1.train.GradientDescentOptimizer(1.0)
        optimizer = (
            scaling(hvd.DistributedOptimizer(plain), scale)
            if outside
            else hvd.DistributedOptimizer(scaling(plain, scale))
        )
        train_op = optimizer.minimize(slope * variable)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            session.run(train_op, {slope: rank + 1.0})
            np.testing.assert_allclose(session.run(variable), 3.0 - (size + 1) / 2)
            session.run(train_op, {slope: np.inf if rank == size - 1 else 1.0})
            np.testing.assert_allclose(session.run(variable), 3.0 - (size + 1) / 2)


@pytest.mark.parametrize("outside", (True, False), ids=("scales outside", "scales inside"))
def test_a_scaling_optimizer_and_a_pass_that_overflows_on_one_rank(hvd: Any, outside: bool) -> None:
    """The ranks decide alike in every pass, and scale alike thereafter."""
    rank, size = hvd.rank(), hvd.size()
    scaling = v1.mixed_precision.MixedPrecisionLossScaleOptimizer
    with tf.Graph().as_default():
        scale = v1.mixed_precision.DynamicLossScale(initial_loss_scale=64.0, increment_period=100)
        slope = v1.placeholder(tf.float32, [])
        variable = v1.get_variable("v", initializer=np.float32(3.0), use_resource=True)
        inner = v1.train.GradientDescentOptimizer(1.0)
        inner = inner if outside else scaling(inner, scale)
        optimizer = hvd.DistributedOptimizer(inner, backward_passes_per_step=2)
        train_op = (scaling(optimizer, scale) if outside else optimizer).minimize(slope * variable)
        with v1.Session() as session:
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            for overflows in (False, False, True, False, False, False):
                session.run(train_op, {slope: np.inf if overflows and rank == size - 1 else rank + 1.0})
            np.testing.assert_allclose(session.run(variable), 3.0 - 2 * (size + 1))
            assert session.run(scale()) == 32.0


def test_the_hook_broadcasts(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    root = size - 1
    hook = hvd.BroadcastGlobalVariablesHook(root)
    for _ in range(2):  # a hook serves another graph, too
        with tf.Graph().as_default():
            variables = [v1.get_variable(f"v{at}", initializer=np.arange(3.0) + 10 * rank + at) for at in range(3)]
            count = v1.train.get_or_create_global_step()
            local = v1.get_variable("l", initializer=np.float64(rank), collections=[v1.GraphKeys.LOCAL_VARIABLES])
            with v1.train.MonitoredTrainingSession(
                hooks=[hook], config=v1.ConfigProto(inter_op_parallelism_threads=1)
            ) as session:
                found = session.run([*variables, count, local])
        for at, value in enumerate(found[:3]):
            np.testing.assert_array_equal(value, np.arange(3.0) + 10 * root + at)
        assert found[4] == rank


def test_the_hook_of_a_process_set(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    if size == 1:
        return
    others = hvd.add_process_set(range(1, size))
    hook = hvd.BroadcastGlobalVariablesHook(size - 1, process_set=others)
    with tf.Graph().as_default():
        variable = v1.get_variable("v", initializer=np.float64(rank))
        v1.train.get_or_create_global_step()
        with v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
            assert session.run(variable) == (size - 1 if rank else 0)
    hvd.remove_process_set(others)
