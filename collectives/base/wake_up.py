"""A wake-up call for one thread that waits, which no interrupt can break."""

from __future__ import annotations

import threading


class WakeUp:
    """Wakes the one thread that waits for it.

    Unlike `threading.Event`, it can be used by a thread that signal handlers interrupt. An exception such as
    KeyboardInterrupt that is raised within a method of an Event or Condition can leave its lock taken, and every thread
    that uses it afterwards waits for ever. Here each method is one operation of a lock, which cannot be interrupted.
    """

    __slots__ = ("_asleep",)

    def __init__(self) -> None:
        self._asleep = threading.Lock()
        self._asleep.acquire()

    def set(self) -> None:
        """Wake the thread that waits, or let the next `wait` return at once."""
        try:
            self._asleep.release()
        except RuntimeError:
            return  # it is set already

    def is_set(self) -> bool:
        """Whether the next `wait` returns at once."""
        return not self._asleep.locked()

    def wait(self, seconds: float = -1) -> bool:
        """Wait until it is set, and clear it.

        Args:
            seconds: at most; negative: for ever.

        Returns:
            Whether it was set.
        """
        return self._asleep.acquire(timeout=seconds)
