"""Batch normalization over the batches of all ranks.

    shift              this rank's own mean, a constant
    row                of each channel: shift, sum and sum of squares of x - shift; and the number of values per channel
    rows               the rows of all ranks, by the only collective of the forward pass; its adjoint is the only one of
                       the backward pass
    mean, variance     of all values, merged as by Chan, Golub and LeVeque (1979), in float64
    result             (x - shift) * scale + offset

Mean and variance do not depend on the shift, but a shift near the mean avoids cancellation. Every step is a
differentiable operation, so gradients of all orders are those of the whole batch.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collectives.base.errors import InvalidArgumentError
from collectives.frontends.layer_numbers import NumberedLayers
from collectives.tensorflow import autograd
from collectives.tensorflow.errors import unconverted
from collectives.tensorflow.graph_call import GraphCall
from collectives.tensorflow.keras_version import LEGACY
from collectives.worlds.runtime import global_process_set, is_elastic, world_of

_numbers = NumberedLayers(int)


@tf.keras.utils.register_keras_serializable(package="collectives")
class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
    """``tf.keras.layers.BatchNormalization`` with training statistics over the batches of all ranks.

    For Keras 3, or for Keras 2 if ``TF_USE_LEGACY_KERAS=1`` makes it ``tf.keras``. In training every rank calls it, and
    differentiates it, in the same order; batches may differ in length, and may be empty. Inference, and training on one
    rank, are those of the base class. The gradients of gamma and beta cover this rank's batch alone: a
    `DistributedGradientTape` or optimizer combines them over the ranks.

    Args:
        fused: part of Horovod's interface; must be False.
        process_set: the ranks whose batches are normalized together; all by default.
        kwargs: as for ``BatchNormalization``.

    Raises:
        ValueError: ``fused``, ``renorm`` or ``virtual_batch_size``, or several axes.
        MismatchError (in training, on every rank): the ranks' channels differ.
    """

    def __init__(self, fused: bool | None = False, *, process_set: Any = global_process_set, **kwargs: Any) -> None:
        if fused is not False:
            raise InvalidArgumentError("SyncBatchNormalization does not support fused=True. [F82]")
        refused = [option for option in ("renorm", "virtual_batch_size", "adjustment") if kwargs.get(option)]
        if refused:
            raise InvalidArgumentError(f"SyncBatchNormalization does not support {', '.join(refused)}. [F83]")
        axis = kwargs.get("axis", -1)
        if isinstance(axis, (list, tuple)):
            if len(axis) != 1:
                raise InvalidArgumentError(f"axis: expected one axis, got {axis} [F84]")
            kwargs["axis"] = axis[0]
        if LEGACY:
            kwargs["fused"] = False  # the fused kernel, used by default for four dimensions, computes another variance
        super().__init__(**kwargs)
        self._process_set = process_set
        self.supports_jit = False  # XLA does not support callbacks

    @unconverted
    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> tf.Tensor:
        if not _flag(training) or not self.trainable:
            return super().call(inputs, training=False, mask=mask)
        world = world_of(self._process_set)
        if world.size == 1 and not is_elastic():
            return super().call(inputs, training=True, mask=mask)
        if mask is not None and len(mask.shape) != len(inputs.shape) - 1:
            raise InvalidArgumentError(
                f"mask: expected one dimension fewer than inputs, got shape {mask.shape} for inputs of shape "
                f"{inputs.shape} [F85]"
            )
        x = tf.cast(inputs, tf.float64 if inputs.dtype == tf.float64 else tf.float32)
        axis = self.axis[0] if isinstance(self.axis, (list, tuple)) else self.axis
        channel = int(axis) % len(x.shape)
        near, row = _statistics(x, mask, channel)
        label = f"sync_batch_normalization.{_numbers.of(world, self)}"
        gathering = GraphCall("allgather", label, self._process_set, exact=True)
        (rows,) = autograd.run(gathering, [row[tf.newaxis]])
        mean, variance, count = _merge(rows)
        self._move(mean, variance, count)
        scale = tf.math.rsqrt(variance + self.epsilon)
        if self.scale:
            scale *= tf.cast(self.gamma, tf.float64)
        shift = tf.split(row[:-1], 3)[0]
        offset = (shift - mean) * scale
        if self.center:
            offset += tf.cast(self.beta, tf.float64)
        shape = [1] * len(x.shape)
        shape[channel] = -1
        scale, offset = (tf.reshape(tf.cast(vector, x.dtype), shape) for vector in (scale, offset))
        return tf.cast(near * scale + offset, self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        number = getattr(self._process_set, "process_set_id", self._process_set)
        return config if self._process_set is global_process_set else {**config, "process_set": number}

    def _move(self, mean: Any, variance: Any, count: Any) -> None:
        """Update the running statistics, unless the batches of all ranks are empty."""
        rate = tf.where(count > 0, tf.constant(1.0 - self.momentum, tf.float64), tf.constant(0.0, tf.float64))
        for moving, batch_value in ((self.moving_mean, mean), (self.moving_variance, variance)):
            current = tf.convert_to_tensor(moving)
            moving.assign(current + tf.cast((batch_value - tf.cast(current, tf.float64)) * rate, current.dtype))


def _flag(training: Any) -> bool:
    if not tf.is_tensor(training):
        return bool(training)
    value = tf.get_static_value(training)
    if value is None:
        raise InvalidArgumentError(
            "training: expected True or False, got a tensor whose value is not known while the graph is built; pass "
            "a Python bool [F86]"
        )
    return bool(value)


def _statistics(x: Any, mask: Any, channel: int) -> tuple[Any, Any]:
    """The values minus this rank's mean; and a float64 row of the mean, their sum, sum of squares and number."""
    others = [axis for axis in range(len(x.shape)) if axis != channel]
    sizes = tf.shape(x, tf.int64)
    if mask is None:
        inside = None
        count = tf.reduce_prod(tf.gather(sizes, others))
    else:
        inside = tf.cast(mask, tf.bool)[..., tf.newaxis]
        count = tf.math.count_nonzero(inside)
    counted = tf.cast(count, x.dtype)
    total = tf.reduce_sum(x if inside is None else tf.where(inside, x, tf.zeros([], x.dtype)), others, keepdims=True)
    shift = tf.stop_gradient(total / tf.maximum(counted, 1))
    near = x - shift
    kept = near if inside is None else tf.where(inside, near, tf.zeros([], x.dtype))
    sums = [
        tf.reshape(shift, [-1]),
        tf.reduce_sum(kept, others),
        tf.reduce_sum(tf.square(kept), others),
        counted[tf.newaxis],
    ]
    return near, tf.concat([tf.cast(part, tf.float64) for part in sums], 0)


def _merge(rows: Any) -> tuple[Any, Any, Any]:
    """Mean and variance of each channel over all ranks, and the number of values per channel."""
    shifts, sums, squares = tf.split(rows[:, :-1], 3, axis=1)
    counts = rows[:, -1:]
    count = tf.reduce_sum(counts)
    mean = tf.math.divide_no_nan(tf.reduce_sum(counts * shifts + sums, 0), count)
    away = shifts - mean
    deviation = tf.reduce_sum(squares + 2.0 * away * sums + counts * tf.square(away), 0)
    return mean, tf.math.divide_no_nan(deviation, count), count
