"""A group: some ranks, how they reach each other, and how they agree. What `threads` and `mpi` build and a World
uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from collectives.base.config import Config
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
    split: Callable[[Sequence[int]], Group | None]
    """Makes a group of some of these ranks, in ascending order; called by every rank of this group, None on those left
    out."""
    ranks: tuple[int, ...]
    """The ranks' numbers in the outermost group, by which messages call them."""
    close: Callable[[], None]
    """Gives back what was made for the group, and nothing else."""
    config: Config | None = None
    """The settings with rank 0's where those hold for all; None: as they were given."""

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
        self._entry = 0

    def enter(self, signature: int, words: Sequence[int] | memoryview = ()) -> None:
        self._call = call = self._call + 1
        self._count = len(words)
        self._entry = entry = signature << 16 | (call & CALL_MASK)
        self._board.enter(call, entry, words)

    def look(self, *, spin: bool = True) -> bool | None:
        return self._board.look(self._call, self._entry, spin)

    def agree(self, signature: int, words: Sequence[int] | memoryview = ()) -> bool:
        self.enter(signature, words)
        return self._board.await_entries(self._call, self._entry)

    def called(self) -> bool:
        following = self._call + 1
        return len(self._board.missing(following)) < len(self._board.peers)

    def missing(self) -> list[int]:
        return self._board.missing(self._call)

    def check(self, *, deep: bool = False, upcoming: bool = False) -> None:
        board, call = self._board, self._call + upcoming
        board.check(processes=deep)
        for peer in board.missing(call):
            board.check(peer, lambda peer=peer: peer not in board.missing(call), processes=deep)  # type: ignore[misc]

    def relax(self) -> None:
        self._board.relax()

    def words_of(self, peer: int) -> Sequence[int]:
        return self._board.words_of(peer, self._call, self._count)

    def exchange(self, value: Any) -> list[Any]:
        return self._exchange(value)

    def fail(self, text: str, *, in_call: bool = False) -> None:
        self._board.mark(FAILED, text, self._call if in_call else 0)

    def leave(self) -> None:
        self._board.mark(LEFT)

    def acknowledged(self) -> bool:
        return all(self._board.state_of(peer) in (LEFT, FAILED) for peer in self._board.peers)

    def all_left(self) -> bool:
        return all(self._board.is_gone(peer) for peer in self._board.peers)

    def close(self) -> bool:
        return True  # nothing travels on a board
