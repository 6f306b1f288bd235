"""Completions of issued GPU work, and the order between them and the caller's stream.

For the engine, an operation on device tensors is complete when its work has been enqueued on the main stream. When the
caller fetches the result, its stream is made to wait for that work; the tensors are kept alive until the work is done.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from collectives.base.exclusion import exclusively
from collectives.device.protocol import Device, active
from collectives.tensors.cuda_tensors import DeviceView
from collectives.tensors.streams import free_of_capture

Wait = Callable[..., None]
"""Blocks until the `Completion` that is passed; without one, until the GPU has done all issued work."""


class Events:
    """A pool of events of one device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._idle: deque[_EventReturn] = deque()
        self._all: dict[int, _EventReturn] = {}
        """Idle or not."""

    def lend(self, completion: Completion) -> int:
        """An event for the lifetime of a completion. A stream that waits for it is unaffected by its later reuse."""
        try:
            event = self._idle.pop().event
        except IndexError:
            event = self.device.create_event()
        # Returned without executing Python code: an interrupt that is handled within a destructor is lost.
        reference = self._all[event] = _EventReturn(completion, self._idle.append)
        reference.event = event
        return event

    def close(self) -> None:
        """Destroy all events; no completion of theirs is used any more."""
        for event in self._all:
            self.device.destroy_event(event)
        self._all.clear()
        self._idle.clear()


class Completion:
    """The completion of all work enqueued on a stream until now. Its event returns to the pool together with it.

    Streams are not remembered: when one is destroyed, the next may have its number.
    """

    __slots__ = ("__weakref__", "_passed", "event", "events")

    def __init__(self, events: Events, stream: int) -> None:
        self.events = events
        self._passed = False
        self.event = events.lend(self)
        events.device.record(self.event, stream)

    def passed(self) -> bool:
        """Whether the work is done."""
        if not self._passed:
            self._passed = self.events.device.passed(self.event)
        return self._passed

    def before(self, stream: int) -> None:
        """Order all later work of a stream after it."""
        if not self._passed:
            self.events.device.wait(stream, self.event)


class _EventReturn(weakref.ref[Completion]):
    """A weak reference to a completion; its callback returns it, with the event, to the pool of events."""

    __slots__ = ("event",)
    event: int


class Fence:
    """Orders the caller's later work after an operation, and makes the operation's result.

    Args:
        view: of the caller's tensor, whose framework knows the caller's stream.
        finish: makes the caller's result, on a stream that is ordered after the operation.
        failure: returns why work on the device has been aborted, or None.

    Attributes:
        completion: of the operation, once it has been issued.
        whose: rank and tensor, for messages.
    """

    __slots__ = ("_failure", "_finish", "_lock", "_result", "completion", "view", "whose")

    def __init__(self, view: DeviceView, finish: Callable[[], Any], failure: Callable[[], Exception | None]) -> None:
        self.view = view
        self.completion: Completion | None = None
        self._finish: Callable[[], Any] | None = finish
        self._failure = failure
        self._result: Any = None
        self.whose = "tensor"
        self._lock = threading.RLock()

    def pass_through(self, ordered: set[tuple[Completion, int]]) -> Any:
        """Order all later work of the calling thread's current stream after the operation.

        Args:
            ordered: completions and the streams that already wait for them; shared by the members of one call.

        Returns:
            The caller's result.

        Raises:
            RankFailedError, TransportError: the issued work has been aborted, because a peer is gone.
            InvalidArgumentError: the stream is being captured into a graph; the result can be fetched later.
        """
        failure = self._failure()
        if failure is not None:
            raise failure
        completion = self.completion
        if completion is not None:
            with active(self.view.device):
                stream = self.view.current_stream()
                if (completion, stream) not in ordered:
                    free_of_capture(
                        self.view.device, stream, self.whose, "synchronize before the capture begins, or after it"
                    )
                    completion.before(stream)
                    ordered.add((completion, stream))
        if self._finish is not None:
            exclusively(self._lock, self._finished, completion, stream)
        return self._result

    def _finished(self, completion: Completion | None, stream: int) -> None:
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
            if completion is not None and self.view.copied:
                # The result was just copied into the caller's tensor: other streams that fetch it must wait for
                # the copy too.
                with active(self.view.device):
                    self.completion = Completion(completion.events, stream)

    def then(self, change: Callable[[Any], Any]) -> None:
        """Have the caller given ``change(result)``; called before the result can be fetched."""
        finish = self._finish
        assert finish is not None
        self._finish = lambda: change(finish())

    def passed(self) -> bool:
        """Whether the GPU has done the operation."""
        if self.completion is None:
            return True
        with active(self.view.device):
            return self.completion.passed()
