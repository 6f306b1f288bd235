"""A pool of page-locked host memory: locking pages takes the driver milliseconds, and unlocking them waits for the GPU.

Memory returns to the pool when the last array that refers to it is dropped, which the owner does only when the GPU is
done with it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

from collectives.base.exclusion import exclusively
from collectives.device.protocol import Array

_SMALLEST, _STEP = 4 << 10, 1 << 20
"""Bytes: sizes are powers of two from the first to the second, and multiples of the second beyond."""
_MOST_IDLE = 256 << 20


class PinnedPool:
    """Page-locked memory of one process.

    Args:
        lock: allocates a number of bytes and returns the address; its errors are passed on.
        unlock: frees memory by its address.
    """

    def __init__(self, lock: Callable[[int], int], unlock: Callable[[int], None]) -> None:
        self._lock, self._unlock = lock, unlock
        self._taking = threading.RLock()
        self._returned: deque[tuple[int, int]] = deque()
        """Sizes and addresses; appended by finalizers, which run at any time in any thread and therefore take no
        lock."""
        self._idle: dict[int, list[int]] = {}
        self._idle_bytes = 0

    def take(self, nbytes: int) -> Array:
        """``nbytes`` bytes as an array of uint8, contents undefined."""
        size = _size(nbytes)
        address = exclusively(self._taking, self._taken, size)
        return np.asarray(_Pinned(address, nbytes, self._returned, size))

    def _taken(self, size: int) -> int:
        while self._returned:
            returned, address = self._returned.popleft()
            self._idle.setdefault(returned, []).append(address)
            self._idle_bytes += returned
        addresses = self._idle.get(size)
        if addresses:
            self._idle_bytes -= size
            return addresses.pop()
        if self._idle_bytes > _MOST_IDLE:
            self._release()
        return self._lock_pages(size)

    def _lock_pages(self, size: int) -> int:
        try:
            return self._lock(size)
        except Exception:
            if not self._idle_bytes:
                raise
        self._release()
        return self._lock(size)

    def _release(self) -> None:
        for addresses in self._idle.values():
            while addresses:
                self._unlock(addresses.pop())
        self._idle_bytes = 0


class _Pinned:
    """Owner of one piece of memory, to which its NumPy arrays refer."""

    def __init__(self, address: int, nbytes: int, returned: deque[tuple[int, int]], size: int) -> None:
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, False)}
        # Not at exit: other finalizers may still use the memory, and the system reclaims it anyway.
        weakref.finalize(self, returned.append, (size, address)).atexit = False


def _size(nbytes: int) -> int:
    if nbytes >= _STEP:
        return -(-nbytes // _STEP) * _STEP
    return max(_SMALLEST, 1 << (nbytes - 1).bit_length())
