"""Point-to-point messages of ranks that are threads of one process: the receiver copies from the sender's array."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.base.dtypes import SUPPORTED
from collectives.base.errors import RankFailedError
from collectives.transport.base import Array
from collectives.transport.point_to_point import AtOnce, Incoming, Outgoing

EAGER_BYTES = 8 << 10
"""Payloads up to this size are copied by the sender, who is then done."""


Queue = deque[Callable[["ThreadEndpoint"], object]]
"""Functions that a rank calls in `poll`."""


class ThreadEndpoint:
    """`point_to_point.Endpoint` among threads.

    Args:
        queues: of each rank of the group, shared by all.
        names: the ranks' numbers in messages.
    """

    def __init__(self, rank: int, queues: Sequence[Queue], names: Sequence[int]) -> None:
        self.arrived: Callable[[Incoming], object] = lambda message: None
        self.at_once: AtOnce | None = None
        self._rank = rank
        self._names = names
        self._queues = queues

    def send(self, message: Outgoing) -> None:
        array = message.array
        eager = array.nbytes <= EAGER_BYTES
        payload = (array.copy() if eager else array, None if eager else message)
        envelope = Incoming(self._rank, message.tag, SUPPORTED[array.dtype], message.shape, array.nbytes, payload)
        self._queues[message.peer].append(lambda peer: peer.arrived(envelope))
        if eager:
            message.end()

    def poll(self) -> None:
        queue = self._queues[self._rank]
        while queue:
            queue.popleft()(self)

    def receive(self, message: Incoming, into: Array) -> None:
        array, origin = message.payload
        np.copyto(into[: message.nbytes], array.view(np.uint8))
        if origin is not None and origin.done:  # its send has failed, so that its memory may have been used again
            raise RankFailedError(
                f"rank {self._names[self._rank]}: rank {self._names[message.source]} has shut down or failed"
            )
        self._end(message)

    def refuse(self, message: Incoming, why: str) -> None:
        self._end(message, why)

    def _end(self, message: Incoming, refused: str = "") -> None:
        _, origin = message.payload
        message.payload = None
        message.end()
        if origin is not None:
            self._queues[message.source].append(lambda peer: _settle(origin, refused))

    @property
    def busy(self) -> bool:
        return False

    def close(self) -> None:
        self._queues[self._rank].clear()


def _settle(message: Outgoing, refused: str) -> Any:
    message.refused = refused
    message.end()
