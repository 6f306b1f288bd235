"""Agreement, failures and departures of ranks on several hosts, over a network."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from collectives.base.errors import RankFailedError
from collectives.transport import backoff
from collectives.transport.host.board import CALL_MASK, FAILED, LEFT, Board
from collectives.transport.tcp.notices import AFTER_EVERY_CALL, Notice

_SAY_HERE_AFTER = 0.4
"""Seconds after which a rank that waits in a call tells the others, which then know who is missing."""


class ControlChannel(Protocol):
    """Exchanges of values, and what ranks say about themselves: `channel.Channel` or `tcp_channel.TcpChannel`.

    Attributes:
        names: the ranks' numbers in messages.
        failed: reason by failed rank.
        left: last call by rank that has left.
        here: present call by waiting rank.
    """

    rank: int
    size: int
    names: Sequence[int]
    failed: dict[int, str]
    left: dict[int, int]
    here: dict[int, int]

    def exchange(self, value: Any) -> list[Any]:
        """Gather every rank's small value (see `interchange`) on every rank, in rank order."""

    def tell(self, notice: Notice, text: str) -> None:
        """Send a notice to every other rank. Does not wait."""

    def leave(self, calls: int) -> None:
        """Notify every other rank that this one has left after ``calls`` calls."""

    def departed(self) -> set[int]:
        """The ranks that have left, or whose processes are known to have ended."""

    def look_for_failures(self) -> None:
        """Raise RankFailedError if a rank has failed."""

    def quiet(self) -> bool:
        """Wait for a bounded time until no notice is in flight. Returns True if none remains."""


class Words(Protocol):
    """The collective that brings every rank's record, a token and words, to every rank."""

    same: bool
    """Whether all ranks entered the call with the same token; equal on every rank, valid once all records have
    arrived."""
    carries: bool
    """As of `Control`."""

    def post(self, token: int, words: Sequence[int] | memoryview) -> None:
        """Enter the next call. Does not wait."""

    def test(self, spin: bool) -> bool:
        """Whether all records have arrived, by a few looks if it may ``spin``."""

    def wait(self) -> None:
        """Wait until all records have arrived. Raises as `Control.agree`."""

    def of(self, peer: int) -> Sequence[int]:
        """The words of a rank, valid until this rank enters the next call but one; only where `same`."""


class NetworkControl:
    """`base.Control` across hosts: one small allgather per call.

    Failures and departures are notices of the channel, which every wait reads; on its own host a rank also puts them
    on the board, which is None where the ranks share none.
    """

    def __init__(
        self, channel: ControlChannel, words: Words, exchange: Callable[[Any], list[Any]], board: Board | None
    ) -> None:
        self.rank, self.size = channel.rank, channel.size
        self.carries = words.carries
        self._channel, self._words, self._names = channel, words, channel.names
        self.exchange = exchange
        self._board = board
        self._call = 0
        self._waits = False
        """Whether a rank may be missing in the present call."""
        self._entered_at = 0.0
        self._said_here = 0
        self._has_failed = False
        # The words' own method, because every call of it counts in a small all-reduce.
        self.words_of = words.of
        self.relax = backoff.yield_core

    def enter(self, signature: int, words: Sequence[int] | memoryview = ()) -> None:
        self._call = call = self._call + 1
        self._words.post(signature << 16 | (call & CALL_MASK), words)
        self._waits = True
        self._entered_at = time.monotonic()

    def look(self, *, spin: bool = True) -> bool | None:
        if self._waits:
            if not self._words.test(spin):
                return None
            self._waits = False
            if self._channel.failed:
                # A rank that has failed in this call, before this rank entered it, left its record behind.
                self._channel.look_for_failures()
        return self._words.same

    def enter_and_look(self, signature: int, words: Sequence[int] | memoryview = ()) -> bool | None:
        # `enter`, written out: every call counts in a small all-reduce.
        self._call = call = self._call + 1
        self._words.post(signature << 16 | (call & CALL_MASK), words)
        self._waits = True
        self._entered_at = time.monotonic()
        return self.look()

    def agree(self, signature: int, words: Sequence[int] | memoryview = ()) -> bool:
        self.enter(signature, words)
        self._words.wait()
        return bool(self.look())

    def called(self) -> bool:
        return True  # entering a collective operation shows only to ranks that enter it too

    def missing(self) -> list[int]:
        if self._said_here != self._call:
            return []
        return [peer for peer in range(self.size) if peer != self.rank and self._channel.here.get(peer, 0) < self._call]

    def tells(self, expected: Sequence[tuple[int, int, int]]) -> bool:
        return all(list(self.words_of(peer)[:2]) == [first, second] for peer, first, second in expected)

    def fail(self, text: str, *, in_call: bool = False) -> None:
        self._has_failed = True
        if self._board is not None:
            self._board.mark(FAILED, text)
        self._channel.tell(Notice.FAILED, text)

    def leave(self) -> None:
        if self._board is not None:
            self._board.mark(LEFT)
        # Messages of two tags may overtake each other: this one the word of the failure.
        self._channel.leave(AFTER_EVERY_CALL if self._has_failed else self._call)

    def has_left(self, peer: int) -> bool:
        board = self._board
        return peer in self._channel.left or (
            board is not None and peer in board.peers and board.state_of(peer) == LEFT
        )

    def acknowledged(self) -> bool:
        board = self._board  # ranks of other hosts reach no memory
        return board is None or all(board.state_of(peer) in (LEFT, FAILED) for peer in board.peers)

    def all_left(self) -> bool:
        board = self._board
        on_board = {peer for peer in board.peers if board.is_gone(peer)} if board is not None else set()
        return len(self._channel.departed() | on_board) == self.size - 1

    def check(self, *, deep: bool = False, upcoming: bool = False) -> None:
        channel = self._channel
        channel.look_for_failures()  # first: it knows of deaths at first hand, the board of what followed from them
        if self._board is not None:
            self._board.check(processes=deep)
        for peer, calls in list(channel.left.items()):
            if calls < self._call + upcoming:
                raise RankFailedError(
                    f"rank {self._names[self.rank]}: rank {self._names[peer]} has shut down or ended while this rank "
                    "waits for it; every rank must make the same calls before it leaves [R16]"
                )
        waits = self._waits and self._said_here != self._call
        if deep and waits and time.monotonic() - self._entered_at > _SAY_HERE_AFTER:
            self._said_here = self._call
            channel.tell(Notice.HERE, str(self._call))

    def close(self) -> bool:
        quiet = self._channel.quiet()
        return quiet and not (self._has_failed or self._channel.failed)
