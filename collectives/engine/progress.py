"""Who drives: one thread leads at a time, the others follow.

A thread that waits for a handle takes the lead if nobody has it, and otherwise follows: it sleeps until its handle is
done or the lead is free. The background thread leads only while nobody waits: it is woken by work, lets operations
gather for a cycle, gives way to whoever comes, and sleeps without using any CPU when there is nothing to do.

This is the lowest layer of the engine; `collectives.engine.coordinator` and `collectives.engine.engine` are built on
it. The three are one object, because a blocking call looks at the state of all of them.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from collectives.base.errors import CollectivesError, InvalidArgumentError
from collectives.engine.handles import Handle

LIST_BYTES = 32 << 20
"""Bytes at which a list of new operations is complete: enough to be quick, few enough to begin early."""
THREAD_NAME = "collectives rank"
_MOST_CYCLES = 20
"""Cycles for which the background thread waits while operations keep coming."""
_SWITCH_INTERVAL = 2e-4


class Lead:
    """The lead of one engine, and those who want it.

    Args:
        rank: for the name of the background thread.
        cycle: seconds for which the background thread lets operations gather.
        threshold: bytes of operations for which it waits no longer.
    """

    def __init__(self, rank: int, cycle: float, threshold: int) -> None:
        self.refusal: Callable[[], CollectivesError] | None = None
        """Makes the error of every further call, once there can be none."""
        self.cycle = cycle
        self.threshold = threshold
        self._rank = rank
        self._inbox: deque[Handle] = deque()
        """What was submitted and no leader has seen yet."""
        self._make_locks()

    def _make_locks(self) -> None:
        # Knows its owner: an interrupt may come between taking it and giving it back, and must not leave it taken.
        self._lead: Any = threading.RLock()
        self._leading = False
        self._bell = threading.Condition()
        self._followers = 0
        self._awaited: list[Handle] = []
        self._callers: set[threading.Thread] = set()
        """Threads themselves and not their numbers, which the system gives out again as soon as a thread has ended."""
        self._last_caller: threading.Thread | None = None
        self._work = threading.Event()
        self._background: threading.Thread | None = None
        self._stopping = False
        """Whether somebody wants the lead in order to end everything."""

    def _note_caller(self) -> None:
        self._last_caller = thread = threading.current_thread()
        # One that Python has not started is some framework's: it calls for a thread of the program, which waits for it
        # and cannot call.
        if not isinstance(thread, threading._DummyThread):
            self._callers.add(thread)

    def leads(self) -> bool:
        """Whether this thread is in the middle of a call."""
        return self._leading and bool(self._lead._is_owned())

    def _refuse_within(self) -> NoReturn:
        raise InvalidArgumentError(
            "a collective was called within a collective of the same thread, from a signal handler or a destructor; "
            "let the handler set a flag, and call afterwards"
        )

    def _give_lead(self) -> None:
        """Let others lead; nothing if this thread does not."""
        lead = self._lead
        if not lead._is_owned():
            return
        self._leading = False
        while lead._is_owned():  # more than once if an interrupt came just after the lead had been taken
            lead.release()
        if self._followers:
            self._ring()

    def _ring(self) -> None:
        with self._bell:
            self._bell.notify_all()

    def _follow(self, handle: Handle, deadline: float | None) -> None:
        """Sleep until the handle is done, the lead is free, or the time is over."""
        with self._bell:
            self._followers += 1
            try:
                # Counted first, looked second: whoever gives the lead away after this look sees the follower and rings.
                if handle.done:
                    return
                if self._lead.acquire(False):
                    self._lead.release()
                    return
                left = 1.0 if deadline is None else max(0.0, min(1.0, deadline - time.monotonic()))
                self._bell.wait(left)
            finally:
                self._followers -= 1

    def wait(self, handle: Handle, timeout: float | None = None) -> None:
        """Return when the handle is done."""
        raise NotImplementedError

    def has_work(self) -> bool:
        """Whether anything is in flight."""
        raise NotImplementedError

    def drive_in_background(self) -> None:
        """Drive while there is work and nobody waits; called by the background thread."""
        raise NotImplementedError

    def _hand_over(self) -> None:
        """This thread drives no longer: if there is work left, somebody else must."""
        if self._followers:
            self._ring()
        elif self.has_work() and self.refusal is None:
            self._wake()

    def _wake(self) -> None:
        if self._background is None:
            with self._bell:
                if self._background is None:
                    thread = threading.Thread(
                        target=_run_background,
                        args=(weakref.ref(self), self._work),
                        name=f"{THREAD_NAME} {self._rank}",
                        daemon=True,
                    )
                    weakref.finalize(self, self._work.set)
                    thread.start()
                    self._background = thread
        self._work.set()

    def await_background(self, within: float) -> None:
        """Return when the background thread has ended, as it does after a refusal, or after ``within`` seconds."""
        thread = self._background
        if thread is not None and thread is not threading.current_thread():
            thread.join(within)

    def gather(self) -> None:
        """Let operations gather for a cycle, and for some more while they keep coming and do not fill a list."""
        for _ in range(_MOST_CYCLES):
            if not self.cycle or self._followers:
                return
            before = len(self._inbox)
            time.sleep(self.cycle)  # the cycle itself: what comes meanwhile travels together
            waiting = list(self._inbox)
            if len(waiting) <= before or sum(handle.entry.nbytes for handle in waiting) >= min(
                self.threshold, LIST_BYTES
            ):
                return

    @contextlib.contextmanager
    def paused(self, within: float = -1) -> Iterator[None]:
        """Take the lead from whoever has it, for good, between two rounds; without it after ``within`` seconds."""
        with self._bell:
            self._followers += 1  # the background thread gives way to followers
        self._stopping = True
        try:
            taken = self._lead.acquire(timeout=within)
        finally:
            with self._bell:
                self._followers -= 1
        if taken:
            self._leading = True
        try:
            yield
        finally:
            self._give_lead()
            self._hand_over()


def _run_background(reference: weakref.ref[Lead], work: threading.Event) -> None:
    """The background thread; it does not keep its engine alive."""
    while True:
        work.wait()
        work.clear()
        engine = reference()
        if engine is None or engine.refusal is not None:
            return
        engine.gather()
        engine.drive_in_background()
        del engine


_interval_users = 0
_interval_before = 0.0
_interval_lock = threading.Lock()


@contextlib.contextmanager
def quick_switches() -> Iterator[None]:
    """While a background thread works: NumPy gives the interpreter lock away for every block, and waits for it to come
    back.

    A thread that computes in Python keeps it for 5 ms by default, hundreds of times longer than a block takes.
    """
    global _interval_users, _interval_before
    with _interval_lock:
        if _interval_users == 0:
            _interval_before = sys.getswitchinterval()
            sys.setswitchinterval(min(_SWITCH_INTERVAL, _interval_before))
        _interval_users += 1
    try:
        yield
    finally:
        with _interval_lock:
            _interval_users -= 1
            if _interval_users == 0:
                sys.setswitchinterval(_interval_before)
