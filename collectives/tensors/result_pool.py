"""Reuse of results' memory.

The first write to a fresh 64 MiB array causes thousands of page faults, which take about as long as the copy itself.
The memory of a result that the caller has dropped therefore returns to a pool, and the next out-of-place call of that
size writes to resident pages: it is as fast as an in-place call. The pool keeps a bounded number of bytes.

Results lie in the arena (`collectives.tensors.arena`), so that they are mapped when they are the next call's input. All
pools draw on the one arena of the process.

A pooled result is a plain ``numpy.ndarray``. Its ultimate base is a lease, which NumPy keeps alive as long as any view
of the result; the end of the lease returns the buffer.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.base.exclusion import attempted
from collectives.tensors.arena import MAPPED_FROM, arena, private

THRESHOLD = 1 << 20
"""Results of at least this many bytes are pooled. The arena reuses smaller blocks just as fast."""

_PAGE = 4096


_Buffer = npt.NDArray[np.uint8]
"""Memory that outlives its results, aligned to a cache line."""


class _Lease:
    """The base of one result, which owns its memory."""

    __slots__ = ("__array_interface__", "__weakref__", "_block")

    def __init__(self, block: _Buffer, nbytes: int) -> None:
        self._block = block
        address = block.ctypes.data
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


class _LeaseReference(weakref.ref[_Lease]):
    """A reference to a lease that also holds its buffer; its callback receives both when the lease ends."""

    __slots__ = ("block",)
    block: _Buffer


class ResultPool:
    """Uninitialised result arrays with reuse of memory.

    Keeps at most ``limit`` bytes for reuse, including those in use that will return.

    Safe to use from several threads, from a destructor that runs during ``empty``, and in a forked child: the lock is
    never waited for. If it is taken, memory is allocated anew.

    No Python code runs when a dropped result returns, because an interrupt handled within a destructor is lost.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free: list[_Buffer] = []  # oldest first
        self._lent: dict[int, _LeaseReference] = {}  # by the buffer's id, oldest first
        self._returned: deque[_LeaseReference] = deque()
        self._forks = arena.forks
        self._lock: Any = threading.RLock()

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An uninitialised C-contiguous array of ``shape`` and ``dtype``, exactly of type ``numpy.ndarray``.

        From ``MAPPED_FROM`` bytes up it is aligned to 64 bytes and in the arena, unless the arena is exhausted; its
        memory is reused once its last view is gone.
        """
        dtype = np.dtype(dtype)
        nbytes = (math.prod(shape) if isinstance(shape, tuple) else shape) * dtype.itemsize
        if nbytes < MAPPED_FROM:
            return np.empty(shape, dtype)
        whole = -(-nbytes // _PAGE) * _PAGE
        lease = None
        if nbytes >= THRESHOLD and whole <= self.limit:
            lease = attempted(self._lock, 0.0, self._lease, nbytes, whole)
        if lease is None:
            return arena.empty(shape, dtype)  # what cannot be kept gains nothing from a buffer
        return np.asarray(lease).view(dtype).reshape(shape)

    def _lease(self, nbytes: int, whole: int) -> _Lease:
        self._settle()
        block = self._take(nbytes)
        if block is None:
            block = self._add(whole)
        lease = _Lease(block, nbytes)
        reference = _LeaseReference(lease, self._returned.append)
        reference.block = block
        self._lent[id(block)] = reference
        return lease

    def aligned(self, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A 1-D array as of ``empty``, aligned to 64 bytes at any size, for frameworks that would copy other memory."""
        dtype = np.dtype(dtype)
        return self.empty(count, dtype) if count * dtype.itemsize >= MAPPED_FROM else private(count, dtype)

    @property
    def free_bytes(self) -> int:
        """Bytes currently kept for reuse, at most ``limit``."""
        self._settle_if_free()
        return sum(block.nbytes for block in list(self._free))

    def clear(self) -> None:
        """Free the kept memory. Results in use stay valid, and return to the pool later."""
        self._settle_if_free()
        self._free = []

    def _take(self, nbytes: int) -> _Buffer | None:
        """The smallest kept buffer of ``nbytes`` to a quarter (and a page) more, the newest of equal ones."""
        best = None
        largest = nbytes + nbytes // 4 + _PAGE
        for index, block in enumerate(self._free):
            if nbytes <= block.nbytes <= largest:
                best, largest = index, block.nbytes
        return None if best is None else self._free.pop(best)

    def _add(self, nbytes: int) -> _Buffer:
        """A new buffer. The oldest are evicted for it, because recent sizes are more likely to recur."""
        excess = (
            nbytes
            - self.limit
            + sum(b.nbytes for b in self._free)
            + sum(lent.block.nbytes for lent in self._lent.values())
        )
        while excess > 0:
            given_up = self._free.pop(0) if self._free else self._lent.pop(next(iter(self._lent))).block
            excess -= given_up.nbytes
        return arena.empty(nbytes, np.uint8)

    def _settle(self) -> None:
        """Move returned buffers to the free list; the caller holds the lock."""
        while True:
            block = self._returned.popleft().block if self._returned else None
            if self._forks != arena.forks:  # a child may look at results of before the fork
                self._forks = arena.forks
                self._free = []
                self._lent = {}
                self._returned = deque()
            if block is None:
                return
            if self._lent.pop(id(block), None) is not None:  # else evicted meanwhile
                self._free.append(block)

    def _settle_if_free(self) -> None:
        attempted(self._lock, 0.0, self._settle)
