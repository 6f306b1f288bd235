"""When the GPU has done what was issued, and who must wait for it.

An operation on device tensors is complete, for the engine, when its work has been given to the world's stream. What
follows on the caller's stream is put behind it there, when the caller asks for the result; what the work reads and
writes is kept until it is done.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from collectives.device.protocol import Device, active
from collectives.tensors.cuda_tensors import DeviceView
from collectives.tensors.streams import free_of_capture


class Events:
    """Events of one device that are used over and over."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._idle: deque[_Return] = deque()
        self._lent: dict[int, _Return] = {}
        """By event; all that there are."""

    def lend(self, completion: Completion) -> int:
        """An event for as long as the completion exists. Whoever was made to wait for it waits for what it stood for
        then."""
        try:
            event = self._idle.pop().event
        except IndexError:
            event = self.device.create_event()
        # Comes back without a line of Python: an interrupt that is handled within a destructor is lost.
        reference = self._lent[event] = _Return(completion, self._idle.append)
        reference.event = event
        return event

    def close(self) -> None:
        for event in self._lent:
            self.device.destroy_event(event)
        self._lent.clear()
        self._idle.clear()


class Completion:
    """That all work given to a stream until now is done. The event goes back when nobody can ask any more.

    Streams are not remembered: when one is destroyed, the next may have its number.
    """

    __slots__ = ("__weakref__", "_passed", "event", "events")

    def __init__(self, events: Events, stream: int) -> None:
        self.events = events
        self._passed = False
        self.event = events.lend(self)
        events.device.record(self.event, stream)

    def passed(self) -> bool:
        if not self._passed:
            self._passed = self.events.device.passed(self.event)
        return self._passed

    def before(self, stream: int) -> None:
        """What is given to a stream from now on comes after it."""
        if not self._passed:
            self.events.device.wait(stream, self.event)


class _Return(weakref.ref[Completion]):
    """A reference to a completion, whose callback receives it together with the event when nobody can ask any more."""

    __slots__ = ("event",)
    event: int


class Wait(Protocol):
    """Blocks until a completion has passed; without one, until the GPU has done all issued work."""

    def __call__(self, completion: Completion | None = None) -> None: ...


class Fence:
    """Between an operation and what its caller does next.

    Args:
        view: of the caller's tensor, whose framework knows the caller's stream.
        finish: makes the caller's result, on a stream that comes after the operation.
        failure: why work on the device has been aborted, or None.

    Attributes:
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
        self._lock = threading.Lock()

    def pass_through(self, ordered: set[tuple[Completion, int]]) -> Any:
        """What the calling thread's program gives to its stream from now on comes after the operation; the result.

        Args:
            ordered: what has been put before which stream in this very call, and need not be again.

        Raises:
            RankFailedError, TransportError: the work was under way and has been aborted, because a peer is gone.
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
        with self._lock:
            if self._finish is not None:
                self._result, self._finish = self._finish(), None
                if completion is not None and self.view.copied:
                    # What was just copied into the caller's tensor, others who fetch it on other streams must come
                    # after as well.
                    with active(self.view.device):
                        self.completion = Completion(completion.events, stream)
            return self._result

    def then(self, change: Callable[[Any], Any]) -> None:
        """The caller is given ``change(result)``; said before anybody can have asked for the result."""
        finish = self._finish
        assert finish is not None
        self._finish = lambda: change(finish())

    def passed(self) -> bool:
        """Whether the GPU is done with the operation."""
        if self.completion is None:
            return True
        with active(self.view.device):
            return self.completion.passed()


class Keeper:
    """Keeps alive what the GPU still reads or writes, in the order in which it was issued."""

    def __init__(self) -> None:
        self._kept: deque[tuple[Completion, Any]] = deque()

    def keep(self, completion: Completion, things: Any) -> None:
        """Hold on to ``things`` until then; look at what was kept before."""
        self.release()
        self._kept.append((completion, things))

    def release(self) -> None:
        """Let go of what the GPU is done with."""
        kept = self._kept
        while kept and kept[0][0].passed():
            kept.popleft()
