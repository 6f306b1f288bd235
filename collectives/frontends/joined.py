"""All-reduces of many small tensors, copied into one array whose request says what it consists of.

A tensor of a grouped operation costs the engine some 10 us, whatever its size: a request, a handle, words in a round.
Copying 256 KiB costs as much. Besides, the array lies in the arena, where the ranks reach it without system calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from collectives.base.reduce_op import Op
from collectives.worlds.world import World

_BELOW = 256 << 10
"""Bytes of a tensor, on average, below which tensors are copied together."""
_APART_UP_TO = 4 << 20
"""Bytes of all tensors up to which two copies, in and out, take less time than system calls on each tensor."""


class Shapes(tuple[tuple[int, ...], ...]):
    """The shapes of tensors, hashed once: every call looks its request up by them."""

    _hash: int

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            self._hash = super().__hash__()
            return self._hash


def pays(arrays: Sequence[Any], op: Op | None, compression: Any) -> bool:
    """Whether `allreduce` is quicker than the grouped operation; the same on every rank whose arrays have the same
    sizes."""
    return _may_join(arrays, op, compression) and sum(array.nbytes for array in arrays) < len(arrays) * _BELOW


def pays_apart(arrays: Sequence[Any], op: Op | None, compression: Any) -> bool:
    """`pays` of `allreduce_apart`."""
    return _may_join(arrays, op, compression) and sum(array.nbytes for array in arrays) <= _APART_UP_TO


def _may_join(arrays: Sequence[Any], op: Op | None, compression: Any) -> bool:
    # Adasum treats each tensor as one vector, and a compressed tensor is copied anyway.
    return op is not Op.ADASUM and compression is None and len(arrays) > 1


def allreduce(
    world: World,
    arrays: Sequence[Any],
    places: Sequence[Any],
    wholes: Sequence[Any],
    parts: Sequence[tuple[tuple[int, ...], ...]],
    **how: Any,
) -> None:
    """Copy arrays to their places, and reduce what these belong to.

    Args:
        arrays: of any shapes.
        places: for each array as many elements of one of ``wholes``, 1-D. What belongs to no array holds any numbers,
            and holds others afterwards.
        wholes: 1-D arrays.
        parts: for each of ``wholes`` the shapes of all tensors in it.
        how: the keywords of the all-reduce.
    """
    for array, place in zip(arrays, places, strict=True):
        np.copyto(place, array.reshape(-1))
    if len(wholes) == 1:
        world.allreduce_(wholes[0], shapes=parts[0], **how)
    else:
        world.grouped_allreduce_(wholes, shapes=parts, **how)


def allreduce_apart(
    world: World,
    arrays: Sequence[Any],
    results: Sequence[Any],
    parts: Sequence[tuple[tuple[int, ...], ...]],
    **how: Any,
) -> None:
    """`allreduce` whose results are copied out of the joined arrays.

    Args:
        arrays: of any shapes.
        results: for each array one of its shape and dtype; may be the array itself.
        parts: for each array the shapes of the tensors that are concatenated in it; empty if it is one tensor.
    """
    by_dtype: dict[Any, list[int]] = {}
    for number, array in enumerate(arrays):
        by_dtype.setdefault(array.dtype, []).append(number)
    order = [number for numbers in by_dtype.values() for number in numbers]
    places, wholes = [], []
    for dtype, numbers in by_dtype.items():
        ends = list(accumulate(arrays[number].size for number in numbers))
        wholes.append(world.memory(ends[-1], dtype))
        places += [wholes[-1][start:end] for start, end in zip([0, *ends], ends, strict=False)]
    shapes = [
        tuple(shape for number in numbers for shape in parts[number] or (arrays[number].shape,))
        for numbers in by_dtype.values()
    ]
    allreduce(world, [arrays[number] for number in order], places, wholes, shapes, **how)
    for number, place in zip(order, places, strict=True):
        result = results[number]
        np.copyto(result, place.reshape(result.shape))
