"""Concatenate the small tensors of a grouped all-reduce in a compiled program, and split the result.

Each operand costs the engine and the call a few microseconds, the bytes of a small tensor next to nothing: 161 tensors
of 1 to 40 elements become one operand. Their shapes are passed on as `CollectiveCall.parts`, so that ranks whose
tensors happen to have the same total length are not matched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

_BELOW = 32 << 10
"""Bytes below which a tensor is packed."""

Shape = tuple[int, ...]


def pack(
    tensors: Sequence[Any],
) -> tuple[list[Any], tuple[tuple[Shape, ...], ...], Callable[[Sequence[Any]], list[Any]]]:
    """Concatenate small tensors of one dtype.

    Returns:
        The operands (large tensors as they are, then one of each dtype), the shapes in each of them (empty for one that
        is not packed), and the function that turns results into those of the tensors.
    """
    small: dict[Any, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if math.prod(tensor.shape) * tensor.dtype.itemsize < _BELOW:
            small.setdefault(tensor.dtype, []).append(number)
    packs = [members for members in small.values() if len(members) > 1]
    packed = {number for members in packs for number in members}
    alone = [number for number in range(len(tensors)) if number not in packed]
    operands = [tensors[number] for number in alone]
    operands += [jnp.concatenate([tensors[number].reshape(-1) for number in members]) for members in packs]
    parts = ((),) * len(alone) + tuple(tuple(tuple(tensors[number].shape) for number in members) for members in packs)

    def unpack(results: Sequence[Any]) -> list[Any]:
        unpacked: list[Any] = [None] * len(tensors)
        for number, result in zip(alone, results, strict=False):
            unpacked[number] = result
        for members, result in zip(packs, results[len(alone) :], strict=True):
            start = 0
            for number in members:
                shape = tensors[number].shape
                end = start + math.prod(shape)
                unpacked[number] = result[start:end].reshape(shape)
                start = end
        return unpacked

    return operands, parts, unpack
