"""Gradients that add up over several passes before they are combined."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

v1 = tf.compat.v1

PASSES, STEPS, RATE = 2, 2, 0.5


def slope(rank: int, number: int) -> Any:
    """The gradient of a rank's loss in its pass of this number."""
    return np.array([1.0, -2.0]) * (rank + 1) + number


def loss_of(variable: Any, unused: Any, slopes: Any) -> Any:
    return tf.reduce_sum(variable * slopes)


def wanted(size: int, average: bool, op: str) -> Any:
    """After each pass: the start, less rate times what the passes of the finished steps sum up to."""
    combine = {"average": np.mean, "sum": np.sum}[op]
    passes = np.array(
        [combine([slope(rank, number) for rank in range(size)], axis=0) for number in range(PASSES * STEPS)]
    )
    passes = passes / PASSES if average else passes
    done = [(number + 1) // PASSES * PASSES for number in range(len(passes))]
    return np.array([[4.0, 5.0] - RATE * passes[:until].sum(0) for until in done])


def make(hvd: Any, **options: Any) -> Any:
    return hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(RATE), backward_passes_per_step=PASSES, **options)


def in_session(hvd: Any, resource: bool = True, **options: Any) -> tuple[Any, list[int]]:
    """Where the variable is after each pass, and the global step."""
    with tf.Graph().as_default(), v1.variable_scope("model", use_resource=resource):
        given = v1.placeholder(tf.float64, [2])
        variable = v1.get_variable("v", initializer=np.array([4.0, 5.0]))
        unused = v1.get_variable("unused", initializer=np.array([1.0]))
        count = v1.train.get_or_create_global_step()
        train = make(hvd, **options).minimize(loss_of(variable, unused, given), count, [variable, unused])
        found, counts = [], []
        with v1.train.MonitoredTrainingSession(config=v1.ConfigProto(inter_op_parallelism_threads=1)) as session:
            for number in range(PASSES * STEPS):
                session.run(train, {given: slope(hvd.rank(), number)})
                found.append(session.run(variable))
                counts.append(int(session.run(count)))
    return np.array(found), counts


def eagerly(hvd: Any, graph: bool, **options: Any) -> tuple[Any, list[int]]:
    variable, unused, count = tf.Variable([4.0, 5.0], dtype=tf.float64), tf.Variable([1.0]), tf.Variable(0)
    optimizer = make(hvd, **options)

    def step(slopes: Any) -> None:
        optimizer.minimize(lambda: loss_of(variable, unused, slopes), count, [variable, unused])

    run = tf.function(step) if graph else step
    found, counts = [], []
    for number in range(PASSES * STEPS):
        run(tf.constant(slope(hvd.rank(), number)))
        found.append(variable.numpy())
        counts.append(int(count))
    return np.array(found), counts


@pytest.mark.parametrize(("op", "average"), (("average", False), ("sum", True)))
def test_passes_add_up(hvd: Any, op: str, average: bool) -> None:
    options = {"op": {"average": hvd.Average, "sum": hvd.Sum}[op], "average_aggregated_gradients": average}
    runs = [eagerly(hvd, False, **options), eagerly(hvd, True, **options), in_session(hvd, **options)]
    if average:
        v1.disable_control_flow_v2()  # variables of TensorFlow 1 go with its control flow
        try:
            runs.append(in_session(hvd, resource=False, **options))
        finally:
            v1.enable_control_flow_v2()
    for found, counts in runs:
        np.testing.assert_allclose(found, wanted(hvd.size(), average, op), rtol=1e-12)
        assert counts == list(range(1, PASSES * STEPS + 1))


def test_local_variables_add_up(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    variable, own = tf.Variable(0.0), tf.Variable(0.0)
    optimizer = make(hvd)
    optimizer.register_local_var(own)

    @tf.function
    def step() -> None:
        optimizer.minimize(lambda: (variable + own) * (rank + 1.0), var_list=[variable, own])

    for _ in range(PASSES):
        step()
    np.testing.assert_allclose(variable.numpy(), -RATE * PASSES * (size + 1) / 2)
    np.testing.assert_allclose(own.numpy(), -RATE * PASSES * (rank + 1) / size)


def test_several_functions_share_one_cycle(hvd: Any) -> None:
    """As when a last, smaller batch makes TensorFlow trace again, or a rank alone does so."""
    variable = tf.Variable([4.0, 5.0], dtype=tf.float64)
    optimizer = make(hvd)

    @tf.function
    def step(slopes: Any) -> None:
        optimizer.minimize(lambda: tf.reduce_sum(tf.reduce_mean(slopes, 0) * variable), var_list=[variable])

    for number in range(PASSES):
        rows = 1 + (hvd.rank() + number) % 2
        step(tf.constant([slope(hvd.rank(), number)] * rows))
    np.testing.assert_allclose(variable.numpy(), wanted(hvd.size(), False, "average")[PASSES - 1], rtol=1e-12)


def test_sparse_gradients(hvd: Any) -> None:
    table = tf.Variable(tf.zeros([3, 2]))

    def loss() -> Any:
        return tf.reduce_sum(tf.gather(table, [hvd.rank() % 3]))

    with pytest.raises(ValueError, match="sparse_as_dense"):
        make(hvd).minimize(loss, var_list=[table])
    optimizer = make(hvd, sparse_as_dense=True)
    for _ in range(PASSES):
        optimizer.minimize(loss, var_list=[table])
    counts = np.bincount([rank % 3 for rank in range(hvd.size())], minlength=3)
    np.testing.assert_allclose(table.numpy(), np.tile(-RATE * PASSES * counts / hvd.size(), (2, 1)).T, rtol=1e-6)


def test_a_variable_without_a_gradient_in_a_pass(hvd: Any) -> None:
    """With "reproducible" too, where the place of that pass in the tree has another step's gradients."""
    for algorithm in (None, "reproducible"):
        always, mostly = tf.Variable(0.0), tf.Variable(0.0)
        optimizer = hvd.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=4, algorithm=algorithm
        )
        for number in range(8):
            used = [always] if number in (2, 4) else [always, mostly]
            optimizer.minimize(lambda used=used, number=number: 10.0**number * sum(used), var_list=[always, mostly])
        assert (always.numpy(), mostly.numpy()) == (-11_111_111.0, -11_101_011.0), algorithm


def test_several_lists_of_variables_are_refused(hvd: Any) -> None:
    a, b = tf.Variable(1.0), tf.Variable(1.0)
    optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2)
    optimizer.compute_gradients(lambda: 10 * a, [a])
    with pytest.raises(ValueError, match=r"backward_passes_per_step.*the same variables in every backward pass"):
        optimizer.compute_gradients(lambda: b, [b])
