"""Batch normalisation over the batches of all ranks.

    x - shift          shift: this rank's own mean, taken as a constant
    row                shift, sum and sum of squares of x - shift, of each channel; the number of values in one
    rows               the rows of all ranks: the one collective of the forward pass; its adjoint is the one of the backward pass
    mean, variance     of all values, merged as by Chan, Golub and LeVeque (1979), in float64
    result             (x - shift) * scale + offset

Whatever the shift, mean and variance are the same; but near the mean nothing large is subtracted from something large.
Every step is an operation that TensorFlow differentiates, so that gradients of all orders come for free, as those of
the whole batch.
"""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from collectives.base.errors import InvalidArgumentError
from collectives.runtime import global_process_set, world_of
from collectives.tensorflow import autograd
from collectives.tensorflow.autograph import unconverted
from collectives.tensorflow.graph_call import GraphCall
from collectives.tensorflow.keras_version import LEGACY
from collectives.world import World


class _Numbers:
    """A world's layers, numbered in the order in which they are first used; no layer's operations meet those of
    another."""

    def __init__(self) -> None:
        self._next = 0  # not how many are known: when layers are forgotten differs between ranks
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def of(self, layer: Any) -> int:
        if layer not in self._known:
            self._known[layer] = self._next
            self._next += 1
        return self._known[layer]


_numbers: weakref.WeakKeyDictionary[World, _Numbers] = weakref.WeakKeyDictionary()


@tf.keras.utils.register_keras_serializable(package="collectives")
class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
    """``tf.keras.layers.BatchNormalization`` whose statistics, in training, are those of the batches of all ranks.

    Of Keras 3, or of Keras 2 where ``TF_USE_LEGACY_KERAS=1`` makes that ``tf.keras``. In training every rank calls it,
    and goes backward through it, in the same order; batches may differ in length, and may be empty. Inference is
    ordinary, and so is training on one rank. Gradients of gamma and beta are those of the rank's own batch: a
    `DistributedGradientTape` or optimizer combines them with all others.

    Args:
        fused: of Horovod's interface; False.
        process_set: the ranks whose batches belong together; all by default.
        kwargs: as for ``BatchNormalization``.

    Raises:
        ValueError: ``fused``, ``renorm`` or ``virtual_batch_size``, or several axes.
        MismatchError (in training, on every rank): the ranks' channels differ.
    """

    def __init__(self, fused: bool | None = False, *, process_set: Any = global_process_set, **kwargs: Any) -> None:
        if fused is not False:
            raise InvalidArgumentError("SyncBatchNormalization does not support fused=True.")
        refused = [option for option in ("renorm", "virtual_batch_size", "adjustment") if kwargs.get(option)]
        if refused:
            raise InvalidArgumentError(f"SyncBatchNormalization does not support {', '.join(refused)}.")
        axis = kwargs.get("axis", -1)
        if isinstance(axis, (list, tuple)):
            if len(axis) != 1:
                raise InvalidArgumentError(f"axis: expected one axis, got {axis}")
            kwargs["axis"] = axis[0]
        if LEGACY:
            kwargs["fused"] = False  # by default the variance over inputs of four dimensions would be another one
        super().__init__(**kwargs)
        self._process_set = process_set
        self.supports_jit = False  # XLA knows no callback

    @unconverted
    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> tf.Tensor:
        """Normalise; as ``BatchNormalization.call``."""
        if not _flag(training) or not self.trainable:
            return super().call(inputs, training=False, mask=mask)
        world = world_of(self._process_set)
        if world.size == 1:
            return super().call(inputs, training=True, mask=mask)
        if mask is not None and len(mask.shape) != len(inputs.shape) - 1:
            raise InvalidArgumentError(
                f"mask: expected one dimension less than inputs, got {mask.shape} for {inputs.shape}"
            )
        x = tf.cast(inputs, tf.float64 if inputs.dtype == tf.float64 else tf.float32)
        channel = self._channel_axis(len(x.shape))
        near, row = _statistics(x, mask, channel)
        gathering = GraphCall("allgather", self._label(world), self._process_set, exact=True)
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
        """As ``BatchNormalization.get_config``; a process set is kept by its number."""
        config = super().get_config()
        number = getattr(self._process_set, "process_set_id", self._process_set)
        return config if self._process_set is global_process_set else {**config, "process_set": number}

    def _channel_axis(self, dims: int) -> int:
        axis = self.axis[0] if isinstance(self.axis, (list, tuple)) else self.axis
        return int(axis) % dims

    def _label(self, world: World) -> str:
        return f"sync_batch_normalization.{_numbers.setdefault(world, _Numbers()).of(self)}"

    def _move(self, mean: Any, variance: Any, count: Any) -> None:
        """Move the running statistics; they stay where they are if no rank has seen anything."""
        rate = tf.where(count > 0, tf.constant(1.0 - self.momentum, tf.float64), tf.constant(0.0, tf.float64))
        for moving, found in ((self.moving_mean, mean), (self.moving_variance, variance)):
            known = tf.convert_to_tensor(moving)
            moving.assign(known + tf.cast((found - tf.cast(known, tf.float64)) * rate, known.dtype))


def _flag(training: Any) -> bool:
    if not tf.is_tensor(training):
        return bool(training)
    value = tf.get_static_value(training)
    if value is None:
        raise InvalidArgumentError(
            "training: expected True or False, got a tensor whose value is not known while the graph is made"
        )
    return bool(value)


def _statistics(x: Any, mask: Any, channel: int) -> tuple[Any, Any]:
    """The values less this rank's mean; and shift, sum, sum of squares of these, and their number, as a row of
    float64."""
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
    """Mean and variance of each channel over all ranks, and the number of values in one."""
    shifts, sums, squares = tf.split(rows[:, :-1], 3, axis=1)
    counts = rows[:, -1:]
    count = tf.reduce_sum(counts)
    mean = tf.math.divide_no_nan(tf.reduce_sum(counts * shifts + sums, 0), count)
    away = shifts - mean
    deviation = tf.reduce_sum(squares + 2.0 * away * sums + counts * tf.square(away), 0)
    return mean, tf.math.divide_no_nan(deviation, count), count
