"""Calls that block in a library without a bound, made in a separate thread that is abandoned after a timeout."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_Result = TypeVar("_Result")


class Call(threading.Thread, Generic[_Result]):
    """A function running in a thread. Python delivers signals to the main thread only, so no interrupt reaches it.

    Attributes:
        future: its result or exception.
    """

    def __init__(self, function: Callable[[], _Result], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._function = function
        self.future: concurrent.futures.Future[_Result] = concurrent.futures.Future()

    def run(self) -> None:
        try:
            result = self._function()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


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

    call = Call(function, name)
    call.start()
    try:
        concurrent.futures.wait((call.future,), seconds)
        if not call.future.done():
            raise TimeIsUpError
    except BaseException:  # also an interrupt
        call.future.add_done_callback(release)
        raise
    return call.future.result()
