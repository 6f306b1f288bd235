"""The distributed tape against a plain tape that sees the batches of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from collectives.base.errors import InvalidArgumentError, InvalidTypeError, MismatchError
from collectives.frontends.gradient_options import GradientOptions
from collectives.tensorflow.gradients import GradientReduction, variable_key


def data(rank: int, rows: int = 3) -> Any:
    """A batch that differs from rank to rank."""
    return np.random.default_rng(50 + rank).standard_normal((rows, 4))


def weights(dtype: Any = tf.float64) -> list[Any]:
    values = np.random.default_rng(3).standard_normal((4, 3)), np.arange(3.0), np.float64(1.5)
    return [tf.Variable(value, dtype=dtype) for value in values]


def loss_of(variables: list[Any], batch: Any) -> Any:
    kernel, bias, scale = variables
    return tf.reduce_mean(tf.square(tf.tanh(tf.cast(batch, kernel.dtype) @ kernel + bias) * scale))


def of_rank(variables: list[Any], rank: int) -> list[Any]:
    """The gradients of a rank's own loss."""
    with tf.GradientTape() as tape:
        loss = loss_of(variables, data(rank))
    return [grad.numpy() for grad in tape.gradient(loss, variables)]


def combined(variables: list[Any], ranks: Any, combine: Any = np.mean) -> list[Any]:
    return [
        combine(np.stack(grads), axis=0) for grads in zip(*(of_rank(variables, rank) for rank in ranks), strict=True)
    ]


def taped(hvd: Any, variables: list[Any], **options: Any) -> list[Any]:
    with tf.GradientTape() as tape:
        loss = loss_of(variables, data(hvd.rank()))
    return hvd.DistributedGradientTape(tape, **options).gradient(loss, variables)


def check(found: Any, wanted: Any, rtol: float = 1e-12) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(one), other, rtol, rtol)


def alike(hvd: Any, tensors: Any) -> None:
    """All ranks have the same tensors, bit for bit."""
    everyone = hvd.allgather_object([np.asarray(tensor).tobytes() for tensor in tensors])
    assert all(each == everyone[0] for each in everyone)


def ways(function: Any) -> list[Any]:
    """A function as it is, and as a graph."""
    return [function, tf.function(function)]


@pytest.mark.parametrize("name", ("Average", "Sum", "Min", "Max", "Product"))
def test_operations(hvd: Any, name: str) -> None:
    variables = weights()
    combine = {"Average": np.mean, "Sum": np.sum, "Min": np.min, "Max": np.max, "Product": np.prod}[name]
    wanted = combined(variables, range(hvd.size()), combine)
    for run in ways(lambda: taped(hvd, variables, op=getattr(hvd, name))):
        for _ in range(2):
            found = run()
            check(found, wanted)
            alike(hvd, found)


@pytest.mark.parametrize(
    "options",
    ({"gradient_predivide_factor": 4.0}, {"groups": 2}, {"groups": 9}, {"device_dense": "/cpu:0"}),
    ids=str,
)
def test_options_that_change_no_result(hvd: Any, options: dict[str, Any]) -> None:
    variables = weights()
    wanted = combined(variables, range(hvd.size()))
    if options == {"groups": 2}:
        check(taped(hvd, variables, groups=[[variables[2], variables[0]]]), wanted)
    for run in ways(lambda: taped(hvd, variables, **options)):
        check(run(), wanted)


def test_num_groups_is_groups(hvd: Any) -> None:
    variables = weights()
    with pytest.warns(DeprecationWarning, match="num_groups"):
        found = taped(hvd, variables, num_groups=2)
    check(found, combined(variables, range(hvd.size())))


def test_compression(hvd: Any) -> None:
    variables = weights(tf.float32)
    wanted = combined(variables, range(hvd.size()))
    for run in ways(lambda: taped(hvd, variables, compression=hvd.Compression.bf16)):
        found = run()
        check(found, wanted, 0.03)
        assert all(grad.dtype == tf.float32 for grad in found)
        assert np.any(found[0].numpy() != wanted[0])


def test_dtypes_of_one_step_may_differ(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    dtypes = (tf.float32, tf.float16, tf.bfloat16, tf.float64)
    variables = [tf.Variable([1.0, 2.0], dtype=dtype) for dtype in dtypes]

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(tf.cast(variable * (rank + 1), tf.float64)) for variable in variables])
        return hvd.DistributedGradientTape(tape).gradient(loss, variables)

    for run in ways(step):
        found = run()
        assert [grad.dtype for grad in found] == list(dtypes)
        check([tf.cast(grad, tf.float64) for grad in found], [np.full(2, (size + 1) / 2)] * 4)


def test_none_stays_none(hvd: Any) -> None:
    variables = weights()
    stranger = tf.Variable([1.0, 2.0])
    for run in ways(lambda: _with(hvd, variables, [variables[0], stranger, *variables[1:]])):
        found = run()
        assert found[1] is None
        check([found[0], *found[2:]], combined(variables, range(hvd.size())))


def _with(hvd: Any, variables: list[Any], sources: Any, **options: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = loss_of(variables, data(hvd.rank()))
    return hvd.DistributedGradientTape(tape).gradient(loss, sources, **options)


def test_arguments_of_gradient(hvd: Any) -> None:
    variables = weights()
    stranger = tf.Variable([1.0, 2.0])
    found = _with(hvd, variables, [*variables, stranger], unconnected_gradients=tf.UnconnectedGradients.ZERO)
    np.testing.assert_array_equal(found[-1], [0.0, 0.0])
    found = _with(hvd, variables, variables, output_gradients=tf.constant(3.0, tf.float64), use_generic_names=True)
    check(found, [3.0 * grad for grad in combined(variables, range(hvd.size()))])


def test_structures_of_sources(hvd: Any) -> None:
    variables = weights()
    kernel, bias, scale = combined(variables, range(hvd.size()))
    for run in ways(lambda sources: _with(hvd, variables, sources)):
        check([run(variables[0])], [kernel])
        found = run({"a": variables[1], "b": [variables[0], (variables[2],)]})
        check([found["a"], found["b"][0], found["b"][1][0]], [bias, kernel, scale])
        assert isinstance(found["b"][1], tuple)
        found = run(tuple(variables))
        assert isinstance(found, tuple)
        check(found, [kernel, bias, scale])


def test_wrapped_before_while_and_after_recording(hvd: Any) -> None:
    variables = weights()
    wanted = combined(variables, range(hvd.size()))
    batch = data(hvd.rank())

    def before() -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = loss_of(variables, batch)
        return tape.gradient(loss, variables)

    def recording() -> Any:
        with tf.GradientTape() as inner:
            tape = hvd.DistributedGradientTape(inner)
            loss = loss_of(variables, batch)
        return tape.gradient(loss, variables)

    def inside() -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = loss_of(variables, batch)
            return tape.gradient(loss, variables)

    for function in (before, recording, inside):
        for run in ways(function):
            check(run(), wanted)


def test_what_a_tape_can_do(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    mean = (size + 1) / 2
    x = tf.constant([1.0, 2.0])
    plain = tf.GradientTape(persistent=True, watch_accessed_variables=False)
    variable = tf.Variable(5.0)
    with hvd.DistributedGradientTape(plain) as tape:
        assert isinstance(tape, tf.GradientTape)
        tape.watch(x)
        with tape.stop_recording():
            ignored = tf.reduce_sum(x) * 7.0
        y = (rank + 1.0) * x * x + ignored * variable
    assert tape.watched_variables() == ()
    np.testing.assert_allclose(tape.gradient(y, x), mean * 2 * np.array([1.0, 2.0]))
    np.testing.assert_allclose(tape.gradient(y, x), mean * 2 * np.array([1.0, 2.0]))
    np.testing.assert_allclose(plain.gradient(y, x), (rank + 1) * 2 * np.array([1.0, 2.0]))
    np.testing.assert_allclose(tape.jacobian(y, x), (rank + 1) * np.diag([2.0, 4.0]))
    rows = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    with tape:
        tape.watch(rows)
        y = rows * rows * (rank + 1.0)
    np.testing.assert_allclose(tape.batch_jacobian(y, rows)[1], (rank + 1) * np.diag([6.0, 8.0]))
    with tape:
        tape.watch(x)
        y = x * x
        tape.reset()
        tape.watch(x)
        y = 3.0 * x
    np.testing.assert_allclose(tape.gradient(y, x), [3.0, 3.0])


def test_a_tape_serves_once(hvd: Any) -> None:
    variables = weights()
    with tf.GradientTape() as plain:
        loss = loss_of(variables, data(hvd.rank()))
    tape = hvd.DistributedGradientTape(plain)
    tape.gradient(loss, variables)
    with pytest.raises(RuntimeError, match="non-persistent"):
        tape.gradient(loss, variables)
    with pytest.raises(RuntimeError, match="non-persistent"):
        plain.gradient(loss, variables)


def test_second_derivatives(hvd: Any) -> None:
    rank = hvd.rank()
    x = tf.Variable(2.0, dtype=tf.float64)

    def second() -> Any:
        with tf.GradientTape() as outer:
            with hvd.DistributedGradientTape(tf.GradientTape()) as inner:
                y = (rank + 1.0) * x**3
            first = inner.gradient(y, x)
        return outer.gradient(first, x)

    # The adjoint of an average is the average of what the ranks ask for: one, each.
    for run in ways(second):
        np.testing.assert_allclose(run(), (rank + 1) * 6 * 2.0, rtol=1e-12)


def test_a_subclass_of_a_tape(hvd: Any) -> None:
    class Counting(tf.GradientTape):
        asked = 0

        def gradient(self, *args: Any, **kwargs: Any) -> Any:
            self.asked += 1
            return super().gradient(*args, **kwargs)

    variables = weights()
    with hvd.DistributedGradientTape(Counting()) as tape:
        loss = loss_of(variables, data(hvd.rank()))
    check(tape.gradient(loss, variables), combined(variables, range(hvd.size())))
    assert tape.asked == 1
    assert isinstance(tape, Counting)


@pytest.mark.parametrize("scale", (True, False))
def test_local_sources(hvd: Any, scale: bool) -> None:
    rank, size = hvd.rank(), hvd.size()
    variables = weights()
    own = tf.Variable(tf.ones([rank + 1], tf.float64))  # of another shape on every rank

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(variables, data(rank)) + tf.reduce_sum(own * (rank + 1.0))
        tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scale)
        tape.register_local_source(own)
        return tape.gradient(loss, [own, *variables])

    for run in ways(step):
        found = run()
        np.testing.assert_allclose(found[0], np.full(rank + 1, (rank + 1) / (size if scale else 1)))
        check(found[1:], combined(variables, range(size)))


def test_local_and_global_gradients(hvd: Any) -> None:
    variables = weights()
    with tf.GradientTape() as tape:
        loss = loss_of(variables, data(hvd.rank()))
    tape = hvd.DistributedGradientTape(tape, scale_local_gradients=False)
    tape.register_local_source(variables[1])
    local, others = tape.get_local_and_global_gradients(loss, variables)
    assert [source is variables[1] for source, _ in local] == [True]
    assert others[0][0] is variables[0]
    np.testing.assert_allclose(local[0][1], of_rank(variables, hvd.rank())[1])
    kernel, _, scale = combined(variables, range(hvd.size()))
    check([grad for _, grad in others], [kernel, scale])


def test_partial_tape_of_a_keras_model(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    tf.keras.utils.set_random_seed(4)
    model = tf.keras.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(3), tf.keras.layers.Dense(2)])
    mine = model.layers[1]

    def grads_of(batch: Any, wrap: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(batch)))
        return wrap(tape).gradient(loss, model.trainable_variables)

    every = [[grad.numpy() for grad in grads_of(data(other), lambda tape: tape)] for other in range(size)]
    wanted = [np.mean([grads[at] for grads in every], axis=0) for at in (0, 1)] + [
        every[rank][at] / size for at in (2, 3)
    ]
    found = grads_of(data(rank), lambda tape: hvd.PartialDistributedGradientTape(tape, local_layers=mine))
    check(found, wanted, 1e-5)
    check(
        grads_of(data(rank), hvd.PartialDistributedGradientTape),
        [np.mean(grads, axis=0) for grads in zip(*every, strict=True)],
        1e-5,
    )
    with pytest.raises(InvalidArgumentError, match="local_layers"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[mine, "dense"])
    with pytest.raises(InvalidArgumentError, match="build it"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=tf.keras.layers.Dense(3))


def test_process_sets(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    variables = weights()
    others = hvd.add_process_set(range(1, size))
    for run in ways(lambda: taped(hvd, variables, process_set=others)):
        check(run(), combined(variables, range(1, size)) if rank else of_rank(variables, 0))
    hvd.remove_process_set(others)


def test_gradients_without_a_tape(hvd: Any) -> None:
    """What other adapters use: gradients that somebody else has computed."""
    rank, size = hvd.rank(), hvd.size()
    variables = [tf.Variable(tf.zeros([3, 2])), tf.Variable(0.0), tf.Variable(0.0)]
    rows = tf.IndexedSlices(tf.fill([2, 2], rank + 1.0), tf.constant([0, 0]), tf.constant([3, 2]))
    reduction = GradientReduction(GradientOptions(op=hvd.Sum))
    found = reduction.reduce([rows, tf.constant(rank + 1.0), None], variables, {variable_key(variables[1])})
    assert isinstance(found[0], tf.IndexedSlices)
    np.testing.assert_array_equal(found[0].indices, [0])  # each row once, on one rank too
    np.testing.assert_allclose(found[0].values, [[size * (size + 1.0)] * 2])
    np.testing.assert_allclose(found[1], (rank + 1) / size)
    assert found[2] is None
    with pytest.raises(InvalidArgumentError, match="expected one gradient for each of"):
        reduction.reduce([tf.constant(1.0)], variables)
    with pytest.raises(MismatchError if rank else InvalidTypeError, match="expected"):  # one refuses, all hear of it
        reduction.reduce([tf.zeros([3, 2]) if rank else "no gradient"], variables[:1])
    with pytest.raises(InvalidTypeError, match="pass one of these"):
        reduction.reduce([tf.ragged.constant([[1.0], [2.0, 3.0]])], variables[:1])


def test_refusals(hvd: Any) -> None:
    tape = hvd.DistributedGradientTape(tf.GradientTape())
    with pytest.raises(InvalidArgumentError, match="wrapped already"):
        hvd.DistributedGradientTape(tape)
    with pytest.raises(InvalidTypeError, match="gradtape"):
        hvd.DistributedGradientTape("tape")
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(InvalidTypeError, match="compression"):
        hvd.DistributedGradientTape(tf.GradientTape(), compression="fp16")
    variable = tf.Variable(1.0)
    for groups in (-1, "a", [variable], [[variable], [variable]], [["a"]]):
        with pytest.raises(ValueError, match="group"):
            hvd.DistributedGradientTape(tf.GradientTape(), groups=groups)


def test_gradients_of_different_variables_never_meet(hvd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If ranks lack different gradients, equal shapes must not lead them together: they wait for different names, which
    is an error."""
    asked = []

    def note(tensors: Any, *args: Any, name: str, **kwargs: Any) -> Any:
        asked.append(name)
        return tensors

    monkeypatch.setattr("collectives.tensorflow.operations.grouped_allreduce", note)
    variables = [tf.Variable(tf.ones([2, 2])) for _ in range(4)]
    for missing, sparse in (((), ()), ((1,), ()), ((1, 2, 3), ()), ((), (1,)), ((0,), (1,)), ((0,), (2,))):
        with tf.GradientTape() as tape:
            used = [
                tf.gather(each, [1]) if at in sparse else each for at, each in enumerate(variables) if at not in missing
            ]
            loss = tf.add_n([tf.reduce_sum(each) for each in used])
        hvd.DistributedGradientTape(tape).gradient(loss, variables)
    assert len(set(asked)) == len(asked) == 6 + 3
    names = hvd.allgather_object(asked)
    assert all(each == names[0] for each in names)


def test_ranks_whose_shapes_differ_are_told(hvd: Any) -> None:
    variable = tf.Variable(tf.ones([2 + hvd.rank()]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable)
    with pytest.raises(MismatchError, match="shape"):
        hvd.DistributedGradientTape(tape).gradient(loss, [variable])
