"""Calls that block in a library without a bound, made in a separate thread that is abandoned after a timeout."""

from __future__ import annotations

import _thread
import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from collectives.base import interrupts

_Result = TypeVar("_Result")

_LOOK_EVERY = 0.05


class Call(Generic[_Result]):
    """A function to run in a thread of its own, in which no interrupt reaches it: Python runs signal handlers in the
    main thread.

    An interrupt of the thread that starts it or waits for it does not stop it either. `threading.Thread` and
    `concurrent.futures.Future` do not promise that: an interrupt that comes while one of them takes a lock leaves the
    lock taken.

    Attributes:
        finished: whether ``result`` or ``error`` is what the function returned or raised.
    """

    def __init__(self, function: Callable[[], _Result]) -> None:
        self._function = function
        self._once = _thread.allocate_lock()
        self.finished = False
        self.result: _Result | None = None
        self.error: BaseException | None = None

    def start(self) -> None:
        """Run the function, unless it runs or has run already."""
        if not self._once.locked():
            _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        if not self._once.acquire(False):
            return
        try:
            self.result = self._function()
        except BaseException as error:
            self.error = error
        self.finished = True


class TimeIsUpError(Exception):
    """A call did not return in time; it continues in its thread."""


def within(
    seconds: float, name: str, function: Callable[[], _Result], late: Callable[[_Result], object] | None = None
) -> _Result:
    """Call a function in a thread named ``name``, and return its result.

    Args:
        seconds: time after which the thread is abandoned.
        late: called in the thread with a result that arrives later, to release it.

    Raises:
        TimeIsUpError: it did not return in time.
        Exception: the function's own.
    """

    def release(future: concurrent.futures.Future[_Result]) -> None:
        if late is not None and future.exception() is None:
            late(future.result())

    future: concurrent.futures.Future[_Result] = concurrent.futures.Future()

    def work() -> None:
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    end = time.monotonic() + seconds
    with interrupts.deferred():
        threading.Thread(target=work, name=name, daemon=True).start()
        try:
            while not future.done():
                concurrent.futures.wait((future,), max(0.0, min(_LOOK_EVERY, end - time.monotonic())))
                interrupts.check()
                if time.monotonic() > end and not future.done():
                    raise TimeIsUpError
        except BaseException:
            future.add_done_callback(release)
            raise
        return future.result()
