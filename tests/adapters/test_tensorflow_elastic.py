"""The state of variables and of models of ``tf.keras``, on several ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from collectives.base.errors import MismatchError
from collectives.elastic import ElasticSampler


def test_variables_become_those_of_rank_0_and_return(hvd: Any) -> None:
    rank = hvd.rank()
    weights = tf.Variable(tf.fill([3, 2], float(rank)))
    halves = tf.Variable(tf.cast(tf.fill([5], rank), tf.bfloat16))
    count = tf.Variable(rank, dtype=tf.int64)
    sampler = ElasticSampler(range(3 * hvd.size()), shuffle=False)
    state = hvd.elastic.TensorFlowState([weights, halves, count], batch=10 + rank, sampler=sampler)
    state.sync()
    assert state.sampler is sampler and list(sampler) == list(range(rank, 3 * hvd.size(), hvd.size()))
    assert not np.any(weights) and not np.any(tf.cast(halves, tf.float32)) and (int(count), state.batch) == (0, 10)
    weights.assign_add(tf.ones([3, 2]))
    halves.assign(halves + 1)
    count.assign(9)
    state.batch = 11
    state.restore()
    assert not np.any(weights) and not np.any(tf.cast(halves, tf.float32)) and (int(count), state.batch) == (0, 10)
    weights.assign_add(tf.ones([3, 2]))
    state.commit()
    weights.assign_add(tf.ones([3, 2]))
    weights.assign_add(tf.ones([3, 2]))
    state.restore()
    assert np.all(weights == 1.0)


def test_variables_of_a_session(hvd: Any) -> None:
    rank = hvd.rank()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("v", initializer=tf.fill([3], float(rank)), use_resource=True)
        session.run(tf.compat.v1.global_variables_initializer())
        state = hvd.elastic.TensorFlowState(session=session, batch=rank)
        state.sync()
        assert session.run(variable).tolist() == [0, 0, 0] and state.batch == 0
        variable.load(np.full(3, 7.0), session)
        state.restore()
        assert session.run(variable).tolist() == [0, 0, 0]


def test_a_model_and_an_optimizer_of_a_newcomer(hvd: Any) -> None:
    newcomer = hvd.rank() == 0

    def make(value: float) -> tuple[Any, Any]:
        model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(2)])
        for variable in model.variables:
            variable.assign(tf.fill(variable.shape, value))
        return model, tf.keras.optimizers.Adam(0.1)

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.ones([1, 2])))
        tape = hvd.DistributedGradientTape(tape)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )

    model, optimizer = make(1.0 + hvd.rank())
    state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)
    state.sync()
    step()
    state.batch = 1
    state.commit()
    later = make(5.0)  # on all ranks: Keras numbers what a process makes
    if newcomer:
        model, optimizer = later
        state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)
    state.sync()
    values = [np.asarray(each).tolist() for each in [*model.variables, *optimizer.variables]]
    assert all(each == values for each in hvd.allgather_object(values))
    assert state.batch == 1 and optimizer.iterations.numpy() == 1
    step()
    state.restore()
    assert [np.asarray(each).tolist() for each in [*model.variables, *optimizer.variables]] == values


def test_a_model_must_be_built_and_alike(hvd: Any) -> None:
    with pytest.raises(ValueError, match=r"Model must be built first. Run `model.build\(input_shape\)`."):
        hvd.elastic.TensorFlowKerasState(tf.keras.Sequential([tf.keras.layers.Dense(2)]))
    last = hvd.size() - 1
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(2 + (hvd.rank() == last))])
    state = hvd.elastic.TensorFlowKerasState(model, tf.keras.optimizers.SGD(0.1))
    with pytest.raises(MismatchError, match=rf"model: variable 0 is not .*; float32 of shape \(2, 3\) on rank {last}"):
        state.sync()
