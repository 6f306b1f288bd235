"""A handle whose result is computed from that of an engine's handle."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic

from collectives.base.errors import InvalidTypeError
from collectives.base.exclusion import exclusive
from collectives.engine.handles import Handle, Result
from collectives.torch.compiled import untraced


class Derived(Generic[Result]):
    """An operation in flight, and a function of its result.

    `synchronize` and `poll` take it as any handle. It can also be called, as the handles of Horovod's
    ``sparse_allreduce_async`` are.

    Args:
        make: computes the result from the operation's; called once.
    """

    def __init__(self, handle: Handle, make: Callable[[Any], Any]) -> None:
        self._handle = handle
        self._make: Callable[[Any], Any] | None = make
        self._result: Any = None
        self._lock = threading.RLock()

    def poll(self) -> bool:
        """Whether `wait` returns at once."""
        return self._handle.poll()

    def wait(self, timeout: float | None = None) -> Result:
        """The result, when the operation is complete; as often as wanted.

        Raises:
            CollectiveTimeoutError: ``timeout`` seconds have passed; the operation goes on. And what it raises, every
                time.
        """
        return self._made(self._handle.wait(timeout))

    @exclusive
    def _made(self, result: Any) -> Any:
        if self._make is not None:
            self._result = self._make(result)
            self._make = None
        return self._result

    __call__ = wait


@untraced
def poll(handle: Handle | Derived) -> bool:
    """Whether an operation is complete, so that `synchronize` of its handle returns at once.

    Example:
        >>> handle = hvd.allreduce_async(torch.ones(2))
        >>> done = hvd.poll(handle)
        >>> hvd.synchronize(handle)
        tensor([1., 1.])
    """
    return _a_handle(handle).poll()


@untraced
def synchronize(handle: Handle[Result] | Derived[Result], timeout: float | None = None) -> Result:
    """Wait until an operation is complete, and return its result; as often as wanted (Horovod: None from the second
    time on).

    Args:
        timeout: seconds to wait at most; None: as long as the other ranks are alive, and ``COLLECTIVES_TIMEOUT``.

    Raises:
        CollectiveTimeoutError: ``timeout`` has passed; the operation goes on.
        MismatchError, RankFailedError: the operation failed; raised every time.

    Example:
        >>> hvd.synchronize(hvd.allreduce_async(torch.ones(2), op=hvd.Sum))
        tensor([2., 2.])
    """
    return _a_handle(handle).wait(timeout)


def _a_handle(handle: Handle[Result] | Derived[Result]) -> Handle[Result] | Derived[Result]:
    if not isinstance(handle, (Handle, Derived)):
        raise InvalidTypeError(
            f"handle: expected the handle that an asynchronous operation returned, got {type(handle).__name__} [A39]"
        )
    return handle
