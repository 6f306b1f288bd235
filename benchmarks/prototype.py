"""The least program that could reduce on one host: what the engine's all-reduce of mapped tensors is compared with.

Two ranks, and a tensor of each in memory that both have mapped. A call waits until both have come, adds the peer's half
of the tensor block by block, stores every block into the peer's tensor while it is in the cache, and waits until both
are done. Nothing is checked or agreed on: no names, shapes, dtypes, failures, other threads, or operations beside this
one.

It reduces the tensor of the row if that lies in a file (``--memory mapped``), so that it meets the same caches as the
other contestants, and otherwise a copy in a file of its own.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from collectives.tools.bench.collective import IN_PLACE, Case, Result, Unavailable
from collectives.tools.bench.ranks import Ranks

BLOCK = 256 << 10
"""Bytes that are added and stored at a time: they stay in the second-level cache in between."""

_ARRIVED, _DONE = 0, 8
"""Where a rank's two words lie, in words of 64 bits: each has a cache line of its own."""
_LOOKS = 100_000
"""Looks at a word between two looks at the clock."""
_PATIENCE = 30.0
"""Seconds after which a peer that has not come is taken for lost."""
_UFUNCS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


class Prototype:
    """The peer of this name; see the module."""

    name, calls = "prototype", "by_itself"

    def join(self, ranks: Ranks) -> None:
        """Map the peer's words; unavailable without exactly two ranks on one host."""
        if (ranks.size, ranks.local_size) != (2, 2):
            raise Unavailable(
                f"prototype: needs two ranks on one host; there are {ranks.size}, {ranks.local_size} of them here"
            )
        self._ranks, self._rank = ranks, ranks.rank
        self._turn = 0
        # Sums repeated in place may overflow, which MPI does not mention either.
        np.seterr(over="ignore")
        self._copy = _file(mmap.PAGESIZE)
        words = _file(mmap.PAGESIZE)
        self._mine, self._peers = (array.data.cast("B").cast("q") for array in (words, self._reach(words)))

    def _reach(self, array: np.ndarray) -> np.ndarray:
        """The peer's array, given this rank's of as many bytes; collective."""
        process, descriptor, offset = self._ranks.gather(place_of(array))[1 - self._rank]
        start = offset % mmap.ALLOCATIONGRANULARITY
        with open(f"/proc/{process}/fd/{descriptor}", "r+b") as file:
            memory = mmap.mmap(file.fileno(), start + array.nbytes, offset=offset - start)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self._ranks.barrier()
        return np.frombuffer(memory, np.uint8, array.nbytes, start).view(array.dtype)

    def _meet(self, word: int) -> None:
        """Write this rank's word, and wait for its peer's; raises TimeoutError."""
        peers, turn = self._peers, self._turn
        self._mine[word] = turn
        started = 0.0
        while peers[word] < turn:
            for _ in range(_LOOKS):
                if peers[word] >= turn:
                    return
            started = started or monotonic()
            if monotonic() - started > _PATIENCE:
                raise TimeoutError(f"prototype: rank {1 - self._rank} has not come within {_PATIENCE:g} s")

    def allreduce(self, case: Case, mode: str) -> Result:
        """A call that reduces in place; collective. Unavailable for rows out of place, and averages."""
        if mode != IN_PLACE or case.op not in _UFUNCS:
            raise Unavailable("prototype: in place only, and no average")
        block = case.work
        if not all(self._ranks.gather(place_of(block) is not None)):
            if self._copy.nbytes < block.nbytes:
                self.close()
                self._copy = _file(block.nbytes)
            block = self._copy[: block.nbytes].view(case.dtype)
            block[...] = case.work
        peers = self._reach(block)
        half, step = case.count // 2, BLOCK // case.dtype.itemsize
        begin, end = (half, case.count) if self._rank else (0, half)
        parts = [slice(start, min(start + step, end)) for start in range(begin, end, step)]
        blocks = [(block[part], peers[part]) for part in parts]
        combine, copy, meet = _UFUNCS[case.op], np.copyto, self._meet

        def call() -> Any:
            self._turn += 1
            meet(_ARRIVED)
            for own, other in blocks:
                combine(own, other, own)
                copy(other, own)
            meet(_DONE)
            return block

        return call

    def close(self) -> None:
        """Close the copy's descriptor; the file goes with the last view."""
        place = place_of(self._copy)
        if place is not None:
            os.close(place[1])


def _file(nbytes: int) -> np.ndarray:
    """New bytes in an anonymous file, whose descriptor stays open."""
    descriptor = os.memfd_create("prototype")
    os.ftruncate(descriptor, nbytes)
    memory = mmap.mmap(descriptor, nbytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def place_of(array: np.ndarray) -> tuple[int, int, int] | None:
    """Process, descriptor, and offset in bytes of an array in an open file; None for private memory."""
    address = array.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        extent, _, offset, device, inode = line.split()[:5]
        first, last = (int(bound, 16) for bound in extent.split("-"))
        if inode != "0" and first <= address < last:
            for descriptor in Path("/proc/self/fd").iterdir():
                if descriptor.exists() and _file_name(descriptor.stat()) == (device, inode):
                    return os.getpid(), int(descriptor.name), int(offset, 16) + address - first
    return None


def _file_name(status: os.stat_result) -> tuple[str, str]:
    """A file's device and inode as ``/proc/self/maps`` writes them."""
    return f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}", str(status.st_ino)
