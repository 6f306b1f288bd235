"""Watchdog: device work that waits for peers ends in bounded time, even if a peer never arrives.

A kernel that waits for another rank's kernel cannot observe that rank's process, and the host thread that waits for the
kernel is blocked in the driver. So while such work is in flight, a separate thread polls the communicators' errors and
the peers. If the work cannot complete, it aborts the communicators, which ends the kernels, and reports the failure.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from collectives.base.exclusion import exclusively
from collectives.base.wake_up import WakeUp
from collectives.device.protocol import Device
from collectives.transport.cuda.nccl_library import NcclCommunicator

_ABORT_SECONDS = 15.0
"""More than the bound of a communicator's abort."""

_CLOSE_SECONDS = 5.0


class Watch:
    """Watches device work. Not thread-safe: one thread calls its methods.

    The watchdog's thread refers to the watch only while it polls, so dropping the watch ends the thread and keeps
    nothing that the callables refer to alive.

    Args:
        communicators: to be polled and aborted; read at every poll, so that the owner may extend it.
        check_peers: raises if a peer has died or failed.
        on_failure: called once, in the watchdog's thread, with the error, after everything has been aborted. Must not
            wait for a thread that may be in `close`.
        on_abort: called while communicators are being aborted; releases resources that they then wait for.
        interval: seconds between polls.
    """

    def __init__(
        self,
        device: Device,
        communicators: Sequence[NcclCommunicator],
        check_peers: Callable[[], None],
        on_failure: Callable[[Exception], None],
        on_abort: Callable[[], None] = lambda: None,
        *,
        interval: float = 0.1,
    ) -> None:
        self.failure: Exception | None = None
        """The error that was found; the communicators are then aborted, and the watch has ended."""
        self._communicators = communicators
        self._check_peers = check_peers
        self._on_failure = on_failure
        self._on_abort = on_abort
        self._interval = interval
        self._suspicious = False
        self._flight = _WorkInFlight(device)
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._flight.close)

    def add(self, event: int) -> None:
        """Watch the work of a recorded event, which must live until `settled` returns True, or until `close`."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_look_after,
                args=(self._flight, weakref.ref(self), self._interval),
                name="collectives-watch",
                daemon=True,
            )
            self._thread.start()
        self._flight.add(event)

    def settled(self) -> bool:
        """Whether all added work is done, without waiting. The device must be the calling thread's current one."""
        return self._flight.settled()

    def close(self) -> None:
        """End the thread; ``on_failure`` is not called afterwards."""
        self._flight.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)

    def _look(self) -> bool:
        """Poll the work, the communicators and the peers once. Returns False if the watch has ended."""
        try:
            self._flight.device.activate()
            for communicator in list(self._communicators):
                communicator.check()  # first, because failed work may appear completed
            if self._flight.settled():
                self._suspicious = False
                return True
        except Exception as error:
            return self._fail(error)
        try:
            self._check_peers()
            self._suspicious = False
        except Exception as error:
            # A peer may leave when its work is done, shortly before this rank's is: it counts as missing only if this
            # rank's work is still incomplete at the next poll.
            if self._suspicious:
                return self._fail(error)
            self._suspicious = True
        return True

    def _fail(self, error: Exception) -> bool:
        if self._flight.closed:
            return False
        self.failure = error = error.with_traceback(None)  # the traceback refers to this watch
        # Concurrently: NCCL may complete an abort only when the device's other communicators are being aborted, too.
        aborts = [
            threading.Thread(target=communicator.abort, daemon=True) for communicator in list(self._communicators)
        ]
        for abort in aborts:
            abort.start()
        with contextlib.suppress(Exception):  # a failed device may release nothing; the aborts are bounded anyway
            self._on_abort()
        for abort in aborts:
            abort.join(_ABORT_SECONDS)
        if not self._flight.closed:
            self._on_failure(error)
        return False


class _WorkInFlight:
    """The events of work in flight: the only object that the thread refers to while it sleeps."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.closed = False
        self._lock = threading.RLock()
        self._changed = WakeUp()
        self._events: list[int] = []
        self._asleep = True

    def add(self, event: int) -> None:
        exclusively(self._lock, self._note, event)
        # Otherwise it polls anyway, and waking it for every operation would cost more than the operation.
        if self._asleep:
            self._changed.set()

    def _note(self, event: int) -> None:
        if event not in self._events:
            self._events.append(event)

    def settled(self) -> bool:
        return exclusively(self._lock, self._settled)

    def _settled(self) -> bool:
        self._events = [event for event in self._events if not self.device.passed(event)]
        return not self._events

    def close(self) -> None:
        self.closed = True
        self._changed.set()

    def wait(self, interval: float) -> bool:
        """Sleep while nothing is in flight, then for ``interval`` seconds. Returns False if the watch was closed."""
        self._asleep = True
        while not self._events and not self.closed:
            self._changed.wait()
        self._asleep = False
        end = time.monotonic() + interval
        # No late wake-up ends the pause: a peer that has left counts as missing if the next look still finds work.
        while not self.closed and (left := end - time.monotonic()) > 0:
            self._changed.wait(left)
        return not self.closed


def _look_after(flight: _WorkInFlight, watch: weakref.ref[Watch], interval: float) -> None:
    while flight.wait(interval):
        present = watch()
        if present is None or not present._look():
            return
        del present
