"""Calls that block in a library without a bound, made in a thread of their own, which is left behind in time."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_Result = TypeVar("_Result")


class Call(threading.Thread, Generic[_Result]):
    """A function running in a thread. Python delivers signals to the main thread alone, so no interrupt reaches it.

    Attributes:
        future: its result, or what it raised.
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
    """A call did not return in time; it goes on in its thread."""


def within(
    seconds: float, name: str, function: Callable[[], _Result], late: Callable[[_Result], object] | None = None
) -> _Result:
    """Call a function in a thread of that name, and return its result.

    Args:
        seconds: after which the thread is left behind.
        late: called there with a result that comes after that, to release it.

    Raises:
        TimeIsUpError: it did not return in time.
        Exception: what the function raised.
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
    except BaseException:  # an interrupt too
        call.future.add_done_callback(release)
        raise
    return call.future.result()
