"""Collectives in graphs: in which order they run, that none waits for what another rank holds, and what becomes of
errors and of memory."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from collectives.base.errors import MismatchError
from collectives.engine import callers
from collectives.tensorflow import graph, status
from collectives.worlds.runtime import world


def one_thread() -> Any:
    """The settings of a session that has one thread for everything."""
    return tf.compat.v1.ConfigProto(
        inter_op_parallelism_threads=1, intra_op_parallelism_threads=1, use_per_session_threads=True
    )


def ranks_sum(hvd: Any) -> int:
    return sum(rank + 1 for rank in range(hvd.size()))


# ---- graphs for sessions


def test_eight_in_a_session_of_one_thread_in_another_order_on_every_rank(hvd: Any) -> None:
    order = np.random.default_rng(hvd.rank()).permutation(8)
    with tf.Graph().as_default():
        inputs: dict[int, Any] = {}
        given = tf.compat.v1.placeholder(tf.float32, [None])
        before = given
        for number in order:
            # Ready one after the other, in this rank's order; the collectives themselves do not depend on each other.
            with tf.control_dependencies([before]):
                before = inputs[number] = given * float(number + 1)
        reduced = [hvd.allreduce(inputs[number], op=hvd.Sum, name=f"tensor {number}") for number in range(8)]
        with tf.compat.v1.Session(config=one_thread()) as session:
            for step in range(3):
                found = session.run(reduced, {given: [float(hvd.rank() + step)]})
                total = sum(range(hvd.size())) + step * hvd.size()
                assert [x.tolist() for x in found] == [[total * (number + 1.0)] for number in range(8)]
            some = session.run([reduced[5], reduced[2]], {given: [1.0]})
            assert [x.tolist() for x in some] == [[6.0 * hvd.size()], [3.0 * hvd.size()]]


def test_names_in_a_session_graph(hvd: Any) -> None:
    """Of equal names, and of none, each has its own; scopes count unless told otherwise."""
    with tf.Graph().as_default():
        x = tf.constant([float(hvd.rank())])
        reduced = []
        for scope in ("one", "two"):
            with tf.name_scope(scope):
                reduced += [hvd.allreduce(x + 1, op=hvd.Sum, name="same"), hvd.allreduce(x + 2, op=hvd.Sum)]
                reduced += [hvd.allreduce(x + 3, op=hvd.Sum, name="bare", ignore_name_scope=True)]
        order = reduced if hvd.rank() % 2 else reduced[::-1]
        with tf.compat.v1.Session(config=one_thread()) as session:
            found = session.run(order)
        ranks = sum(range(hvd.size()))
        expected = [[ranks + k * hvd.size()] for k in (1, 2, 3)] * 2
        assert [value.tolist() for value in found] == (expected if hvd.rank() % 2 else expected[::-1])


def test_what_is_constant_is_combined_in_every_run(hvd: Any) -> None:
    """No optimizer of graphs may take a collective for a computation that it can make beforehand, or twice for once."""
    done = hvd.allreduce(0.0)
    with tf.Graph().as_default():
        same = [hvd.allreduce(tf.ones(3), op=hvd.Sum), hvd.allreduce(tf.ones(3), op=hvd.Sum)]
        with tf.compat.v1.Session() as session:
            before = world().statistics.tensors
            for _ in range(2):
                assert [value.tolist() for value in session.run(same)] == [[hvd.size()] * 3] * 2
            assert world().statistics.tensors - before == 4
    assert done.numpy() == 0


def test_control_flow_in_a_session(hvd: Any) -> None:
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [])
        branched = tf.cond(x > 0, lambda: hvd.allreduce(x, op=hvd.Sum), lambda: hvd.allreduce(-x, op=hvd.Max))
        _, looped = tf.while_loop(
            lambda i, y: i < 3, lambda i, y: (i + 1, hvd.allreduce(y, op=hvd.Sum)), [0, x], parallel_iterations=1
        )
        with tf.compat.v1.Session(config=one_thread()) as session:
            value = float(hvd.rank() + 1)
            assert session.run([branched, looped], {x: value}) == [ranks_sum(hvd), ranks_sum(hvd) * hvd.size() ** 2]
            assert session.run(branched, {x: -value}) == hvd.size()


# ---- functions


def test_the_order_of_the_program_in_functions(hvd: Any) -> None:
    """Unnamed ones of equal shape, through nested functions and control flow: they pair up by order, or the numbers are
    wrong."""
    ranks = ranks_sum(hvd)

    @tf.function
    def inner(x: Any) -> Any:
        y = hvd.allreduce(x, op=hvd.Sum)
        z = hvd.allreduce(x * 10, op=hvd.Sum)
        return z, y  # whatever the order of results

    @tf.function
    def outer(x: Any, steps: Any) -> Any:
        a = hvd.allreduce(x + 1, op=hvd.Sum)
        b, c = inner(x)
        d = hvd.allreduce(x + 2, op=hvd.Sum)
        if steps > 1:
            e = hvd.allreduce(x + 3, op=hvd.Sum)
            hvd.allreduce(x + 4, op=hvd.Sum)
        else:
            e = inner(x + 5)[1]
        found = tf.TensorArray(tf.float32, 0, dynamic_size=True)
        for i in tf.range(steps):
            x2 = tf.cast(i, tf.float32) * x
            inner(x)
            found = found.write(i, hvd.allreduce(x2, op=hvd.Sum) + hvd.allreduce(x2 * 100, op=hvd.Sum))
        return a, b, c, d, e, found.stack()

    x = tf.constant(float(hvd.rank() + 1))
    size = hvd.size()
    for steps in (1, 4):
        a, b, c, d, e, rows = outer(x, tf.constant(steps))
        branch = ranks + 3 * size if steps > 1 else ranks + 5 * size
        assert [float(value) for value in (a, b, c, d, e)] == [
            ranks + size,
            10 * ranks,
            ranks,
            ranks + 2 * size,
            branch,
        ]
        assert rows.numpy().tolist() == [101.0 * i * ranks for i in range(steps)]


def test_the_first_collective_may_come_with_a_later_trace(hvd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Horovod's elastic programs, whose first step builds the model without a collective."""
    monkeypatch.setattr(graph, "_order", None)

    @tf.function
    def step(communicates: bool) -> Any:
        value = tf.ones(3) * float(1 + hvd.rank())
        return hvd.allreduce(value, op=hvd.Sum) if communicates else value

    assert step(False).numpy().tolist() == [1.0 + hvd.rank()] * 3
    assert step(True).numpy().tolist() == [hvd.size() * (hvd.size() + 1) / 2] * 3


def test_a_result_that_only_one_rank_uses(hvd: Any) -> None:

    @tf.function
    def function(x: Any) -> Any:
        first = hvd.allreduce(x, op=hvd.Sum)
        second = hvd.allreduce(x * 2, op=hvd.Sum)
        hvd.broadcast(x, 0)
        return first if hvd.rank() == 0 else second

    assert float(function(tf.constant(1.0))) == hvd.size() * (1 if hvd.rank() == 0 else 2)


def test_a_rank_that_traces_again_when_the_others_do_not(hvd: Any) -> None:

    @tf.function
    def function(x: Any, kind: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            once, twice = hvd.allreduce(x, op=hvd.Sum), hvd.allreduce(x * 2, op=hvd.Sum, name="twice")
        return once, twice, tape.gradient([once, twice], x)

    for step in range(4):
        kind = step if hvd.rank() == 0 else 0  # a Python number: traced for each
        once, twice, gradient = function(tf.constant([1.0 + hvd.rank()]), kind)
        assert once.numpy().tolist() == [ranks_sum(hvd)] and twice.numpy().tolist() == [2 * ranks_sum(hvd)]
        assert gradient.numpy().tolist() == [3 * hvd.size()]


def test_functions_of_several_threads(hvd: Any) -> None:
    """Traced by threads of their own, they run at the same time, each on every rank, in any order."""
    started = threading.Barrier(4)
    found: dict[int, list[float]] = {}

    def work(number: int) -> None:
        @tf.function
        def function(x: Any) -> Any:
            y = hvd.allreduce(x, op=hvd.Sum, name=f"thread {number} first")
            return hvd.allreduce(y * x, op=hvd.Sum, name=f"thread {number} second")

        started.wait(30)
        found[number] = [float(function(tf.constant(float(number + hvd.rank() + step)))) for step in range(3)]

    numbers = np.random.default_rng(hvd.rank()).permutation(4)
    threads = [threading.Thread(target=work, args=(int(number),)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    for number in range(4):
        sums = [sum(number + rank + step for rank in range(hvd.size())) for step in range(3)]
        assert found[number] == [total * total for total in sums]


# ---- memory


def test_large_results_are_not_copied(hvd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    memory = world().memory

    def noted(count: int, dtype: Any) -> Any:
        array = memory(count, dtype)
        made.append(array.ctypes.data)
        return array

    monkeypatch.setattr(world(), "memory", noted)

    @tf.function
    def function(*tensors: Any) -> Any:
        return hvd.grouped_allreduce([x + 1 for x in tensors], op=hvd.Sum)

    # Small, a multiple of 64 bytes, small, not a multiple, a multiple.
    found = function(*[tf.zeros(shape) for shape in ((3,), (100, 700), (5,), (100_001,), (20_000,))])
    assert all(np.all(x.numpy() == hvd.size()) for x in found)
    shared, own = made
    addresses = [np.asarray(x).ctypes.data for x in found]
    assert [addresses[1], addresses[3], addresses[4]] == [shared + 64, own, shared + 64 + 4 * 70_000]
    made.clear()
    found = hvd.grouped_allreduce(
        [tf.ones(3), tf.ones(100_001), tf.cast(tf.ones(5), tf.bfloat16), tf.ones(7)], op=hvd.Sum
    )
    addresses = [np.asarray(x).ctypes.data for x in found]
    assert addresses == [made[0], made[0] + 64, made[1], made[0] + 64 + 4 * 100_016]
    assert all(np.all(x.numpy() == hvd.size()) for x in found)


def test_functions_traced_again_share_their_callbacks(hvd: Any) -> None:

    def trace() -> None:
        @tf.function
        def function(x: Any) -> Any:
            return hvd.allreduce(x, op=hvd.Sum, name="again and again"), hvd.allgather(x, name="gathered again")

        function(tf.ones(17))

    trace()
    gc.collect()
    before = status._guarded.cache_info().currsize
    for _ in range(5):
        trace()
    assert status._guarded.cache_info().currsize == before


# ---- errors


def test_other_orders_on_other_ranks_end_with_an_error(hvd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback waits for a thread of the program, which waits for the callback: that nothing more can come is
    noticed."""
    monkeypatch.setattr(callers, "STUCK_AFTER", 0.5)

    def one_after_the_other() -> Any:
        names = ["here", "there"] if hvd.rank() % 2 else ["there", "here"]
        return [hvd.allreduce(tf.ones(1), op=hvd.Sum, name=name) for name in names]

    for function in (one_after_the_other, tf.function(one_after_the_other)):
        with pytest.raises((MismatchError, tf.errors.OpError), match="every rank waits"):
            function()
        hvd.barrier()


def test_xla_is_refused_by_name(hvd: Any) -> None:

    @tf.function
    def inner(x: Any) -> Any:
        return hvd.allreduce(x)

    for function in (
        lambda x: hvd.allreduce(x),
        inner,
        lambda x: tf.cond(x[0] > 0, lambda: hvd.allreduce(x), lambda: x),
    ):
        with pytest.raises(ValueError, match="jit_compile"):
            tf.function(function, jit_compile=True)(tf.ones(2))
        with pytest.raises(ValueError, match="jit_compile"):
            tf.function(function, jit_compile=True).get_concrete_function(tf.ones(2))
    assert inner(tf.ones(2)).numpy().tolist() == [1.0, 1.0]


def test_clustering_by_xla_leaves_collectives_out(hvd: Any) -> None:
    tf.config.optimizer.set_jit("autoclustering")
    try:
        function = tf.function(lambda x: hvd.allreduce(tf.sin(x) * 2 + 1, op=hvd.Sum) * 3 + 1)
        found = function(tf.fill([1000], hvd.rank() + 0.5))
    finally:
        tf.config.optimizer.set_jit(False)
    expected = sum(np.sin(rank + 0.5) * 2 + 1 for rank in range(hvd.size())) * 3 + 1
    np.testing.assert_allclose(found.numpy(), np.full(1000, expected), rtol=1e-5)


# ---- life


def test_a_function_outlives_the_world(hvd: Any) -> None:

    @tf.function
    def function(x: Any) -> Any:
        return hvd.grouped_allreduce([x, x * 2], op=hvd.Sum, name="outlives"), hvd.allgather(x[None])

    for step in range(2):
        (once, twice), gathered = function(tf.constant(1.0 + hvd.rank()))
        assert (float(once), float(twice)) == (ranks_sum(hvd), 2 * ranks_sum(hvd))
        assert gathered.numpy().tolist() == [1.0 + rank for rank in range(hvd.size())]
        if step == 0:
            hvd.shutdown()
            for call in (lambda: hvd.allreduce(tf.ones(2)), lambda: function(tf.constant(1.0))):
                with pytest.raises(tf.errors.FailedPreconditionError, match="init"):
                    call()
            hvd.init()
