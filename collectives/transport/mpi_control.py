"""Agreement, failures and departures of ranks on several hosts, through MPI."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.base.errors import RankFailedError
from collectives.transport import backoff
from collectives.transport.base import Array
from collectives.transport.board import CALL_MASK, FAILED, LEFT, Board
from collectives.transport.channel import FAILURE_TAG, HERE_TAG, Channel

if TYPE_CHECKING:
    from mpi4py import MPI

_SAY_HERE_AFTER = 0.4
"""Seconds after which a rank that waits in a call tells the others, which then know who is missing."""
_RECORD = 3
"""Words of a record: the token, and as many of the words that travel with it as fit."""
_AFTER_EVERY_CALL = 1 << 62


class MpiControl:
    """`base.Control` across hosts: one small allgather per call.

    Failures and departures are notices of the channel, which every wait reads; on its own host a rank also puts them
    on the board.
    """

    def __init__(self, channel: Channel, exchange: Callable[[Any], list[Any]], board: Board | None) -> None:
        self.rank = channel.rank
        self.size = channel.size
        self._channel = channel
        self._names = channel.names
        self._comm = channel.comm
        self._waiter = channel.waiter
        self._exchange = exchange
        self._board = board
        self._call = 0
        self._record = np.zeros(_RECORD, np.int64)
        self._records = np.zeros((self.size, _RECORD), np.int64)
        channel.kept += [self._record, self._records]
        self._words: Array = self._records[:, 1:]
        self._request: MPI.Request | None = None
        self._entry = 0
        self._same = False
        self._entered: Sequence[int] | memoryview = ()
        self._entered_at = 0.0
        self._said_here = 0
        self._has_failed = False

    def enter(self, signature: int, words: Sequence[int] | memoryview = ()) -> None:
        self._call += 1
        self._entry = signature << 16 | (self._call & CALL_MASK)
        self._entered = words
        self._record[0] = self._entry
        short = words[: _RECORD - 1]
        self._record[1 : 1 + len(short)] = short
        self._request = self._comm.Iallgather(self._record, self._records)
        self._entered_at = time.monotonic()

    def look(self, *, spin: bool = True) -> bool | None:
        if self._request is not None:
            if not self._request.Test():
                return None
            self._request = None
            self._same = self._read_records()
        return self._same

    def enter_and_look(self, signature: int, words: Sequence[int] | memoryview = ()) -> bool | None:
        self.enter(signature, words)
        return self.look()

    def _read_records(self) -> bool:
        """Compare the records of all ranks, and gather the words that do not fit into them."""
        records, words = self._records, self._entered
        if not bool((records[:, 0] == self._entry).all()):
            return False
        self._words = records[:, 1 : 1 + min(len(words), _RECORD - 1)]
        if len(words) > _RECORD - 1:
            mine = np.array(words, np.int64)
            everybody = np.empty((self.size, len(mine)), np.int64)
            self._channel.collective = (mine, everybody)  # before it is posted, as in `Channel.exchange`
            request = self._comm.Iallgather(mine, everybody)
            self._waiter.wait(request, "every rank's sizes")
            self._words = everybody
        return True

    def agree(self, signature: int, words: Sequence[int] | memoryview = ()) -> bool:
        self.enter(signature, words)
        assert self._request is not None
        self._waiter.wait(self._request, "every rank to enter the call")
        return bool(self.look())

    def called(self) -> bool:
        return True  # entering a collective operation of MPI shows only to ranks that enter it too

    def missing(self) -> list[int]:
        if self._said_here != self._call:
            return []
        return [peer for peer in range(self.size) if peer != self.rank and self._channel.here.get(peer, 0) < self._call]

    def relax(self) -> None:
        backoff.yield_core()

    def words_of(self, peer: int) -> Sequence[int]:
        words: list[int] = self._words[peer].tolist()
        return words

    def tells(self, told: Sequence[tuple[int, int, int]]) -> bool:
        return all(self.words_of(peer)[:2] == [first, second] for peer, first, second in told)

    def exchange(self, value: Any) -> list[Any]:
        return self._exchange(value)

    def fail(self, text: str, *, in_call: bool = False) -> None:
        self._has_failed = True
        if self._board is not None:
            self._board.mark(FAILED, text)
        self._channel.tell(FAILURE_TAG, text)

    def leave(self) -> None:
        if self._board is not None:
            self._board.mark(LEFT)
        # Messages of two tags may overtake each other: a rank that has failed must not look as if it had left early.
        self._channel.leave(_AFTER_EVERY_CALL if self._has_failed else self._call)

    def acknowledged(self) -> bool:
        channel, board = self._channel, self._board
        channel.read_notices()
        on_board = (
            {peer for peer in board.peers if board.state_of(peer) in (LEFT, FAILED)} if board is not None else set()
        )
        return len(channel.failed.keys() | channel.left.keys() | on_board) == self.size - 1

    def all_left(self) -> bool:
        channel, board = self._channel, self._board
        channel.read_notices()
        on_board = {peer for peer in board.peers if board.is_gone(peer)} if board is not None else set()
        return len(channel.left.keys() | on_board) == self.size - 1

    def check(self, *, deep: bool = False, upcoming: bool = False) -> None:
        """Raise RankFailedError if a rank has failed, or has left without entering this rank's present call."""
        if self._board is not None:
            self._board.check(processes=deep)
        channel = self._channel
        channel.look_for_failures()
        for peer, calls in channel.left.items():
            if calls < self._call + upcoming:
                raise RankFailedError(
                    f"rank {self._names[self.rank]}: rank {self._names[peer]} has shut down or ended while this rank "
                    f"waits for it; "
                    f"every rank must make the same calls before it leaves"
                )
        waits = self._request is not None and self._said_here != self._call
        if deep and waits and time.monotonic() - self._entered_at > _SAY_HERE_AFTER:
            self._said_here = self._call
            channel.tell(HERE_TAG, str(self._call))

    def close(self) -> bool:
        return self._channel.quiet()
