"""A thread with an event loop, for what must happen on sockets while the program computes.

Connections are accepted and proved there, beats are sent, values of a store are handed out. The words of a round and
the blocks of collectives are not moved there, but by the thread that waits for them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

_END_WITHIN = 2.0
_THREAD_NAME = "collectives-network"
_services: weakref.WeakSet[Service] = weakref.WeakSet()


class Service:
    """An event loop in a daemon thread. The methods may be called from any thread.

    Sockets that belong to it are closed in forked children: a connection would otherwise stay open after the death of
    this process, for as long as a child of it lives.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        # What the loop looks names up with; its threads count as threads that submit nothing, by their name.
        self.loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(1, _THREAD_NAME))
        self._sockets: weakref.WeakSet[Any] = weakref.WeakSet()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=_THREAD_NAME, daemon=True)
        self._process = os.getpid()
        self._thread.start()
        _services.add(self)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine in the thread; returns the future of its result."""
        return asyncio.run_coroutine_threadsafe(self._kept(coroutine), self.loop)

    async def _kept(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)  # the loop refers to tasks weakly
        try:
            return await coroutine
        finally:
            self._tasks.discard(task)

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function in the thread; does not wait for it."""
        self.loop.call_soon_threadsafe(function, *arguments)

    def owns(self, sock: Any) -> None:
        """Have a socket closed in forked children."""
        self._sockets.add(sock)

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

    def after_fork(self) -> None:
        """In a forked child: close its copies of the sockets."""
        for sock in list(self._sockets):
            with suppress(OSError):
                sock.close()


def _after_fork_in_child() -> None:
    for service in list(_services):
        service.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
