"""Dividing elements among chunks, and rows among ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def split(count: int, parts: int, align: int = 1) -> list[int]:
    """Sizes of ``parts`` neighbouring parts of ``count`` elements, as equal as whole units of ``align`` elements allow.

    Every boundary between parts is a multiple of ``align``; larger parts come first; what does not fill a unit is cut
    from the last part that is not empty.
    """
    units = -(-count // align)
    share, extra = divmod(units, parts)
    sizes = [(share + (part < extra)) * align for part in range(parts)]
    excess = units * align - count
    if excess:
        sizes[(parts if share else extra) - 1] -= excess
    return sizes


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where each part begins."""
    return [0, *accumulate(sizes)][: len(sizes)]


def rows(count: int, parts: int) -> list[int]:
    """How many of ``count`` rows each rank gets in a reduce-scatter: the first ranks get one more where it does not
    divide."""
    return split(count, parts)
