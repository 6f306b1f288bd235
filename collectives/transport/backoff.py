"""Bounded waiting for memory or a request that can only be looked at: yield the core, then sleep longer and longer.

A wait that is usually short spins at its caller first, in line, because a call of Python costs as much as such a wait
lasts. What is here begins when that was in vain.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from collectives.base.errors import CollectiveTimeoutError

YIELDS = 200
LOOK_EVERY = 0.1
"""Seconds between two looks at the process table, or whatever else costs more than reading a word."""
LONGEST_NAP = 1e-3
_FIRST_NAP = 20e-6
_GROWTH = 1.2

yield_core: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))
"""Give the core to another thread or process that can run: it may be the one that is waited for."""


class Backoff:
    """The sleeps of one wait, and its clock; begins where it is made.

    Attributes:
        begun: `time.monotonic` when the wait began.
        now: `time.monotonic` at the latest `look`.
    """

    __slots__ = ("_looked", "_nap", "begun", "now")

    def __init__(self, first_nap: float = _FIRST_NAP) -> None:
        self.begun = self.now = self._looked = time.monotonic()
        self._nap = first_nap

    def look(self) -> bool:
        """Read the clock. Returns True every `LOOK_EVERY` seconds, for looks that are expensive."""
        self.now = now = time.monotonic()
        if now - self._looked <= LOOK_EVERY:
            return False
        self._looked = now
        return True

    def nap(self, longest: float = LONGEST_NAP, until: float | None = None) -> None:
        """Sleep, at first for 20 microseconds, then longer each time, up to ``longest`` seconds; not beyond ``until``
        (as `time.monotonic` has it), measured from the latest `look`."""
        time.sleep(self._nap if until is None else min(self._nap, max(0.0, until - self.now)))
        self._nap = min(self._nap * _GROWTH, longest)


def wait(
    ready: Callable[[], bool],
    check: Callable[[bool], object],
    timeout: float,
    late: Callable[[], str],
    *,
    yields: int = YIELDS,
    pause: Callable[[], object] = yield_core,
    longest: float = LONGEST_NAP,
) -> None:
    """Return when ``ready()``.

    Args:
        ready: looks and returns.
        check: called between two looks once the core has been yielded in vain; what it raises ends the wait. Its
            argument is True every `LOOK_EVERY` seconds, when it may look at what is expensive.
        timeout: seconds.
        late: the message of the error when they are over: which rank waited for what, and what to do.
        yields: how often the core is yielded before the first sleep.
        pause: yields the core.
        longest: seconds that a sleep may last.

    Raises:
        CollectiveTimeoutError: not ready in time.
    """
    for _ in range(yields):
        if ready():
            return
        pause()
    backoff = Backoff()
    while not ready():
        check(backoff.look())
        if backoff.now - backoff.begun > timeout:
            raise CollectiveTimeoutError(late())
        backoff.nap(longest)


def poll(ready: Callable[[], object], seconds: float, nap: float = LONGEST_NAP) -> bool:
    """Look every ``nap`` seconds until ``ready()`` or the time is over. Returns whether it became ready."""
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(nap)
    return True
