"""The arena: memory for tensors that the other ranks of a host can map.

The arena grows in *pieces*: anonymous files in memory, which peers map through ``/proc/PID/fd`` when they first meet a
tensor in one (`collectives.transport.mapped_memory`). They have no name, so that ``kill -9`` leaves nothing behind.
Tensors lie in *blocks* of a piece. A block is the base of one NumPy array and goes back when the last view of that
array is gone, be it NumPy's or another library's.

Where a tensor lies travels between ranks as one *word*: a flag, the piece's number and the offset in it. An address of
private memory never has the flag.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.base.logging import logger

MAPPED = 1 << 62
"""Set in the word of a tensor in the arena; user-space addresses have at most 57 bits."""
OFFSET_BITS = 40
OFFSET_MASK = (1 << OFFSET_BITS) - 1

_PIECE_BYTES = 64 << 20
_HUGE_PAGE = 2 << 20
_ALIGNMENT = 64  # a cache line; required by vectorized loops and by zero-copy imports of other libraries


class Piece:
    """One anonymous file, mapped as a whole.

    Attributes:
        number: its name among the pieces of this process, never used again.
        descriptor: of the file, for peers to open.
        nbytes, address: of the mapping.
        memory: the mapping as uint8.
    """

    __slots__ = ("address", "descriptor", "free", "memory", "nbytes", "number", "used")

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.descriptor = os.memfd_create("collectives", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, nbytes)
            mapping = mmap.mmap(self.descriptor, nbytes, flags=mmap.MAP_SHARED)
        except BaseException:
            os.close(self.descriptor)
            raise
        with suppress(OSError, AttributeError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)
        self.address: int = self.memory.ctypes.data
        self.free: list[tuple[int, int]] = [(0, nbytes)]
        """Free ranges as start and end, sorted, none next to another."""
        self.used = 0
        """Blocks in use."""

    def take(self, nbytes: int, align: int) -> int | None:
        """Take the first free range that fits; returns its offset, or None."""
        for index, (start, end) in enumerate(self.free):
            at = -(-start // align) * align
            if at + nbytes <= end:
                self.free[index : index + 1] = [part for part in ((start, at), (at + nbytes, end)) if part[0] < part[1]]
                self.used += 1
                return at
        return None

    def give_back(self, start: int, end: int) -> None:
        """Merge a range with its free neighbours."""
        self.used -= 1
        free = self.free
        index = bisect_right(free, (start, end))
        if index < len(free) and free[index][0] == end:
            end = free.pop(index)[1]
        if index and free[index - 1][1] == start:
            index -= 1
            start = free.pop(index)[0]
        insort(free, (start, end))


class _Block:
    """The base of one array in the arena."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


class _BlockReference(weakref.ref[_Block]):
    """A reference to a block that also knows its range; its callback receives both when the block's last view ends."""

    __slots__ = ("end", "piece", "start")
    piece: Piece
    start: int
    end: int


class Arena:
    """The memory of one process that its peers may map. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pieces: dict[int, Piece] = {}
        self.ranges: tuple[tuple[int, int, int], ...] = ()
        """Address, end and word of each piece."""
        self._last = (0, 0, 0)
        """The range that was met last: most programs have one."""
        self._numbers = 0
        self._lent: dict[int, _BlockReference] = {}
        """By address."""
        self._returned: deque[_BlockReference] = deque()
        self._refused = False

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An uninitialised C-contiguous array, aligned to 64 bytes; in private memory if the arena cannot grow."""
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape if isinstance(shape, tuple) else (shape,)) * dtype.itemsize
        block = self._lease(nbytes) if nbytes else None
        if block is None:
            return np.empty(shape, dtype)
        return np.asarray(block).view(dtype).reshape(shape)

    def locate(self, address: int, nbytes: int) -> int:
        """The word of ``nbytes`` bytes at an address, or 0 if they are not in the arena."""
        start, end, word = self._last
        if not (start <= address and address + nbytes <= end):
            for start, end, word in self.ranges:
                if start <= address and address + nbytes <= end:
                    self._last = (start, end, word)
                    break
            else:
                return 0
        return word + address - start

    def locate_all(self, addresses: npt.NDArray[np.int64], nbytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """`locate` of many tensors at once."""
        words = np.zeros_like(addresses)
        for start, end, word in self.ranges:
            np.copyto(words, addresses + (word - start), where=(addresses >= start) & (addresses + nbytes <= end))
        return words

    def piece(self, number: int) -> Piece:
        """The piece of this number, as in a word that `locate` has just returned."""
        return self._pieces[number]

    def numbers(self) -> set[int]:
        """The numbers of the pieces that have not ended."""
        return set(self._pieces)

    def _lease(self, nbytes: int) -> _Block | None:
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        align = _HUGE_PAGE if size >= _HUGE_PAGE else _ALIGNMENT
        with self._lock:
            self._settle()
            for piece in self._pieces.values():
                at = piece.take(size, align)
                if at is not None:
                    break
            else:
                grown = self._grow(size)
                if grown is None:
                    return None
                piece, at = grown, grown.take(size, align)
                assert at is not None
            block = _Block(piece.address + at, nbytes)
            reference = _BlockReference(block, self._returned.append)
            reference.piece, reference.start, reference.end = piece, at, at + size
            self._lent[piece.address + at] = reference
            return block

    def _grow(self, nbytes: int) -> Piece | None:
        """Add a piece with room for ``nbytes``; None where the system refuses."""
        if self._refused:
            return None
        whole = max(_PIECE_BYTES, -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE)
        try:
            piece = Piece(self._numbers + 1, whole)
        except (OSError, ValueError, OverflowError, AttributeError) as error:
            self._refused = True
            logger.warning("no more memory that other ranks can map (%s): tensors lie in private memory", error)
            return None
        self._numbers += 1
        self._pieces[piece.number] = piece
        self._list_ranges()
        return piece

    def _settle(self) -> None:
        """Free the blocks whose last view is gone; the caller holds the lock."""
        while self._returned:
            reference = self._returned.popleft()
            piece = reference.piece
            if self._lent.pop(piece.address + reference.start, None) is not None:
                piece.give_back(reference.start, reference.end)

    def _list_ranges(self) -> None:
        self.ranges = tuple(
            (piece.address, piece.address + piece.nbytes, MAPPED | piece.number << OFFSET_BITS)
            for piece in self._pieces.values()
        )
        self._last = (0, 0, 0)


arena = Arena()
"""This process's arena. It exists before any world, and serves all of them."""
