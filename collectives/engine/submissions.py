"""The operations that this rank has submitted and that are not complete.

    inbox      submitted by any thread, not yet seen by the driving thread
    pending    collected by the driving thread, by key
    fresh      those of `pending` that have not been proposed to the other ranks
    deferred   operations whose name is taken by the mark of a refused call

Any thread may add an operation; collecting and completing are for the driving thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import filterfalse
from operator import attrgetter
from typing import NoReturn

from collectives.base.errors import CollectivesError, InvalidArgumentError
from collectives.base.wake_up import WakeUp
from collectives.engine.handles import Handle
from collectives.engine.negotiation import Key
from collectives.engine.overlaps import InFlight

_DONE = attrgetter("done")
_MOST_SHOWN = 5
"""Operations in flight that an error names."""
WITHOUT_HANDLE = None
"""Stands in `Submissions.names` for a named operation that is carried out without a handle."""


class Submissions:
    """The operations in flight of one rank in one world.

    Attributes:
        in_flight: the memory of this rank's operations in flight, shared with its other worlds.
        names: the operation in flight of each name.
        unnamed: unnamed operations so far; equal on all ranks between two negotiation rounds.
        obstacles: why blocking calls cannot be carried out without a handle at present.
        refusal: makes the error of every further call; None while calls are accepted.
        work: set when the background thread has something to do, or must end.
    """

    def __init__(self, rank: int, in_flight: InFlight) -> None:
        self.inbox: deque[Handle] = deque()
        self.pending: dict[Key, Handle] = {}
        self.fresh: list[Handle] = []
        self.names: dict[str, Handle | None] = {}
        self.unnamed = 0
        self.in_flight = in_flight
        self.obstacles: set[str] = set()
        self.refusal: Callable[[], CollectivesError] | None = None
        self.work = WakeUp()
        self._deferred: list[Handle] = []
        self._rank = rank

    def add(self, handle: Handle) -> str | None:
        """Put an operation into the inbox.

        Returns:
            None, or why it cannot be in flight: it shares memory with another operation. It is not submitted then, and
            the caller must tell the other ranks.

        Raises:
            InvalidArgumentError: an operation of this name is in flight.
            CollectivesError: calls are refused.
        """
        if self.refusal is not None:
            raise self.refusal()
        name = handle.entry.name
        try:
            if name is not None:
                first = self.names.setdefault(name, handle)
                if first is not handle:
                    if first is None or first.entry.request.collective != "invalid":
                        self.refuse_duplicate(name)
                    self.names[name] = handle  # carried out after the mark of the refused call
            overlap = self.in_flight.claim(handle)
            if overlap is not None:
                if name is not None:
                    self.names.pop(name, None)
                return overlap
            self.inbox.append(handle)
        except BaseException:
            self._withdraw(handle)
            raise
        if self.refusal is not None:  # set meanwhile, possibly after the refusing thread emptied the inbox
            handle.fail(self.refusal())  # type: ignore[unreachable]
        return None

    def _withdraw(self, handle: Handle) -> None:
        """Undo an interrupted submission, unless the operation is in flight already: then it goes on."""
        if handle in self.inbox or handle in self._deferred or self.pending.get(handle.key) is handle:
            return
        self.in_flight.operations.pop(handle.claim, None)
        name = handle.entry.request.name or ""
        if self.names.get(name) is handle:
            del self.names[name]

    def add_first(self, handle: Handle) -> None:
        """Add, ahead of the inbox, an operation whose name is reserved and whose round has been entered.

        It is too late to refuse memory that another thread may have claimed meanwhile.
        """
        self.in_flight.claim(handle)
        if handle.entry.name is not None:
            self.names[handle.entry.name] = handle
        self.inbox.appendleft(handle)
        self.collect()

    def refuse_duplicate(self, name: str) -> NoReturn:
        """Raise InvalidArgumentError: an operation of this name is in flight."""
        first = self.names.get(name)
        which = f" ({first.entry.request.describe()}{submitted_at(first)})" if first else ""
        raise InvalidArgumentError(
            f"rank {self._rank}: tensor {name!r}: an operation of this name is in flight already{which}; synchronize "
            f"it first, or give this one another name [W31]"
        )

    def collect(self) -> None:
        """Move the inbox to `pending` and `fresh`, in submission order, and number unnamed operations."""
        while self.inbox:
            handle = self.inbox.popleft()
            name = handle.entry.name
            if name is not None:
                handle.key = name
            else:
                handle.key = self.unnamed
                for member in handle.members:
                    member.key = self.unnamed
                self.unnamed += 1
            if handle.key in self.pending:
                self._deferred.append(handle)
                continue
            self.pending[handle.key] = handle
            self.fresh.append(handle)

    def next_list(self, limit: int) -> list[Handle]:
        """The fresh operations to propose: a list ends where its bytes reach ``limit``.

        Cutting by bytes rather than by time makes the lists equal on all ranks and in every step, so that proposals
        are unanimous and plans are cached.
        """
        filled = 0
        for number, handle in enumerate(self.fresh):
            filled += handle.entry.nbytes
            if filled >= limit:
                return self.fresh[: number + 1]
        return list(self.fresh)

    def complete(self, handles: Sequence[Handle], error: BaseException | None = None) -> None:
        """Finish these operations, or fail them with ``error``."""
        pending, names = self.pending, self.names
        for handle in handles:
            key = handle.key
            pending.pop(key, None)
            if type(key) is str and names.get(key) is handle:
                del names[key]
            if error is None:
                handle.finish()
            else:
                handle.fail(error)
        if self.fresh:
            self.fresh = list(filterfalse(_DONE, self.fresh))
        if self._deferred:
            deferred, self._deferred = self._deferred, []
            self.inbox.extendleft(reversed(deferred))

    def refuse(self, refusal: Callable[[], CollectivesError], error: CollectivesError | None = None) -> None:
        """Refuse every further call; operations in flight fail, with ``error`` or with the refusal."""
        self.obstacles.add("refusal")
        self.refusal = refusal
        while self.inbox:
            self.inbox.popleft().fail(error or refusal())
        for handle in [*self.pending.values(), *self._deferred]:
            handle.fail(error or refusal())
        self.pending.clear()
        self.names.clear()

    def has_work(self) -> bool:
        """Whether any operation is in flight."""
        return bool(self.pending or self.inbox)


def describe(rank: int, handles: Sequence[Handle]) -> str:
    """A line that lists operations in flight, for the message of the error that ends them; empty without any."""
    if not handles:
        return ""
    shown = "; ".join(f"{handle.title}{submitted_at(handle)}" for handle in handles[:_MOST_SHOWN])
    more = f"; and {len(handles) - _MOST_SHOWN} more" if len(handles) > _MOST_SHOWN else ""
    return f"\nrank {rank} was waiting for {shown}{more}"


def submitted_at(handle: Handle) -> str:
    """The line that submitted an operation, for messages; empty if it was not recorded."""
    return f", submitted at {handle.where}" if handle.where else ""
