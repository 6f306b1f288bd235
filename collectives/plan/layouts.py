"""Layouts: the chunks of each collective, their sizes, and their offsets in any rank's input and output.

They follow from facts that all ranks share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.plan.program import Layout
from collectives.schedules import partition

_ALIGN = 64


def whole(shape: tuple[int, ...], dtype: np.dtype[Any], chunks: int) -> Layout:
    """A tensor of ``shape`` that every rank has in full, in chunks that begin at cache lines."""
    sizes = partition.split(math.prod(shape), chunks, max(1, _ALIGN // dtype.itemsize))
    starts = dict(enumerate(partition.offsets(sizes)))
    return Layout(sizes, lambda rank: starts, lambda rank: starts)


def scattered(shape: tuple[int, ...], size: int) -> Layout:
    """A chunk per rank, its share of the rows of ``shape``; the output is that chunk alone."""
    row = math.prod(shape[1:])
    sizes = [rows * row for rows in partition.rows(shape[0], size)]
    starts = dict(enumerate(partition.offsets(sizes)))
    return Layout(sizes, lambda rank: starts, lambda rank: {rank: 0})


def gathered(sizes: Sequence[int]) -> Layout:
    """A chunk of ``sizes[r]`` elements from each rank r, which is its whole input."""
    starts = dict(enumerate(partition.offsets(sizes)))
    return Layout(sizes, lambda rank: {rank: 0}, lambda rank: starts)


def exchanged(sizes: Sequence[int], size: int) -> Layout:
    """Chunk i * N + j, of ``sizes[i * N + j]`` elements, goes from rank i to rank j; inputs are ordered by receiver,
    outputs by sender."""

    def placed(chunks: range) -> dict[int, int]:
        return dict(zip(chunks, partition.offsets([sizes[chunk] for chunk in chunks]), strict=True))

    return Layout(
        sizes,
        lambda rank: placed(range(rank * size, rank * size + size)),
        lambda rank: placed(range(rank, size * size, size)),
    )
