"""Agreement, failures and departures of ranks that share a board."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from collectives.transport.board import CALL_MASK, FAILED, LEFT, Board


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
