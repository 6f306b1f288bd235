"""Bounded polling of memory or requests that cannot notify: yield the core at first, then sleep for increasing times.

Waits that are usually short spin inline at their caller first, because a Python call costs as much as such a wait.
These functions take over when spinning has failed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from collectives.base import interrupts
from collectives.base.errors import CollectiveTimeoutError

YIELDS = 200
LOOK_EVERY = 0.1
"""Seconds between checks that cost more than reading a word, such as of the process table."""
LONGEST_NAP = 1e-3
_FIRST_NAP = 20e-6
_GROWTH = 1.2

yield_core: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))
"""Yield the core to another runnable thread or process, which may be the awaited one."""


class Backoff:
    """The sleeps of one wait, which has ``begun`` at construction, and whose latest `look` at the clock was ``now``."""

    __slots__ = ("_looked", "_nap", "begun", "now")

    def __init__(self, first_nap: float = _FIRST_NAP) -> None:
        self.begun = self.now = self._looked = time.monotonic()
        self._nap = first_nap

    def look(self) -> bool:
        """Read the clock. Returns True every `LOOK_EVERY` seconds, when expensive checks are due."""
        self.now = now = time.monotonic()
        if now - self._looked <= LOOK_EVERY:
            return False
        self._looked = now
        return True

    def nap(self, longest: float = LONGEST_NAP, until: float | None = None) -> None:
        """Sleep for 20 microseconds at first, then longer each time, up to ``longest`` seconds, and not beyond
        ``until`` as seen at the latest `look`. Signal handlers that were deferred run before."""
        interrupts.check()
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
    """Wait until ``ready()`` is true: after so many ``yields`` sleep, at most ``longest`` seconds at a time.

    Args:
        check: called between polls after the yields; its exceptions end the wait. Its argument is True every
            `LOOK_EVERY` seconds, when expensive checks are due.
        late: the message of the timeout error: which rank waited for what, and what to do.

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
    """Poll every ``nap`` seconds until ``ready()`` is true or the time is over. Returns whether it became ready."""
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(nap)
    return True
