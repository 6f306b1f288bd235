"""Mapped memory: tensors in the arenas of this host's ranks, read and written where they lie.

Each rank announces on the board the pieces of its arena (`collectives.tensors.arena`) that its tensors lie in. A peer
that meets a piece for the first time opens its file through ``/proc/PID/fd``, maps it, and keeps the mapping until the
owner has ended the piece. From then on a tensor in it is a NumPy array for the peer too: no copy, no system call.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import numpy as np

from collectives.base.exclusion import exclusively
from collectives.base.logging import logger
from collectives.tensors.arena import MAPPED, OFFSET_BITS, OFFSET_MASK, arena
from collectives.tensors.arena_piece import map_shared
from collectives.transport.base import Array
from collectives.transport.host.board import PIECES, Board

_NO_PIECE = (0, 0, 0, 0)
_MOST_VIEWS = 4096


class _Mapping:
    """A piece of another process, mapped into this one."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self, descriptor: int, nbytes: int) -> None:
        mapping, offset = map_shared(descriptor, nbytes)
        self.memory: Array = np.frombuffer(mapping, np.uint8, nbytes, offset)


_mappings: weakref.WeakValueDictionary[tuple[int, int], _Mapping] = weakref.WeakValueDictionary()
"""By the file's device and number: the groups of a rank (process sets) share mappings."""


class MappedMemory:
    """The tensors of one group's ranks that lie in arenas. Methods may be called from any thread, but `close`."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._announced: dict[int, int] = {}
        """Place in this rank's table -> number of the piece."""
        self._mapped: dict[tuple[int, int], _Mapping | None] = {}
        """By peer and number of the piece; None where the system refuses."""
        self._has_warned = False
        """Whether the log says that a piece was not mapped."""
        self._views: dict[tuple[int, int, int], Array] = {}
        """What `view_of` has returned, by peer, word and dtype."""
        self._lock = threading.RLock()
        """Held while a piece is announced or mapped."""

    def word_of(self, address: int, nbytes: int) -> int:
        """What tells the peers where this rank's memory lies: its place in the arena, or its address."""
        word = arena.locate(address, nbytes)
        if not word:
            return address
        number = word - MAPPED >> OFFSET_BITS
        return word if self._announce(number) else address

    def words_of(self, addresses: Array, nbytes: Array) -> Array:
        """`word_of` for many tensors at once, as int64."""
        words = arena.locate_all(addresses, nbytes)
        located = np.flatnonzero(words)
        if not located.size:
            return addresses
        # No `numpy.unique`, which imports `numpy.ma`.
        numbers = set((words[located] - MAPPED >> OFFSET_BITS).tolist())
        return np.where(words, words, addresses) if all(map(self._announce, numbers)) else addresses

    def view_of(self, peer: int, word: int, dtype: np.dtype[Any]) -> Array | None:
        """The peer's memory from ``word`` on, to the end of its piece, as a 1-D array; None if it is not mapped."""
        if not word & MAPPED:
            return None
        cached = self._views.get((peer, word, dtype.num))
        if cached is not None:
            return cached
        number, offset = word - MAPPED >> OFFSET_BITS, word & OFFSET_MASK
        mapping = exclusively(self._lock, self._mapping, peer, number)
        if mapping is None:
            return None
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        rest = mapping.memory[offset:]
        view = self._views[peer, word, dtype.num] = rest[: rest.size // dtype.itemsize * dtype.itemsize].view(dtype)
        return view

    def address_of(self, peer: int, word: int) -> int:
        """The address in the peer's process that a word tells."""
        if not word & MAPPED:
            return word
        *_, address = self._board.piece_of(peer, (word - MAPPED >> OFFSET_BITS) % PIECES)
        return address + (word & OFFSET_MASK)

    def addresses_of(self, peer: int, words: Array) -> Array:
        """`address_of` for many tensors at once, as int64."""
        if not (words & MAPPED).any():
            return words
        return np.array([self.address_of(peer, word) for word in words.tolist()], np.int64)

    def close(self) -> None:
        """Drop the mappings; those that are still referenced stay."""
        self._views.clear()
        self._mapped.clear()

    def _announce(self, number: int) -> bool:
        """Enter a piece into the table, unless it is there; returns False if its place is taken."""
        place = number % PIECES
        return self._announced.get(place) == number or exclusively(self._lock, self._enter, place, number)

    def _enter(self, place: int, number: int) -> bool:
        live = arena.numbers()
        for entry, announced in list(self._announced.items()):
            if announced not in live:
                self._board.announce_piece(entry, _NO_PIECE)
                del self._announced[entry]
        if place not in self._announced:
            piece = arena.piece(number)
            self._board.announce_piece(place, (number, piece.descriptor, piece.nbytes, piece.address))
            self._announced[place] = number
        return self._announced[place] == number

    def _mapping(self, peer: int, number: int) -> _Mapping | None:
        if (peer, number) not in self._mapped:
            self._map(peer, number)
        return self._mapped[peer, number]

    def _map(self, peer: int, number: int) -> None:
        """Map a piece of a peer, and drop the mappings of pieces that the peer has ended."""
        board = self._board
        for mapped in [mapped for mapped in self._mapped if mapped[0] == peer]:
            if board.piece_of(peer, mapped[1] % PIECES)[0] != mapped[1]:
                del self._mapped[mapped]
                self._views.clear()
        announced, descriptor, nbytes, _ = board.piece_of(peer, number % PIECES)
        process = board.process_of(peer)
        mapping: Any = None
        try:
            if announced != number:
                raise ValueError("it has been given back")
            handle = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
            try:
                status = os.fstat(handle)
                if status.st_size != nbytes:  # beyond the end of a file there is nothing to read
                    raise ValueError(f"its descriptor, {descriptor}, is another file's")
                key = status.st_dev, status.st_ino
                mapping = _mappings.get(key)
                if mapping is None:
                    mapping = _mappings[key] = _Mapping(handle, nbytes)
            finally:
                os.close(handle)
        except (OSError, ValueError) as error:
            level = logger.debug if self._has_warned else logger.warning
            self._has_warned = True
            level(
                "rank %d: memory of rank %d cannot be mapped (%s): it is accessed by system calls instead",
                board.names[board.rank],
                board.names[peer],
                error,
            )
        self._mapped[peer, number] = mapping
