"""A thread with an event loop, for what must happen on sockets while the program computes: connections are accepted and
proved, beats sent, values of a store handed out. Words and blocks are moved by the thread that waits for them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

from collectives.base import interrupts
from collectives.base.wake_up import WakeUp

T = TypeVar("T")

_END_WITHIN = 2.0
_LOOK_EVERY = 0.05
_THREAD_NAME = "collectives-network"
_services: weakref.WeakSet[Service] = weakref.WeakSet()


class Running(Generic[T]):
    """A coroutine in a service's thread.

    Not a `concurrent.futures.Future`, whose lock an interrupt can leave taken: the service's thread would then wait for
    the lock for ever.
    """

    def __init__(self, service: Service, coroutine: Coroutine[Any, Any, T]) -> None:
        self._service, self._coroutine = service, coroutine
        self._task: asyncio.Task[T] | None = None
        self._finished = WakeUp()

    def begin(self) -> None:
        self._task = self._service.loop.create_task(self._coroutine)
        self._service.tasks.add(self._task)
        self._task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[T]) -> None:
        self._service.tasks.discard(task)
        if not task.cancelled():
            task.exception()  # asyncio logs exceptions that were never retrieved
        self._finished.set()

    def done(self) -> bool:
        return self._task is not None and self._task.done()

    def wait(self, seconds: float) -> bool:
        """Wait for it, at most so long; for one thread. Returns whether it is done."""
        return self.done() or self._finished.wait(seconds)

    def result(self) -> T:
        """What it has returned, once it is done. Raises what it has raised."""
        assert self._task is not None
        return self._task.result()

    def cancel(self) -> None:
        if not self.done():
            with suppress(RuntimeError):  # the loop was closed meanwhile
                self._service.call(self._cancel)

    def _cancel(self) -> None:
        assert self._task is not None  # its beginning was the earlier call
        # After its first step: a coroutine that has never run would not release what it was given.
        self._service.loop.call_soon(self._task.cancel)


class Service:
    """An event loop in a daemon thread. The methods may be called from any thread.

    Its sockets are closed in forked children: a connection would otherwise stay open after the death of this process,
    for as long as a child of it lives.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        # What the loop looks names up with; its threads count as threads that submit nothing, by their name.
        self.loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(1, _THREAD_NAME))
        self.sockets: weakref.WeakSet[Any] = weakref.WeakSet()
        """Which are closed in forked children."""
        self.tasks: set[asyncio.Task[Any]] = set()
        """Of the coroutines that run: the loop refers to them weakly."""
        self._thread = threading.Thread(target=self._run, name=_THREAD_NAME, daemon=True)
        self._process = os.getpid()
        with interrupts.deferred():  # an interrupted start leaves a thread that ends with a KeyError
            self._thread.start()
        _services.add(self)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Running[T]:
        running = Running(self, coroutine)
        with interrupts.deferred():
            try:
                self.call(running.begin)
            except RuntimeError:  # the service has ended
                coroutine.close()
                raise
        return running

    def run(self, coroutine: Coroutine[Any, Any, T], seconds: float, check: Callable[[], object] = lambda: None) -> T:
        """Run a coroutine in the thread, and wait for it, for a bounded time; cancel it when the wait ends without its
        result. What ``check`` raises, which is called now and then, ends the wait, as an interrupt does.

        Raises:
            TimeoutError: it was not done in time.
        """
        running = self.start(coroutine)
        end = time.monotonic() + seconds
        try:
            while not running.wait(_LOOK_EVERY):
                interrupts.check()
                check()
                if time.monotonic() > end:
                    raise TimeoutError(f"no answer within {seconds:g} s")
            return running.result()
        finally:
            running.cancel()

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        self.loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """Cancel all coroutines, and end the thread."""
        if os.getpid() != self._process or not self._thread.is_alive():
            return
        with suppress(RuntimeError):  # the loop was closed meanwhile
            asyncio.run_coroutine_threadsafe(self._end(), self.loop)
        if threading.current_thread() is not self._thread:
            self._thread.join(_END_WITHIN)

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_END_WITHIN / 2) if tasks else None
        self.loop.stop()


def _close_copies() -> None:
    """In a forked child."""
    for service in list(_services):
        for sock in list(service.sockets):
            with suppress(OSError):
                sock.close()


os.register_at_fork(after_in_child=_close_copies)
