"""A group's own MPI communicator: exchanges of values, and notices that a rank gives about itself.

Both are requests that are posted and tested. Exchanges are collective. A notice (the rank has failed, leaves, or waits
in a call) arrives at any time, and is read during every wait.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.base.errors import RankFailedError
from collectives.transport import backoff
from collectives.transport.bounded_mpi import Waiter

if TYPE_CHECKING:
    from mpi4py import MPI

FAILURE_TAG, LEAVE_TAG, BLOCK_TAG, HERE_TAG = 1, 2, 3, 4
_NOTICES = (FAILURE_TAG, HERE_TAG, LEAVE_TAG)
_LEAVE_BYTES = 32
_NOTICE_BYTES = 2000
"""Few enough that every MPI sends them eagerly, whether or not the receiver is inside MPI."""
_SAY_GOODBYE_WITHIN = 1.0

_open: set[Channel] = set()
"""Channels whose memory MPI may still write to: posted requests may complete although they are not waited for."""


class Channel:
    """One rank's end of the communicator. Not thread-safe.

    Args:
        comm: owned by the channel.
        timeout: seconds that a wait may last.
        names: the ranks' numbers in messages.

    Attributes:
        waiter: waits for requests on the communicator, and reads notices meanwhile.
        failed: reason by failed rank.
        left: last call by rank that has left.
        here: present call by waiting rank.
    """

    def __init__(self, comm: MPI.Intracomm, timeout: float, names: Sequence[int]) -> None:
        self.comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.names = names
        self.waiter = Waiter(names[self.rank], timeout)
        self.waiter.check = self.look_for_failures
        self.failed: dict[int, str] = {}
        self.left: dict[int, int] = {}
        self.here: dict[int, int] = {}
        self.kept: list[Any] = []
        """Further memory that requests on this communicator may write to."""
        self._has_left = False
        self._sent: list[MPI.Request] = []
        self._arriving: list[tuple[MPI.Request, int, int, bytearray]] = []
        self._length = np.zeros(1, np.int64)
        self._lengths = np.zeros(self.size, np.int64)
        self.collective: Any = None
        """The request and the memory of the last collective, which an exception may have left incomplete."""
        _open.add(self)

    def exchange(self, value: Any) -> list[Any]:
        """Gather every rank's (small, picklable) value on every rank, in rank order; raises as `Waiter.wait`."""
        from mpi4py import MPI

        mine = pickle.dumps(value)
        self._length[0] = len(mine)
        self.waiter.wait(self.comm.Iallgather(self._length, self._lengths), "every rank to say what it has")
        everybody = bytearray(int(self._lengths.sum()))
        request = self.comm.Iallgatherv((mine, MPI.BYTE), (everybody, self._lengths.copy(), MPI.BYTE))
        self.collective = (request, mine, everybody)
        self.waiter.wait(request, "every rank to say what it has")
        ends = np.cumsum(self._lengths).tolist()
        data = memoryview(everybody)
        return [
            pickle.loads(data[end - length : end]) for end, length in zip(ends, self._lengths.tolist(), strict=True)
        ]

    def tell(self, tag: int, text: str) -> None:
        """Send a notice to every other rank. Does not wait."""
        data = text.encode("utf-8", "replace")[-_NOTICE_BYTES:]
        for peer in range(self.size):
            if peer != self.rank:
                self._sent.append(self.comm.Isend(data, peer, tag))

    def leave(self, calls: int) -> None:
        """Notify every other rank that this one has left after ``calls`` calls, and post receives for the same from
        them.

        A peer may leave long after this rank has ceased to poll. A posted receive takes its notice even while MPI is
        being finalised, which would otherwise find unexpected messages.
        """
        if self._has_left:
            return
        self.tell(LEAVE_TAG, str(calls))
        self.read_notices()
        self._has_left = True
        known = self.left.keys() | {peer for _, peer, tag, _ in self._arriving if tag == LEAVE_TAG}
        for peer in set(range(self.size)) - known - {self.rank}:
            text = bytearray(_LEAVE_BYTES)
            self._arriving.append((self.comm.Irecv(text, peer, LEAVE_TAG), peer, LEAVE_TAG, text))

    def read_notices(self) -> None:
        """Receive the notices that have arrived into `failed`, `left` and `here`."""
        from mpi4py import MPI

        status = MPI.Status()
        for tag in _NOTICES[: -1 if self._has_left else None]:
            while (message := self.comm.Improbe(MPI.ANY_SOURCE, tag, status)) is not None:
                text = bytearray(status.Get_count(MPI.BYTE))
                self._arriving.append((message.Irecv(text), status.Get_source(), tag, text))
        if self._arriving:
            self._arriving = [notice for notice in self._arriving if not self._arrived(*notice)]
        if self._sent:
            self._sent = [request for request in self._sent if not request.Test()]

    def _arrived(self, request: MPI.Request, peer: int, tag: int, data: bytearray) -> bool:
        if not request.Test():
            return False
        text = data.rstrip(b"\0").decode("utf-8", "replace")
        if tag == FAILURE_TAG:
            self.failed[peer] = text
        else:
            (self.left if tag == LEAVE_TAG else self.here)[peer] = int(text)
        return True

    def look_for_failures(self) -> None:
        """Read the notices; raise RankFailedError if a rank has failed."""
        self.read_notices()
        for peer, text in self.failed.items():
            raise RankFailedError(f"rank {self.names[self.rank]}: rank {self.names[peer]} has failed:\n{text}")

    def quiet(self) -> bool:
        """Drain notices for a bounded time. Returns True if every rank has left or failed, so that none remain in
        flight.

        An unread notice would be received on a later communicator to which MPI gives the same context number.
        """
        return backoff.poll(self._all_said_goodbye, _SAY_GOODBYE_WITHIN)

    def _all_said_goodbye(self) -> bool:
        self.read_notices()
        return len(self.left.keys() | self.failed.keys()) == self.size - 1 and not self._sent and not self._arriving

    def close(self) -> None:
        """Free the communicator, which must have no request pending; a local operation of MPI."""
        _open.discard(self)
        self.comm.Free()
