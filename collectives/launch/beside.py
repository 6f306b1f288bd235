"""What runs beside a loop that others depend on, because it may take long or fail: threads do it, and leave what comes
of it for the loop.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

_READ = 4096


class Mailbox:
    """Calls that other threads leave for a loop."""

    def __init__(self) -> None:
        self._source, self._waker = socket.socketpair()
        for end in (self._source, self._waker):
            end.setblocking(False)
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()

    def fileno(self) -> int:
        """A file descriptor that can be read from when there are calls."""
        return self._source.fileno()

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Have the loop call a function; from any thread."""
        self._calls.append((function, arguments))
        with suppress(BlockingIOError):  # a full socket wakes, too
            self._waker.send(b"\0")

    def deliver(self) -> None:
        """Call what was left so far; in the loop."""
        with suppress(BlockingIOError):
            os.read(self._source.fileno(), _READ)
        while self._calls:
            function, arguments = self._calls.popleft()
            function(*arguments)


class Workers:
    """Threads that do one thing after the other until `close`.

    A process that one of them has started with `agent.die_with_parent` is ended by the kernel with the thread.

    Args:
        number: of threads, at most; one keeps the order.
    """

    def __init__(self, mailbox: Mailbox, number: int) -> None:
        self._mailbox, self._number = mailbox, number
        self._tasks: SimpleQueue[tuple[Callable[[], Any], Callable[[Any], object]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def do(self, work: Callable[[], T], then: Callable[[T | Exception], object]) -> None:
        """Have a thread call ``work``, and then the loop ``then`` with what it has returned or raised."""
        self._tasks.put((work, then))
        if len(self._threads) < self._number:
            thread = threading.Thread(target=self._run, name="collectives-launcher", daemon=True)
            with suppress(
                *[RuntimeError] if self._threads else []
            ):  # the system allows no more: those that are there do it
                thread.start()
                self._threads.append(thread)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            work, then = task
            try:
                outcome = work()
            except Exception as error:
                outcome = error
            self._mailbox.post(then, outcome)

    def close(self, seconds: float = 0.0) -> None:
        """End the threads when all is done; waits a bounded time."""
        for _ in self._threads:
            self._tasks.put(None)
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
