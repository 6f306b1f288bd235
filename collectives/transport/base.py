"""What a transport is: two ways to move a block, one interface to each, and nothing about collectives.

Ranks that share a host share **memory**: whoever holds the bytes does nothing, and the peer reads them where they lie
(or writes them where they belong). What remains to be agreed on is *when*, and that is the board's business
(`collectives.transport.board`). Ranks that do not share a host pass **messages**: both sides act.

The executor uses whichever of the two reaches a peer, so one schedule may span both. Every wait of a transport is
bounded: it ends with the bytes, or with an error that says who was missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collectives.transport.board import Board

Array = np.ndarray[Any, np.dtype[Any]]

SLOTS = 4
"""Segments that may be in flight in a window at once: one being filled, one or two being read, one being left."""

SLOT_BYTES = 2 << 20
"""Bytes of a window that one segment may use. Small, so that what was written is still in cache when it is read."""

WINDOW_BYTES = SLOTS * SLOT_BYTES


class MemoryTransport(Protocol):
    """Memory shared by the ranks of one host. Peers are named by their rank in the group."""

    name: str
    board: Board
    """Who has come how far; shared by the same ranks."""
    windows: Sequence[Array | None]
    """Each rank's window, `WINDOW_BYTES` of uint8 that all ranks of the host can read; None for ranks elsewhere."""
    reads_private: bool
    """Whether `fetch` and `store` work, that is, whether the system lets a rank into its peers' private memory."""

    def fetch(self, peer: int, address: int, into: int, nbytes: int) -> None:
        """Copy ``nbytes`` from the peer's private memory at ``address`` to this rank's at ``into``.

        Raises:
            TransportError: the system refused, or the peer's memory is gone.
        """

    def store(self, peer: int, address: int, source: int, nbytes: int) -> None:
        """Copy ``nbytes`` of this rank's memory at ``source`` to the peer's private memory at ``address``; raises as `fetch`."""

    def close(self) -> None:
        """Let go of the shared memory; the other ranks keep theirs."""


class MessageTransport(Protocol):
    """Messages between any two ranks of the group, in order per pair of ranks; both sides name the same length."""

    name: str

    def post_receive(self, peer: int, into: Array) -> None:
        """Begin to receive a block from ``peer`` into contiguous memory, which must stay alive until `drain`."""

    def post_send(self, peer: int, block: Array) -> None:
        """Begin to send a contiguous block, which must stay alive and unchanged until `drain`."""

    def drain(self) -> None:
        """Wait until everything posted has arrived and left.

        Raises:
            RankFailedError, CollectiveTimeoutError: a rank is gone, or did not come in time.
        """

    def close(self) -> None:
        """Release what the transport holds."""


class Control(Protocol):
    """How the ranks of a group agree, fail and find each other: the little that is said about the data."""

    rank: int
    size: int

    def agree(self, signature: int, words: Sequence[int] = ()) -> bool:
        """Enter the next call of the group with what this rank asks for; return when every rank has entered.

        ``signature`` is 47 bits that stand for the request. ``words`` (at most `board.max_words` of 64 bits, equally many on ranks with
        equal signatures) travel along and are read with `words_of`. What this rank wrote into its window before is visible to its
        peers afterwards.

        Returns:
            Whether all ranks came with the same signature. The answer is the same on every rank.

        Raises:
            RankFailedError, CollectiveTimeoutError: a rank is gone, or did not come in time.
        """

    def words_of(self, peer: int) -> Sequence[int]:
        """The words with which ``peer`` entered the current call; valid until this rank enters the next but one."""

    def exchange(self, value: Any) -> list[Any]:
        """Give every rank every rank's (small, picklable) value, in rank order; the slow path of errors and set-up."""

    def fail(self, text: str) -> None:
        """Tell the other ranks that this one has failed; their waits end with a RankFailedError that carries ``text``."""

    def leave(self) -> None:
        """Tell the other ranks that this one will not enter another call."""

    def acknowledged(self) -> bool:
        """Whether every other rank has failed, left or died too, so that none will touch this rank's memory."""

    def close(self) -> None:
        """Release what the control plane holds."""
