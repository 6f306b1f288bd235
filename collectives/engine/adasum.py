"""Adasum: a sum of gradients that adds what is orthogonal and averages what is parallel.

S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021:

    adasum(a, b) = (1 - a.b / (2 a.a)) a  +  (1 - a.b / (2 b.b)) b

Orthogonal vectors are added, equal ones are averaged, and a zero vector leaves the other as it is. The operation is
symmetric but not associative, so that more than two vectors need an order: a binary tree, in which neighbours are
paired level by level and an odd one passes up unchanged. For powers of two that is the pairing of Horovod's recursive
distance doubling.

    rank       0   1   2   3   4   5   6            tree(7)
               └─┬─┘   └─┬─┘   └─┬─┘   │
    level 0     0,1     2,3     4,5    6            [(0, 1), (2, 3), (4, 5)]
                 └───┬───┘       └──┬──┘
    level 1       0,1,2,3         4,5,6             [(0, 2), (4, 6)]
                     └───────┬──────┘
    level 2            0,1,2,3,4,5,6                [(0, 4)]

A coefficient needs the dot products of two whole vectors, but only those three numbers. So the ranks divide the
elements, not the tree: each rank climbs the whole tree with its own slice of every rank's vector, and only the dot
products are summed over ranks.

    1. all-to-all     each rank gets its slice of all N vectors, as the rows of an array of shape (N, slice)
    2. for each level of the tree:
         dots         of this rank's slices, for every pair of the level
         all-reduce   of those, a sum in float64: 24 bytes for each pair
         combine      the slices; the result takes the row of the left one
    3. allgather      row 0 of every rank is its slice of the result

A rank sends S(N-1)/N bytes in the first step and as many in the last, for a vector of S bytes, as a ring all-reduce
does. Between them are ceil(log2 N) all-reduces of at most 12 N bytes, which wait for latency alone. Every slice is
combined on one rank, so that all ranks end with the same bits. How the elements are divided matters only to the
rounding of the dot products.

Several tensors of one fused operation are combined each by itself, with dot products of their own (their columns of the
array); the dot products of a level may well share one all-reduce. The callers refuse integers, bools and complex
numbers.

Two things differ from Horovod, on purpose: any number of ranks will do; and a vector counts as zero only if its squared
length is 0 in float64, where Horovod takes any length below 1e-4 for zero, so that adasum(s a, s b) was not s adasum(a,
b) for small s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.base.dtypes import accumulator, is_half
from collectives.tensors.halves import cast
from collectives.tensors.reduction import quiet

_Array = npt.NDArray[Any]
_Doubles = npt.NDArray[np.float64]
Pairs = Sequence[tuple[int, int]]
"""The rows that are combined at one level of the tree, left and right; each row occurs once at most."""

_BLOCK = 8192
"""Elements that are widened to float64 at a time: two operands stay in the L2 cache, and the dot products stay below
the 10,000 elements from which OpenBLAS wakes its threads, which cost it more than they bring."""


def tree(size: int) -> list[list[tuple[int, int]]]:
    """The levels of the combination, each the pairs whose result takes the left one's place; the whole ends in place
    0."""
    levels = []
    distance = 1
    while distance < size:
        levels.append([(left, left + distance) for left in range(0, size - distance, 2 * distance)])
        distance *= 2
    return levels


def widen(vectors: _Array) -> _Array:
    """The array to climb the tree with: halves become float32, to be rounded once at the end; others are used as they
    are.

    Args:
        vectors: of shape (ranks, slice), each row contiguous; float16, bfloat16, float32 or float64. The slice may be
            empty.
    """
    wide = accumulator(vectors.dtype)
    if wide == vectors.dtype:
        return vectors
    working = np.empty(vectors.shape, wide)
    for source, out in zip(vectors, working, strict=True):
        cast(source, out)
    return working


def dots(vectors: _Array, pairs: Pairs) -> _Doubles:
    """This rank's part of each pair's a.b, a.a and b.b, to be summed over ranks: float64, of shape (pairs, 3).

    The products are exact for everything but float64, and are added in float64. Infinities and NaN pass through
    silently.

    Args:
        vectors: as for ``widen``, which need not have been called.
    """
    sums = np.zeros((len(pairs), 3))
    left, right = np.empty(_BLOCK), np.empty(_BLOCK)
    with quiet():
        for (i, j), total in zip(pairs, sums, strict=True):
            for start in range(0, vectors.shape[1], _BLOCK):
                a = _widened(vectors[i, start : start + _BLOCK], left)
                b = _widened(vectors[j, start : start + _BLOCK], right)
                total += (np.dot(a, b), np.dot(a, a), np.dot(b, b))
    return sums


def combine(vectors: _Array, pairs: Pairs, sums: _Doubles) -> None:
    """Combine each pair into its left row; the right row keeps what it has.

    Computed in float64 and rounded once: a coefficient is as large as |b| / |a|, which float32 may not hold.

    Args:
        vectors: from ``widen``; float32 or float64.
        sums: the pairs' ``dots``, summed over all ranks.
    """
    left, right = np.empty(_BLOCK), np.empty(_BLOCK)
    with quiet():
        for (i, j), (ab, aa, bb) in zip(pairs, sums, strict=True):
            scale_a, scale_b = _coefficient(ab, aa), _coefficient(ab, bb)
            for start in range(0, vectors.shape[1], _BLOCK):
                block = vectors[i, start : start + _BLOCK]
                a, b = left[: block.size], right[: block.size]
                np.copyto(a, block)
                np.copyto(b, vectors[j, start : start + _BLOCK])
                np.multiply(a, scale_a, a)
                np.multiply(b, scale_b, b)
                np.add(a, b, a)
                np.copyto(block, a, casting="unsafe")


def reference(vectors: Sequence[_Array]) -> _Doubles:
    """The formula over the tree, in float64 and on whole vectors: what tests compare with.

    Args:
        vectors: one of each rank, 1-D and equally long.
    """
    row = [vector.astype(np.float64) for vector in vectors]
    for level in tree(len(row)):
        for i, j in level:
            a, b = row[i], row[j]
            ab = float(a @ b)
            row[i] = _coefficient(ab, float(a @ a)) * a + _coefficient(ab, float(b @ b)) * b
    return row[0]


def _widened(block: _Array, scratch: _Doubles) -> _Doubles:
    """The block in float64: itself, or in ``scratch``."""
    if block.dtype == np.float64:
        return block
    wide = scratch[: block.size]
    if is_half(block.dtype):
        cast(block, wide)
    else:
        np.copyto(wide, block)
    return wide


def _coefficient(product: float, square: float) -> float:
    """1 - a.b / (2 a.a); of a zero vector 1, which leaves it zero and adds nothing to the other."""
    return 1.0 - product / square / 2 if square != 0 else 1.0
