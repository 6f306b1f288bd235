"""The order in which a rank's NCCL communicators issue work: only one at a time has work in flight.

Kernels of different communicators that wait for each other's peers in different orders deadlock. So before a world
issues such work, each of its ranks takes that rank's turn, and keeps it until the work is done. Ranks do so in
ascending order, one after the other, so that no cycle of waits can form.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from collectives.base.exclusion import exclusive
from collectives.transport import backoff

_NAP = 50e-6
"""Seconds between polls of the GPU, which does not notify this thread."""


class Turn:
    """The turn of one rank, for its world and that world's process sets.

    Attributes:
        needed: whether there are process sets; becomes true on all ranks between the same two operations.
        reported: whether the transports between the GPUs have been logged.
    """

    def __init__(self) -> None:
        self.needed = self.reported = False
        self._lock = threading.RLock()
        self._busy: Callable[[], bool] | None = None

    def take(self, busy: Callable[[], bool], rank: int, timeout: float, check: Callable[[], None]) -> None:
        """Take the turn; a world keeps it until another one takes it while the former is not busy.

        Args:
            busy: whether work that the world has issued, or is issuing, is incomplete.
            timeout: seconds to wait for another world's work.
            check: raises if a peer has failed; called now and then.

        Raises:
            CollectiveTimeoutError: another world's work did not end in time.
        """
        backoff.wait(
            lambda: self._taken(busy),
            lambda deep: check() if deep else None,
            timeout,
            lambda: (
                f"rank {rank}: an NCCL operation of another process set did not end within {timeout:g} s; see whether "
                f"one of its ranks is missing, or raise COLLECTIVES_TIMEOUT [G37]"
            ),
            yields=0,
            longest=_NAP,
        )

    @exclusive
    def _taken(self, busy: Callable[[], bool]) -> bool:
        if self._busy is None or self._busy == busy or not self._busy():
            self._busy = busy
            return True
        return False
