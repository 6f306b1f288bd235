"""Dividing elements among chunks, and rows among ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def split(count: int, parts: int, align: int = 1) -> list[int]:
    """Sizes of ``parts`` consecutive parts of ``count`` elements, as equal as units of ``align`` elements allow.

    Every boundary between parts is a multiple of ``align``; larger parts come first; the last part that is not empty
    may end within a unit.
    """
    units = -(-count // align)
    share, extra = divmod(units, parts)
    sizes = [(share + (part < extra)) * align for part in range(parts)]
    excess = units * align - count
    if excess:
        sizes[(parts if share else extra) - 1] -= excess
    return sizes


def offsets(sizes: Sequence[int]) -> list[int]:
    """The first element of each part."""
    return [0, *accumulate(sizes)][: len(sizes)]


def rows(count: int, parts: int) -> list[int]:
    """The rows of each rank in a reduce-scatter of ``count`` rows: the first ranks get the remainder, one row each."""
    return split(count, parts)
