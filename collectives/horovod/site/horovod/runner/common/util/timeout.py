"""A time by which several steps must be done."""

from __future__ import annotations

import time


class TimeoutException(Exception):
    """The time is up.

    Attributes:
        message: what was being done.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Timeout:
    """Counts from its construction.

    Args:
        timeout: seconds.
        message: of the error; ``{activity}`` stands for what was being done.
    """

    def __init__(self, timeout: float, message: str) -> None:
        self._seconds, self._message = timeout, message
        self._end = time.monotonic() + timeout

    def remaining(self) -> float:
        """Seconds that are left, 0 or more."""
        return max(0.0, self._end - time.monotonic())

    def timed_out(self) -> bool:
        """Whether none are left."""
        return time.monotonic() > self._end

    def check_time_out_for(self, activity: str) -> None:
        """Raise if the time is up.

        Raises:
            TimeoutException: it is.
        """
        if self.timed_out():
            sentence = self._message.format(activity=activity).rstrip().removesuffix(".")
            raise TimeoutException(f"{sentence}. Timeout after {self._seconds} seconds.")
