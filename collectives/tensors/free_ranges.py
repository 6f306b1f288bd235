"""Which ranges of a piece of memory are free: best fit, and free neighbours merge."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator


class FreeRanges:
    """The free ranges of the bytes from 0 to ``nbytes``. Not thread-safe.

    An exception in the middle of a method, as an interrupt raises it, may lose a range. It never makes one free that is
    in use: what is taken is removed first, what is given back is added last, and each table is read without trust in
    the others.
    """

    __slots__ = ("_ends", "_sizes", "_starts")

    def __init__(self, nbytes: int) -> None:
        self._sizes = [(nbytes, 0)]
        """Size and start of each range, sorted."""
        self._starts = {0: nbytes}
        """Start -> size."""
        self._ends = {nbytes: 0}
        """End -> start."""

    def take(self, nbytes: int, align: int) -> int | None:
        """Take ``nbytes`` from the smallest range that has them at a multiple of ``align``; None if none has."""
        sizes = self._sizes
        for index in range(bisect_left(sizes, (nbytes, 0)), len(sizes)):
            size, start = sizes[index]
            at = -(-start // align) * align
            if at + nbytes <= start + size:
                del sizes[index]
                self._starts.pop(start, None)
                self._ends.pop(start + size, None)
                self._add(start, at)
                self._add(at + nbytes, start + size)
                return at
        return None

    def give_back(self, start: int, end: int) -> None:
        """Free the bytes from ``start`` to ``end``."""
        size = self._starts.pop(end, None)
        if size is not None:
            self._remove(end, size)
            self._ends.pop(end + size, None)
            end += size
        before = self._ends.pop(start, None)
        if before is not None:
            self._remove(before, start - before)
            self._starts.pop(before, None)
            start = before
        self._add(start, end)

    def of_at_least(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Start and end of the ranges of at least ``nbytes``."""
        for size, start in self._sizes[bisect_left(self._sizes, (nbytes, 0)) :]:
            yield start, start + size

    def _add(self, start: int, end: int) -> None:
        if start < end:
            insort(self._sizes, (end - start, start))
            self._starts[start] = end - start
            self._ends[end] = start

    def _remove(self, start: int, size: int) -> None:
        index = bisect_left(self._sizes, (size, start))
        if self._sizes[index : index + 1] == [(size, start)]:
            del self._sizes[index]
