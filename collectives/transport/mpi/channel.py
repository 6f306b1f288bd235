"""A group's own MPI communicator: exchanges of values, the words of a call, and notices that a rank gives about itself.

All are requests that are posted and tested. Exchanges and words are collective. A notice (the rank has failed, leaves,
or waits in a call) arrives at any time, and is read during every wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from collectives.base.errors import RankFailedError
from collectives.base.interchange import from_json, to_json
from collectives.transport import backoff
from collectives.transport.base import Array
from collectives.transport.mpi.bounded_mpi import Waiter
from collectives.transport.tcp.notices import Notice, Notices

if TYPE_CHECKING:
    from mpi4py import MPI

_LEAVE_BYTES = 32
_NOTICE_BYTES = 2000
"""Few enough that every MPI sends them eagerly, whether or not the receiver is inside MPI."""
_SAY_GOODBYE_WITHIN = 1.0
_RECORD = 3
"""Words of a record: the token, and as many of the words that travel with it as fit."""

_open: set[Channel] = set()
"""Channels whose memory MPI may still write to: posted requests may complete although they are not waited for."""


class User(Protocol):
    """What posts requests on the communicator of a channel."""

    @property
    def busy(self) -> bool:
        """Whether one of them may be pending."""


class _Posted:
    """A notice on its way, or a collective. It is kept before it is posted, so that its memory outlives a request that
    an interrupt keeps from being stored; without a request it never completes."""

    __slots__ = ("data", "peer", "request", "tag")

    def __init__(self, data: Any, peer: int = -1, tag: int = -1) -> None:
        self.data, self.peer, self.tag = data, peer, tag
        self.request: MPI.Request | None = None

    def complete(self) -> bool:
        return self.request is not None and bool(self.request.Test())


class Channel:
    """`network_control.ControlChannel` through a communicator, which it owns. Not thread-safe.

    Attributes:
        waiter: waits for requests on the communicator, and reads notices meanwhile.
        notices: the group's through the heart (see `hear`).
        users: further ones of the communicator.
    """

    def __init__(self, comm: MPI.Intracomm, timeout: float, names: Sequence[int]) -> None:
        self.comm, self.names = comm, names
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.waiter = Waiter(names[self.rank], timeout)
        self.waiter.check = self.look_for_failures
        self.failed: dict[int, str] = {}
        self.left: dict[int, int] = {}
        self.here: dict[int, int] = {}
        self._gone: set[int] = set()
        self.notices: Notices | None = None
        self.users: list[User] = []
        self.kept: list[Any] = []
        """Further memory that requests on this communicator may write to."""
        self._has_left = False
        self._sent: list[_Posted] = []
        self._arriving: list[_Posted] = []
        self._length = np.zeros(1, np.int64)
        self._lengths = np.zeros(self.size, np.int64)
        self._collectives: list[_Posted] = []
        """Those that are not known to be complete: an exception may have ended the wait."""
        _open.add(self)

    def hear(self, notices: Notices) -> None:
        """Report failures through the heart, which also detects deaths, and the order of both."""
        self.notices, self.failed, self._gone = notices, notices.failed, notices.gone

    def exchange(self, value: Any) -> list[Any]:
        from mpi4py import MPI

        own_bytes = to_json(value)
        self._length[0] = len(own_bytes)
        length, lengths = self._length, self._lengths
        self.gather((length, lengths), lambda: self.comm.Iallgather(length, lengths), "every rank to send its value")
        all_bytes, counts = bytearray(int(lengths.sum())), lengths.copy()
        memory = (own_bytes, MPI.BYTE), (all_bytes, counts, MPI.BYTE)
        self.gather(memory, lambda: self.comm.Iallgatherv(*memory), "every rank to send its value")
        ends = np.cumsum(counts).tolist()
        data = memoryview(all_bytes)
        return [from_json(bytes(data[end - n : end])) for end, n in zip(ends, counts.tolist(), strict=True)]

    @property
    def in_step(self) -> bool:
        """Whether every exchange has ended. Another one after that would meet what the other ranks have left behind."""
        return not self._collectives

    def gather(self, memory: Any, post: Callable[[], MPI.Request], what: str) -> None:
        """Post a collective, which reads and writes this memory, and wait for it; raises as `Waiter.wait`."""
        posted = _Posted(memory)
        self._collectives.append(posted)
        posted.request = post()
        self.waiter.wait(posted.request, what)
        self._collectives.remove(posted)

    def tell(self, notice: Notice, text: str) -> None:
        if self.notices is not None and notice is Notice.FAILED:
            self.notices.tell(notice, text)
            return
        data = text.encode("utf-8", "replace")[-_NOTICE_BYTES:]
        for peer in range(self.size):
            if peer != self.rank:
                self._sent.append(_Posted(data))
                self._sent[-1].request = self.comm.Isend(data, peer, notice)

    def leave(self, calls: int) -> None:
        """Tell every other rank that this one has left, and post receives for the same from them: a peer may leave long
        after this rank has ceased to poll, and a posted receive takes its notice even while MPI is being finalised,
        which would otherwise find unexpected messages."""
        if self._has_left:
            return
        if self.notices is not None:
            self.notices.leave(calls)
        self.tell(Notice.LEFT, str(calls))
        self._read_notices()
        self._has_left = True
        leavers = self.left.keys() | {notice.peer for notice in self._arriving if notice.tag == Notice.LEFT}
        for peer in set(range(self.size)) - leavers - {self.rank}:
            text = bytearray(_LEAVE_BYTES)
            self._arriving.append(_Posted(text, peer, Notice.LEFT))
            self._arriving[-1].request = self.comm.Irecv(text, peer, Notice.LEFT)

    def departed(self) -> set[int]:
        self._read_notices()
        return self.left.keys() | self._gone

    def _read_notices(self) -> None:
        """Receive the notices that have arrived into `failed`, `left` and `here`."""
        from mpi4py import MPI

        status = MPI.Status()
        for tag in Notice:
            if self._has_left and tag is Notice.LEFT:
                continue  # the receives for it are posted
            while (message := self.comm.Improbe(MPI.ANY_SOURCE, tag, status)) is not None:
                text = bytearray(status.Get_count(MPI.BYTE))
                self._arriving.append(_Posted(text, status.Get_source(), tag))
                self._arriving[-1].request = message.Irecv(text)
        if self._arriving:
            self._arriving = [notice for notice in self._arriving if not self._arrived(notice)]
        if self._sent:
            self._sent = [notice for notice in self._sent if not notice.complete()]

    def _arrived(self, notice: _Posted) -> bool:
        if not notice.complete():
            return False
        text = notice.data.rstrip(b"\0").decode("utf-8", "replace")
        if notice.tag == Notice.FAILED:
            self.failed[notice.peer] = text
        else:
            (self.left if notice.tag == Notice.LEFT else self.here)[notice.peer] = int(text)
        return True

    def look_for_failures(self) -> None:
        self._read_notices()
        if self.notices is not None:
            self.notices.look_for_failures()
        for peer, text in list(self.failed.items()):
            raise RankFailedError(f"rank {self.names[self.rank]}: rank {self.names[peer]} has failed [R2]:\n{text}")

    def quiet(self) -> bool:
        return backoff.poll(self._all_said_goodbye, _SAY_GOODBYE_WITHIN)

    def _all_said_goodbye(self) -> bool:
        self._read_notices()
        return len(self.left.keys() | self.failed.keys()) == self.size - 1 and not self._sent and not self._arriving

    def close(self) -> None:
        """Free the communicator, a local operation of MPI, if nothing is pending on it; otherwise it stays for good.

        Any call of MPI, in any thread, goes on with the collectives that are pending, whether or not a caller holds
        their requests, and would use a communicator that was freed. And a message that was never received would be
        received on a later communicator to which MPI gives the same context number.
        """
        if self._is_idle():
            _open.discard(self)
            self.comm.Free()

    def _is_idle(self) -> bool:
        from mpi4py import MPI

        self._read_notices()
        if self._sent or self._arriving or self.waiter.busy or any(user.busy for user in self.users):
            return False
        if not all(posted.complete() for posted in self._collectives):
            return False
        return not self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)


class MpiWords:
    """`network_control.Words` through MPI: an allgather of records of three words, and a second one for more."""

    carries = False

    def __init__(self, channel: Channel) -> None:
        self.same = False
        self._channel = channel
        self._record = np.zeros(_RECORD, np.int64)
        self._records = np.zeros((channel.size, _RECORD), np.int64)
        channel.kept += [self._record, self._records]
        channel.users.append(self)
        self._all_words: Array = self._records[:, 1:]
        self._posted: Sequence[int] | memoryview = ()
        self._request: MPI.Request | None = None
        self.busy = False
        """Whether this rank has entered a round that has not ended."""

    def post(self, token: int, words: Sequence[int] | memoryview) -> None:
        self._posted = words
        self._record[0] = token
        short = words[: _RECORD - 1]
        self._record[1 : 1 + len(short)] = short
        self.busy = True  # an interrupt may come before there is a request
        self._request = self._channel.comm.Iallgather(self._record, self._records)

    def test(self, spin: bool) -> bool:
        if self._request is not None:
            if not self._request.Test():
                return False
            self._request = None
            self._read_records()
        return True

    def wait(self) -> None:
        if self._request is not None:
            self._channel.waiter.wait(self._request, "every rank to enter the call")
            self._request = None
            self._read_records()

    def of(self, peer: int) -> Sequence[int]:
        words: list[int] = self._all_words[peer].tolist()
        return words

    def _read_records(self) -> None:
        """Compare the records of all ranks, and gather the words that do not fit into them."""
        self.busy = False
        records, words = self._records, self._posted
        self.same = bool((records[:, 0] == self._record[0]).all())
        if not self.same:
            return
        self._all_words = records[:, 1 : 1 + min(len(words), _RECORD - 1)]
        if len(words) > _RECORD - 1:
            own_words = np.array(words, np.int64)
            all_words = np.empty((self._channel.size, len(own_words)), np.int64)
            self._channel.gather(
                (own_words, all_words),
                lambda: self._channel.comm.Iallgather(own_words, all_words),
                "every rank's sizes",
            )
            self._all_words = all_words
