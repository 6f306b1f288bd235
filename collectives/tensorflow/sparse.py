"""All-reduce of ``tf.IndexedSlices``, eagerly or in a graph; `sparse_rows` has the method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from collectives.base.errors import UnsupportedError
from collectives.base.reduce_op import Op
from collectives.tensorflow import autograd, graph_call
from collectives.tensorflow.graph_call import GraphCall


def check(call: GraphCall) -> None:
    """Raise UnsupportedError (a NotImplementedError) on all ranks for an ``op`` other than Sum and Average."""
    if call.op is None or not call.op.linear:
        text = (
            f"op: expected Average or Sum of tf.IndexedSlices, got {call.op!r}; pass tf.convert_to_tensor(slices) [F45]"
        )
        raise call.world.refused(UnsupportedError(text), call.name)


def allreduce(call: GraphCall, slices: Sequence[Any]) -> list[Any]:
    """Reduce several sparse tensors by one call. Differentiable with respect to their values.

    Args:
        call: an all-reduce that `check` accepts; its compression is ignored.
        slices: ``tf.IndexedSlices``; ranks may differ in the number of rows, which may be 0.

    Returns:
        ``tf.IndexedSlices``, equal on every rank; indices are ascending and unique. The average of integers has the
        dtype of TensorFlow's division: float32 for up to 16 bits, else float64.
    """
    if call.op is Op.AVERAGE:
        slices = [_divisible(each) for each in slices]
    merge = replace(
        call, collective="merge", prescale=1.0, postscale=1.0, compression=None, algorithm=None, transport=None
    )
    indices = [each.indices for each in slices]
    back = autograd.gradient_call(merge, [each.values for each in slices])

    def merged(values: Sequence[Any]) -> list[Any]:
        results = graph_call.run(merge, [tensor for pair in zip(values, indices, strict=True) for tensor in pair])
        return results[::2] + results[1::2]

    def adjoint(gradients: list[Any], inputs: list[Any], outputs: list[Any]) -> list[Any]:
        chosen = [i for i, each in enumerate(slices) if autograd.has_gradient(each)]
        totals = autograd.run(replace(back, collective="allreduce"), gradients)
        return [
            tf.gather(total, tf.searchsorted(outputs[len(slices) + i], indices[i]))
            for i, total in zip(chosen, totals, strict=True)
        ]

    results = autograd.attach(merged, adjoint, [autograd.scaled(each.values, call.prescale) for each in slices])
    return [
        tf.IndexedSlices(autograd.scaled(values, call.postscale), union, each.dense_shape)
        for values, union, each in zip(results[: len(slices)], results[len(slices) :], slices, strict=True)
    ]


def _divisible(slices: Any) -> Any:
    """Convert integers to the dtype of TensorFlow's division, before the sum, which therefore cannot overflow."""
    if not slices.dtype.is_integer:
        return slices
    wide = tf.float32 if slices.dtype.size <= 2 else tf.float64
    return tf.IndexedSlices(tf.cast(slices.values, wide), slices.indices, slices.dense_shape)
