"""Batch normalisation over all ranks against plain batch normalisation of all batches in one."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from collectives.base.errors import InvalidArgumentError, MismatchError

CHANNELS = 3
SHAPES = {"rows": (), "steps": (5,), "images": (4, 3)}
MOMENTUM = 0.8


def batches(rows: list[int], shape: tuple[int, ...], far: float = 30.0) -> list[Any]:
    """A batch for each rank, far from zero, with another mean on each rank."""
    draw = np.random.default_rng(17)
    return [
        draw.standard_normal((count, *shape, CHANNELS)) * (1 + rank) + far * (1 + rank)
        for rank, count in enumerate(rows)
    ]


def layer(kind: Any, dtype: Any = "float64", **options: Any) -> Any:
    gamma, beta = tf.constant_initializer([0.5, -2.0, 3.0]), tf.constant_initializer([1.0, 0.0, -4.0])
    options = {"momentum": MOMENTUM, "gamma_initializer": gamma, "beta_initializer": beta, **options}
    return kind(dtype=dtype, **options)


def moved(rank: int, values: Any, options: dict[str, Any]) -> Any:
    """Values with their channels where a layer expects them."""
    return np.moveaxis(values, -1, 1) if options.get("axis") == 1 else values


def compare(
    hvd: Any, inputs: list[Any], dtype: str = "float64", tolerance: float = 1e-10, graph: bool = False, **options: Any
) -> None:
    """The same outputs, gradients and running statistics, step after step."""
    rank = hvd.rank()
    here = slice(sum(map(len, inputs[:rank])), sum(map(len, inputs[: rank + 1])))
    plain, mine = (
        layer(tf.keras.layers.BatchNormalization, dtype, **options),
        layer(hvd.SyncBatchNormalization, dtype, **options),
    )
    draw = np.random.default_rng(5)

    def step(bn: Any, x: Any, slopes: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = bn(x, training=True)
            loss = tf.reduce_sum(tf.cast(y, slopes.dtype) * slopes)
        return y, *tape.gradient(loss, [x, *bn.trainable_variables])

    traced = tf.function(step) if graph else step
    for number in range(2):
        whole = moved(rank, np.concatenate(inputs) * (1 + number), options)
        slopes = draw.standard_normal(whole.shape)
        wanted = step(plain, tf.constant(whole, dtype), tf.constant(slopes))
        found = traced(mine, tf.constant(whole[here], dtype), tf.constant(slopes[here]))
        assert found[0].dtype == wanted[0].dtype
        for mine_is, plain_is in ((found[0], wanted[0][here]), (found[1], wanted[1][here])):
            np.testing.assert_allclose(tf.cast(mine_is, "float64"), tf.cast(plain_is, "float64"), tolerance, tolerance)
        for gradient, plain_is in zip(found[2:], wanted[2:], strict=True):
            total = hvd.allreduce(gradient, op=hvd.Sum)
            np.testing.assert_allclose(total, plain_is, tolerance, tolerance * max(1.0, len(whole)))
    for variable, plain_is in zip(mine.non_trainable_variables, plain.non_trainable_variables, strict=True):
        np.testing.assert_allclose(
            variable.numpy(), plain_is.numpy(), max(tolerance, 1e-7)
        )  # Keras 2 has momentum in single precision
        everyone = hvd.allgather_object(variable.numpy().tobytes())
        assert all(each == everyone[0] for each in everyone)
    x = tf.constant(moved(rank, inputs[rank], options), dtype)
    np.testing.assert_allclose(mine(x, training=False), plain(x), 1e-5, 1e-6)


def rows_of(hvd: Any) -> list[int]:
    return [2 + 3 * rank for rank in range(hvd.size())]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_the_whole_batch(hvd: Any, shape: tuple[int, ...]) -> None:
    compare(hvd, batches(rows_of(hvd), shape), graph=shape == (5,))


def test_is_exact_under_horovods_gradients_too(hvd: Any, as_horovod: None) -> None:
    """Its gradient is that of the one batch that all ranks have together."""
    compare(hvd, batches(rows_of(hvd), ()))


@pytest.mark.parametrize("options", ({"axis": 1}, {"center": False, "scale": False}), ids=str)
def test_options(hvd: Any, options: dict[str, Any]) -> None:
    compare(hvd, batches(rows_of(hvd), (4, 3)), **options)


def test_single_precision_far_from_zero(hvd: Any) -> None:
    """Values around 1000 with a deviation of 1: squares of the values themselves would lose every digit of the
    variance."""
    rank = hvd.rank()
    inputs = [(each - each.mean() + 1000.0).astype(np.float32) for each in batches([64] * hvd.size(), ())]
    mine = hvd.SyncBatchNormalization(epsilon=0.0)
    found = mine(tf.constant(inputs[rank]), training=True)
    whole = np.concatenate(inputs).astype(np.float64)
    wanted = (inputs[rank] - whole.mean(0)) / whole.std(0)
    np.testing.assert_allclose(found, wanted, 1e-4, 2e-4 / whole.std())


@pytest.mark.parametrize("policy", ("mixed_float16", "mixed_bfloat16"))
def test_mixed_precision(hvd: Any, policy: str) -> None:
    inputs = [each.astype(np.float16) for each in batches([8] * hvd.size(), (), far=2.0)]
    mine, plain = hvd.SyncBatchNormalization(dtype=policy), tf.keras.layers.BatchNormalization(dtype=policy)
    found = mine(tf.constant(inputs[hvd.rank()]), training=True)
    wanted = plain(tf.constant(np.concatenate(inputs)), training=True)[8 * hvd.rank() :][:8]
    assert found.dtype == wanted.dtype == tf.as_dtype(policy.removeprefix("mixed_"))
    np.testing.assert_allclose(tf.cast(found, "float32"), tf.cast(wanted, "float32"), 0.02, 0.02)
    assert mine.gamma.dtype == mine.moving_mean.dtype == "float32"


def test_a_rank_without_rows(hvd: Any) -> None:
    rows = [3, 0, 4][: hvd.size()]
    compare(hvd, batches(rows, (4,)), graph=True)


def test_masks(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    inputs = batches([4] * size, (5,))
    masks = [np.random.default_rng(other).random((4, 5)) < 0.6 for other in range(size)]
    mine = layer(hvd.SyncBatchNormalization)
    found = mine(tf.constant(inputs[rank]), training=True, mask=tf.constant(masks[rank]))
    kept = np.concatenate(inputs)[np.concatenate(masks)]
    gamma, beta = mine.gamma.numpy(), mine.beta.numpy()
    wanted = (inputs[rank] - kept.mean(0)) / np.sqrt(kept.var(0) + mine.epsilon) * gamma + beta
    np.testing.assert_allclose(found, wanted, 1e-10, 1e-10)
    np.testing.assert_allclose(mine.moving_mean.numpy(), kept.mean(0) * (1 - MOMENTUM), 1e-10)
    with pytest.raises(ValueError, match="mask"):
        mine(tf.constant(inputs[rank]), training=True, mask=tf.constant([True]))


def test_second_derivatives(hvd: Any) -> None:
    rank = hvd.rank()
    inputs = batches([3] * hvd.size(), (), far=1.0)
    whole = tf.constant(np.concatenate(inputs))
    here = slice(3 * rank, 3 * rank + 3)

    def penalty(bn: Any, x: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(tf.sin(bn(x, training=True)))
            slope = inner.gradient(loss, x)
            size = tf.reduce_sum(slope * slope)
        return outer.gradient(size, x)

    wanted = penalty(layer(tf.keras.layers.BatchNormalization), whole)[here]
    found = penalty(layer(hvd.SyncBatchNormalization), tf.constant(inputs[rank]))
    np.testing.assert_allclose(found, wanted, 1e-8, 1e-8)


def test_frozen_and_inference_need_no_other_rank(hvd: Any) -> None:
    mine = layer(hvd.SyncBatchNormalization)
    x = tf.constant(batches([2], ())[0])
    mine.build(x.shape)
    if hvd.rank() == 0:
        mine(x)
        mine(x, training=False)
        mine.trainable = False
        mine(x, training=True)
    np.testing.assert_array_equal(mine.moving_mean.numpy(), np.zeros(CHANNELS))


def test_names_do_not_depend_on_when_layers_are_forgotten(hvd: Any) -> None:
    x = tf.constant(batches([2] * hvd.size(), ())[hvd.rank()])
    kept = []
    for number in range(3):
        mine = layer(hvd.SyncBatchNormalization)
        mine(x, training=True)
        if number == 0 and hvd.rank() == 0:
            kept.append(mine)
        del mine
        gc.collect()
    assert len(kept) == (hvd.rank() == 0)


def test_a_model_is_made_again_from_its_configuration(hvd: Any) -> None:
    given = tf.keras.Input((CHANNELS,))
    model = tf.keras.Model(given, hvd.SyncBatchNormalization(momentum=0.7)(given))
    again = type(model).from_config(
        model.get_config(), custom_objects={"SyncBatchNormalization": hvd.SyncBatchNormalization}
    )
    assert [type(each) for each in again.layers] == [type(each) for each in model.layers]
    assert again.layers[-1].momentum == 0.7


def test_a_process_set(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    members = [0, size - 1]
    pair = hvd.add_process_set(members)
    inputs = batches([3] * size, ())
    mine = layer(hvd.SyncBatchNormalization, process_set=pair)
    if rank in members:
        found = mine(tf.constant(inputs[rank]), training=True)
        whole = np.concatenate([inputs[member] for member in members])
        wanted = (inputs[rank] - whole.mean(0)) / np.sqrt(
            whole.var(0) + mine.epsilon
        ) * mine.gamma.numpy() + mine.beta.numpy()
        np.testing.assert_allclose(found, wanted, 1e-10)
    assert mine.get_config()["process_set"] == pair.process_set_id
    hvd.remove_process_set(pair)


def test_refusals(hvd: Any) -> None:
    for options in ({"fused": True}, {"fused": None}, {"renorm": True}, {"virtual_batch_size": 2}, {"axis": [1, 2]}):
        with pytest.raises(ValueError):
            hvd.SyncBatchNormalization(**options)
    mine = hvd.SyncBatchNormalization()
    assert "process_set" not in mine.get_config()
    with pytest.raises(InvalidArgumentError, match="training"):
        tf.function(lambda flag: mine(tf.ones([2, 3]), training=flag), autograph=False)(tf.constant(True))
    with pytest.raises(MismatchError, match="shape"):
        hvd.SyncBatchNormalization()(tf.ones([2, 2 + hvd.rank()]), training=True)
