"""A handle: an operation from its submission until its result is fetched.

It keeps the memory of the operation alive, records where it was submitted, and holds its result or its error. The
engine completes it; any thread may `poll` it or wait for it, any number of times.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, Generic, Protocol

import numpy as np

from collectives.base.errors import CollectivesError
from collectives.base.exclusion import exclusively
from collectives.base.logging import logger
from collectives.engine.overlaps import InFlight
from collectives.engine.request_cache import CachedRequest
from collectives.tensors.detection import Extent

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Result = TypeVar("Result", covariant=True, default=Any)
else:
    from typing import TypeVar

    Result = TypeVar("Result", covariant=True)

EMPTY: Any = np.empty(0)
"""Stands for an array where there is none."""
PACKAGE = str(Path(__file__).parents[1])
_adding = threading.RLock()
_MOST_UNNAMED_ROWS = 1000


class Driver(Protocol):
    """Completes handles: the engine."""

    in_flight: InFlight

    @property
    def refusal(self) -> Callable[[], CollectivesError] | None:
        """Makes the error of every further call; None while calls are accepted."""

    def wait(self, handle: Handle, timeout: float | None = None) -> None:
        """Return when the handle is done."""


@dataclass(slots=True, eq=False, repr=False)
class Handle(Generic[Result]):
    """One operation, or a grouped operation.

    Attributes:
        source, out: input and output, 1-D arrays or `collectives.tensors.cuda_tensors.DeviceArray`; an output whose
            size is not known before is set when the operation runs.
        deliver: makes the caller's result once the operation is done.
        members: the handles of a grouped operation.
        rows: of allgather and all-to-all: the rows that this rank sends, to all or to each.
        reads, writes: views of the program's memory that the operation reads or writes while it is in flight; what it
            writes may be a contiguous array of which no view was made.
        extents: of a grouped operation, the memory of its members, sorted by address.
        claim: its number in `collectives.engine.overlaps`; 0 if it claims no memory of the program.
        done: whether it is complete; then ``error`` or ``result`` is final.
        ready, fence: of device tensors: the event after the caller's earlier work, and the fence before its later work
            (`collectives.cuda`).
        gathered: of allgather and all-to-all, once done: the numbers of rows received; of device tensors, the result
            and these.
        key: its name, or its number among the unnamed, assigned by the engine; of a member, its group's name.
        place: index of a member in its grouped operation; None otherwise.
    """

    entry: CachedRequest
    source: Any
    out: Any
    deliver: Callable[[Handle], Any]
    keep: Any = None
    members: Sequence[Handle] = ()
    rows: Sequence[int] = ()
    reads: Any = None
    writes: Any = None
    extents: Sequence[Extent] = field(default=(), init=False)
    claim: int = field(default=0, init=False)
    done: bool = field(default=False, init=False)
    told: bool = field(default=False, init=False)
    result: Any = field(default=None, init=False)
    error: BaseException | None = field(default=None, init=False)
    ready: Any = field(default=None, init=False)
    fence: Any = field(default=None, init=False)
    gathered: Any = field(default=None, init=False)
    key: str | int = field(default="", init=False)
    place: int | None = field(default=None, init=False)
    engine: Driver | None = field(default=None, init=False)
    submitted: float = field(default_factory=time.monotonic, init=False)
    _callbacks: list[Callable[[Handle], object]] | None = field(default=None, init=False)
    _code: CodeType | None = field(default=None, init=False)
    _line: int = field(default=0, init=False)

    @property
    def name(self) -> str:
        """Its name in messages; that of a member is like ``gradients[2]``."""
        request, place = self.entry.request, "" if self.place is None else f"[{self.place}]"
        if request.name is not None or (isinstance(self.key, str) and self.key):
            return f"{self.key if request.name is None else request.name}{place}"
        number = f" number {self.key}" if self.key != "" else ""
        return f"{'grouped_' if place else ''}{request.collective}{number}{place}, unnamed"

    @property
    def row(self) -> str:
        """The tensor's row in Horovod's timeline: ``allreduce.loss``, or one of 1,000 like ``allreduce.noname.7``."""
        collective, place = self.entry.request.collective, "" if self.place is None else f"[{self.place}]"
        name = f"noname.{self.key % _MOST_UNNAMED_ROWS}{place}" if isinstance(self.key, int) else self.name
        return f"{collective}.{name}"

    @property
    def phase(self) -> str:
        """The operation's name in Horovod's timeline: ``ALLREDUCE``."""
        request = self.entry.request
        return "ADASUM" if request.op == "adasum" else request.collective.upper()

    @property
    def title(self) -> str:
        """Its collective and its name, as in ``allreduce 'loss'``."""
        name = self.name
        return name if name.endswith(", unnamed") else f"{self.entry.request.collective} {name!r}"

    def wait(self, timeout: float | None = None) -> Result:
        """Wait until the operation is complete, and return its result; may be called again.

        Args:
            timeout: seconds to wait at most; None: as long as the other ranks are alive, and `COLLECTIVES_TIMEOUT`.

        Raises:
            CollectiveTimeoutError: ``timeout`` has passed; the operation goes on.
            MismatchError, RankFailedError: the operation failed; raised every time.
        """
        if not self.done:
            assert self.engine is not None
            self.engine.wait(self, timeout)
        if self.error is not None:
            raise self.error
        if self.fence is None and not self.members:
            return self.result
        return self.fetch()

    def fetch(self) -> Result:
        """The result of a completed operation, ordered before the calling thread's later work on its device."""
        if self.fence is not None:
            return self.fence.pass_through(set())
        if self.members and any(member.fence is not None for member in self.members):
            ordered: set[Any] = set()
            results: Any = [
                member.result if member.fence is None else member.fence.pass_through(ordered) for member in self.members
            ]
            return results
        return self.result

    def poll(self) -> bool:
        """Whether the operation is complete, so that `wait` returns at once."""
        if self.done:
            return all(part.fence is None or part.fence.passed() for part in (self, *self.members))
        return self.engine is not None and self.engine.refusal is not None

    def add_done_callback(self, callback: Callable[[Handle], object]) -> None:
        """Have ``callback(handle)`` called once when the operation has completed or failed; at once if it already has.

        The completing thread calls it from within the engine: it should be quick, and may neither call a collective nor
        wait for one. On a GPU the work may still be running; `wait` orders later work after it. Exceptions are logged.
        """
        exclusively(_adding, self._add_callback, callback)
        # Read last; the completing thread reads the callbacks last, so that one of the two threads sees this one.
        if self.done:
            self._call_back()

    def _add_callback(self, callback: Callable[[Handle], object]) -> None:
        if self._callbacks is None:
            self._callbacks = []
        self._callbacks.append(callback)

    def _call_back(self) -> None:
        callbacks = self._callbacks
        while callbacks:
            try:
                callback = callbacks.pop(0)
            except IndexError:  # the other thread has removed it
                return
            try:
                callback(self)
            except Exception:
                logger.exception("%s: a callback on its completion raised an exception [W62]", self.name)

    def locate(self) -> None:
        """Note the line of the program that submits this operation: the nearest caller outside of this package."""
        frame = sys._getframe(2)
        while frame.f_code.co_filename.startswith(PACKAGE) and frame.f_back is not None:
            frame = frame.f_back
        self._code, self._line = frame.f_code, frame.f_lineno

    @property
    def where(self) -> str:
        """The line that submitted it, such as ``train.py:12 in step``; empty if it was not recorded."""
        if self._code is None:
            return ""
        return f"{self._code.co_filename}:{self._line} in {self._code.co_name}"

    def finish(self) -> None:
        """Make the result of an operation that has been carried out."""
        if self.done:
            return  # it was agreed on, but has failed on every rank
        try:
            if self.members:
                self._finish_members()
            if self.error is None:
                self.result = self.deliver(self)
        except Exception as error:  # of the framework, while it makes the caller's type
            self.error = error
        except BaseException as error:
            self.fail(error)
            raise
        self._end()

    def _finish_members(self) -> None:
        for member in self.members:
            member.finish()
            if member.error is not None and self.error is None:
                # Not raised: its traceback would keep the locals of the engine's frames alive.
                self.error = member.error

    def fail(self, error: BaseException) -> None:
        """Complete it with an error."""
        if not self.done:
            self.error = error
            self._end()

    def _end(self) -> None:
        """Release the program's memory before ``done`` is set, since another operation may use it from then on."""
        self.keep = self.reads = self.writes = None
        if self.claim:
            assert self.engine is not None
            self.engine.in_flight.operations.pop(self.claim, None)
        self.done = True
        if self._callbacks:
            self._call_back()

    def __repr__(self) -> str:
        state = "pending" if not self.done else "failed" if self.error is not None else "done"
        tensors = f" of {len(self.members)} tensors" if self.members else ""
        return f"<Handle {self.title}{tensors}: {state}>"


def no_result(handle: Handle) -> None:
    """Deliver the result of an operation that has none."""
