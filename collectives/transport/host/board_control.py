"""Agreement, failures and departures of ranks that share a board."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from collectives.transport.host.board import FAILED, LEFT, Board


class BoardControl:
    """`base.Control` for ranks that all share one board: entering a call writes one word and reads one per peer.

    Args:
        exchange: gathers every rank's value on every rank, in rank order.
    """

    carries = False

    def __init__(self, board: Board, exchange: Callable[[Any], list[Any]]) -> None:
        self.rank, self.size = board.rank, board.size
        self.exchange = exchange
        self._board = board
        # The board's own methods, because every call of them counts in a small all-reduce.
        self.enter, self.look, self.enter_and_look = board.enter, board.look, board.enter_and_look
        self.words_of, self.tells, self.relax, self.missing = board.words_of, board.tells, board.relax, board.missing

    def agree(self, signature: int, words: Sequence[int] | memoryview = ()) -> bool:
        self._board.enter(signature, words)
        return self._board.await_entries()

    def called(self) -> bool:
        return len(self._board.missing(upcoming=True)) < len(self._board.peers)

    def check(self, *, deep: bool = False, upcoming: bool = False) -> None:
        board = self._board
        board.check(processes=deep)
        for peer in board.missing(upcoming=upcoming):
            board.check(peer, partial(board.has_entered, peer, upcoming), processes=deep)

    def fail(self, text: str, *, in_call: bool = False) -> None:
        self._board.mark(FAILED, text, self._board.call if in_call else 0)

    def leave(self) -> None:
        self._board.mark(LEFT)

    def has_left(self, peer: int) -> bool:
        return self._board.state_of(peer) == LEFT

    def acknowledged(self) -> bool:
        return all(self._board.state_of(peer) in (LEFT, FAILED) for peer in self._board.peers)

    def all_left(self) -> bool:
        return all(self._board.is_gone(peer) for peer in self._board.peers)

    def close(self) -> bool:
        return True  # a board has no messages in flight
