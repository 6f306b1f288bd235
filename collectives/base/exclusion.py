"""One thread at a time, in code that a signal handler may leave between any two instructions.

Python runs signal handlers in the main thread wherever the interpreter happens to look for signals, which differs from
version to version: from Python 3.14 on also between the acquisition of a ``with`` statement's lock and its block. What
a handler raises there leaves the lock taken for ever, and every other thread waits for it. So a lock that the main
thread takes while its handlers are not deferred (`collectives.base.interrupts`) is an RLock, which knows its owner, and
is taken here: it is given back by the block that it guards, and once more, if this thread owns it still, by a block
that begins before its acquisition. Whichever instruction is interrupted, one of the two gives it back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

Lock = Any
"""``threading.RLock``, whose `_is_owned` has no types."""
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def exclusively(
    lock: Lock, act: Callable[Parameters, Result], *arguments: Parameters.args, **keywords: Parameters.kwargs
) -> Result:
    """Return ``act(*arguments, **keywords)``, called with a lock held. Its owner may do so again from within."""
    nested = lock._is_owned()
    try:
        with lock:
            return act(*arguments, **keywords)
    finally:
        if not nested and lock._is_owned():
            give_back(lock)


def attempted(lock: Lock, within: float, act: Callable[..., Result], *arguments: Any) -> Result | None:
    """Return ``act(*arguments)``, called with a lock held; None, without a call, if another thread holds it for longer
    than ``within`` seconds, or if this thread does, as in a destructor or a signal handler."""
    if lock._is_owned():
        return None
    try:
        if lock.acquire(False) or (within and lock.acquire(True, within)):
            try:
                return act(*arguments)
            finally:
                lock.release()
        return None
    finally:
        if lock._is_owned():
            give_back(lock)


def give_back(lock: Lock) -> None:
    """Release a lock as often as this thread has acquired it; does nothing if it has not."""
    while lock._is_owned():
        lock.release()


def exclusive(
    method: Callable[Concatenate[Any, Parameters], Result],
) -> Callable[Concatenate[Any, Parameters], Result]:
    """A method that one thread at a time is in, of all such methods of its object: it runs `exclusively` with ``_lock``
    of the object held."""

    def run(self: Any, /, *arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        return exclusively(self._lock, method, self, *arguments, **keywords)

    functools.update_wrapper(run, method)
    return run
