"""The fixed tree: the one order in which the values of several ranks are combined, whatever moves them.

    count 4    (0+1) + (2+3)                count 6    ((0+1) + (2+3)) + (4+5)
    count 3    (0+1) + 2                    count 7    ((0+1) + (2+3)) + ((4+5) + 6)

A range of values is split at the largest power of two below its length. So the values of an aligned range (one that
begins at a multiple of a power of two, and is as long) are combined with each other first, and a rank, a host, or an
algorithm that has them can pass on one value for all of them without changing a bit of the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from collectives.schedules import partition

Value = TypeVar("Value")
Range = tuple[int, int]


class Merge(NamedTuple):
    """One combination: ``left op right``. An operand below the count is a value; ``count + d`` is intermediate result
    d. The result becomes intermediate result ``depth``; that of the last merge is the whole."""

    left: int
    right: int
    depth: int
    """Of no intermediate result that is in use, unless it is an operand: a left value can be fetched there."""
    spare: int
    """Another one such, where a right value can be fetched."""


@functools.cache
def merges(count: int, first: int = 0) -> tuple[Merge, ...]:
    """The tree over ``count`` values, as merges in an order in which they can be carried out.

    Args:
        first: the value with which the order begins, and which is never fetched, so that ranks do not all read the same
            peer at once; the tree does not depend on it.
    """
    order: list[Merge] = []

    def visit(begin: int, end: int, depth: int) -> int:
        if end - begin == 1:
            return begin
        middle = split(begin, end)
        if middle <= first < end:
            right, left = visit(middle, end, depth), visit(begin, middle, depth + 1)
        else:
            left, right = visit(begin, middle, depth), visit(middle, end, depth + 1)
        order.append(Merge(left, right, depth, depth if left == count + depth + 1 else depth + 1))
        return count + depth

    visit(0, count, 0)
    return tuple(order)


def intermediates(count: int) -> int:
    """How many intermediate results, fetched values included, `merges` keeps at once at most."""
    return (count - 1).bit_length() + 1 if count > 2 else 0


def split(begin: int, end: int) -> int:
    """Where the tree over a range divides it."""
    return begin + (1 << (end - begin - 1).bit_length() - 1)


def nodes(begin: int, end: int, count: int) -> list[Range]:
    """The ranges of the largest subtrees, of the tree over ``count`` values, that lie within a range."""

    def within(low: int, high: int) -> list[Range]:
        if high <= begin or end <= low:
            return []
        if begin <= low and high <= end:
            return [(low, high)]
        middle = split(low, high)
        return within(low, middle) + within(middle, high)

    return within(0, count)


def shares(count: int, ranks: int) -> list[Range]:
    """Each rank's range of ``count`` parts: as equal as possible, the larger ones first."""
    sizes = partition.split(count, ranks)
    return [(begin, begin + size) for begin, size in zip(partition.offsets(sizes), sizes, strict=True)]


def carries(count: int) -> tuple[int, ...]:
    """For each of ``count`` values that come one after the other, a power of two: how many subtrees to its left it
    completes, of 1, 2, 4... values. It is added to these in this order, as a carry to the digits of a binary number."""
    return tuple((~value & value + 1).bit_length() - 1 for value in range(count))


def evaluate(
    begin: int, end: int, value: Callable[[Range], Value | None], combine: Callable[[Value, Value], Value]
) -> Value:
    """The tree over a range, from the values of subtrees; ``value`` is None of one that has to be combined."""
    whole = value((begin, end))
    if whole is not None:
        return whole
    middle = split(begin, end)
    return combine(evaluate(begin, middle, value, combine), evaluate(middle, end, value, combine))


def follows(hosts: Sequence[Sequence[int]]) -> bool:
    """Whether each host's ranks are a subtree of the tree over all ranks: consecutive, and as many, a power of two, on
    every host."""
    ranks, each = [rank for host in hosts for rank in host], len(hosts[0])
    return ranks == list(range(len(ranks))) and all(len(host) == each for host in hosts) and each & (each - 1) == 0
