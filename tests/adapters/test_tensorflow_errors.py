"""Errors that are TensorFlow's as well as our own: eagerly, in functions, and in graphs for sessions."""

from __future__ import annotations

import pickle
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from collectives.base import errors
from collectives.tensorflow import errors as both
from collectives.tensorflow import status


def run(way: str, function: Callable[[], Any]) -> Any:
    if way == "eager":
        return function()
    if way == "function":
        return tf.function(function)()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        return session.run(function())


def in_a_thread(function: Callable[[], Any]) -> None:
    """Run it there, and raise here what it raises."""
    found: list[BaseException] = []

    def target() -> None:
        try:
            function()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if found:
        raise found[0]


WAYS = pytest.mark.parametrize("way", ("eager", "function", "session"))


@WAYS
def test_a_mismatch_is_a_failed_precondition(hvd: Any, way: str) -> None:
    rank = hvd.rank()
    shape, packed = [2 * hvd.size(), 3 + rank], ([2, 3], [6]) if rank else ([6], [2, 3])
    shapes = lambda: hvd.allreduce(tf.ones([3 + rank]), name="shapes")  # noqa: E731
    for call in (
        shapes,
        lambda: hvd.grouped_allreduce([tf.ones(2), tf.ones([3 + rank])], name="group"),
        lambda: hvd.grouped_allreduce([tf.ones(each) for each in packed], name="as many elements together"),
        lambda: hvd.allreduce(tf.ones(3, tf.int32 if rank else tf.float32), name="dtypes"),
        lambda: hvd.allgather(tf.ones(shape), name="columns"),
        lambda: hvd.reducescatter(tf.ones(shape), name="columns"),
        lambda: hvd.alltoall(tf.ones(shape), name="columns"),
        lambda: hvd.broadcast(tf.ones(3), rank, name="roots"),
    ):
        with pytest.raises(tf.errors.FailedPreconditionError, match=r"MismatchError: rank \d|rank \d: ") as caught:
            run(way, call)
        assert caught.value.error_code == tf.errors.FAILED_PRECONDITION and "rank 0: " in caught.value.message
        if call is shapes:
            assert re.search(r"'shapes'(.|\n)*[(\[]3[\],)](.|\n)*[(\[]4[\],)]", caught.value.message)
        assert isinstance(caught.value, errors.MismatchError) is (way == "eager")
    assert run(way, lambda: hvd.allreduce(1.0, op=hvd.Sum, name="goes on")) == hvd.size()


@WAYS
def test_bad_splits_are_an_invalid_argument(hvd: Any, way: str) -> None:
    size = hvd.size()
    for call in (
        lambda: hvd.alltoall(tf.ones([2]), tf.ones([size], tf.int32) * 3),
        lambda: hvd.alltoall(tf.ones([2]), tf.ones([size + 1], tf.int32)),
        lambda: hvd.alltoall(tf.ones([size + 1])),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match="splits") as caught:
            run(way, call)
        assert isinstance(caught.value, ValueError) is (way == "eager")
    assert run(way, lambda: hvd.allreduce(1.0, op=hvd.Sum)) == size


@WAYS
def test_a_foreign_process_set_is_an_invalid_argument(hvd: Any, way: str) -> None:
    known = hvd.add_process_set([0])
    if hvd.rank():
        with pytest.raises(tf.errors.InvalidArgumentError, match="process_set: rank"):
            run(way, lambda: hvd.allreduce(tf.ones(2), process_set=known))
    else:
        assert run(way, lambda: hvd.allreduce(1.0, process_set=known)) == 1.0
    hvd.barrier()
    hvd.remove_process_set(known)


@pytest.mark.parametrize("ordered", (True, False))
def test_nothing_behind_a_mismatch_runs(hvd: Any, ordered: bool) -> None:
    """Neither where the main thread has traced the function, nor where another one has."""
    variable = tf.Variable(tf.zeros(0), shape=[None])

    @tf.function
    def function(x: Any) -> None:
        variable.assign(hvd.allreduce(x, name=f"behind {ordered}"))

    call = function.get_concrete_function(tf.TensorSpec([None])) if ordered else function
    variable.assign(tf.fill([3], 7.0))
    wrong, right = tf.ones([3 + hvd.rank()]), tf.ones([3])
    with pytest.raises(tf.errors.FailedPreconditionError, match="behind"):
        call(wrong) if ordered else in_a_thread(lambda: call(wrong))
    assert variable.numpy().tolist() == [7.0] * 3
    call(right) if ordered else in_a_thread(lambda: call(right))
    assert variable.numpy().tolist() == [1.0] * 3


def test_mismatches_in_branches_and_loops(hvd: Any) -> None:

    @tf.function
    def function(x: Any, times: Any) -> Any:
        for number in tf.range(times):
            if number % 2 == 0:
                x = tf.ensure_shape(hvd.allreduce(x, op=hvd.Sum, name="within"), [None])
        return x

    good = tf.ones([2])
    assert function(good, 3).numpy().tolist() == [hvd.size() ** 2] * 2
    with pytest.raises(tf.errors.FailedPreconditionError, match="within"):
        function(tf.ones([2 + hvd.rank()]), 3)
    assert function(good, 3).numpy().tolist() == [hvd.size() ** 2] * 2


def test_adjoints_raise_them_too(hvd: Any) -> None:
    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        y = hvd.allgather(x, name="forward")
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"forward\.gradient"):
        tape.gradient(y, x, tf.ones([2 * hvd.size()]) if hvd.rank() else tf.ones([2 * hvd.size(), 1]))
    assert hvd.allreduce(1.0, op=hvd.Sum).numpy() == hvd.size()


def test_sparse_tensors_take_sum_and_average_only(hvd: Any) -> None:
    slices = tf.IndexedSlices(tf.ones([1, 3], tf.int32), tf.constant([hvd.rank()]))
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        for call in (
            lambda op=op: hvd.allreduce(slices, op=op),
            lambda op=op: hvd.grouped_allreduce([tf.ones(1), slices], op=op),
        ):
            with pytest.raises(NotImplementedError, match=r"Average or Sum of tf\.IndexedSlices") as caught:
                call()
            assert isinstance(caught.value, ValueError)
    assert hvd.allreduce(1.0, op=hvd.Sum).numpy() == hvd.size()


def test_every_error_has_a_twin() -> None:
    ours = {
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.CollectivesError)
    }
    without = {errors.CollectivesError, errors.ForkedProcessError, errors.MissingDependencyError}
    for kind in ours - without:
        twin = both.as_tensorflow(kind("rank 0: what to do"))
        assert isinstance(twin, kind) and isinstance(twin, tf.errors.OpError) and both.as_tensorflow(twin) is twin
        assert str(twin) == twin.message == "rank 0: what to do"
        copy = pickle.loads(pickle.dumps(twin))
        assert type(copy) is type(twin) and str(copy) == str(twin)
    for kind in without:
        assert type(both.as_tensorflow(kind("no twin"))) is kind


def test_without_the_c_interface_callbacks_raise(hvd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert status._is_registered()
    monkeypatch.setattr(status, "_is_registered", lambda: False)
    for way in ("function", "session"):
        with pytest.raises(tf.errors.UnknownError, match="MismatchError: rank"):
            run(way, lambda: hvd.allreduce(tf.ones([1 + hvd.rank()]), name="raised"))
        assert run(way, lambda: hvd.allreduce(1.0, op=hvd.Sum)) == hvd.size()
