"""The memory of the emulated GPUs: host memory that other processes can map, with the rules of a GPU's.

No memory is zero by itself: new memory, freed memory, and the gaps between allocations hold the byte ``GARBAGE``. Freed
memory stays mapped, so that a use after free shows in the data and is reported instead of ending the process. Memory
that other processes have mapped stays allocated until they have unmapped it.

Arrays come from a pool, as CuPy's do: several share an allocation, and a dropped one returns at once to the stream it
was made for, where it is reused. It turns to garbage *in that stream's order*: a late reader on another stream reads
garbage.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from collectives.base.errors import TransportError
from collectives.device.protocol import Allocation, Array

GARBAGE = 0xDE
HANDLE = 64
_PAGE = mmap.PAGESIZE
_MARGIN = 32
"""Bytes of garbage behind each allocation, checked when it is freed: writes beyond its end are reported."""
_ARENA = 256 << 10
_SMALL = 64 << 10
_UNIT = 512
_FREED_MAPPINGS = 16384

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FIXED = 0x10
_MEMORY = struct.Struct("<8sqqqq")
_MAGIC = b"EMU-MEM\0"


class Illegal(NamedTuple):
    """An illegal access; ``fatal``: a GPU would have stopped, so the device is broken."""

    text: str
    fatal: bool


@dataclass(eq=False)
class PoolBlock:
    """A part of an arena: the memory of one array at a time.

    Attributes:
        freed: in the order of its stream, not of the program.
        given_back: how often the program has dropped it.
        arrived: how often its stream has reached the drop.
    """

    piece: Piece
    offset: int
    capacity: int
    nbytes: int = 0
    freed: bool = False
    given_back: int = 0
    arrived: int = 0

    @property
    def address(self) -> int:
        return self.piece.base + self.offset


@dataclass(eq=False)
class Piece:
    """One allocation.

    Attributes:
        key: of imported memory: the process and the serial number there.
        blocks: of an arena: in the order of their offsets.
    """

    base: int
    nbytes: int
    mapped: int
    serial: int
    kind: str
    owner: object
    fd: int = -1
    freed: bool = False
    exported: bool = False
    references: int = 1
    key: tuple[int, int] = (0, 0)
    blocks: list[PoolBlock] | None = field(default=None, repr=False)


class AddressSpace:
    """The memory of all emulated devices of this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pieces: list[Piece] = []  # by their bases
        self._imported: dict[tuple[int, int], Piece] = {}
        self._serials = count(1)
        self._freed: deque[Piece] = deque()
        self._freed_mappings = 0
        self._dropped: deque[Piece] = deque()
        """Pinned memory whose array was dropped; appended by finalizers, which may take no lock."""
        self._garbage = -1
        self._lingering: list[tuple[int, Piece]] = []
        """Freed memory that other processes may still map, with its files."""

    # ---- allocating and freeing

    def allocate(self, nbytes: int, owner: object, *, again: bool = False) -> Piece:
        """Allocate garbage; ``again``: at the address of freed memory of that size, if there is any."""
        with self._lock:
            serial = next(self._serials)
            mapped = _round(nbytes + _MARGIN, _PAGE)
            fd = os.memfd_create(_name(os.getpid(), serial))
            try:
                os.ftruncate(fd, mapped)
                old = (
                    next((p for p in reversed(self._freed) if p.mapped == mapped and p.kind == "device"), None)
                    if again
                    else None
                )
                base = _map(mapped, mmap.MAP_SHARED, fd, old.base if old else None)
            except BaseException:
                os.close(fd)
                raise
            if old:
                self._forget(old)
            ctypes.memset(base, GARBAGE, mapped)
            return self._add(Piece(base, nbytes, mapped, serial, "device", owner, fd))

    def pinned(self, nbytes: int, owner: object) -> Array:
        """Allocate pinned host memory; it is freed with the array."""
        with self._lock:
            mapped = _round(nbytes + _MARGIN, _PAGE)
            base = _map(mapped, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, None)
            ctypes.memset(base, GARBAGE, mapped)
            piece = self._add(Piece(base, nbytes, mapped, next(self._serials), "pinned", owner))
        return array_at(base, nbytes, self._dropped.append, piece)

    def free(self, piece: Piece) -> str | None:
        """Turn an allocation into garbage. Returns a violation if something wrote beyond its end."""
        with self._lock:
            margin = ctypes.string_at(piece.base + piece.nbytes, piece.mapped - piece.nbytes)
            spilled = piece.kind != "imported" and margin.strip(bytes([GARBAGE])) != b""
            piece.freed = True
            if piece.kind == "device":
                ctypes.memset(piece.base, GARBAGE, piece.mapped)  # for the processes that map it
                if piece.exported:
                    self._lingering.append(
                        (os.dup(piece.fd), piece)
                    )  # another number, so that it cannot be opened any more
                    self.still_mapped(piece.owner)
                os.close(piece.fd)
            elif piece.kind == "imported":
                os.close(piece.fd)
            self._imported.pop(piece.key, None)
            step = 1 << 20
            for at in range(0, piece.mapped, step):
                _map(min(step, piece.mapped - at), mmap.MAP_PRIVATE, self._garbage_file(step), piece.base + at)
            self._freed.append(piece)
            self._freed_mappings += -(-piece.mapped // step)
            while self._freed_mappings > _FREED_MAPPINGS:
                oldest = self._freed[0]
                self._forget(oldest)
                _libc.munmap(oldest.base, oldest.mapped)
        return f"something wrote beyond the end of the {piece.nbytes} bytes at {piece.base:#x}" if spilled else None

    def still_mapped(self, owner: object) -> int:
        """Bytes that an owner has freed while other processes still map them."""
        with self._lock:
            for entry in list(self._lingering):
                with contextlib.suppress(BlockingIOError):  # locked by processes that map it
                    fcntl.flock(entry[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.close(entry[0])
                    self._lingering.remove(entry)
            return sum(piece.nbytes for _, piece in self._lingering if piece.owner is owner)

    def free_all(self, owner: object) -> list[str]:
        """Free all memory of an owner except pinned memory. Returns violations."""
        with self._lock:
            self._settle()
            mine = [
                piece for piece in self._pieces if piece.owner is owner and not piece.freed and piece.kind != "pinned"
            ]
            return [text for piece in mine if (text := self.free(piece))]

    # ---- other processes

    def export(self, base: int) -> bytes:
        """A handle by which another process can map an allocation."""
        piece = self.find(base)
        if piece is None or piece.freed or piece.kind != "device" or piece.base != base:
            raise TransportError(
                f"cannot share the memory at {base:#x}: it is not where an allocation of this process begins"
            )
        piece.exported = True
        return _MEMORY.pack(_MAGIC, os.getpid(), piece.fd, piece.nbytes, piece.serial).ljust(HANDLE, b"\0")

    def import_(self, handle: bytes, owner: object) -> Piece:
        """Map another process's allocation, once, however often it is imported."""
        magic, pid, theirs, nbytes, serial = _MEMORY.unpack_from(handle)
        if magic != _MAGIC or len(handle) != HANDLE:
            raise TransportError("cannot open shared memory: this is no handle of it")
        if pid == os.getpid():
            raise TransportError(
                "cannot open shared memory in the process that it belongs to: there its own address is to be used"
            )
        with self._lock:
            if known := self._imported.get((pid, serial)):
                known.references += 1
                return known
            mapped = _round(nbytes + _MARGIN, _PAGE)
            fd = open_shared(pid, theirs, _name(pid, serial))
            try:
                fcntl.flock(fd, fcntl.LOCK_SH)
                base = _map(mapped, mmap.MAP_SHARED, fd, None)
            except BaseException:
                os.close(fd)
                raise
            piece = self._add(
                Piece(base, nbytes, mapped, next(self._serials), "imported", owner, fd, key=(pid, serial))
            )
            self._imported[piece.key] = piece
            return piece

    def forget_import(self, piece: Piece) -> None:
        """Unmap imported memory when it has been forgotten as often as it was imported."""
        with self._lock:
            piece.references -= 1
            if piece.references == 0:
                self.free(piece)

    # ---- looking up

    def find(self, address: int) -> Piece | None:
        """The allocation that contains an address, freed or not."""
        with self._lock:
            self._settle()
            at = bisect_right(self._pieces, address, key=_base) - 1
            piece = self._pieces[at] if at >= 0 else None
            return piece if piece and address < piece.base + max(1, piece.nbytes) else None

    def allocation(self, address: int) -> Piece:
        piece = self.find(address)
        if piece is None or piece.freed or piece.kind == "pinned":
            raise TransportError(f"the address {address:#x} is not device memory")
        return piece

    def illegal(self, address: int, nbytes: int) -> Illegal | None:
        """Why these bytes must not be accessed now; None if they may be."""
        piece = self.find(address)
        where = f"{nbytes} bytes at {address:#x}"
        if piece is None:
            return Illegal(f"{where}: unknown memory", True)
        if address + nbytes > piece.base + piece.nbytes:
            return Illegal(f"{where}: beyond the end of {piece.nbytes} bytes at {piece.base:#x}", True)
        if piece.freed:
            return Illegal(f"{where}: freed memory", False)
        if piece.blocks is None:
            return None
        with self._lock:
            at = bisect_right(piece.blocks, address - piece.base, key=_offset) - 1
            block = piece.blocks[at] if at >= 0 else None
            if block is None or address + nbytes > block.address + block.nbytes:
                return Illegal(f"{where}: beyond the end of the array that begins before it", True)
            return (
                Illegal(f"{where}: memory of an array that has gone back to the pool", False) if block.freed else None
            )

    def held(self, owner: object) -> dict[str, int]:
        """The numbers of an owner's allocations and imports, without those of a pool."""
        with self._lock:
            kinds = [
                piece.kind
                for piece in self._pieces
                if piece.owner is owner and not piece.freed and piece.blocks is None
            ]
        return {"allocations": kinds.count("device"), "imports": kinds.count("imported")}

    def _add(self, piece: Piece) -> Piece:
        insort(self._pieces, piece, key=_base)
        return piece

    def _forget(self, piece: Piece) -> None:
        self._freed.remove(piece)
        self._freed_mappings -= -(-piece.mapped // (1 << 20))
        self._pieces.remove(piece)

    def _settle(self) -> None:
        while self._dropped:
            self.free(self._dropped.popleft())

    def _garbage_file(self, nbytes: int) -> int:
        if self._garbage < 0:
            self._garbage = os.memfd_create("emulated-cuda-garbage")
            os.pwrite(self._garbage, bytes([GARBAGE]) * nbytes, 0)
        return self._garbage


SPACE = AddressSpace()


class Pool:
    """The pool of a device's arrays.

    Args:
        new: allocates a number of bytes.
        submit: enqueues work on a stream.
        violation: records a violation.
    """

    def __init__(
        self,
        new: Callable[[int], Piece],
        submit: Callable[[int, Callable[[], None]], None],
        violation: Callable[[str], None],
    ) -> None:
        self._new, self._submit, self._violation = new, submit, violation
        self._lock = threading.RLock()  # `new` may call `trim`
        self._idle: dict[tuple[int, int], list[PoolBlock]] = {}
        self._arenas: dict[int, Piece] = {}
        self._returned: deque[tuple[int, PoolBlock]] = deque()

    def array(self, nbytes: int, stream: int) -> Array:
        """Uninitialized bytes for a stream; they return to it when the last view of them is dropped."""
        with self._lock:
            self._settle()
            # A margin of garbage behind every array, as behind allocations.
            capacity = _round(nbytes + _MARGIN, _UNIT)
            idle = self._idle.get((stream, capacity))
            block = idle.pop() if idle else self._carve(capacity, stream)

        def take() -> None:
            block.nbytes, block.freed = nbytes, False

        if block.given_back == block.arrived:
            take()
        else:  # its stream has not reached the previous drop yet, and the new array's memory is valid only after that
            self._submit(stream, take)
        return array_at(block.address, nbytes, self._give_back, block, nbytes, stream)

    def trim(self) -> list[Piece]:
        """Remove and return the allocations without arrays, to be freed; no work may be using them."""
        with self._lock:
            self._settle()
            idle = {block for blocks in self._idle.values() for block in blocks}
            pieces = {block.piece for block in idle if all(other in idle for other in block.piece.blocks or ())}
            for key, blocks in self._idle.items():
                self._idle[key] = [block for block in blocks if block.piece not in pieces]
            self._arenas = {stream: piece for stream, piece in self._arenas.items() if piece not in pieces}
            return list(pieces)

    def _carve(self, capacity: int, stream: int) -> PoolBlock:
        piece = self._arenas.get(stream)
        offset = piece.blocks[-1].offset + piece.blocks[-1].capacity if piece and piece.blocks else 0
        if piece is None or capacity > _SMALL or offset + capacity > piece.nbytes:
            piece, offset = self._new(_ARENA if capacity <= _SMALL else capacity), 0
            if capacity <= _SMALL:
                self._arenas[stream] = piece
        block = PoolBlock(piece, offset, capacity)
        piece.blocks = [*(piece.blocks or ()), block]  # a new list, because other threads may be reading the old one
        return block

    def _give_back(self, block: PoolBlock, nbytes: int, stream: int) -> None:
        """Return a block. A finalizer, which runs in any thread at any time: takes no lock."""

        def arrive() -> None:
            if not block.piece.freed:
                margin = ctypes.string_at(block.address + nbytes, block.capacity - nbytes)
                if margin.strip(bytes([GARBAGE])):
                    self._violation(
                        f"something wrote beyond the end of an array of {nbytes} bytes at {block.address:#x}"
                    )
                block.freed = True
                ctypes.memset(block.address, GARBAGE, block.capacity)
            block.arrived += 1  # last, because from then on the block may be reused

        block.given_back += 1
        self._submit(stream, arrive)
        self._returned.append((stream, block))

    def _settle(self) -> None:
        while self._returned:
            stream, block = self._returned.popleft()
            self._idle.setdefault((stream, block.capacity), []).append(block)


def array_at(address: int, nbytes: int, finalizer: Callable[..., None], *arguments: Any) -> Array:
    """Memory as an array of uint8; the finalizer is called when the last array that refers to it is dropped."""
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(memory, finalizer, *arguments).atexit = False
    array: Array = np.frombuffer(memoryview(memory), np.uint8)
    return array


def open_shared(pid: int, fd: int, name: str) -> int:
    """Open another process's memory file, if it still has that name."""
    path = f"/proc/{pid}/fd/{fd}"
    try:
        mine = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        found = os.readlink(f"/proc/self/fd/{mine}")
    except OSError as error:
        raise TransportError(f"cannot open what process {pid} shared: {error}") from None
    if found != f"/memfd:{name} (deleted)":
        os.close(mine)
        raise TransportError(f"cannot open what process {pid} shared: it has been given back there")
    return mine


def as_allocation(piece: Piece) -> Allocation:
    return Allocation(piece.base, piece.nbytes, piece.serial)


def _name(pid: int, serial: int) -> str:
    return f"emulated-cuda-{pid}-{serial}"


def _round(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def _base(piece: Piece) -> int:
    return piece.base


def _offset(block: PoolBlock) -> int:
    return block.offset


def _map(nbytes: int, flags: int, fd: int, at: int | None) -> int:
    fixed = _MAP_FIXED if at is not None else 0
    address: int | None = _libc.mmap(at, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags | fixed, fd, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise TransportError(f"cannot map {nbytes} bytes: {os.strerror(ctypes.get_errno())}")
    return address
