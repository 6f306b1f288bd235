"""One piece of the arena: an anonymous file in memory, mapped as a whole. Peers may map it too.

**Huge pages.** Over 4 KiB pages a first write takes five to ten times as long, and a reduction from 16 MiB up a third
longer. Linux gives such files no huge pages by itself unless its administrator says so (``shmem_enabled``), and a
mapping uses them only at a multiple of 2 MiB. So mappings are aligned (`map_shared`), and where the system makes huge
pages only when it is asked, the first block in 2 MiB of a piece asks for one (``MADV_COLLAPSE``, Linux 6.1). What is
asked for is allocated at once, and not by the first write.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.base import interrupts
from collectives.tensors.free_ranges import FreeRanges

HUGE_PAGE = 2 << 20
REMOVE = 9
"""MADV_REMOVE: the memory of whole pages goes back to the system, in all mappings; they then read as zeros."""

_COLLAPSE = 25
"""MADV_COLLAPSE: make huge pages of what is mapped."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE: allocate pages, or copy private ones, without a change of what is in them."""
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # Linux; Python's mmap does not name them
_SHARED_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"

_libc = ctypes.CDLL(None, use_errno=True)
madvise: Any = _libc.madvise
madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_mmap: Any = _libc.mmap
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_mmap.restype = ctypes.c_void_p
_mprotect: Any = _libc.mprotect
_mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_shared(descriptor: int, nbytes: int) -> tuple[mmap.mmap, int]:
    """Map a file, shared, at a multiple of ``HUGE_PAGE``.

    Returns:
        An object that holds the mapping, and the offset of the file's first byte in it.

    Raises:
        OSError, ValueError, OverflowError: the system refuses it.
    """
    # mmap chooses the address. So memory of this process is mapped that contains a multiple, and the file over it.
    whole = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    start: int = np.frombuffer(whole, np.uint8).ctypes.data
    offset = -start % HUGE_PAGE
    map_fixed(start + offset, nbytes, mmap.MAP_SHARED, descriptor, 0)
    with suppress(OSError, AttributeError):
        whole.madvise(mmap.MADV_HUGEPAGE, offset, nbytes)
    return whole, offset


def map_fixed(address: int, nbytes: int, flags: int, descriptor: int = -1, offset: int = 0) -> None:
    """Map whole pages, of a file or of none, in place of what is mapped there.

    Args:
        flags: of ``mmap``, as MAP_SHARED.

    Raises:
        OSError: the system refuses it.
    """
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if _mmap(address, nbytes, access, flags | _MAP_FIXED, descriptor, offset) != address:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def populate(address: int, nbytes: int) -> None:
    """Have whole private pages copied now, and not when they are first written to."""
    if madvise(address, nbytes, _POPULATE_WRITE):  # Linux before 5.14
        for page in range(address, address + nbytes, mmap.PAGESIZE):
            byte = ctypes.c_uint8.from_address(page)
            byte.value = byte.value


def ranges_of(descriptor: int) -> list[tuple[int, int, int]]:
    """Where a file is mapped into this process, shared: start, end, and offset in the file."""
    number, ranges = os.fstat(descriptor).st_ino, []
    for line in text_of("/proc/self/maps").splitlines():
        addresses, access, offset, _, inode, *_ = line.split()
        if access.endswith("s") and int(inode) == number:
            start, end = addresses.split("-")
            ranges.append((int(start, 16), int(end, 16), int(offset, 16)))
    return ranges


def huge_pages_must_be_asked_for() -> bool:
    """Whether the system makes no huge page for a file in memory unless it is asked for this very page."""
    return "[never]" in text_of(_SHARED_HUGE_PAGES)


def text_of(path: str) -> str:
    """What a file of the system's says; empty where there is none."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


class Piece:
    """A file without a name, and its mapping, which lives as long as an array in it.

    Args:
        number: its name among the pieces of this process, never used again.
        nbytes: a multiple of ``HUGE_PAGE``.
        asks: whether to ask for huge pages.

    Attributes:
        number, nbytes: as given.
        descriptor: of the file, for peers to open.
        address, memory: of the mapping, as uint8.
        mapping, offset: what holds the mapping, and where in it the piece begins.
        free: what is not leased.
        used: the number of blocks in use.
        closed: no further block is taken from it, because a forked child may see its blocks.

    Raises:
        OSError, ValueError, OverflowError: the system refuses the memory.
    """

    def __init__(self, number: int, nbytes: int, asks: bool = False) -> None:
        self.number = number
        self.nbytes = nbytes
        self.descriptor = os.memfd_create("collectives", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, nbytes)
            self.mapping, self.offset = map_shared(self.descriptor, nbytes)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(self.mapping, np.uint8, nbytes, self.offset)
        self.address: int = self.memory.ctypes.data
        self.free = FreeRanges(nbytes)
        self.used = 0
        self.closed = False
        self._asks = asks
        self._touched = bytearray(nbytes // HUGE_PAGE)
        """For each huge page whether it may have physical memory."""

    def reserve(self, start: int, end: int) -> OSError | None:
        """Have the system set memory aside for some bytes now. Where it does not overcommit memory, it would kill the
        process at the first write that it has no memory for.

        Returns:
            Why it has refused; None if it has not.
        """
        with interrupts.deferred():  # a handler's TimeoutError is no refusal of the system
            try:
                os.posix_fallocate(self.descriptor, start, end - start)
            except OSError as error:
                return error
        return None

    def touch(self, start: int, end: int) -> None:
        """Note that bytes may be written."""
        first, last = start // HUGE_PAGE, -(-end // HUGE_PAGE)
        if self._asks:
            self._ask(first, last)
        self._touched[first:last] = b"\1" * (last - first)

    def _ask(self, first: int, last: int) -> None:
        """Ask for huge pages in place of what has no memory yet, from the huge page ``first`` to ``last``."""
        touched = self._touched
        while (begin := touched.find(0, first, last)) >= 0:
            next_touched = touched.find(1, begin, last)
            first = last if next_touched < 0 else next_touched
            start, nbytes = begin * HUGE_PAGE, (first - begin) * HUGE_PAGE
            self.memory[start : start + nbytes : HUGE_PAGE] = 0  # the system makes huge pages of small ones only
            # Refused now and then while other pages are on their way to the lists of the system's.
            if madvise(self.address + start, nbytes, _COLLAPSE) and madvise(self.address + start, nbytes, _COLLAPSE):
                self._asks = ctypes.get_errno() in (errno.EAGAIN, errno.EBUSY)

    def emptied(self, start: int, end: int) -> None:
        """Note that the memory of whole huge pages has been given back."""
        first, last = start // HUGE_PAGE, end // HUGE_PAGE
        self._touched[first:last] = bytes(last - first)

    def idle(self) -> list[tuple[int, int, int]]:
        """Free ranges of whole huge pages, of which some may have physical memory: its bytes, start and end."""
        ranges = []
        for start, end in self.free.of_at_least(HUGE_PAGE):
            first, last = -(-start // HUGE_PAGE), end // HUGE_PAGE
            touched = self._touched.count(1, first, last)
            if touched:
                ranges.append((touched * HUGE_PAGE, first * HUGE_PAGE, last * HUGE_PAGE))
        return ranges

    def punch(self, start: int, end: int) -> None:
        """Give the memory of whole free huge pages back to the system; they read as zeros afterwards."""
        with suppress(OSError, AttributeError):  # a system that cannot keeps the memory until the piece ends
            self.mapping.madvise(REMOVE, self.offset + start, end - start)
        self.emptied(start, end)

    def end(self) -> None:
        """Close the file. It is unmapped when the last reference to this object is gone."""
        if not self.closed:  # else a child's arrays lose what they hold
            self.punch(0, self.nbytes)  # a peer that still has it mapped holds no memory
        os.close(self.descriptor)

    def make_private(self) -> None:
        """In a forked child: put a private copy, made page by page when it is written to, in place of the mapping."""
        flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
        access = mmap.PROT_READ | mmap.PROT_WRITE
        if _mmap(self.address, self.nbytes, access, flags, self.descriptor, 0) != self.address:
            _mprotect(self.address, self.nbytes, mmap.PROT_READ)  # no memory: the child may read
        os.close(self.descriptor)
