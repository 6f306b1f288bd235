"""Memory for results, used again.

The first write to a fresh 64 MiB array costs thousands of page faults, about as much time as the copy itself. A result
that the caller has dropped therefore goes back to a pool, and the next out-of-place call of that size writes into
memory whose pages are there: it runs at the speed of an in-place call. The pool keeps a bounded number of bytes.

A pooled result is a plain ``numpy.ndarray``. Its ultimate base is a small lease; NumPy keeps it alive for as long as
any view of the result lives, and its end returns the block.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

THRESHOLD = 1 << 20
"""Bytes from which a result is pooled. malloc reuses smaller blocks itself, as quickly."""

_PAGE = 4096
_ALIGNMENT = 64  # a cache line; what vectorised loops and zero-copy imports of other libraries want


class _Buffer:
    """Memory that outlives its results, aligned to a cache line."""

    __slots__ = ("address", "memory", "nbytes")

    def __init__(self, nbytes: int) -> None:
        # numpy.empty and not mmap: it asks for huge pages from 4 MiB up, and nothing but the array's own end frees it.
        self.memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
        start = self.memory.ctypes.data
        self.address: int = start + -start % _ALIGNMENT
        self.nbytes = nbytes

    def view(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """The memory, which stays valid without the block."""
        start = self.address - self.memory.ctypes.data
        return self.memory[start : start + nbytes]


class _Lease:
    """The base of one result, and the owner of its memory."""

    __slots__ = ("__array_interface__", "__weakref__", "_block")

    def __init__(self, block: _Buffer, nbytes: int) -> None:
        self._block = block
        self.__array_interface__ = {"data": (block.address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


class _LeaseReference(weakref.ref[_Lease]):
    """A reference to a lease, whose callback receives it together with the block when the lease has ended."""

    __slots__ = ("block",)
    block: _Buffer


class ResultPool:
    """Uninitialised result arrays. At most ``limit`` bytes are kept for reuse, counting those that are lent out and
    will come back.

    Safe to use from several threads, from a destructor that runs in the middle of ``empty``, and in a forked child:
    nobody ever waits for the lock. Who cannot have it allocates afresh.

    A dropped result comes back without a line of Python: an interrupt that is handled within a destructor is lost.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free: list[_Buffer] = []  # oldest first
        self._lent: dict[int, _LeaseReference] = {}  # by address, oldest first
        self._returned: deque[_LeaseReference] = deque()
        self._lock = threading.Lock()

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An uninitialised C-contiguous array of ``shape`` and ``dtype``, exactly of type ``numpy.ndarray``.

        From ``THRESHOLD`` bytes on it is aligned to 64 bytes, and its memory is reused after its last view is gone.
        """
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape if isinstance(shape, tuple) else (shape,)) * dtype.itemsize
        whole = -(-nbytes // _PAGE) * _PAGE
        if nbytes < THRESHOLD or whole > self.limit:  # a block that could not be kept gains nothing
            return np.empty(shape, dtype)
        if not self._lock.acquire(blocking=False):
            return _Buffer(nbytes).view(nbytes).view(dtype).reshape(shape)
        try:
            self._settle()
            block = self._take(nbytes) or self._add(whole)
            lease = _Lease(block, nbytes)
            reference = _LeaseReference(lease, self._returned.append)
            reference.block = block
            self._lent[block.address] = reference
        finally:
            self._lock.release()
        return np.asarray(lease).view(dtype).reshape(shape)

    def aligned(self, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """``empty`` in one dimension, aligned to 64 bytes whatever its size: for frameworks that take no other memory
        without a copy."""
        dtype = np.dtype(dtype)
        nbytes = count * dtype.itemsize
        if THRESHOLD <= nbytes <= self.limit:
            return self.empty(count, dtype)
        return _Buffer(nbytes).view(nbytes).view(dtype)

    @property
    def free_bytes(self) -> int:
        """Bytes kept for reuse now, at most ``limit``."""
        self._settle_if_free()
        return sum(block.nbytes for block in list(self._free))

    def clear(self) -> None:
        """Free what is kept. Results that are still in use stay valid, and come back to the pool later."""
        self._settle_if_free()
        self._free = []

    def _take(self, nbytes: int) -> _Buffer | None:
        """The smallest kept block of at least ``nbytes`` and at most a quarter (and a page) more, the newest of
        equals."""
        best = None
        largest = nbytes + nbytes // 4 + _PAGE
        for index, block in enumerate(self._free):
            if nbytes <= block.nbytes <= largest:
                best, largest = index, block.nbytes
        return None if best is None else self._free.pop(best)

    def _add(self, nbytes: int) -> _Buffer:
        """A new block. The oldest are given up for it: the sizes of today are more likely asked for again."""
        excess = (
            nbytes
            - self.limit
            + sum(b.nbytes for b in self._free)
            + sum(lent.block.nbytes for lent in self._lent.values())
        )
        while excess > 0:
            given_up = self._free.pop(0) if self._free else self._lent.pop(next(iter(self._lent))).block
            excess -= given_up.nbytes
        return _Buffer(nbytes)

    def _settle(self) -> None:
        """Put what has come back away; with the lock."""
        while self._returned:
            block = self._returned.popleft().block
            if self._lent.pop(block.address, None) is not None:  # else it was given up meanwhile
                self._free.append(block)

    def _settle_if_free(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()
