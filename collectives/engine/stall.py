"""The stall inspector: reports which operations wait for which ranks, and where the program submitted them.

A rank that never submits what the others wait for causes no error: all ranks are alive, and wait. Each such operation
is reported once after a while and, if so configured, ends the wait with an error.

Whether a rank will submit anything more depends on its other threads: `parked` and `processor_seconds` observe them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from collectives.base.errors import CollectiveTimeoutError
from collectives.base.frames import current_frames
from collectives.base.logging import logger
from collectives.engine.handles import Handle

_WAITS = ("wait", "join", "_wait_for_tstate_lock", "_shutdown")
"""The functions of `threading` in which a thread waits for another."""


class Wait(NamedTuple):
    """What a rank waits for: in words, where the program asked for it, since when on the monotonic clock, and the ranks
    that are known to be missing; as far as it is known."""

    what: str
    where: str
    since: float | None
    ranks: list[int]


def parked(threads: Iterable[threading.Thread]) -> set[threading.Thread]:
    """The threads among these that wait for another thread of this process without a timeout: in a join, or for an
    event, a queue or a future."""
    frames = current_frames()
    parked_threads = set()
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        if frame is None or frame.f_code.co_filename != threading.__file__ or frame.f_code.co_name not in _WAITS:
            continue
        bounded = False
        while frame is not None and frame.f_code.co_filename == threading.__file__:
            bounded = bounded or frame.f_locals.get("timeout") not in (None, -1)
            frame = frame.f_back
        if not bounded:
            parked_threads.add(thread)
    return parked_threads


def processor_seconds(thread: threading.Thread) -> float:
    """The processor time that a thread has used; 0 where the system does not provide it."""
    try:
        with open(f"/proc/self/task/{thread.native_id}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


class StallInspector:
    """Inspects the operations in flight.

    Args:
        warning: seconds after which an operation is reported; 0: never.
        shutdown: seconds after which waiting is an error; 0: never.
    """

    def __init__(self, rank: int, warning: float, shutdown: float) -> None:
        self._rank = rank
        self._warning = warning
        self._shutdown = shutdown
        self._reported: set[int] = set()
        self._extra, self._why = 0.0, ""

    def bound(self, seconds: float, why: str) -> None:
        """End waits after so many seconds, where ``shutdown`` does not before; ``why``: sentences for the error."""
        self._extra, self._why = seconds, why

    def look(self, handles: Iterable[Handle], missing: Callable[[Handle], Sequence[int]]) -> None:
        """Report the operations that have waited for too long.

        Args:
            missing: the ranks that have not submitted an operation; empty if they are not known.

        Raises:
            CollectiveTimeoutError: an operation has waited longer than ``shutdown``.
        """
        now = time.monotonic()
        waiting = list(handles)
        late = [
            handle
            for handle in waiting
            if self._warning and now - handle.submitted > self._warning and id(handle) not in self._reported
        ]
        if late:
            logger.warning(
                "some tensors have waited for more than %g s for ranks that have not submitted them. Those ranks are "
                "busy with other work, or they never submit these tensors, and then the program hangs [R29]:\n%s",
                self._warning,
                "\n".join(self._describe(handle, now, missing(handle)) for handle in late),
            )
        self._reported = {id(handle) for handle in waiting} & (self._reported | {id(handle) for handle in late})
        if self._shutdown:
            for handle in waiting:
                if now - handle.submitted > self._shutdown:
                    raise CollectiveTimeoutError(
                        f"rank {self._rank}: a tensor has waited for more than {self._shutdown:g} s "
                        f"(COLLECTIVES_STALL_SHUTDOWN); see what the missing ranks are doing [R20]:\n"
                        + self._describe(handle, now, missing(handle))
                    )
        late = [handle for handle in waiting if now - handle.submitted > self._extra] if self._extra else []
        if late:
            raise CollectiveTimeoutError(
                f"rank {self._rank}: a tensor has waited for more than {self._extra:g} s. {self._why} [E45]:\n"
                + self._describe(late[0], now, missing(late[0]))
            )

    def _describe(self, handle: Handle, now: float, missing: Sequence[int]) -> str:
        who = f"missing ranks: {', '.join(map(str, missing))}" if missing else "missing ranks: not known"
        where = f"; submitted on rank {self._rank} at {handle.where}" if handle.where else ""
        what = f"{handle.name} ({handle.entry.request.collective})"
        return f"  {what}, waiting for {now - handle.submitted:.1f} s; {who}{where}"
