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

MOST_BLOCKS = 1024
"""How many blocks one system call takes: IOV_MAX."""


class Blocks:
    """A list of blocks of one process's memory, as the system's ``struct iovec``: rows of address and length in bytes.

    Attributes:
        rows: int64 of shape (blocks, 2).
        at: where the rows lie.
    """

    __slots__ = ("at", "rows")

    def __init__(self, lengths: Array) -> None:
        self.rows: Array = np.zeros((len(lengths), 2), np.int64)
        self.rows[:, 1] = lengths
        self.at: int = self.rows.ctypes.data


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
            RankFailedError: the peer has failed, left or died.
            TransportError: the system refused, although the peer is alive.
        """

    def store(self, peer: int, address: int, source: int, nbytes: int) -> None:
        """Copy ``nbytes`` of this rank's memory at ``source`` to the peer's private memory at ``address``; raises as
        `fetch`."""

    def fetch_list(self, peer: int, blocks: Blocks, first: int, count: int, into: int, nbytes: int) -> None:
        """Copy ``count`` of the peer's ``blocks``, ``nbytes`` in all, one behind the other to this rank's memory at
        ``into``."""

    def store_list(self, peer: int, blocks: Blocks, own: Blocks, first: int, count: int, nbytes: int) -> None:
        """Copy ``count`` of this rank's ``own`` blocks to the peer's, each to the one of the same number and length."""

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

    def enter(self, signature: int, words: Sequence[int] | memoryview = ()) -> None:
        """Enter the next call of the group with what this rank asks for.

        ``signature`` is 47 bits that stand for the request. ``words`` (at most `board.max_words` of 64 bits, equally
        many on ranks with equal signatures; many of them as a memoryview of format "q") travel along and are read with
        `words_of`. What this rank wrote into its window before is visible to its peers afterwards.
        """

    def look(self, *, spin: bool = True) -> bool | None:
        """Whether all ranks entered the call with the same signature, the same answer on every rank; None while one is
        missing.

        ``spin``: look a few times before saying that one is missing.

        Raises:
            RankFailedError: a rank failed in the middle of this call.
        """

    def agree(self, signature: int, words: Sequence[int] | memoryview = ()) -> bool:
        """`enter`, and wait until every rank has; returns what `look` says.

        Raises:
            RankFailedError, CollectiveTimeoutError: a rank is gone, or did not come in time.
        """

    def called(self) -> bool:
        """Whether a peer may have entered the call after the present one, so that this rank should come too."""

    def missing(self) -> list[int]:
        """The peers known not to have entered the present call."""

    def check(self, *, deep: bool = False, upcoming: bool = False) -> None:
        """Raise RankFailedError if a rank has failed, or has left without entering the present call.

        ``deep``: look at processes too. ``upcoming``: the call after the present one is meant.
        """

    def relax(self) -> None:
        """Give other ranks and threads a chance to run."""

    def words_of(self, peer: int) -> Sequence[int]:
        """The words with which ``peer`` entered the current call; valid until this rank enters the next but one."""

    def exchange(self, value: Any) -> list[Any]:
        """Give every rank every rank's (small, picklable) value, in rank order; the slow path of errors and set-up."""

    def fail(self, text: str, *, in_call: bool = False) -> None:
        """Tell the other ranks that this one has failed; their waits end with a RankFailedError that carries ``text``.

        ``in_call``: it failed in the middle of the present call, which nobody may take part in any more.
        """

    def leave(self) -> None:
        """Tell the other ranks that this one will not enter another call; also after `fail`, of which they are told
        first."""

    def acknowledged(self) -> bool:
        """Whether every other rank has failed, left or died too, so that none will touch this rank's memory."""

    def all_left(self) -> bool:
        """Whether every other rank has left or died; of those that have failed, whether they have said so with `leave`
        as well."""

    def close(self) -> bool:
        """Wait a moment until nothing said by anybody is on its way any more; whether that came about."""
