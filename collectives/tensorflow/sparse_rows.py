"""Reduction of sparse rows, on arrays. The ranks gather their indices first, and then use the cheaper method.

    indices     gathered from all ranks; U is their union
    values      gathered, and rows of equal indices summed here          if the ranks have at most 2 |U| rows together
                or spread over |U| rows, with zeros, and all-reduced     if they overlap more than that

An all-reduce moves each of its rows twice, a gather each rank's rows once. The rule picks the method that moves fewer
rows; every rank knows all indices, so all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.base import dtypes
from collectives.base.reduce_op import Op
from collectives.worlds.world import World


def allreduce(world: World, arrays: Sequence[Any], average: bool, name: str | None) -> list[Any]:
    """Sum the rows of several sparse tensors over the ranks, in as few operations as for one.

    Args:
        arrays: values and indices of each tensor in turn; indices in any order, possibly repeated.
        average: divide by the number of ranks; not for integers.

    Returns:
        Values and indices of each tensor in turn, equal on all ranks; indices are ascending and unique.
    """
    gathering, further = name and f"{name}.indices", name and f"{name}.rows"
    with world.ahead_of(gathering):
        own_rows = [_combined(values, indices) for values, indices in zip(arrays[::2], arrays[1::2], strict=True)]
    gathered = world.grouped_allgather([indices for _, indices in own_rows], name=gathering)
    # The next operation has one name whichever it is, so a rank that fails before it knows which can refuse it.
    with world.ahead_of(further):
        unions = [np.unique(indices) for indices in gathered]
        overlaps = [len(indices) > 2 * len(union) for indices, union in zip(gathered, unions, strict=True)]
        apart, shared = ([i for i, overlap in enumerate(overlaps) if overlap is wanted] for wanted in (False, True))
        spread = [_spread(*own_rows[i], unions[i]) for i in shared]
    sums: list[Any] = [None] * len(own_rows)
    rows = world.grouped_allgather([own_rows[i][0] for i in apart], name=further) if apart else []
    if shared:
        op, reducing = Op.AVERAGE if average else Op.SUM, name and f"{name}.sums" if apart else further
        for i, total in zip(shared, world.grouped_allreduce_(spread, op=op, name=reducing), strict=True):
            sums[i] = total
    for i, values in zip(apart, rows, strict=True):
        total = _combined(values, gathered[i])[0]
        sums[i] = (total / total.dtype.type(world.size)).astype(total.dtype) if average else total
    return [array for pair in zip(sums, unions, strict=True) for array in pair]


def _spread(values: Any, indices: Any, union: Any) -> Any:
    """Rows for all indices of the union: the values, and zeros for indices that this rank lacks."""
    rows = np.zeros((len(union), *values.shape[1:]), values.dtype)
    rows[np.searchsorted(union, indices)] = values
    return rows


def _combined(values: Any, indices: Any) -> tuple[Any, Any]:
    """Sum rows of equal indices, in order; returns values and ascending indices."""
    if len(indices) < 2 or (np.diff(indices) > 0).all():
        return values, indices
    order = np.argsort(indices, kind="stable")
    indices = indices[order]
    starts = np.flatnonzero(np.concatenate([[True], indices[1:] != indices[:-1]]))
    wide = values[order].astype(np.float32) if dtypes.is_half(values.dtype) else values[order]
    return np.add.reduceat(wide, starts, axis=0).astype(values.dtype), indices[starts]
