"""The threads of this process that call collectives: which of them wait, for what, and whether any may go on.

A rank is *stuck* when every thread that could submit an operation waits for one. The coordinator tells the other ranks
so; when all are stuck, they are in a deadlock, and what they wait for fails (`collectives.engine.negotiation`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from collectives.base.wake_up import WakeUp
from collectives.engine import stall
from collectives.engine.handles import Handle

THREAD_NAME = "collectives rank"
"""Prefix of the names of the engine's own threads."""
_OWN_THREADS = "collectives"
"""Prefix of the names of all threads of this package, which submit nothing: those that serve the network, too."""
STUCK_AFTER, STUCK_AFTER_AMONG_THREADS = 20.0, 1.0
"""Seconds without progress after which other threads no longer count as ones that might call a collective: any thread,
and threads that wait for another thread or are other ranks."""
_INSPECT_AFTER = 0.1
"""Seconds without progress after which other threads are inspected."""
_COMPUTES = 0.1
"""The share of a core above which a thread counts as computing: it may call collectives afterwards, or let a thread
that waits for it do so."""


class _Here(threading.local):
    noted = False


class Callers:
    """The calling threads of one engine.

    Attributes:
        ranks_are_threads: whether every other thread of this process is another rank, as with the transport of threads.
        followers: of the threads that sleep, or are about to, until another thread stops driving.
        awaited: the handles that threads wait for without a timeout.
        here: whether the current thread is known as one that calls; which takes half as long to look up as the thread.
    """

    def __init__(self, ranks_are_threads: bool) -> None:
        self.ranks_are_threads = ranks_are_threads
        self._idle_since: float | None = None
        self._patience: float | None = None
        """Seconds without progress after which this rank counts as stuck; None: the threads were not inspected yet."""
        self._used_before: dict[threading.Thread, float] = {}
        """Processor seconds that other threads had used by ``_idle_since``."""
        self.reset()

    def reset(self) -> None:
        """Forget all threads, as in a forked child, which has none of them."""
        self.followers: list[WakeUp] = []
        self.awaited: list[Handle] = []
        self.here = _Here()
        # Threads and not their numbers, which the system reuses as soon as a thread has ended.
        self._known: set[threading.Thread] = set()

    def note(self) -> None:
        """Remember the current thread as one that calls collectives."""
        thread = threading.current_thread()
        # A thread that Python has not started is some framework's: it calls on behalf of a thread of the program, which
        # waits for it and cannot call.
        if not isinstance(thread, threading._DummyThread):
            self._known.add(thread)
        self.here.noted = True

    def notify(self) -> None:
        """Wake the followers."""
        for follower in list(self.followers):
            follower.set()

    @contextlib.contextmanager
    def following(self) -> Iterator[WakeUp]:
        """Count the current thread as a follower; yields what wakes it."""
        follower = WakeUp()
        try:
            self.followers.append(follower)
            yield follower
        finally:
            if follower in self.followers:
                self.followers.remove(follower)

    def made_progress(self) -> None:
        """Restart the clock of `stuck`."""
        self._idle_since = None

    def stuck(self) -> bool:
        """Whether every thread that could submit an operation waits for one, or has done nothing for a while."""
        alive = threading.enumerate()
        self._known.difference_update([caller for caller in list(self._known) if caller not in alive])
        waiting = sum(not handle.done for handle in self.awaited)  # one whose operation is done is about to go on
        if not waiting:
            self._idle_since = None
            return False
        # A thread that has never called may do so at any time; the engine's own and timers hardly will.
        strangers = {
            thread
            for thread in alive
            if not (
                thread in self._known or thread.name.startswith(_OWN_THREADS) or isinstance(thread, threading.Timer)
            )
        }
        if len(self._known) <= waiting and not strangers:
            return True
        now = time.monotonic()
        if self._idle_since is None:
            self._idle_since, self._patience = now, None
        if self._patience is None and now - self._idle_since < _INSPECT_AFTER:
            return False
        parked = stall.parked(alive)
        busy = len(self._known - parked) > waiting
        may_be_elsewhere = not self.ranks_are_threads and not strangers <= parked
        patience = STUCK_AFTER if busy or may_be_elsewhere else STUCK_AFTER_AMONG_THREADS
        if patience != self._patience:
            self._idle_since, self._patience = now, patience
            self._used_before = {thread: stall.processor_seconds(thread) for thread in self._known | strangers}
        if now - self._idle_since < patience:
            return False
        # A caller may wait for a stranger, and call again when that one has computed its result.
        watched = self._known if self.ranks_are_threads else self._known | strangers
        if len(self._known) > waiting and patience == STUCK_AFTER and self._computes(watched, now - self._idle_since):
            self._idle_since = None
            return False
        return True

    def _computes(self, threads: set[threading.Thread], seconds: float) -> bool:
        """Whether one of these threads, other than the driving one, has computed during the last ``seconds``."""
        others = threads - {threading.current_thread()}
        return any(
            stall.processor_seconds(thread) - self._used_before.get(thread, 0.0) > _COMPUTES * seconds
            for thread in others
        )
