"""Progress: which thread drives the engine, and how it and the others wait.

One thread drives at a time. A thread that waits for a handle drives if no other does, and otherwise follows: it sleeps
until its handle is done or the driving thread stops. The background thread drives only while no thread waits: work
wakes it. It lets operations gather for a cycle, stops as soon as another thread waits, and uses no CPU without work.

The driving thread runs negotiation rounds (`collectives.engine.coordinator`) until what it waits for is done.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from collectives.base import interrupts
from collectives.base.config import Config, setting_of
from collectives.base.errors import CollectiveTimeoutError, InvalidArgumentError, RankFailedError
from collectives.base.wake_up import WakeUp
from collectives.engine.callers import THREAD_NAME, Callers
from collectives.engine.coordinator import LIST_BYTES, Coordinator
from collectives.engine.failure import FailureHandler
from collectives.engine.handles import Handle
from collectives.engine.stall import StallInspector
from collectives.engine.submissions import Submissions, describe
from collectives.transport.backoff import LONGEST_NAP, YIELDS, Backoff

_MOST_CYCLES = 20
"""Cycles for which the background thread waits while operations keep coming."""
_SWITCH_INTERVAL = 2e-4
"""Seconds after which the interpreter switches threads while a background thread works. NumPy releases the interpreter
lock for every block and waits to get it back; a thread that computes in Python holds it for 5 ms by default, hundreds
of times longer than a block takes."""
_NAP, _LAZY_NAP = 20e-6, 2e-3
_LAZY_AFTER = 1.0
"""Seconds of waiting after which naps may last ``_LAZY_NAP``."""
_RECORDED_FROM = 1e-4
"""Seconds from which a wait for other ranks appears in the timeline."""


class Progress:
    """Drives the negotiation rounds of one engine, and tells ``failure`` of whatever ends a drive, before it is raised.

    Attributes:
        lock: held by the driving thread. An RLock, because it knows its owner: an interrupt may come between acquiring
            and releasing it, and must not leave it held.
        driving: whether a thread is in the middle of driving.
        stopping: whether a thread waits to end the engine.
        cycle: seconds for which the background thread lets operations gather.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        submissions: Submissions,
        callers: Callers,
        failure: FailureHandler,
        config: Config,
        rank: int,
    ) -> None:
        self.cycle = config.cycle_time * 1e-3
        self._coordinator = coordinator
        self._control = coordinator.control
        self._submissions = submissions
        self._pending, self._inbox = submissions.pending, submissions.inbox
        self._callers = callers
        self._rank = rank
        self._failure = failure
        self._timeout = config.timeout
        self._stall = StallInspector(rank, config.stall_warning, config.stall_shutdown)
        self.bound_stalls = self._stall.bound
        self.reset()

    def reset(self) -> None:
        """Make new locks, as in a forked child, where threads that do not exist may hold the old ones."""
        self.lock: Any = threading.RLock()
        self.driving = self.stopping = False
        self._submissions.work = WakeUp()
        self._starting = threading.Lock()
        self._background: threading.Thread | None = None
        self._woken: list[Progress] = []
        """This object, from `wake` until the background thread runs: an engine with work must not be collected."""
        self._callers.reset()

    # ---- one thread drives

    def drives(self) -> bool:
        """Whether this thread is in the middle of a call."""
        return self.driving and bool(self.lock._is_owned())

    def refuse_reentry(self) -> None:
        """Raise InvalidArgumentError if this thread is in the middle of a call."""
        if self.driving and self.lock._is_owned():
            raise InvalidArgumentError(
                "a signal handler or a destructor called a collective while the same thread was in one; set a flag "
                "there, and call the collective later [W28]"
            )

    def release(self) -> None:
        """Let other threads drive; does nothing if this thread does not."""
        lock = self.lock
        if not lock._is_owned():
            return
        self.driving = False
        while lock._is_owned():  # more than once if an interrupt came just after it had been acquired
            lock.release()
        if self._callers.followers:
            self._callers.notify()

    def hand_over(self) -> None:
        """Have another thread drive if work is left."""
        if self._callers.followers:
            self._callers.notify()
        elif self._submissions.has_work() and self._submissions.refusal is None:
            self.wake()

    def guarded(self, act: Callable[[], object]) -> None:
        """Call ``act``; any exception is a failure in the middle of a call, which ends the world."""
        try:
            act()
        except BaseException as error:
            self._failure.fail(error)
            raise

    @contextlib.contextmanager
    def paused(self, within: float = math.inf) -> Iterator[None]:
        """Stop the driving thread between two rounds and drive in its place; without it after ``within`` seconds."""
        paused = False
        try:
            with self._callers.following():  # the background thread stops for followers
                self.stopping = True
                if interrupts.acquire(self.lock, within):
                    self.driving = True
            paused = True
            yield
        finally:
            if not paused:  # but interrupted: the engine goes on
                self.stopping = False
            self.release()
            self.hand_over()

    # ---- waiting for a handle

    def wait(self, handle: Handle, timeout: float | None = None) -> None:
        """Return when the handle is done; drive meanwhile, or let the thread that drives do so.

        Raises:
            CollectiveTimeoutError: ``timeout`` seconds have passed; the operation goes on.
            InvalidArgumentError: this thread drives already: a signal handler waits within a collective.
        """
        if self.driving:
            self.refuse_reentry()
        deadline = None if timeout is None else time.monotonic() + timeout
        awaited = self._callers.awaited
        try:
            if deadline is None:
                awaited.append(handle)
            while not handle.done:
                try:
                    if self.stopping:
                        time.sleep(_NAP)  # let the thread that ends the engine acquire the lock
                    if self.lock.acquire(False):
                        self.driving = True
                        self._drive(handle, deadline)
                    else:
                        self._follow(handle, deadline)
                finally:
                    self.release()
                if deadline is not None and not handle.done and time.monotonic() >= deadline:
                    raise CollectiveTimeoutError(
                        f"rank {self._rank}: {handle.name}: not complete after {timeout:g} s; it continues, so call "
                        "synchronize again [R31]"
                    )
        finally:
            if self.lock._is_owned():  # an interrupt came just before the first time
                self.release()
            if deadline is None and handle in awaited:
                awaited.remove(handle)
            if self._callers.followers or self._pending or self._inbox:
                self.hand_over()

    def _follow(self, handle: Handle, deadline: float | None) -> None:
        """Sleep until the handle is done, no thread drives, or the deadline has passed."""
        with self._callers.following() as stopped:
            # Listed first and checked second: a thread that stops driving after this check sees the follower.
            if handle.done:
                return
            if self.lock.acquire(False):
                self.lock.release()
                return
            interrupts.check()
            stopped.wait(1.0 if deadline is None else max(0.0, min(1.0, deadline - time.monotonic())))

    # ---- the background thread

    def wake(self) -> None:
        """Have the background thread drive, which is started if need be."""
        if self._background is None:
            with interrupts.deferred(), self._starting:
                if self._background is None:
                    thread = threading.Thread(
                        target=_run_background,
                        args=(weakref.ref(self), self._woken, self._submissions.work),
                        name=f"{THREAD_NAME} {self._rank}",
                        daemon=True,
                    )
                    weakref.finalize(self, self._submissions.work.set)
                    thread.start()
                    self._background = thread
        self._woken[:] = [self]
        self._submissions.work.set()

    def await_background(self, within: float) -> None:
        """Return when the background thread has ended, as it does after a refusal, or after ``within`` seconds."""
        thread = self._background
        if thread is not None and thread is not threading.current_thread():
            thread.join(within)

    def gather(self) -> None:
        """Let operations gather for a cycle, and for further ones while they keep coming and do not fill a list."""
        inbox = self._submissions.inbox
        for _ in range(_MOST_CYCLES):
            if not self.cycle or self._callers.followers:
                return
            before = len(inbox)
            time.sleep(self.cycle)  # the cycle itself: what is submitted meanwhile is negotiated together
            waiting = list(inbox)
            full = min(self._coordinator.threshold, LIST_BYTES)
            if len(waiting) <= before or sum(handle.entry.nbytes for handle in waiting) >= full:
                return

    def drive_in_background(self) -> None:
        """Drive while there is work and no other thread waits."""
        submissions = self._submissions
        while (
            submissions.has_work()
            and submissions.refusal is None
            and not self._callers.followers
            and self.lock.acquire(False)
        ):
            self.driving = True
            try:
                with _quick_switches():
                    self._drive(None, None)
            except BaseException:
                return  # every handle in flight carries the error
            finally:
                self.release()

    # ---- driving

    def _drive(self, handle: Handle | None, deadline: float | None) -> None:
        """Run rounds until the handle is done or the deadline has passed; without a handle (in the background), until
        there is no work or another thread waits. Any exception is a failure in the middle of a call, which ends the
        world."""
        coordinator, control, submissions = self._coordinator, self._control, self._submissions
        begun = time.monotonic()
        try:
            while True:
                if submissions.refusal is not None:
                    raise submissions.refusal()
                if handle is not None:
                    if handle.done or self.stopping:
                        return
                elif self._callers.followers or not submissions.has_work():
                    return
                if coordinator.open is None and not coordinator.propose():
                    if not self._pause_until(coordinator.has_reason_to_propose, handle, deadline, begun):
                        return
                    continue
                if coordinator.open is None:  # carried out already
                    begun = time.monotonic()
                    continue
                same = control.look()
                if same is None:
                    if not self._pause_until(lambda: control.look(spin=False) is not None, handle, deadline, begun):
                        return
                    same = control.look()
                if same:
                    coordinator.carry_out()
                    begun = time.monotonic()
                else:
                    coordinator.compare()
        except BaseException as error:
            self._failure.fail(error)
            raise

    def _pause_until(
        self, ready: Callable[[], bool], handle: Handle | None, deadline: float | None, begun: float
    ) -> bool:
        """Poll ``ready`` with growing naps; the bound on all waits counts from ``begun``. Returns False if the deadline
        has passed or this thread must stop driving."""
        coordinator, control, callers = self._coordinator, self._control, self._callers
        for _ in range(YIELDS if handle is not None else 1):
            if ready():
                return True
            control.relax()
        pause = Backoff()
        timeline = coordinator.context.timeline
        missing: Sequence[int] = ()
        while not ready():
            deep = pause.look()
            now = pause.now
            if timeline is not None and coordinator.open is not None:
                missing = control.missing() or missing  # the last ones to be waited for
            if deadline is not None and now >= deadline:
                return False
            if self.stopping or (handle is None and callers.followers):
                return False
            if handle is not None and handle.done:
                return True
            try:
                control.check(deep=deep, upcoming=coordinator.open is None)
            except RankFailedError as error:
                if "\n" not in str(error):  # otherwise it ends with the failure itself, which says enough
                    error.args = (f"{error}{describe(self._rank, self._waiting())}",)
                raise
            if deep:
                if self._submissions.refusal is not None:  # by another thread, as when work on a GPU was aborted
                    raise self._submissions.refusal()
                self._inspect(handle if deadline is None else None, now - begun)
            # Peers write memory and signal nothing: polling costs 2.6 % of a core while a rank is late.
            pause.nap(LONGEST_NAP if now - pause.begun < _LAZY_AFTER else _LAZY_NAP, until=deadline)
        ended = time.monotonic()
        if timeline is not None and ended - pause.begun > _RECORDED_FROM:
            ranks = [coordinator.names[peer] for peer in missing]
            timeline.span("engine", "wait for other ranks", pause.begun, ended, missing=ranks)
        return True

    def _waiting(self) -> list[Handle]:
        """The operations of the open round, or all that are pending."""
        open_here = self._coordinator.open[0] if self._coordinator.open is not None else ()
        return list(open_here or self._submissions.pending.values())

    def _inspect(self, handle: Handle | None, waited: float) -> None:
        """Report stalled operations, note whether this rank is stuck, and raise CollectiveTimeoutError for a handle
        that has waited longer than `Config.timeout`."""
        self._stall.look(self._submissions.pending.values(), self._coordinator.missing)
        self._coordinator.tell_if_stuck()
        if handle is not None and waited > self._timeout:
            self._time_out(handle)

    def _time_out(self, handle: Handle) -> NoReturn:
        missing = self._coordinator.missing(handle)
        if len(missing) == 1:
            who = f"rank {missing[0]}, which is alive but has not made the same call; see what it is doing"
        else:
            ranks = f"ranks {', '.join(map(str, missing))}" if missing else "other ranks"
            who = f"{ranks}, which are alive but have not made the same call; see what they are doing"
        raise CollectiveTimeoutError(
            f"rank {self._rank}: {handle.name}: waited {self._timeout:g} s for {who}, or raise "
            f"{setting_of(self._timeout)} [R19]"
        )


def _run_background(reference: weakref.ref[Progress], woken: list[Progress], work: WakeUp) -> None:
    """The background thread; it keeps its engine alive only while there is work."""
    while True:
        work.wait()
        progress = woken.pop() if woken else reference()
        if progress is None or progress._submissions.refusal is not None:
            return
        progress.gather()
        progress.drive_in_background()
        del progress


_switching = threading.Lock()
_quick_users, _interval_before = 0, 0.0


@contextlib.contextmanager
def _quick_switches() -> Iterator[None]:
    """Shorten the switch interval of the process until the last of those that are in here has left."""
    global _quick_users, _interval_before
    with _switching:
        if _quick_users == 0:
            _interval_before = sys.getswitchinterval()
            sys.setswitchinterval(min(_SWITCH_INTERVAL, _interval_before))
        _quick_users += 1
    try:
        yield
    finally:
        with _switching:
            _quick_users -= 1
            if _quick_users == 0:
                sys.setswitchinterval(_interval_before)
