"""TensorFlow's own optimizers over several ranks: eagerly, in functions, and in graphs in the style of TensorFlow 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.engine import adasum

v1 = tf.compat.v1

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9),
    "adam": lambda: v1.train.AdamOptimizer(0.05),
    "adagrad": lambda: v1.train.AdagradOptimizer(0.1),
}
ROWS, WORDS = 4, 7
STEPS = 3


def data(rank: int, step: int) -> tuple[Any, Any, Any]:
    """Numbers, words and targets that differ from rank to rank and step to step."""
    draw = np.random.default_rng(100 * rank + step)
    return draw.standard_normal((ROWS, 3)), draw.integers(0, WORDS, ROWS), draw.standard_normal((ROWS, 2))


def whole(size: int, step: int) -> list[Any]:
    return [np.concatenate(parts) for parts in zip(*(data(rank, step) for rank in range(size)), strict=True)]


def initial() -> list[Any]:
    draw = np.random.default_rng(8)
    return [draw.standard_normal(shape) for shape in ((3, 2), (2,), (WORDS, 2))]


def loss_of(variables: list[Any], numbers: Any, words: Any, targets: Any) -> Any:
    kernel, bias, table = variables
    return tf.reduce_mean(tf.square(tf.tanh(numbers @ kernel + bias) + tf.gather(table, words) - targets))


@contextmanager
def control_flow(second: bool) -> Iterator[None]:
    """TensorFlow 1's, which goes with its variables, or TensorFlow 2's."""
    if not second:
        v1.disable_control_flow_v2()
    yield
    v1.enable_control_flow_v2()


def in_session(
    make: Callable[[], Any], feeds: list[Any], wrap: Any = lambda optimizer: optimizer, resource: bool = True
) -> list[Any]:
    """Train in a graph; the variables, and the global step."""
    with tf.Graph().as_default(), v1.variable_scope("model", use_resource=resource), control_flow(resource):
        given = [
            v1.placeholder(tf.float64, [None, 3]),
            v1.placeholder(tf.int64, [None]),
            v1.placeholder(tf.float64, [None, 2]),
        ]
        variables = [v1.get_variable(f"v{at}", initializer=value) for at, value in enumerate(initial())]
        count = v1.train.get_or_create_global_step()
        train = wrap(make()).minimize(loss_of(variables, *given), global_step=count)
        with v1.Session(
            config=v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
        ) as session:
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            for feed in feeds:
                session.run(train, dict(zip(given, feed, strict=True)))
            return list(session.run([*variables, count]))


def eagerly(
    make: Callable[[], Any], feeds: list[Any], wrap: Any = lambda optimizer: optimizer, graph: bool = False
) -> list[Any]:
    """Train without a session."""
    variables = [tf.Variable(value) for value in initial()]
    count = tf.Variable(0, dtype=tf.int64)
    optimizer = wrap(make())

    def step(*feed: Any) -> Any:
        optimizer.minimize(lambda: loss_of(variables, *feed), var_list=variables, global_step=count)

    run = tf.function(step, autograph=False) if graph else step
    for feed in feeds:
        run(*map(tf.constant, feed))
    return [variable.numpy() for variable in [*variables, count]]


def close(hvd: Any, found: list[Any], wanted: list[Any]) -> None:
    """The same as on one rank, to rounding, and the same on all ranks, bit for bit."""
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, 1e-9, 1e-9)
    everyone = hvd.allgather_object([each.tobytes() for each in found])
    assert all(each == everyone[0] for each in everyone)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_one_rank_with_the_whole_batch(hvd: Any, name: str) -> None:
    make, size = OPTIMIZERS[name], hvd.size()
    mine = [data(hvd.rank(), step) for step in range(STEPS)]
    wanted = eagerly(make, [whole(size, step) for step in range(STEPS)])
    assert wanted[-1] == STEPS
    close(hvd, in_session(make, mine, hvd.DistributedOptimizer), wanted)
    close(hvd, eagerly(make, mine, hvd.DistributedOptimizer, graph=name == "adam"), wanted)
    if name == "adagrad":
        close(hvd, in_session(make, mine, hvd.DistributedOptimizer, resource=False), wanted)


def test_options_that_change_no_result(hvd: Any) -> None:
    make, size = OPTIMIZERS["adagrad"], hvd.size()
    mine = [data(hvd.rank(), step) for step in range(STEPS)]
    wanted = eagerly(make, [whole(size, step) for step in range(STEPS)])
    options = {"sparse_as_dense": True, "groups": 2, "gradient_predivide_factor": 2.0}
    close(hvd, in_session(make, mine, lambda optimizer: hvd.DistributedOptimizer(optimizer, **options)), wanted)


def test_it_is_the_optimizer_still(hvd: Any) -> None:
    inner = v1.train.MomentumOptimizer(0.1, 0.9)
    optimizer = hvd.DistributedOptimizer(inner, name="other", use_locking=True)
    assert isinstance(optimizer, v1.train.MomentumOptimizer)
    variable = tf.Variable([1.0, 2.0])
    optimizer.minimize(lambda: tf.reduce_sum(variable * (hvd.rank() + 1.0)), var_list=[variable])
    mean = (hvd.size() + 1) / 2
    assert optimizer.get_slot_names() == inner.get_slot_names() == ["momentum"]
    np.testing.assert_allclose(optimizer.get_slot(variable, "momentum"), [mean, mean])
    assert inner.get_slot(variable, "momentum") is optimizer.get_slot(variable, "momentum")
    assert [each.shape for each in optimizer.variables()] == [(2,)]
    assert optimizer.get_name() == "Momentum"
    stranger = tf.Variable(1.0)
    pairs = optimizer.compute_gradients(lambda: tf.reduce_sum(variable), [variable, stranger])
    assert pairs[1] == (None, stranger)


def test_local_variables(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    for scale in (True, False):
        variable, own = tf.Variable(0.0), tf.Variable(0.0)
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), scale_local_gradients=scale)
        optimizer.register_local_var(own)
        optimizer.minimize(lambda variable=variable, own=own: (variable + own) * (rank + 1.0), var_list=[variable, own])
        np.testing.assert_allclose(variable.numpy(), -(size + 1) / 2)
        np.testing.assert_allclose(own.numpy(), -(rank + 1) / (size if scale else 1), rtol=1e-6)


def test_adasum_combines_steps(hvd: Any) -> None:
    """Every rank steps by itself; how far they have come is combined."""
    rank, size = hvd.rank(), hvd.size()
    for passes in (1, 2):
        starts = initial()
        every = []
        for other in range(size):
            ended = eagerly(OPTIMIZERS["momentum"], [data(other, step) for step in range(passes)])[:-1]
            every.append([end - start for end, start in zip(ended, starts, strict=True)])
        combined = [adasum.reference([delta.ravel() for delta in deltas]) for deltas in zip(*every, strict=True)]
        wanted = [start + delta.reshape(start.shape) for start, delta in zip(starts, combined, strict=True)]
        mine = [data(rank, step) for step in range(passes)]

        def wrap(optimizer: Any, passes: int = passes) -> Any:
            return hvd.DistributedOptimizer(optimizer, op=hvd.Adasum, backward_passes_per_step=passes)

        close(hvd, in_session(OPTIMIZERS["momentum"], mine, wrap, resource=passes == 1)[:-1], wanted)
        close(hvd, eagerly(OPTIMIZERS["momentum"], mine, wrap, graph=passes == 2)[:-1], wanted)


def test_refusals(hvd: Any) -> None:
    make = OPTIMIZERS["adam"]
    optimizer = hvd.DistributedOptimizer(make())
    with pytest.raises(InvalidArgumentError, match="wrapped already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(InvalidTypeError, match="or a Keras optimizer"):
        hvd.DistributedOptimizer("adam")
    for options in (
        {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
        {"op": hvd.Adasum, "average_aggregated_gradients": True},
        {"backward_passes_per_step": 0},
        {"op": hvd.Adasum, "backward_passes_per_step": 0},
        {"groups": -1},
    ):
        with pytest.raises(ValueError):
            hvd.DistributedOptimizer(make(), **options)
    with pytest.raises(InvalidTypeError, match="compression"):
        hvd.DistributedOptimizer(make(), compression=3)


@pytest.mark.parametrize("graph", (False, True), ids=("eagerly", "graph"))
def test_what_a_tape_has_combined_is_not_combined_again(hvd: Any, graph: bool) -> None:
    """By an optimizer of Keras 3; for those of TensorFlow 1 and Keras 2 test_keras2_combined.py shows it."""
    total = hvd.size() * (hvd.size() + 1) / 2
    for distributed in (False, True):
        for clip in (False, True):
            variable = tf.Variable([0.0, 0.0])
            optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), op=hvd.Sum, groups=1)
            assert isinstance(optimizer, tf.keras.optimizers.SGD)

            def step(
                variable: Any = variable, optimizer: Any = optimizer, distributed: bool = distributed, clip: bool = clip
            ) -> None:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(variable * (hvd.rank() + 1.0))
                if distributed:
                    tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
                grads = tape.gradient(loss, [variable])
                optimizer.apply_gradients(
                    zip(tf.clip_by_global_norm(grads, 1e6)[0] if clip else grads, [variable], strict=True)
                )

            (tf.function(step) if graph else step)()
            np.testing.assert_allclose(variable.numpy(), [-total, -total], rtol=1e-6)
