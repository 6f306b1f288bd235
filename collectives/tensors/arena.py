"""The arena: memory for tensors that the other ranks of a host can map.

The arena grows in *pieces*: anonymous files in memory, which peers map through ``/proc/PID/fd`` when they first meet a
tensor in one (`collectives.transport.host.mapped_memory`). They have no name, so that ``kill -9`` leaves nothing
behind. Tensors lie in *blocks* of a piece. A block is the base of one NumPy array and goes back when the last view of
that array is gone, be it NumPy's or another library's.

Where a tensor lies travels between ranks as one *word*: a flag, the piece's number and the offset in it. An address of
private memory never has the flag.

**Given back.** The end of a block runs no Python code, because an interrupt handled in a destructor would be lost. The
block is noted, and settled by the next allocation, by `Arena.release` (`collectives.empty_cache`), and when a world
ends. From 64 MiB up the memory itself returns to the system at once, by a system call; smaller blocks are kept for
reuse, but at most 64 MiB of idle memory. A piece without blocks ends, but for one.

**Refused.** Where the system refuses memory, or the limit (``COLLECTIVES_ARENA``) is reached, arrays lie in private
memory, and the log says so once. A large request that was refused does not keep small ones out.

**Forks.** A forked child has the arrays of its parent, and what it writes to them is its own. What the parent writes
*in place* may show in the child until the child itself has written to that page: a child that needs a snapshot copies.
But memory of a dropped array is not used for another one: pieces that existed at the fork take no further blocks, and
keep their memory until all their arrays are gone. The child's own arena begins empty.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.base import interrupts
from collectives.base.config import Config
from collectives.base.exclusion import attempted, give_back
from collectives.base.logging import logger
from collectives.tensors.arena_piece import HUGE_PAGE, REMOVE, Piece, huge_pages_must_be_asked_for, madvise, text_of

MAPPED = 1 << 62
"""Set in the word of a tensor in the arena; user-space addresses have at most 57 bits."""
OFFSET_BITS = 40
OFFSET_MASK = (1 << OFFSET_BITS) - 1
MAPPED_FROM = 16 << 10
"""Bytes from which what the engine allocates lies in the arena, and mapped tensors are reached in place. Below, a block
costs more than peers gain, and a copy into the window takes less than a second meeting of the ranks."""
MOST_PIECES = 128
"""Pieces at once. Each is a quarter of those before it or more, so that there are few."""
_MOST_NUMBERS = 1 << 22
"""Pieces of a process, one after the other: a word has room for no higher number."""

_ALIGNMENT = 64  # a cache line; required by vectorized loops and by zero-copy imports of other libraries
_PAGE = 4096
_PIECE_BYTES = 64 << 20
_IDLE_BYTES = 64 << 20
"""The most physical memory of free blocks that is kept."""
_LARGE_BYTES = 64 << 20
"""Blocks of at least this size give their physical memory back when they end."""
_QUICK_BYTES = 1 << 20
"""Blocks up to this size are kept by size for the next request of that size, without merging."""
_MOST_QUICK_BYTES = 16 << 20
_WAIT = 1.0
"""Seconds to wait for another thread, which is within an allocation."""
_SKIPS = 1000
"""Requests that are refused like the one before them without asking the system again."""

_BYTE = np.dtype(np.uint8)
_new = np.ndarray.__new__

_Place = tuple[Piece, int, int]
"""A block's piece, start and size."""


class _Block(np.ndarray[Any, np.dtype[np.uint8]]):
    """The base of one array in the arena; holds the mapping."""

    __slots__ = ()


class _BlockReference(weakref.ref[_Block]):
    """A reference to a block that also knows its place; its callback receives both when the block's last view ends."""

    __slots__ = ("place",)
    place: _Place
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class _PunchReference(weakref.ref[_Block]):
    """A reference whose callback is a function of ctypes, which converts it to an argument that it ignores."""

    __slots__ = ()
    _as_parameter_ = 0


class Arena:
    """The memory of one process that its peers may map.

    Safe to use from several threads, and from a destructor or a signal handler that runs during an allocation: that one
    gets private memory.

    Attributes:
        forks: counts up when this process forks, and in the child. Memory that was leased before must not be reused.
    """

    def __init__(self) -> None:
        self.forks = 0
        self._numbers = 0
        self._limit: int | None = None
        """Bytes of all pieces; None before the first piece."""
        self._reserve = self._asks = False
        """Whether the system must be asked for memory, and for huge pages; see `Piece`."""
        self._has_warned = False
        self._begin()

    def _begin(self) -> None:
        self._lock: Any = threading.RLock()
        self._wait = _WAIT
        """0 after one wait has timed out: the thread that holds the lock may wait for this one."""
        self._pieces: dict[int, Piece] = {}
        """All pieces, by number."""
        self._open: list[Piece] = []
        """Those from which blocks are taken."""
        self.ranges: tuple[tuple[int, int, int], ...] = ()
        """Address, end and word of each piece."""
        self._last = (0, 0, 0)
        """The range that was met last: most programs have one."""
        self._lent: set[_BlockReference] = set()
        self._returned: deque[_BlockReference] = deque()
        self._note = self._returned.append
        self._punches: dict[int, _PunchReference] = {}
        """Of large blocks, by address."""
        self._quick: dict[int, list[_Place]] = {}
        """Free blocks by size, not merged."""
        self._quick_bytes = 0
        self._merged_bytes = 0
        """Merged since the idle memory was last counted."""
        self._ceiling, self._skips = MAPPED, 0
        """The smallest growth that was refused, and how many further requests are refused without asking the system."""
        self._forks_seen = self.forks

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An uninitialised C-contiguous array, aligned to 64 bytes; in private memory if the arena cannot grow.

        Args:
            shape: non-negative.
            dtype: not of Python objects.

        Raises:
            InvalidArgumentError: ``COLLECTIVES_ARENA`` is not a number of bytes.
        """
        dtype = np.dtype(dtype)
        nbytes = int(math.prod(shape) if isinstance(shape, tuple) else shape) * dtype.itemsize  # NumPy's ints too
        if nbytes:
            block = self._lease(nbytes)
            if block is not None:
                return np.ndarray(shape, dtype, block)
        return private(shape, dtype)

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

    def release(self) -> int:
        """Give all memory that is not in use back to the system; returns its bytes, as far as they are known."""
        return attempted(self._lock, self._wait, self._release) or 0

    def _release(self) -> int:
        self._settle()
        self._merge()
        released = self._trim(0)
        self._end([piece for piece in self._open if not piece.used])
        return released

    # ---- blocks

    def _lease(self, nbytes: int) -> _Block | None:
        if nbytes >= _QUICK_BYTES:
            unit = HUGE_PAGE if nbytes >= _LARGE_BYTES else _PAGE
            size = -(-nbytes // unit) * unit
        else:
            size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        lock = self._lock
        if lock._is_owned():  # called by a destructor or a signal handler during an allocation of this thread
            return None
        try:  # as `attempted`, without its calls
            if not lock.acquire(False) and not lock.acquire(True, self._wait):
                self._wait = 0.0
                return None
            try:
                return self._take(size, nbytes)
            finally:
                lock.release()
        finally:
            if lock._is_owned():
                give_back(lock)

    def _take(self, size: int, nbytes: int) -> _Block | None:
        """Take a block of ``size`` bytes, of which ``nbytes`` are used; the lock is held."""
        if self._returned or self._forks_seen != self.forks:
            self._settle()
        quick = self._quick.get(size)
        if quick:
            place = quick.pop()
            self._quick_bytes -= size
        else:
            free_range = self._find(size)
            if free_range is None:
                return None
            place = free_range
        piece, start, _ = place
        block: _Block = _new(_Block, nbytes, _BYTE, piece.mapping, piece.offset + start)
        reference = _BlockReference(block, self._note)
        reference.place = place
        piece.used += 1
        self._lent.add(reference)
        if size >= _LARGE_BYTES:
            address = piece.address + start
            # Called before the callback of the older reference, so before the range is free.
            self._punches[address] = _PunchReference(block, functools.partial(madvise, address, size, REMOVE))
        return block

    def _find(self, size: int) -> _Place | None:
        """Take a block from a piece, or from a new one; None if there is no memory."""
        align = HUGE_PAGE if size >= HUGE_PAGE else _ALIGNMENT
        while True:
            for piece in self._open:
                start = piece.free.take(size, align)
                if start is not None:
                    if self._reserve and (problem := piece.reserve(start, start + size)) is not None:
                        piece.free.give_back(start, start + size)
                        self._tell(problem)
                        return None
                    piece.touch(start, start + size)
                    return piece, start, size
            if self._quick_bytes:
                self._merge()
            elif self._grow(size) is None:
                return None

    def _settle(self) -> None:
        """Free the blocks whose last view is gone; the caller holds the lock."""
        if self._forks_seen != self.forks:
            self._close_pieces()
        returned, lent = self._returned, self._lent
        vacant = False
        while returned:
            reference = returned.popleft()
            if self._forks_seen != self.forks:  # another thread has forked meanwhile, before the view was gone
                self._close_pieces()
            if reference not in lent:  # of before a fork
                continue
            lent.discard(reference)
            place = piece, start, size = reference.place
            piece.used -= 1
            vacant = vacant or not piece.used
            if piece.closed:
                continue
            if size <= _QUICK_BYTES:
                self._quick.setdefault(size, []).append(place)
                self._quick_bytes += size
                continue
            if self._punches.pop(piece.address + start, None) is not None:
                piece.emptied(start, start + size)
            piece.free.give_back(start, start + size)
            self._merged_bytes += size
        if self._quick_bytes > _MOST_QUICK_BYTES:
            self._merge()
        if vacant and (len(self._pieces) > 1 or not self._open):
            self._end([piece for piece in self._pieces.values() if piece.closed and not piece.used])
            empty = sorted((piece for piece in self._open if not piece.used), key=lambda piece: piece.nbytes)
            self._end(empty[1:])
        if self._merged_bytes > _IDLE_BYTES:
            self._merged_bytes = 0
            self._trim(_IDLE_BYTES)

    def _merge(self) -> None:
        """Merge the blocks that are kept by size with their free neighbours."""
        kept, self._quick = self._quick, {}
        self._merged_bytes += self._quick_bytes
        self._quick_bytes = 0
        for size, places in kept.items():
            for piece, start, _ in places:
                piece.free.give_back(start, start + size)

    # ---- pieces

    def _grow(self, nbytes: int) -> Piece | None:
        """Add a piece with room for ``nbytes``; None where the system refuses."""
        if self._limit is None:
            self._limit = _limit()
            self._reserve = never_overcommits()
            self._asks = huge_pages_must_be_asked_for()
        need = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
        if need >= self._ceiling and self._skips:
            self._skips -= 1
            return None
        total = sum(piece.nbytes for piece in self._pieces.values())
        room = min(self._limit - total, 1 << OFFSET_BITS) // HUGE_PAGE * HUGE_PAGE
        usual = min(max(_PIECE_BYTES, total // 4 // HUGE_PAGE * HUGE_PAGE), room)
        problem: Exception = MemoryError(
            f"the limit, COLLECTIVES_ARENA, is {self._limit} bytes"
            if need > self._limit - total and self._limit < MAPPED
            else f"{nbytes} bytes are asked for, and there are {len(self._pieces)} pieces of {self._numbers} so far"
        )
        if need <= room and len(self._pieces) < MOST_PIECES and self._numbers < _MOST_NUMBERS - 1:
            for whole in (usual, need) if usual > need else (need,):
                with interrupts.deferred():  # a handler's TimeoutError is no refusal of the system
                    try:
                        piece = Piece(self._numbers + 1, whole, self._asks)
                    except (OSError, ValueError, OverflowError) as error:
                        problem = error
                        continue
                    self._numbers += 1
                    self._pieces[piece.number] = piece
                    self._open.append(piece)
                    self._list_ranges()
                    return piece
        self._ceiling, self._skips = need, _SKIPS
        if self._limit:
            self._tell(problem)
        return None

    def _end(self, pieces: list[Piece]) -> None:
        """End pieces without blocks."""
        if not pieces:
            return
        self._merge()
        for piece in pieces:
            del self._pieces[piece.number]
            if piece in self._open:
                self._open.remove(piece)
        self._list_ranges()
        for piece in pieces:
            piece.end()
        self._ceiling = MAPPED

    def _trim(self, keep: int) -> int:
        """Give the physical memory of free blocks back to the system, all but ``keep`` bytes; returns the bytes."""
        ranges = [(piece, *idle) for piece in self._open for idle in piece.idle()]
        excess = sum(touched for _, touched, _, _ in ranges) - keep
        released = 0
        for piece, touched, start, end in reversed(ranges):  # the newest pieces, and the largest ranges in each
            if released >= excess:
                break
            piece.punch(start, end)
            released += touched
        return released

    def _list_ranges(self) -> None:
        self.ranges = tuple(
            (piece.address, piece.address + piece.nbytes, MAPPED | piece.number << OFFSET_BITS)
            for piece in self._pieces.values()
        )
        self._last = (0, 0, 0)

    def _tell(self, problem: Exception) -> None:
        level = logger.debug if self._has_warned else logger.warning
        self._has_warned = True
        level("there is no more memory that other ranks can map (%s): new arrays are in private memory", problem)

    # ---- forks

    def at_fork(self) -> None:
        """In the parent, before and after a fork: from now on the present blocks are not reused."""
        self.forks += 1
        self._punches.clear()

    def in_child(self) -> None:
        """In a forked child: make the parent's pieces private, and begin anew."""
        self.forks += 1
        for piece in self._pieces.values():
            piece.make_private()
        self._begin()  # a lock that another thread of the parent has held is never released here

    def _close_pieces(self) -> None:
        """After a fork: take no further blocks from the present pieces."""
        self._forks_seen = self.forks
        for piece in self._open:
            piece.closed = True
        self._open = []
        self._quick = {}
        self._quick_bytes = 0
        self._end([piece for piece in self._pieces.values() if not piece.used])


def private(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An uninitialised C-contiguous array in private memory, aligned to 64 bytes."""
    dtype = np.dtype(dtype)
    nbytes = int(math.prod(shape) if isinstance(shape, tuple) else shape) * dtype.itemsize
    if not nbytes:
        return np.empty(shape, dtype)
    memory = np.empty(nbytes + _ALIGNMENT, _BYTE)
    return np.ndarray(shape, dtype, memory, -memory.ctypes.data % _ALIGNMENT)


def _limit() -> int:
    """The most bytes of all pieces, by the environment."""
    name = "COLLECTIVES_ARENA"
    limit = Config.from_environment({name: os.environ.get(name, "")}).arena
    if not hasattr(os, "memfd_create"):
        return 0
    return MAPPED if limit < 0 else limit


def never_overcommits() -> bool:
    """Whether the system promises no memory that it does not have."""
    return text_of("/proc/sys/vm/overcommit_memory").strip() == "2"


arena = Arena()
"""This process's arena. It exists before any world, and serves all of them."""

os.register_at_fork(before=arena.at_fork, after_in_parent=arena.at_fork, after_in_child=arena.in_child)
