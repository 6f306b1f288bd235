"""Memory for results, used again.

The first write to a fresh 64 MiB array costs thousands of page faults, about as much time as the copy itself. A result that
the caller has dropped therefore goes back to a pool, and the next out-of-place call of that size writes into memory
whose pages are there: it runs at the speed of an in-place call. The pool keeps a bounded number of bytes.

A pooled result is a plain ``numpy.ndarray``. Its ultimate base is a small lease; NumPy keeps it alive for as long as any view
of the result lives, and its death returns the block.
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


class _Block:
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
    """The base of one result: holds a block, and hands it back when the last view of the result is gone."""

    __slots__ = ("__array_interface__", "_block", "_pool")

    def __init__(self, block: _Block, nbytes: int, pool: weakref.ref[ResultPool]) -> None:
        self._block = block
        self._pool = pool
        self.__array_interface__ = {"data": (block.address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        pool = self._pool()
        if pool is not None:
            pool._give_back(self._block)


class ResultPool:
    """Uninitialised result arrays, at most ``limit`` bytes of which are kept for reuse once they are dropped.

    Safe to use from several threads, from a destructor that runs in the middle of ``empty``, and in a forked child: nobody
    ever waits for the lock. Who cannot have it allocates afresh, or leaves a dropped block for the holder to put away.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free: list[_Block] = []  # oldest first
        self._free_bytes = 0
        self._returned: deque[_Block] = deque()
        self._lock = threading.Lock()
        self._reference = weakref.ref(self)

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An uninitialised C-contiguous array of ``shape`` and ``dtype``, exactly of type ``numpy.ndarray``.

        From ``THRESHOLD`` bytes on it is aligned to 64 bytes, and its memory is reused after its last view is gone.
        """
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape if isinstance(shape, tuple) else (shape,)) * dtype.itemsize
        if nbytes < THRESHOLD or nbytes > self.limit:  # a block that could not be kept gains nothing
            return np.empty(shape, dtype)
        block = self._take(nbytes) or _Block(-(-nbytes // _PAGE) * _PAGE)
        return np.asarray(_Lease(block, nbytes, self._reference)).view(dtype).reshape(shape)

    def aligned(self, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """``empty`` in one dimension, aligned to 64 bytes whatever its size: for frameworks that take no other memory without a copy."""
        dtype = np.dtype(dtype)
        nbytes = count * dtype.itemsize
        if THRESHOLD <= nbytes <= self.limit:
            return self.empty(count, dtype)
        return _Block(nbytes).view(nbytes).view(dtype)

    @property
    def free_bytes(self) -> int:
        """Bytes kept for reuse now, at most ``limit``."""
        return self._free_bytes

    def clear(self) -> None:
        """Free what is kept. Results that are still in use stay valid, and come back to the pool later."""
        self._settle()
        with self._lock:
            self._free, blocks = [], self._free
            self._free_bytes = 0
        del blocks

    def _take(self, nbytes: int) -> _Block | None:
        """The smallest kept block of at least ``nbytes`` and at most a quarter (and a page) more, the newest of equals."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            best = None
            largest = nbytes + nbytes // 4 + _PAGE
            for index, block in enumerate(self._free):
                if nbytes <= block.nbytes <= largest:
                    best, largest = index, block.nbytes
            if best is None:
                return None
            self._free_bytes -= self._free[best].nbytes
            return self._free.pop(best)
        finally:
            self._lock.release()
            self._settle()

    def _give_back(self, block: _Block) -> None:
        """Runs in a destructor: anywhere, at any time, in any thread."""
        self._returned.append(block)  # atomic
        self._settle()

    def _settle(self) -> None:
        """Put returned blocks away. Whoever holds the lock settles again after it, so that none is forgotten."""
        while self._returned and self._lock.acquire(blocking=False):
            try:
                while self._returned:
                    block = self._returned.popleft()
                    if block.nbytes > self.limit:
                        continue
                    self._free.append(block)
                    self._free_bytes += block.nbytes
                    while self._free_bytes > self.limit:  # the oldest go: the sizes of today are more likely asked for again
                        self._free_bytes -= self._free.pop(0).nbytes
            finally:
                self._lock.release()
