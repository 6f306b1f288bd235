"""Small tensors of a compiled program travel as one: XLA lays them one behind the other, and takes the result apart.

An operand costs the engine and the call a few microseconds, and a small tensor's bytes next to nothing (161 tensors of
1 to 40 elements: one operand in place of 161). The shapes go along as `CollectiveCall.parts`, so that ranks whose tensors add up
to the same length by chance do not mix them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

_BELOW = 32 << 10
"""Bytes of a tensor that is packed."""

Shape = tuple[int, ...]


def pack(
    tensors: Sequence[Any],
) -> tuple[list[Any], tuple[tuple[Shape, ...], ...], Callable[[Sequence[Any]], list[Any]]]:
    """Put small tensors of one dtype together.

    Returns:
        The operands: large tensors as they are, then one of each dtype; the shapes in each; and what makes the tensors
            of the results.
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
        found: list[Any] = [None] * len(tensors)
        for number, result in zip(alone, results, strict=False):
            found[number] = result
        for members, result in zip(packs, results[len(alone) :], strict=True):
            start = 0
            for number in members:
                shape = tensors[number].shape
                end = start + math.prod(shape)
                found[number] = result[start:end].reshape(shape)
                start = end
        return found

    return operands, parts, unpack
