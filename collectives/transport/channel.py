"""A communicator of a group's own: values that all ranks exchange, and notices that a rank gives about itself.

Both are messages of MPI, posted and tested. Exchanges are collective; a notice (it has failed, it leaves, it waits in a
call) comes at any time, and is read by whoever waits for anything.
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
"""Few enough for every MPI to send at once, whether or not the receiver is inside MPI."""
_SAY_GOODBYE_WITHIN = 1.0

_open: set[Channel] = set()
"""Channels that MPI may still write to: what they have posted may complete although nobody waits for it any more."""


class Channel:
    """One rank's end of the communicator. Not thread-safe.

    Args:
        comm: belongs to the channel.
        timeout: seconds that a wait may last.
        names: what messages call the ranks.

    Attributes:
        waiter: waits for requests on the communicator, and looks for notices of failure meanwhile.
        failed: the ranks that have failed, and what they said.
        left: the ranks that have left, and after which call.
        here: the ranks that wait, and in which call.
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
        """Further memory that requests on this communicator write to."""
        self._has_left = False
        self._sent: list[MPI.Request] = []
        self._arriving: list[tuple[MPI.Request, int, int, bytearray]] = []
        self._length = np.zeros(1, np.int64)
        self._lengths = np.zeros(self.size, np.int64)
        self.collective: Any = None
        """The request of the last collective that may have been left in the middle, and its memory."""
        _open.add(self)

    def exchange(self, value: Any) -> list[Any]:
        """Give every rank every rank's (small, picklable) value, in rank order; waits as `Waiter.wait`."""
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
        """Give a notice to every other rank; returns at once."""
        data = text.encode("utf-8", "replace")[-_NOTICE_BYTES:]
        for peer in range(self.size):
            if peer != self.rank:
                self._sent.append(self.comm.Isend(data, peer, tag))

    def leave(self, calls: int) -> None:
        """Tell every other rank that this one has left after so many calls, and expect the same of them.

        They may leave long after this rank has ceased to look. A receive that is posted takes their notices even while
        MPI is being finalised, which would otherwise find messages that nobody has asked for.
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
        """Note what the other ranks have said about themselves."""
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
        """Wait a moment until every rank has said goodbye; whether all have, so that no notice is on its way any more.

        What nobody has read would be read on a later communicator, if MPI gave that the number of this one.
        """
        return backoff.poll(self._all_said_goodbye, _SAY_GOODBYE_WITHIN)

    def _all_said_goodbye(self) -> bool:
        self.read_notices()
        return len(self.left.keys() | self.failed.keys()) == self.size - 1 and not self._sent and not self._arriving

    def close(self) -> None:
        """Free the communicator, on which nothing may be under way; MPI does this without talking to the other
        ranks."""
        _open.discard(self)
        self.comm.Free()
