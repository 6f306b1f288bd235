"""Memory of operations in flight: no operation may read or write what another one writes.

An operation is in flight from its submission until it is complete. Any number of operations may read the same memory,
and broadcasts from one root may share what they write: the root only reads it, and the others write the same bytes. The
members of a grouped operation all read what was submitted, and results are written in the order of the members:
`separate` gives members that share memory copies of their own.

Only one rank knows which of its tensors share memory. So a violation is refused before anything is sent, and what the
ranks plan and agree on never depends on it.

Extents that overlap no other, nearly always all of them, are kept sorted by address; the few others are searched
linearly.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left
from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.base.exclusion import give_back
from collectives.tensors.arrays import extent_of
from collectives.tensors.detection import Extent, Strided, share_a_byte

if TYPE_CHECKING:
    from collectives.engine.handles import Handle

Span = tuple[int, int, bool, Strided | None, int]
"""An extent, and the number of the operation that uses it."""

_NDARRAY = np.ndarray
_ROOM = 256
"""The number of spans from which those of complete operations are dropped."""


class InFlight:
    """The memory of all operations in flight of one rank, its process sets included. Methods may be called from any
    thread.

    Attributes:
        operations: those in flight that use the program's memory, by ``handle.claim``. Completing one removes it here,
            which needs no lock; its spans are dropped later.
    """

    def __init__(self) -> None:
        self.operations: dict[int, Handle] = {}
        self._numbers = itertools.count(1)
        self._apart: list[Span] = []
        """Spans that do not overlap, sorted."""
        self._entangled: list[Span] = []
        """Spans that overlap others, as is allowed."""
        self._room = _ROOM
        self._lock: Any = threading.RLock()  # a signal handler may submit an operation while its thread is in here

    def claim(self, handle: Handle) -> str | None:
        """Record the memory of an operation until it is complete.

        Returns:
            None; or why the operation must not be submitted, and what to do. Nothing is recorded then.
        """
        extents = claimed_extents(handle) if type(handle.writes) is not _NDARRAY else (extent_of(handle.writes, True),)
        if not extents:
            return None
        operations, apart = self.operations, self._apart
        handle.claim = number = next(self._numbers)
        lock = self._lock
        nested = lock._is_owned()
        try:  # as `exclusively`, without a call
            with lock:
                if not operations:
                    apart.clear()
                    self._entangled.clear()
                elif len(apart) > self._room:
                    self._drop_complete()
                operations[number] = handle
                try:
                    if not self._entangled:
                        # The usual case: it fits between two others.
                        start, end = extents[0][0], extents[-1][1]
                        at = bisect_left(apart, (end,))
                        if not at or apart[at - 1][1] <= start:
                            if len(extents) == 1:
                                apart.insert(at, (*extents[0], number))
                                return None
                            if _lie_apart(extents):
                                apart[at:at] = [(*extent, number) for extent in extents]
                                return None
                    for extent in extents:
                        other = self._insert((*extent, number))
                        if other is not None:
                            del operations[number]
                            return _refusal(handle, extent, other, operations.get(other[4]))
                except BaseException:  # an interrupt, with only some of the spans recorded
                    operations.pop(number, None)
                    raise
        finally:
            if not nested and lock._is_owned():
                give_back(lock)
        return None

    def _insert(self, span: Span) -> Span | None:
        """Add a span. Returns a span that it must not overlap instead, if there is one."""
        start, end, apart = span[0], span[1], self._apart
        at = bisect_left(apart, (end,))
        overlaps = False
        while at and apart[at - 1][1] > start:
            at -= 1
            other = apart[at]
            if other[4] not in self.operations:
                del apart[at]
            elif self._conflict(span, other):
                return other
            else:
                overlaps = True
        for other in self._entangled:
            if other[0] < end and start < other[1] and self._conflict(span, other):
                return other
        if overlaps:
            self._entangled.append(span)
            if len(self._entangled) > self._room:
                self._drop_complete()
        else:
            apart.insert(at, span)
        return None

    def _conflict(self, one: Span, other: Span) -> bool:
        """Whether two spans whose addresses overlap may not be in flight together."""
        own, other_operation = self.operations[one[4]], self.operations.get(other[4])
        if other_operation is None or other_operation is own or not (one[2] or other[2]):
            return False
        root = own.entry.request.root
        if root is not None and root == other_operation.entry.request.root and own.engine is other_operation.engine:
            return False
        return share_a_byte(one[:4], other[:4])

    def _drop_complete(self) -> None:
        operations = self.operations
        self._apart[:] = [span for span in self._apart if span[4] in operations]
        self._entangled[:] = [span for span in self._entangled if span[4] in operations]
        self._room = 2 * (len(self._apart) + len(self._entangled)) + _ROOM


def separate(group: Handle) -> None:
    """Let every member of a grouped operation read what was submitted: of members that write memory that another one
    uses, all but the first work on copies, which are written back when the operation completes."""
    group.extents = sorted([extent for member in group.members for extent in claimed_extents(member)], key=_start)
    if _lie_apart(group.extents) or not any(extent[2] for extent in group.extents):
        return
    extents = sorted(
        [(*extent, at) for at, member in enumerate(group.members) for extent in claimed_extents(member)], key=_start
    )
    end, before = 0, -1
    cluster: set[int] = set()
    """Members whose extents overlap one another, or one in between."""
    for start, last, _, _, at in extents:
        if start < end:
            cluster |= {before, at}
        elif cluster:
            _detach_all_but_first(group, cluster)
            cluster = set()
        end, before = max(end, last), at
    _detach_all_but_first(group, cluster)


def _detach_all_but_first(group: Handle, members: set[int]) -> None:
    for at in sorted(members)[1:]:
        member = group.members[at]
        view = member.writes
        if view is not None and not view.copied and member.out is view.array:
            view.detach()
            member.source = member.out = view.array


def claimed_extents(handle: Handle) -> Sequence[Extent]:
    """The program's memory that an operation uses while it is in flight, sorted; not its own copies and results. One
    that was submitted without a view writes one array and reads nothing else."""
    read, written = handle.reads, handle.writes
    if type(written) is _NDARRAY:
        return (extent_of(written, True),)
    if written is None or not written.nbytes:
        return handle.extents if read is None or read.copied or not read.nbytes else (read.extent(False),)
    if read is None or read.copied or not read.nbytes:
        return (written.extent(True),)
    return sorted((read.extent(False), written.extent(True)), key=_start)


_start = itemgetter(0)


def _lie_apart(extents: Sequence[Extent]) -> bool:
    """Whether no two of several extents, which are sorted, overlap."""
    end = 0
    for extent in extents:
        if extent[0] < end:
            return False
        end = extent[1]
    return True


def _refusal(handle: Handle, own: Extent, other: Span, first: Handle | None) -> str:
    busy = "one that has just completed" if first is None else f"{first.entry.request.describe()}{_place(first)}"
    number = next((at for at, member in enumerate(handle.members) if own in claimed_extents(member)), None)
    which = "its memory" if number is None else f"the memory of its tensor number {number}"
    return (
        f"{handle.entry.request.describe()}{_place(handle)}: {which}, which it {'writes' if own[2] else 'reads'}, is "
        f"{'written' if other[2] else 'read'} by an operation in flight: {busy}; synchronize that operation first, or "
        "pass a copy to one of the two [W30]"
    )


def _place(handle: Handle) -> str:
    return f" (submitted at {handle.where})" if handle.where else ""
