"""A pipe within one process."""

from __future__ import annotations

import threading
from typing import AnyStr, Generic


class Pipe(Generic[AnyStr]):
    """Text or bytes from one thread to another: a write waits until what was written before it has been read."""

    def __init__(self) -> None:
        self._left: AnyStr | None = None
        self._closed = False
        self._changed = threading.Condition()

    def write(self, buf: AnyStr) -> None:
        """Write, once nothing is left to be read.

        Raises:
            RuntimeError: the pipe is closed, or is closed meanwhile.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._left is None or self._closed)
            if self._closed:
                raise RuntimeError("Pipe is closed")
            self._left = buf
            self._changed.notify_all()

    def read(self, length: int = -1) -> AnyStr | None:
        """Read the rest of the last write, or ``length`` of it; None once the pipe is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._left is not None or self._closed)
            if self._left is None:
                return None
            end = length if length > 0 else len(self._left)
            part, rest = self._left[:end], self._left[end:]
            self._left = rest or None
            self._changed.notify_all()
            return part

    def flush(self) -> None:
        """Do nothing: what is written can be read at once."""

    def close(self) -> None:
        """End all waiting. What was written before can still be read."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
