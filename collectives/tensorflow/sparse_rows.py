"""Sums of sparse rows, on arrays: which ranks have which rows is found out first, then the cheaper way is taken.

    indices     of every rank's rows are gathered; U are those that any rank has
    values      gathered as well, and those of equal indices added up                     if all ranks have at most 2 |U| rows together
                or put into |U| rows, with zeros where this rank has none, and reduced    if they overlap more than that

A reduction moves each of its rows twice, a gathering every rank's rows once: so the rule takes what moves less, and
every rank, which knows all indices, decides alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.base import dtypes
from collectives.base.reduce_op import Op
from collectives.world import World


def allreduce(world: World, arrays: Sequence[Any], average: bool, name: str | None) -> list[Any]:
    """Add up the rows of several sparse tensors over the ranks, in as few operations as for one.

    Args:
        arrays: the values and the indices of the first, of the second, ...; indices in any order, and as often as they
            like.
        average: divide by the number of ranks, which is not for integers.

    Returns:
        Values and indices, alike on all ranks: indices ascending, each once.
    """
    gathering, further = name and f"{name}.indices", name and f"{name}.rows"
    with world.ahead_of(gathering):
        mine = [_combined(values, indices) for values, indices in zip(arrays[::2], arrays[1::2], strict=True)]
    gathered = world.grouped_allgather([indices for _, indices in mine], name=gathering)
    # The next operation has the same name whatever it is, so that a rank can say that it will not come before it knows.
    with world.ahead_of(further):
        unions = [np.unique(indices) for indices in gathered]
        overlaps = [len(indices) > 2 * len(union) for indices, union in zip(gathered, unions, strict=True)]
        apart, shared = ([i for i, overlap in enumerate(overlaps) if overlap is wanted] for wanted in (False, True))
        spread = [_spread(*mine[i], unions[i]) for i in shared]
    sums: list[Any] = [None] * len(mine)
    rows = world.grouped_allgather([mine[i][0] for i in apart], name=further) if apart else []
    if shared:
        op, reducing = Op.AVERAGE if average else Op.SUM, name and f"{name}.sums" if apart else further
        for i, total in zip(shared, world.grouped_allreduce_(spread, op=op, name=reducing), strict=True):
            sums[i] = total
    for i, values in zip(apart, rows, strict=True):
        total = _combined(values, gathered[i])[0]
        sums[i] = (total / total.dtype.type(world.size)).astype(total.dtype) if average else total
    return [array for pair in zip(sums, unions, strict=True) for array in pair]


def _spread(values: Any, indices: Any, union: Any) -> Any:
    """The values in rows for all indices of the union, with zeros in those that are not among ``indices``."""
    rows = np.zeros((len(union), *values.shape[1:]), values.dtype)
    rows[np.searchsorted(union, indices)] = values
    return rows


def _combined(values: Any, indices: Any) -> tuple[Any, Any]:
    """Rows of equal indices added up, in their order; indices ascending."""
    if len(indices) < 2 or (np.diff(indices) > 0).all():
        return values, indices
    order = np.argsort(indices, kind="stable")
    indices = indices[order]
    starts = np.flatnonzero(np.concatenate([[True], indices[1:] != indices[:-1]]))
    wide = values[order].astype(np.float32) if dtypes.is_half(values.dtype) else values[order]
    return np.add.reduceat(wide, starts, axis=0).astype(values.dtype), indices[starts]
