"""The watch: work on a device that waits for peers ends in bounded time, even if a peer never comes.

A kernel that waits for another rank's cannot look at that rank's process, and the host that waits for the kernel sits
in the driver. So a thread looks after both while such work is under way: at the communicators' own errors, and at the
peers. When it sees that the work cannot end, it aborts the communicators, which ends the kernels, and tells.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collectives.device.protocol import Device
    from collectives.transport.nccl import Communicator

_ABORT_SECONDS = 15.0
"""More than a communicator takes to give its abort up."""

_CLOSE_SECONDS = 5.0


class Watch:
    """Looks after work on a device; not thread-safe but for its own thread: one thread adds, asks and closes.

    The thread holds on to the watch only while it looks: dropping the watch ends the thread, and nothing that the
    callables refer to is kept alive by it.

    Args:
        device: where the events are from.
        communicators: what is to be asked and aborted; read at every look, so that the owner may extend it.
        check_peers: raises if a peer has died or failed.
        on_failure: called once, in the watch's thread, with what was raised, when everything has been aborted. It must
            not wait for who may be in `close`.
        on_abort: called once communicators are being aborted: gives back what they wait for then.
        interval: seconds between two looks.
    """

    def __init__(
        self,
        device: Device,
        communicators: Sequence[Communicator],
        check_peers: Callable[[], None],
        on_failure: Callable[[Exception], None],
        on_abort: Callable[[], None] = lambda: None,
        *,
        interval: float = 0.1,
    ) -> None:
        self.failure: Exception | None = None
        """What was seen; the communicators are aborted, and the watch has ended."""
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
        """Look after what a recorded event stands for. The event must live until `settled` is true, or until
        `close`."""
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
        """Whether everything added is done; looks and returns. The device must be the calling thread's current one."""
        return self._flight.settled()

    def close(self) -> None:
        """End the thread; ``on_failure`` is not called any more."""
        self._flight.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)

    def _look(self) -> bool:
        """Whether there is anything to come: one look at the work, the communicators and the peers."""
        try:
            self._flight.device.activate()
            for communicator in list(self._communicators):
                communicator.check()  # first: what has failed may look as if it were done
            if self._flight.settled():
                self._suspicious = False
                return True
        except Exception as error:
            return self._fail(error)
        try:
            self._check_peers()
            self._suspicious = False
        except Exception as error:
            # A peer may leave when it has done its part, a moment before ours is done: only if it is still missed is it
            # missing.
            if self._suspicious:
                return self._fail(error)
            self._suspicious = True
        return True

    def _fail(self, error: Exception) -> bool:
        if self._flight.closed:
            return False
        self.failure = error = error.with_traceback(None)  # which refers to this watch
        # All at once: NCCL may end an abort only when the other communicators on the device are being aborted as well.
        aborts = [
            threading.Thread(target=communicator.abort, daemon=True) for communicator in list(self._communicators)
        ]
        for abort in aborts:
            abort.start()
        with contextlib.suppress(Exception):  # a broken device destroys nothing: the aborts have bounds of their own
            self._on_abort()
        for abort in aborts:
            abort.join(_ABORT_SECONDS)
        if not self._flight.closed:
            self._on_failure(error)
        return False


class _WorkInFlight:
    """The events of what is under way: all that the thread holds on to while it sleeps."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.closed = False
        self._changed = threading.Condition()
        self._events: list[int] = []
        self._asleep = True

    def add(self, event: int) -> None:
        with self._changed:
            if event not in self._events:
                self._events.append(event)
            if (
                self._asleep
            ):  # else it looks by itself, and waking it for every operation would cost more than the operation
                self._changed.notify_all()

    def settled(self) -> bool:
        with self._changed:
            self._events = [event for event in self._events if not self.device.passed(event)]
            return not self._events

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def wait(self, interval: float) -> bool:
        """Sleep while nothing is under way, then for ``interval`` seconds; False if the watch was closed meanwhile."""
        with self._changed:
            self._asleep = True
            self._changed.wait_for(lambda: self._events or self.closed)
            self._asleep = False
            self._changed.wait_for(lambda: self.closed, interval)
            return not self.closed


def _look_after(flight: _WorkInFlight, watch: weakref.ref[Watch], interval: float) -> None:
    while flight.wait(interval):
        present = watch()
        if present is None or not present._look():
            return
        del present
