"""Where a signal handler may raise: while a guarded block waits, and after it; nowhere else in it.

Python runs signal handlers in the main thread, between any two instructions: what they raise comes out in the middle of
an import, of a thread's start, of a ``with`` statement's exit, or within a ``suppress(OSError)`` that takes a handler's
TimeoutError for its own. In a block under `deferred` the handlers run where `check` is called, which every long wait
does, and when the block ends. What a handler raises there leaves the block as it is.

    with deferred():
        connect()       # a signal that arrives here waits
        check()         # its handler runs here
        connect()       # a further signal waits until the block ends: nothing interrupts the cleaning up
"""

from __future__ import annotations

# The functions of `signal` make enumerations of what these return, and suppress a ValueError of a handler meanwhile.
import _signal  # type: ignore[import-not-found]
import math
import signal
import sys
import threading
import time
from collections import deque
from types import FrameType, TracebackType
from typing import Any

_NUMBERS = range(1, signal.NSIG)
_PIECE = 0.05
"""Longest seconds of a wait between two calls of `check`."""
_deferral: deferred | None = None
"""The outermost block that the main thread is in."""


class Interrupted(BaseException):
    """Carries an exception of a signal handler out of the block: no `except Exception` on the way takes it for its own.

    Attributes:
        error: what the handler has raised.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(f"a signal handler has raised {type(error).__name__}: {error}")
        self.error = error


class deferred:  # used as a function
    """Have signal handlers written in Python run at `check`, and at the end of the block.

    Does nothing in threads other than the main one, which signals do not interrupt, and within another such block.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._arrived: deque[int] = deque()
        self._active = False
        self._raised = False

    def __enter__(self) -> None:
        global _deferral
        if _deferral is None and threading.current_thread() is threading.main_thread():
            try:
                self._active = True
                _deferral = self
                for number in _NUMBERS:
                    handler = _signal.getsignal(number)
                    if callable(handler):
                        self._handlers[number] = _restored(number, handler)
                        _signal.signal(number, self._note)
            except BaseException:
                self._active, _deferral = False, None
                self._restore()
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _deferral
        if self._active:
            self._active, _deferral = False, None
            try:
                self._restore()
            finally:
                self._deliver()
            if isinstance(error, Interrupted):
                raise error.error from None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._active:
            self._arrived.append(number)
        else:  # an interrupt has kept `_restore` from restoring this handler
            self._handlers[number](number, frame)

    def _restore(self) -> None:
        """Restore the handlers, but for those that a handler has replaced."""
        own = [number for number in self._handlers if _signal.getsignal(number) == self._note]
        # One call without an instruction of Python in it, between which the handlers that are restored could raise.
        deque(map(_signal.signal, own, map(self._handlers.__getitem__, own)), maxlen=0)

    def check(self) -> None:
        if self._arrived and not self._raised and threading.current_thread() is threading.main_thread():
            self._raised = True
            try:
                self._deliver()
            except Exception as error:
                raise Interrupted(error) from error
            self._raised = False

    def _deliver(self) -> None:
        """Run the handlers of the signals that have arrived, all of them even if one raises."""
        if self._arrived:
            number = self._arrived.popleft()
            try:
                self._handlers[number](number, sys._getframe())
            finally:
                self._deliver()


def _restored(number: int, handler: Any) -> Any:
    """A signal's handler, or that of the program where one of an earlier block has stayed in its place."""
    while getattr(handler, "__func__", None) is deferred._note:
        handler = handler.__self__._handlers[number]
    return handler


def check() -> None:
    """Run the handlers of signals that have arrived in this thread's block under `deferred`, if there is one, unless
    one has raised in it before: then it is being left."""
    current = _deferral
    if current is not None:
        current.check()


def acquire(lock: threading.Lock | threading.RLock, within: float = math.inf) -> bool:
    """Acquire a lock within some seconds, with a `check` now and then. Returns whether it was acquired."""
    end = time.monotonic() + within
    while not lock.acquire(timeout=max(0.0, min(_PIECE, end - time.monotonic()))):
        check()
        if time.monotonic() >= end:
            return False
    return True
