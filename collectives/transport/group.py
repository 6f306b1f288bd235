"""A group: some ranks, how they reach each other, and how they agree. What `threads` and `mpi` build and a World uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from collectives.transport.base import Control, MemoryTransport, MessageTransport
from collectives.transport.board import CALL_MASK, FAILED, LEFT, Board


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks 0 to ``size`` - 1 as one of them sees them."""

    rank: int
    size: int
    hosts: tuple[tuple[int, ...], ...]
    """The ranks of each host, each host in rank order, hosts in the order of their first ranks."""
    control: Control
    memory: MemoryTransport | None
    """Reaches the ranks of this host; None where memory cannot be shared."""
    messages: MessageTransport | None
    """Reaches every rank; None where there is nobody to send to, or nothing to send with."""
    close: Callable[[], None]
    """Gives back what was made for the group, and nothing else."""

    @property
    def local(self) -> tuple[int, ...]:
        """The ranks of this rank's host."""
        return next(host for host in self.hosts if self.rank in host)


class BoardControl:
    """`base.Control` for ranks that all share one board: entering a call is one word written and one read per peer.

    Args:
        board: shared by all ranks of the group.
        exchange: gives every rank every rank's value, in rank order.
    """

    def __init__(self, board: Board, exchange: Callable[[Any], list[Any]]) -> None:
        self.rank = board.rank
        self.size = board.size
        self._board = board
        self._exchange = exchange
        self._call = 0
        self._count = 0

    def agree(self, signature: int, words: Sequence[int] = ()) -> bool:
        self._call = call = self._call + 1
        self._count = len(words)
        entry = signature << 16 | (call & CALL_MASK)
        board = self._board
        board.enter(call, entry, words)
        return board.await_entries(call, entry)

    def words_of(self, peer: int) -> Sequence[int]:
        return self._board.words_of(peer, self._call, self._count)

    def exchange(self, value: Any) -> list[Any]:
        return self._exchange(value)

    def fail(self, text: str) -> None:
        self._board.mark(FAILED, text)

    def leave(self) -> None:
        self._board.mark(LEFT)

    def acknowledged(self) -> bool:
        return all(self._board.state_of(peer) in (LEFT, FAILED) for peer in self._board.peers)

    def close(self) -> None:
        """Nothing: the board belongs to whoever made it."""
