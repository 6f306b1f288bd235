"""The background thread of a rank's point-to-point messages, which moves them while the program computes or is in a
collective."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Protocol

from collectives.base import interrupts
from collectives.base.wake_up import WakeUp
from collectives.engine.callers import THREAD_NAME

_FIRST_PAUSE, _LONGEST_PAUSE = 100e-6, 2e-3
"""Seconds between two looks of the background thread."""
_LOOK_EVERY = 0.1
"""Seconds between two looks of the background thread at the other ranks' states."""


class Watched(Protocol):
    """What the thread looks after."""

    @property
    def ended(self) -> bool:
        """Whether there will be nothing more to advance."""

    def idle(self) -> bool:
        """Whether there is nothing to advance."""

    def look(self, deep: bool) -> None:
        """Advance, unless a thread that waits does; with ``deep`` also look at the other ranks' states."""


class MessageThread:
    """Starts the thread when there is work for it for the first time.

    Args:
        watched: is not kept alive.
        rank: in the thread's name.
    """

    def __init__(self, watched: Watched, rank: int) -> None:
        self._watched, self._rank = weakref.ref(watched), rank
        self._work = WakeUp()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Have unfinished transfers advanced while no thread waits."""
        if self._thread is None:
            with interrupts.deferred():
                weakref.finalize(self._watched(), self._work.set)
                thread = threading.Thread(
                    target=_run,
                    args=(self._watched, self._work),
                    name=f"{THREAD_NAME} {self._rank}, messages",
                    daemon=True,
                )
                thread.start()
                self._thread = thread
        if not self._work.is_set():
            self._work.set()

    def end(self) -> None:
        """Have the thread, if there is one, see that what it watches has ended."""
        self._work.set()


def _run(reference: weakref.ref[Watched], work: WakeUp) -> None:
    """The background thread; it keeps its world alive only while it looks."""
    pause, looked = _FIRST_PAUSE, 0.0
    while True:
        work.wait()
        watched = reference()
        if watched is None or watched.ended:
            return
        if watched.idle():
            pause = _FIRST_PAUSE
            del watched
            continue
        work.set()  # look again
        now = time.monotonic()
        deep = now - looked > _LOOK_EVERY
        if deep:
            looked = now
        watched.look(deep)
        del watched
        time.sleep(pause)  # rings and connections do not notify: they are looked at, less and less often
        pause = min(pause * 1.2, _LONGEST_PAUSE)
