"""Whose turn it is: one NCCL communicator of a rank at a time has work under way, where there are several.

Kernels of different communicators that wait for each other's peers in different orders never end. So before a world
issues such work, each of its ranks takes its own turn, and keeps it until that work is done. The ranks do so in the
order of their numbers, one behind the other, which is why they cannot wait for each other in a ring.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from collectives.transport import backoff

_NAP = 50e-6
"""Seconds: what is waited for is an event of the GPU, of which nobody tells this thread."""


class Holder(Protocol):
    """Who may have the turn: a world's accelerator."""

    def busy(self) -> bool:
        """Whether work that it has issued, or is issuing, is under way."""


class Turn:
    """The turn of one rank, for its world and that world's process sets.

    Attributes:
        needed: whether there are process sets. It becomes true on all ranks between the same two operations.
        told: whether the user has been told how the ranks reach each other's GPUs.
    """

    def __init__(self) -> None:
        self.needed = self.told = False
        self._lock = threading.Lock()
        self._holder: Holder | None = None

    def take(self, holder: Holder, rank: int, timeout: float, check: Callable[[], None]) -> None:
        """Have the turn from now on; it is kept until somebody else wants it and nothing is under way.

        Args:
            holder: who takes it.
            rank: of the holder, for messages.
            timeout: seconds to wait for another world's work.
            check: raises if a peer of the holder has failed; called now and then.

        Raises:
            CollectiveTimeoutError: another world's work did not end in time.
        """
        backoff.wait(
            lambda: self._taken(holder),
            lambda deep: check() if deep else None,
            timeout,
            lambda: (
                f"rank {rank}: another process set's NCCL operation did not end within {timeout:g} s: is one of its "
                f"ranks missing? A larger COLLECTIVES_TIMEOUT waits longer"
            ),
            yields=0,
            longest=_NAP,
        )

    def _taken(self, holder: Holder) -> bool:
        with self._lock:
            if self._holder is None or self._holder is holder or not self._holder.busy():
                self._holder = holder
                return True
            return False
