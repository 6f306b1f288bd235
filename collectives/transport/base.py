"""The protocols of a transport: shared memory and messages between ranks, and the control plane.

Ranks of one host share **memory**: a peer reads blocks where they lie, or writes them where they belong, and the owner
does nothing. *When* it may do so is read on the board (`collectives.transport.host.board`). Ranks of different hosts
pass **messages**, in which both sides take part. The executor uses whichever reaches a peer.

Every wait of a transport is bounded: it ends with the bytes, or with an error that names the missing rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collectives.transport.host.board import Board
    from collectives.transport.host.mapped_memory import MappedMemory

Array = np.ndarray[Any, np.dtype[Any]]

SLOTS = 4
"""Segments in flight in a window: one being filled, one or two being read, one being released."""

SLOT_BYTES = 2 << 20
"""Bytes of a window for one segment; small, so that they are still in cache when they are read."""

WINDOW_BYTES = SLOTS * SLOT_BYTES


class MemoryTransport(Protocol):
    """Memory shared by the ranks of one host. Peers are given by their rank in the group."""

    name: str
    board: Board
    """The progress and state of the same ranks."""
    windows: Sequence[Array | None]
    """Each rank's window, `WINDOW_BYTES` of uint8 that all ranks of the host may read and write; None for ranks of
    other hosts."""
    reads_private: bool
    """Whether `fetch` and `store` work: whether the system lets a rank access its peers' private memory."""
    mapped: MappedMemory | None
    """Tensors in the ranks' arenas; None on every rank if the ranks of some host cannot map each other's files."""

    def fetch(self, peer: int, address: int, into: int, nbytes: int) -> None:
        """Copy ``nbytes`` from the peer's private memory at ``address`` to this rank's at ``into``.

        Raises:
            RankFailedError: the peer has failed, left or died.
            TransportError: the system refused, although the peer is alive.
        """

    def store(self, peer: int, address: int, source: int, nbytes: int) -> None:
        """Copy ``nbytes`` from this rank's memory at ``source`` to the peer's private memory at ``address``. Raises as
        `fetch`."""

    def close(self) -> None:
        """Unmap the shared memory; the other ranks keep theirs."""


def as_bytes(array: Array) -> memoryview:
    """The bytes of a contiguous 1-D array; writable if that is."""
    return array.view(np.uint8).data


class MessageTransport(Protocol):
    """Messages between any two ranks of the group, in order per pair of ranks; both sides give the same length."""

    name: str

    def post_receive(self, peer: int, into: Array) -> Any:
        """Begin to receive a block from ``peer`` into contiguous memory, which must live until `drain` returns.
        Returns the message, for `await_arrival`."""

    def post_send(self, peer: int, block: Array) -> None:
        """Begin to send a contiguous block, which must stay alive and unchanged until `drain` returns."""

    def await_arrival(self, message: Any, nbytes: int | None = None) -> None:
        """Wait until a message, or at least its first ``nbytes``, have been received, while others are still under way.
        Raises as `drain`."""

    def drain(self) -> None:
        """Wait until everything posted has been received and sent.

        Raises:
            RankFailedError: a rank failed, left or died.
            CollectiveTimeoutError: a rank did not arrive in time.
        """

    def close(self) -> None:
        """Release the resources of the transport."""


class Control(Protocol):
    """The control plane of a group: agreement on each call, failures, departures, and small exchanges."""

    rank: int
    size: int
    carries: bool
    """Whether words may also be the data of a small operation: any number of them, of which `words_of` returns memory
    of the format "q"."""

    def enter(self, signature: int, words: Sequence[int] | memoryview = ()) -> None:
        """Enter the next call of the group with this rank's proposal. Does not wait.

        What this rank wrote into its window before is visible to its peers afterwards.

        Args:
            signature: 47 bits of a hash of the proposal.
            words: numbers that travel along, for `words_of`: at most `board.max_words` of 64 bits, equally many on
                ranks with equal signatures; many of them as a memoryview of format "q". Where words may be data (see
                `carries`), these come as one of format "B", of whole words; they are not sealed.
        """

    def look(self, *, spin: bool = True) -> bool | None:
        """Whether all ranks entered the call with the same signature; equal on every rank. None while a rank is
        missing, after a few looks if it may ``spin``.

        Raises:
            RankFailedError: a rank failed in the middle of this call.
        """

    def enter_and_look(self, signature: int, words: Sequence[int] | memoryview = ()) -> bool | None:
        """`enter`, then `look`: what every small operation does."""

    def agree(self, signature: int, words: Sequence[int] | memoryview = ()) -> bool:
        """`enter`, and wait until every rank has entered. Returns the result of `look`.

        Raises:
            RankFailedError: a rank failed, left or died.
            CollectiveTimeoutError: a rank did not enter in time.
        """

    def called(self) -> bool:
        """Whether a peer may have entered the call after the present one, so that this rank should enter it too."""

    def missing(self) -> list[int]:
        """The peers known not to have entered the present call."""

    def check(self, *, deep: bool = False, upcoming: bool = False) -> None:
        """Raise RankFailedError if a rank has failed, or has left without entering the present call; or the one after
        it, if ``upcoming``. ``deep``: also check whether the peers' processes exist."""

    def relax(self) -> object:
        """Yield the core to other ranks and threads."""

    def words_of(self, peer: int) -> Sequence[int]:
        """The words with which ``peer`` entered the present call; valid until this rank enters the next but one."""

    def tells(self, expected: Sequence[tuple[int, int, int]]) -> bool:
        """Whether peers entered the present call with the words that ``expected`` lists: peer, first, second."""

    def exchange(self, value: Any, /) -> list[Any]:
        """Gather every rank's small value (see `interchange`) on every rank, in rank order; for set-up and errors."""

    def fail(self, text: str, *, in_call: bool = False) -> None:
        """Announce that this rank has failed; the waits of its peers end with a RankFailedError that carries ``text``.
        ``in_call``: in the middle of the present call, which no rank may take part in any more."""

    def leave(self) -> None:
        """Announce that this rank will not enter another call; also after `fail`, which is announced first."""

    def has_left(self, peer: int) -> bool:
        """Whether ``peer`` is known to have announced with `leave` that it left. Any thread may call it."""

    def acknowledged(self) -> bool:
        """Whether every other rank of this host has failed, left or died too, so that none accesses this rank's memory
        any more."""

    def all_left(self) -> bool:
        """Whether every other rank has announced with `leave` that it left, or died; a failure alone does not count."""

    def close(self) -> bool:
        """Drain control messages for a bounded time. Returns True if none remain in flight, and no rank waits in a
        call."""
