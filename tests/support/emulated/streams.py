"""Streams, events and graphs of the emulated GPUs: CUDA's ordering, and none beyond it.

A stream is a thread that runs its work in order, asynchronously. With a seed it waits for a random time before each
piece of work, differently in every stream, so that work that no event orders happens in the wrong order eventually.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import random
import struct
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from collectives.base.errors import TransportError
from tests.support.emulated.memory import HANDLE, open_shared

Work = Callable[[], object]

_POLL = 50e-6
_SLICE = 0.1
_EVENT = struct.Struct("<8sqqq")
_MAGIC = b"EMU-EVT\0"
_SLOTS = mmap.PAGESIZE // 8 - 1


class Health:
    """Whether a device works. After the first failure it runs no more work, and every wait for it raises."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.failure: str | None = None

    def fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason

    def check(self) -> None:
        if self.failure is not None:
            raise TransportError(f"the emulated device is broken: {self.failure}")

    def wait(self, done: threading.Event, seconds: float, what: str) -> None:
        """Wait for another thread; a timeout is a failure of the device."""
        deadline = time.monotonic() + seconds
        while not done.wait(min(_SLICE, max(0.0, deadline - time.monotonic()))):
            self.check()
            if time.monotonic() >= deadline:
                self.fail(f"{what} did not come about within {seconds:g} s")
        self.check()


class Mark:
    """A position in a stream: what an event stands for."""

    def __init__(self, page: Page | None = None) -> None:
        self._done = threading.Event()
        self._failure: str | None = None
        self._page = page
        self._number = page.issue() if page else 0

    @property
    def done(self) -> bool:
        return self._done.is_set() and self._failure is None

    def arrive(self, failure: str | None) -> None:
        self._failure = failure
        if self._page and failure is None:
            self._page.complete(self._number)
        self._done.set()

    def wait(self, health: Health, seconds: float) -> None:
        health.wait(self._done, seconds, "what an event stands for")
        if self._failure is not None:
            raise TransportError(f"waited for an event of a device that is broken: {self._failure}")


class Stream:
    """A thread that runs work in order. ``submit`` may be called from any thread, and from finalizers."""

    def __init__(self, handle: int, owner: str, health: Health, seed: str | None) -> None:
        self.handle, self.owner, self.health = handle, owner, health
        self.random = random.Random(seed) if seed is not None else None
        self.capture: Capture | None = None
        self.last: frozenset[int] = frozenset()
        self._queue: queue.SimpleQueue[Work | Mark | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"emulated-stream-{handle:#x}", daemon=True)
        self.thread.start()

    def submit(self, work: Work) -> None:
        if self.capture is not None:
            self.capture.note(self, work)
        else:
            self._queue.put(work)

    def submit_now(self, work: Work) -> None:
        """Enqueue work that no capture records: that of the memory pool, which is the host's."""
        self._queue.put(work)

    def mark(self, page: Page | None = None) -> Mark:
        mark = Mark(page)
        self._queue.put(mark)
        return mark

    def drain(self) -> None:
        self.health.check()
        if self.capture is not None:
            self.capture.refuse("the host cannot wait for a stream that is being captured")
        # A wait in the stream has its own bound, and may begin late.
        self.mark().wait(self.health, 2 * self.health.patience)

    def stop(self) -> None:
        """End the thread once all work is done."""
        self._queue.put(None)

    def _run(self) -> None:
        health = self.health
        while (work := self._queue.get()) is not None:
            if self.random and health.failure is None and self.random.random() < 0.7:
                time.sleep(10 ** self.random.uniform(-6, -3))
            if isinstance(work, Mark):
                work.arrive(health.failure)
            elif health.failure is None:
                try:
                    work()
                except BaseException as error:  # as on a GPU, it is reported by the next wait
                    health.fail(f"{type(error).__name__}: {error}")
            del work  # otherwise its objects would live until the next piece of work


class Page:
    """The state of a shared event, in memory that other processes map.

    The first number counts the records. Record n has passed when slot ``n % SLOTS`` has reached n: records on different
    streams may pass in another order than they were made.
    """

    _serials = count(1)

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)
        self._numbers = (ctypes.c_uint64 * (_SLOTS + 1)).from_buffer(self._memory)
        self._lock = threading.Lock()

    @staticmethod
    def make() -> tuple[Page, int, bytes]:
        """A new page, its file, and the handle by which another process opens it."""
        serial = next(Page._serials)
        fd = os.memfd_create(f"emulated-event-{os.getpid()}-{serial}")
        os.ftruncate(fd, mmap.PAGESIZE)
        return Page(fd), fd, _EVENT.pack(_MAGIC, os.getpid(), fd, serial).ljust(HANDLE, b"\0")

    @staticmethod
    def open(handle: bytes) -> Page:
        magic, pid, theirs, serial = _EVENT.unpack_from(handle)
        if magic != _MAGIC or len(handle) != HANDLE:
            raise TransportError("cannot open a shared event: this is no handle of one")
        if pid == os.getpid():
            raise TransportError(
                "cannot open a shared event in the process that made it: there it is to be used itself"
            )
        fd = open_shared(pid, theirs, f"emulated-event-{pid}-{serial}")
        try:
            return Page(fd)
        finally:
            os.close(fd)

    @property
    def issued(self) -> int:
        return int(self._numbers[0])

    def issue(self) -> int:
        with self._lock:
            self._numbers[0] += 1
            return int(self._numbers[0])

    def complete(self, number: int) -> None:
        with self._lock:
            slot = 1 + number % _SLOTS
            self._numbers[slot] = max(self._numbers[slot], number)

    def passed(self, number: int) -> bool:
        return number == 0 or int(self._numbers[1 + number % _SLOTS]) >= number

    def wait(self, number: int, health: Health) -> None:
        began = time.monotonic()
        while not self.passed(number):
            health.check()
            waited = time.monotonic() - began
            if waited > health.patience:
                health.fail(f"another process's event did not come about within {health.patience:g} s")
            time.sleep(_POLL if waited < _SLICE else 20 * _POLL)
        health.check()


class Point(NamedTuple):
    """What an event that was recorded during a capture stands for: nodes of the graph."""

    capture: Capture
    nodes: frozenset[int]


class Event:
    """An event: it stands for its last record, or for nothing.

    Args:
        owner: the identity of its device.
        page: of a shared event of this process.
        fd: of the page.
        handle: by which other processes open it.
        theirs: the page of another process's event.
    """

    def __init__(
        self, owner: str, page: Page | None = None, fd: int = -1, handle: bytes = b"", theirs: Page | None = None
    ) -> None:
        self.owner, self.page, self.fd, self.handle, self.theirs = owner, page, fd, handle, theirs
        self._latest: Mark | Point | None = None

    def record(self, stream: Stream) -> None:
        if self.theirs:
            raise TransportError("another process's event can be waited for, not recorded")
        if stream.capture is None:
            self._latest = stream.mark(self.page)
        elif self.page is not None:
            stream.capture.refuse("a shared event cannot be recorded during a capture")
        else:
            self._latest = Point(stream.capture, stream.last)

    def wait_on(self, stream: Stream) -> None:
        latest, health = self._latest, stream.health
        if stream.capture is not None and not isinstance(latest, Point):
            if self.theirs or latest is not None:
                stream.capture.refuse(
                    "what is being captured cannot wait for what is not: another process, or work given before"
                )
            return
        if isinstance(latest, Point):
            latest.capture.join(stream, latest.nodes)
        elif isinstance(latest, Mark):
            mark = latest
            stream.submit(lambda: mark.wait(health, health.patience))
        elif (page := self.theirs) and (number := page.issued):
            stream.submit(lambda: page.wait(number, health))

    def passed(self) -> bool:
        if self.theirs:
            return self.theirs.passed(self.theirs.issued)
        return self._latest is None or self._settled().done

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _settled(self) -> Mark:
        if isinstance(self._latest, Point):
            raise TransportError(
                "an event recorded during a capture stands for nothing that could be waited for by the host"
            )
        assert self._latest is not None
        return self._latest


GLOBAL, THREAD_LOCAL, RELAXED = range(3)
"""CUDA's capture modes: of a capture, which threads it forbids calls that may wait for the device; of a thread, which
captures forbid it such calls."""


class Capture:
    """Recorded work, and the work after which each piece of it runs.

    Args:
        origin: the stream on which the capture was begun.
        mode: as CUDA numbers them.

    Attributes:
        users: objects to which the graph will refer.
    """

    def __init__(self, origin: Stream, mode: int = THREAD_LOCAL) -> None:
        self.origin = origin
        self.mode = mode
        self.thread = threading.get_ident()
        self.users: set[object] = set()
        self._nodes: list[tuple[Work, frozenset[int]]] = []
        self._streams: list[Stream] = []
        self._refused: str | None = None
        self._over = False
        self.join(origin, frozenset())

    def note(self, stream: Stream, work: Work) -> None:
        self._nodes.append((work, stream.last))
        stream.last = frozenset((len(self._nodes) - 1,))

    def join(self, stream: Stream, nodes: frozenset[int]) -> None:
        """Capture the stream's later work too, ordered after these nodes."""
        if self._over or stream.capture not in (None, self):
            raise TransportError(
                "an event recorded during a capture is of use only to streams of the same capture, while it lasts"
            )
        if stream.capture is None:
            stream.capture, stream.last = self, frozenset()
            self._streams.append(stream)
        stream.last |= nodes

    def refuse(self, reason: str) -> None:
        """Raise an error that, as in CUDA, invalidates the whole capture."""
        self.spoil(reason)
        raise TransportError(f"capture: {reason}")

    def spoil(self, reason: str) -> None:
        """Invalidate the capture: it can only be ended, without a graph."""
        self._refused = self._refused or reason

    def end(self) -> Graph:
        self._over = True
        for stream in self._streams:
            stream.capture = None
        followed = frozenset[int]().union(*(after for _, after in self._nodes))
        if self._refused is not None:
            raise TransportError(f"the capture was spoilt: {self._refused}")
        if set(range(len(self._nodes))) - followed - self.origin.last:
            raise TransportError(
                "the capture has work of another stream, for which the stream that began it never waits"
            )
        return Graph(self._nodes, self.users)


class Graph:
    """Captured work, which runs in any order that respects its dependencies; never twice at once."""

    def __init__(self, nodes: list[tuple[Work, frozenset[int]]], users: set[object]) -> None:
        self.users = users
        self._nodes = nodes
        self._lock = threading.Lock()

    def run(self, chance: random.Random | None, health: Health) -> None:
        with self._lock:
            waiting = list(range(len(self._nodes)))
            done: set[int] = set()
            while waiting:
                health.check()
                ready = [node for node in waiting if self._nodes[node][1] <= done]
                node = chance.choice(ready) if chance else ready[0]
                self._nodes[node][0]()
                waiting.remove(node)
                done.add(node)
