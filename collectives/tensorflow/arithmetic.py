"""Differentiable operations on TensorFlow tensors; answers `collectives.frontends.adjoints.Arithmetic`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collectives.base.reduce_op import Op


class TensorFlowArithmetic:
    """Operations on tensors, eager or of a graph, whose shapes may be unknown."""

    def flat(self, tensor: Any) -> Any:
        return tf.reshape(tensor, [-1])

    def restored(self, tensor: Any, like: Any) -> Any:
        return tf.reshape(tf.cast(tensor, like.dtype), tf.shape(like))

    def widened(self, tensor: Any) -> Any:
        return tf.cast(tensor, tf.float32) if tensor.dtype in (tf.float16, tf.bfloat16) else tensor

    def cast(self, tensor: Any, like: Any) -> Any:
        return tf.cast(tensor, like.dtype)

    def conj(self, tensor: Any) -> Any:
        return tf.math.conj(tensor)

    def sum(self, tensor: Any) -> Any:
        return tf.reduce_sum(tensor, 0)

    def extreme(self, tensor: Any, op: Op) -> Any:
        reduce = tf.reduce_max if op is Op.MAX else tf.reduce_min
        return tf.cast(tf.equal(tensor, reduce(tensor, 0)), tensor.dtype)

    def products_of_others(self, tensor: Any) -> Any:
        return tf.math.cumprod(tensor, exclusive=True) * tf.math.cumprod(tensor, exclusive=True, reverse=True)

    def dot(self, a: Any, b: Any) -> Any:
        return tf.reduce_sum(a * b)

    def nonzero(self, scalar: Any) -> Any:
        return tf.where(scalar == 0, tf.ones_like(scalar), scalar)


def scaled(tensor: Any, factor: float) -> Any:
    """A tensor times a number, in its own dtype; integers are multiplied in float64."""
    if factor == 1.0:
        return tensor
    if tensor.dtype.is_integer:
        return tf.cast(tf.cast(tensor, tf.float64) * factor, tensor.dtype)
    return tensor * tf.cast(factor, tensor.dtype)
