"""Handles whose results are computed from those of the engine's handles."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic

from collectives.base.errors import InvalidTypeError
from collectives.engine.handles import Handle, Result
from collectives.torch.compiled import untraced


class Derived(Generic[Result]):
    """Operations in flight, and the function of their results.

    `synchronize` and `poll` take it as any handle. It can also be called, as the handles of Horovod's
    ``sparse_allreduce_async`` are.

    Args:
        handles: of the operations.
        make: computes the result from theirs, in order; called once.
    """

    def __init__(self, handles: Sequence[Handle], make: Callable[..., Any]) -> None:
        self._handles = handles
        self._make: Callable[..., Any] | None = make
        self._result: Any = None
        self._making = threading.Lock()

    def poll(self) -> bool:
        """Whether `wait` returns at once."""
        return all(handle.poll() for handle in self._handles)

    def wait(self, timeout: float | None = None) -> Result:
        """The result, when the operations are complete; as often as wanted.

        Raises:
            CollectiveTimeoutError: ``timeout`` seconds have passed; the operations go on. And what the operations
                raise, every time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        results = [
            handle.wait(None if deadline is None else max(0.0, deadline - time.monotonic())) for handle in self._handles
        ]
        with self._making:
            if self._make is not None:
                self._result = self._make(*results)
                self._make = None
        return self._result

    __call__ = wait


@untraced
def poll(handle: Handle | Derived) -> bool:
    """Whether an operation is complete, so that `synchronize` returns at once.

    Args:
        handle: what an asynchronous operation returned.
    """
    return _a_handle(handle).poll()


@untraced
def synchronize(handle: Handle[Result] | Derived[Result], timeout: float | None = None) -> Result:
    """Wait until an operation is complete, and return its result; as often as wanted (Horovod: None from the second
    time on).

    Args:
        handle: what an asynchronous operation returned.
        timeout: seconds to wait at most; None: as long as the other ranks are alive, and ``COLLECTIVES_TIMEOUT``.

    Raises:
        CollectiveTimeoutError: ``timeout`` has passed; the operation goes on.
        MismatchError, RankFailedError: the operation failed; raised every time.
    """
    return _a_handle(handle).wait(timeout)


def _a_handle(handle: Handle[Result] | Derived[Result]) -> Handle[Result] | Derived[Result]:
    if not isinstance(handle, (Handle, Derived)):
        raise InvalidTypeError(f"handle: expected what an asynchronous operation returned, got {type(handle).__name__}")
    return handle
