"""A deadline for several steps."""

from __future__ import annotations

import time


class TimeoutException(Exception):
    """A deadline has passed; ``message`` describes the activity."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Timeout:
    """A deadline, counted from construction.

    Args:
        timeout: seconds.
        message: of the error; ``{activity}`` is replaced by the activity.
    """

    def __init__(self, timeout: float, message: str) -> None:
        self._seconds, self._message = timeout, message
        self._end = time.monotonic() + timeout

    def remaining(self) -> float:
        """Return the remaining seconds, 0 or more."""
        return max(0.0, self._end - time.monotonic())

    def timed_out(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self._end

    def check_time_out_for(self, activity: str) -> None:
        """Check the deadline.

        Raises:
            TimeoutException: it has passed.
        """
        if self.timed_out():
            sentence = self._message.format(activity=activity).rstrip().removesuffix(".")
            raise TimeoutException(f"{sentence}. Timeout after {self._seconds} seconds.")
