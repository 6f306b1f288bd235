"""Whatever comes between computing gradients and applying them, each is combined over the ranks once: no more, and no
less."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import collectives.tensorflow
from collectives.base.errors import InvalidArgumentError

RATE = 0.25
KINDS: dict[str, Callable[[], Any]] = {
    "v1": lambda: tf.compat.v1.train.GradientDescentOptimizer(RATE),
    "new": lambda: tf.keras.optimizers.SGD(RATE),
    "old": lambda: tf.keras.optimizers.legacy.SGD(RATE),
}
FACTORS = np.array([[1.0, 3.0], [2.0, -5.0], [4.0, 7.0]])
"""The gradient of each rank."""


def wanted(hvd: Any, op: Any, passes: int = 1) -> Any:
    """The variables after one step from zero."""
    total = FACTORS[: hvd.size()].sum(0) * passes
    return -RATE * (total if op == hvd.Sum else total / hvd.size())


def mine(hvd: Any) -> Any:
    return tf.constant(FACTORS[hvd.rank()], tf.float32)


def variables() -> list[Any]:
    return [tf.Variable(np.zeros(2, np.float32)), tf.Variable(np.zeros(2, np.float32))]


def loss_of(hvd: Any, found: list[Any]) -> Any:
    return tf.reduce_sum(mine(hvd) * (found[0] + found[1]))


def clipped(pairs: Any) -> list[Any]:
    """By a norm that is not reached, so that the numbers stay."""
    grads, found = zip(*pairs, strict=True)
    return list(zip(tf.clip_by_global_norm(grads, 1e6)[0], found, strict=True))


def run(step: Callable[..., None], graph: bool, *arguments: Any) -> None:
    (tf.function(step) if graph else step)(*arguments)


def taped(
    hvd: Any, optimizer: Any, found: list[Any], between: Any = list, wrap: Any = lambda tape: tape
) -> Callable[[], None]:
    """A step that computes gradients by a tape."""

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(hvd, found)
        optimizer.apply_gradients(between(zip(wrap(tape).gradient(loss, found), found, strict=True)))

    return step


def check(found: list[Any], expected: Any) -> None:
    for variable in found:
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-6)


@pytest.fixture(scope="module")
def hvd(hvd: Any) -> Any:
    """The adapter for optimizers of TensorFlow, too."""
    return collectives.tensorflow


# A sum shows what is combined twice; a mean goes other ways where it is in doubt, which are the same for all kinds.
kinds_and_operations = pytest.mark.parametrize(("kind", "op"), [*((kind, "Sum") for kind in KINDS), ("new", "Average")])


@pytest.mark.parametrize("graph", (False, True), ids=("eagerly", "graph"))
@pytest.mark.parametrize("between", (list, clipped), ids=("as they are", "clipped"))
@kinds_and_operations
def test_computed_gradients_are_combined_once(hvd: Any, kind: str, op: str, between: Any, graph: bool) -> None:
    operation, found = getattr(hvd, op), variables()
    optimizer = hvd.DistributedOptimizer(KINDS[kind](), op=operation)
    loss = lambda: loss_of(hvd, found)  # noqa: E731

    def step(*flags: str) -> None:
        pairs = optimizer.compute_gradients(loss, found)
        for grad, _ in pairs:
            if not graph:
                np.testing.assert_allclose(grad.numpy() * -RATE, wanted(hvd, operation), rtol=1e-6)
        optimizer.apply_gradients(between(pairs), **dict.fromkeys(flags, "skip" in str(flags)))

    run(step, graph)
    check(found, wanted(hvd, operation))
    for flag in {"new": ("skip_gradients_aggregation",), "old": ("experimental_aggregate_gradients",)}.get(kind, ()):
        run(step, graph, flag)
        check(found, 2 * wanted(hvd, operation))


@pytest.mark.parametrize("graph", (False, True), ids=("eagerly", "graph"))
@kinds_and_operations
def test_gradients_of_any_tape_are_combined_once(hvd: Any, kind: str, op: str, graph: bool) -> None:
    operation = getattr(hvd, op)
    for wrap in (lambda tape: tape, lambda tape: hvd.DistributedGradientTape(tape, op=operation)):
        for between in (list, clipped):
            found = variables()
            run(taped(hvd, hvd.DistributedOptimizer(KINDS[kind](), op=operation), found, between, wrap), graph)
            check(found, wanted(hvd, operation))


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_left_is_combined(hvd: Any, kind: str) -> None:
    found = variables()
    optimizer = hvd.DistributedOptimizer(KINDS[kind](), op=hvd.Sum)
    pairs = optimizer.compute_gradients(lambda: loss_of(hvd, found), found[:1])
    optimizer.apply_gradients([*clipped(pairs), (mine(hvd), found[1])])
    check(found, wanted(hvd, hvd.Sum))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_fewer_ranks_are_combined_over_the_others(hvd: Any, kind: str) -> None:
    alone = hvd.add_process_set([hvd.size() - 1])
    for graph in (False, True):
        found = variables()
        wrap = lambda tape: hvd.DistributedGradientTape(tape, process_set=alone)  # noqa: E731
        run(taped(hvd, hvd.DistributedOptimizer(KINDS[kind]()), found, wrap=wrap), graph)
        check(found, wanted(hvd, hvd.Average))
    hvd.remove_process_set(alone)


@pytest.mark.parametrize("kind", KINDS)
def test_local_gradients_are_divided_once(hvd: Any, kind: str) -> None:
    found = variables()
    optimizer = hvd.DistributedOptimizer(KINDS[kind]())
    optimizer.register_local_var(found[1])
    optimizer.apply_gradients(clipped(optimizer.compute_gradients(lambda: loss_of(hvd, found), found)))
    check(found[:1], wanted(hvd, hvd.Average))
    np.testing.assert_allclose(found[1].numpy(), -RATE * mine(hvd) / hvd.size(), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_doubtful_gradients_that_differ(hvd: Any, kind: str) -> None:
    """Combined gradients were computed, and others are applied: averaged they are right, and summed nobody can know."""
    found = variables()
    optimizer = hvd.DistributedOptimizer(KINDS[kind]())
    optimizer.compute_gradients(lambda: loss_of(hvd, found), found)
    optimizer.apply_gradients([(mine(hvd), variable) for variable in found])
    check(found, wanted(hvd, hvd.Average))
    optimizer = hvd.DistributedOptimizer(KINDS[kind](), op=hvd.Sum)
    optimizer.compute_gradients(lambda: loss_of(hvd, found), found)
    with pytest.raises(InvalidArgumentError, match="gradients differ, but"):
        optimizer.apply_gradients([(mine(hvd), variable) for variable in found])
    check(found, wanted(hvd, hvd.Average))

    @tf.function
    def step(numbers: Any) -> None:
        optimizer.compute_gradients(lambda: loss_of(hvd, found), found)
        optimizer.apply_gradients([(numbers, variable) for variable in found])

    with pytest.raises(tf.errors.InvalidArgumentError, match="gradients differ, but"):
        step(mine(hvd))
    check(found, wanted(hvd, hvd.Average))
    hvd.allreduce(tf.constant(0.0))  # the ranks are still together


def rows_of(hvd: Any, values: Any, row: int) -> Any:
    return tf.IndexedSlices(tf.constant(values, tf.float32), tf.constant([row]), tf.constant([4, 2]))


SIMILAR: dict[str, Callable[[Any], Any]] = {
    "sums of zero": lambda hvd: mine(hvd) - tf.reduce_mean(mine(hvd)),
    "many elements": lambda hvd: tf.random.stateless_normal([2_000_000], [hvd.rank(), 0]),
    "sums of zero in rows": lambda hvd: rows_of(hvd, [[1 + hvd.rank(), -1 - hvd.rank()]], 2),
    "the same in other rows": lambda hvd: rows_of(hvd, [[1.0, 2.0]], hvd.rank()),
    "an empty share": lambda hvd: tf.IndexedSlices(tf.ones([hvd.rank(), 2]), tf.range(hvd.rank()), tf.constant([4, 2])),
}


@pytest.mark.parametrize("case", SIMILAR)
def test_doubtful_gradients_that_differ_in_little(hvd: Any, case: str) -> None:
    """The gradients of softmax layers add up to zero on every rank, and those of large layers nearly so."""
    grad = SIMILAR[case](hvd)
    variable = tf.Variable(tf.zeros_like(tf.convert_to_tensor(grad)))
    optimizer = hvd.DistributedOptimizer(KINDS["new"]())
    optimizer.compute_gradients(lambda: tf.reduce_sum(variable * hvd.rank()), [variable])
    optimizer.apply_gradients([(grad, variable)])
    expected = -RATE * hvd.allreduce(tf.convert_to_tensor(grad))
    np.testing.assert_allclose(variable.numpy(), expected.numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("graph", (False, True), ids=("eagerly", "graph"))
@pytest.mark.parametrize("kind", KINDS)
def test_several_passes_count_once(hvd: Any, kind: str, graph: bool) -> None:
    for compute in (True, False):
        found = variables()
        optimizer = hvd.DistributedOptimizer(KINDS[kind](), op=hvd.Sum, backward_passes_per_step=2)

        def computed(found: Any = found, optimizer: Any = optimizer) -> None:
            optimizer.apply_gradients(clipped(optimizer.compute_gradients(lambda: loss_of(hvd, found), found)))

        step = computed if compute else taped(hvd, optimizer, found)
        run_again = tf.function(step) if graph else step
        for steps in (0, 1, 1, 2):
            run_again()
            check(found, steps * wanted(hvd, hvd.Sum, passes=2))


@pytest.mark.parametrize("kind", ("new", "old"))
def test_sums_of_passes_are_not_passed_by(hvd: Any, kind: str) -> None:
    optimizer = hvd.DistributedOptimizer(KINDS[kind](), backward_passes_per_step=2)
    flag = {"new": {"skip_gradients_aggregation": True}, "old": {"experimental_aggregate_gradients": False}}[kind]
    with pytest.raises(InvalidArgumentError, match="cannot apply gradients that it has not combined itself"):
        optimizer.apply_gradients([(mine(hvd), variables()[0])], **flag)


@pytest.mark.parametrize("outside", (False, True))
@pytest.mark.parametrize("kind", ("new", "old"))
def test_scaled_losses_are_combined_once(hvd: Any, kind: str, outside: bool) -> None:
    scaling = partial(tf.keras.mixed_precision.LossScaleOptimizer, initial_scale=8)
    wrap = partial(hvd.DistributedOptimizer, op=hvd.Sum)
    for graph in (False, True):
        found = variables()
        optimizer = scaling(wrap(KINDS[kind]())) if outside else wrap(scaling(KINDS[kind]()))

        def step(found: Any = found, optimizer: Any = optimizer) -> None:
            optimizer.minimize(lambda: loss_of(hvd, found), found)

        run(step, graph)
        check(found, wanted(hvd, hvd.Sum))


@pytest.mark.parametrize("kind", ("new", "old"))
def test_a_pass_whose_scaled_loss_overflows_on_one_rank(hvd: Any, kind: str) -> None:
    """The ranks decide alike in every pass: they scale and count alike thereafter."""
    found = variables()
    optimizer = hvd.DistributedOptimizer(KINDS[kind](), backward_passes_per_step=2)
    optimizer = tf.keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=8)
    for overflows in (False, False, True, False, False, False):
        factor = np.inf if overflows and hvd.rank() == hvd.size() - 1 else 1.0
        optimizer.minimize(lambda factor=factor: factor * loss_of(hvd, found), found)
    check(found, 2 * wanted(hvd, hvd.Average, passes=2))
    state = float(optimizer.loss_scale), int(optimizer.iterations)
    assert hvd.allgather_object(state) == [(4.0, state[1])] * hvd.size()
