"""Tensors that come to the all-reduce again and again get memory that the other ranks of a host map, at their address.

DDP allocates its buckets itself, in private memory, and the program has views of them. So a bucket cannot be replaced,
but the pages below it can: when the same storage is all-reduced for the second time, its values are copied into a block
of the arena, and the block's file is mapped over the storage's pages. Addresses and values stay as they are.

    storage  | head |      whole pages      | tail |    the program's; head and tail share pages with other memory
                      the same memory twice
    block    | head |      whole pages      | tail |    in the arena: the engine all-reduces this one

An all-reduce copies head and tail, less than a page each, into the block before it begins, and back when it has ended.

**End.** The storage is held, so that its memory returns to malloc as malloc knows it: when nothing else holds it, at
the next large all-reduce, it gets fresh private pages and is dropped.

**Forks.** A child must have the values of the fork, and share nothing: before it, the pages become private copies. The
next all-reduce shares them again.

**A storage that is moved**, which ``share_memory_`` does, frees its memory while the block's file is still mapped
there, and malloc may use that. The block is kept then until a fork, before which what is still mapped of it becomes
private too. (torch refuses to resize a storage that was all-reduced.)
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from collectives.base import interrupts
from collectives.base.logging import logger
from collectives.tensors.arena import MAPPED, OFFSET_BITS, OFFSET_MASK, arena, never_overcommits
from collectives.tensors.arena_piece import map_fixed, populate, ranges_of
from collectives.torch import memory

FROM_BYTES = 1 << 20
"""The smallest tensor that is moved: below, the mapping gains little."""
_MOST_SEEN = 1024
_MOST = 4096
"""Aliases at once; each takes two of the system's 65,530 mappings of a process."""
_PAGE = mmap.PAGESIZE
_NEVER_OVERCOMMITS = never_overcommits()
"""Whether the system may refuse the private pages that take the block's place again."""


class Alias:
    """One storage's memory, and the block of the arena that is mapped over its whole pages.

    Args:
        flat: the whole storage as a 1-D tensor.
        word: where ``block`` lies in the arena.
        block: as many bytes, at the same place in a page.

    Raises:
        OSError: the system refuses; the storage is as it was.
    """

    def __init__(self, flat: Any, word: int, block: Any) -> None:
        self.address, self.dtype = flat.data_ptr(), flat.dtype
        self.storage = flat.untyped_storage()
        self.tensor = memory.over(block, flat.shape, flat.dtype)
        self.is_mapped = False
        self._piece = arena.piece(word - MAPPED >> OFFSET_BITS)
        self._start, self._end = -(-self.address // _PAGE) * _PAGE, (self.address + flat.nbytes) // _PAGE * _PAGE
        self._offset = (word & OFFSET_MASK) + self._start - self.address
        self._head = (self._start - self.address) // flat.itemsize
        self._tail = (self._end - self.address) // flat.itemsize
        self.share(flat)

    def share(self, flat: Any) -> None:
        """Put the block's pages, with the values of ``flat``, in place of private ones."""
        self.tensor.copy_(flat)
        self._map(mmap.MAP_SHARED)
        self.is_mapped = True

    def enter(self, flat: Any) -> Any:
        """The tensor to all-reduce in place of ``flat``, with its values."""
        self.tensor[: self._head].copy_(flat[: self._head])
        self.tensor[self._tail :].copy_(flat[self._tail :])
        return self.tensor

    def leave(self, flat: Any) -> None:
        """Give ``flat`` the values of the block."""
        flat = flat.data  # as without an alias, autograd does not count this as a change of its own
        if not self.is_mapped:  # a fork came during the operation
            flat.copy_(self.tensor)
            return
        flat[: self._head].copy_(self.tensor[: self._head])
        flat[self._tail :].copy_(self.tensor[self._tail :])

    @property
    def is_moved(self) -> bool:
        """Whether the storage has other memory by now, so that the earlier one was freed."""
        return bool(self.storage.data_ptr() != self.address)

    @property
    def is_alone(self) -> bool:
        """Whether nothing else holds the storage."""
        return _holders(self.storage) == _ALONE

    def make_private(self) -> None:
        """Put private copies in place of the block's pages, as far as they are still there."""
        if not self.is_mapped:
            return
        self.is_mapped = False
        if not self.is_moved:
            self._map(mmap.MAP_PRIVATE)
            populate(self._start, self._end - self._start)
            return
        for start, end, offset in ranges_of(self._piece.descriptor):
            if self._start <= start and end <= self._end:
                map_fixed(start, end - start, mmap.MAP_PRIVATE, self._piece.descriptor, offset)
                populate(start, end - start)

    def empty(self) -> None:
        """Put fresh private pages in place of the block's: nothing needs the values."""
        map_fixed(self._start, self._end - self._start, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def _map(self, flags: int) -> None:
        map_fixed(self._start, self._end - self._start, flags, self._piece.descriptor, self._offset)


class Aliases:
    """Those of this process. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._seen: dict[int, StorageWeakRef] = {}
        """By address: storages that were all-reduced once."""
        self._aliases: dict[int, Alias] = {}
        """By address."""
        self._moved: list[Alias] = []
        self._of_parent: dict[int, Alias] = {}
        """In a child: storages whose memory malloc must not get back, because a page that it empties is a file's."""

    def of(self, flat: Any) -> Alias | None:
        """The alias of a 1-D tensor that is to be all-reduced in place; None where there is none.

        Args:
            flat: contiguous; all of its storage, or it has none.
        """
        if (
            flat.nbytes < FROM_BYTES
            or not flat.is_cpu
            or flat.untyped_storage().nbytes() != flat.nbytes
            or flat.is_conj()
            or flat.is_neg()
            or flat.is_inference()
            or _NEVER_OVERCOMMITS
        ):
            return None
        with interrupts.deferred(), self._lock:
            self._sweep()
            address = flat.data_ptr()
            alias = self._aliases.get(address)
            try:
                if alias is None:
                    return self._add(address, flat) if self._comes_again(address, flat) else None
                if (alias.dtype, alias.tensor.shape) != (flat.dtype, flat.shape):
                    return None
                if not alias.is_mapped:
                    alias.share(flat)
                return alias
            except OSError:  # the system refuses: in private memory
                return None

    def _comes_again(self, address: int, flat: Any) -> bool:
        """Whether the storage was seen before, as private memory that torch has allocated."""
        storage = flat.untyped_storage()
        seen = self._seen.get(address)
        if seen is not None and seen.cdata == storage._cdata and not seen.expired():
            return not storage.is_shared()
        if (
            not storage.resizable()  # another library's, a file's, or known to NumPy
            or storage.is_shared()
            or (torch.cuda.is_available() and flat.is_pinned())
        ):
            return False
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen[address] = StorageWeakRef(storage)
        return False

    def _add(self, address: int, flat: Any) -> Alias | None:
        if len(self._aliases) >= _MOST:
            return None
        whole = arena.empty(flat.nbytes + _PAGE, np.uint8)
        shift = (address - whole.ctypes.data) % _PAGE
        word = arena.locate(whole.ctypes.data + shift, flat.nbytes)
        if not word:  # the arena cannot grow
            return None
        alias = self._aliases[address] = Alias(flat, word, whole[shift : shift + flat.nbytes])
        return alias

    def _sweep(self) -> None:
        """Drop the storages that nothing else holds."""
        for address, alias in list(self._aliases.items()):
            if alias.is_moved:
                self._moved.append(self._aliases.pop(address))
            elif alias.is_alone:
                with suppress(OSError):  # no memory now: at the next call
                    alias.empty()
                    del self._aliases[address]

    # ---- forks

    def before_fork(self) -> None:
        self._lock.acquire()  # held for copies only, and until the child is there
        self._sweep()
        for alias in [*self._aliases.values(), *self._moved]:
            try:
                alias.make_private()
            except OSError as error:
                logger.warning("a tensor's memory remains shared with forked processes: %s [N18]", error)
        self._moved.clear()

    def after_fork(self) -> None:
        self._lock.release()

    def in_child(self) -> None:
        held = self._aliases
        self.__init__()  # type: ignore[misc]  # a lock that the parent holds is never released here
        self._of_parent = held


def _holders(storage: Any) -> tuple[int, int]:
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


class _Holder:
    def __init__(self) -> None:
        self.storage = torch.empty(1).untyped_storage()

    @property
    def holders(self) -> tuple[int, int]:
        return _holders(self.storage)


_ALONE = _Holder().holders
"""The references to a storage that one attribute alone holds; they depend on the versions of torch and Python."""

aliases = Aliases()

os.register_at_fork(before=aliases.before_fork, after_in_parent=aliases.after_fork, after_in_child=aliases.in_child)
