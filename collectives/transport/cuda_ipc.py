"""CUDA IPC: how a kernel of this rank reaches the device memory of its peers on one host, and how streams of different
processes wait for each other.

Memory. The driver names a whole allocation by 64 bytes. So an address travels as the allocation's name and an offset in
it; a process that meets the name for the first time maps the allocation and keeps the mapping. Ranks that are threads
of one process need no name.

Order. Every rank has a row of interprocess events that its peers may wait for. A wait means whatever the event stands
for at that moment, and nothing if it has not been recorded: so an event is always paired with a word on the board
(`transport.board`) that is written after the record and read before the wait. What the host waits for is that the peer
has *issued* its work; the GPU waits for the work itself. No kernel ever spins.
"""

from __future__ import annotations

import bisect
import itertools
import secrets
import struct
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from collectives.base.errors import TransportError
from collectives.device.kernel_sources import WAYS
from collectives.device.kernels import Kernels
from collectives.device.protocol import Allocation, Device

WORDS = 12
"""Words in which an address travels: the address itself; its allocation's number, offset and bytes; and its name."""

_NAMELESS = (0,) * (WORDS - 1)
_PROCESS = secrets.randbits(63)
_MOST_MAPPINGS = 4096
_BATCH = 1024
"""Mappings that are given back together where there are too many: the device is waited for once."""
_FILLED = 16 << 30
_OLD = 20_000
"""From so many mapped bytes on, what was not looked up within so many lookups is given back: its owner may have freed
it, and the memory stays allocated while it is mapped."""
_MOST_NAMES = 4096
_PROBE_BYTES = 4096


class _Mapping:
    """Another process's allocation: where it begins there and here, and how many worlds use it."""

    __slots__ = ("address", "base", "end", "users")

    def __init__(self, address: int, base: int, nbytes: int) -> None:
        self.address = address
        self.base, self.end = base, base + nbytes
        self.users = 0


class Mappings:
    """Other processes' allocations on one device, mapped once for the whole process however many worlds use them.

    Where an owner has freed an allocation and made another at the same place, the driver refuses to map the new one as
    long as the old one is mapped. So what overlaps a new allocation of its process is given back first, whoever has
    used it: nobody can again, because the owner may free only what has been waited for.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[int, int], _Mapping] = {}
        """By process and the allocation's number there."""
        self._places: dict[int, list[tuple[int, int]]] = {}
        """Of each process: where its allocations begin, ascending, and their numbers. They do not overlap."""

    def take(self, device: Device, process: int, serial: int, base: int, nbytes: int, handle: bytes) -> int:
        """Where the allocation begins here; `give` it back as often as it was taken."""
        with self._lock:
            known = self._known.get((process, serial))
            if known is None:
                for old in self._overlapping(process, base, nbytes):
                    self._forget(device, process, old)
                known = self._known[process, serial] = _Mapping(device.import_memory(handle), base, nbytes)
                bisect.insort(self._places.setdefault(process, []), (base, serial))
            known.users += 1
            return known.address

    def give(self, device: Device, process: int, serial: int) -> int:
        """Give a mapping back, if there still is one; the bytes that are mapped no more, because nobody else uses
        it."""
        with self._lock:
            known = self._known.get((process, serial))
            if known is None:
                return 0
            known.users -= 1
            if known.users:
                return 0
            self._forget(device, process, serial)
            return known.end - known.base

    def _overlapping(self, process: int, base: int, nbytes: int) -> list[int]:
        """The numbers of a process's allocations that overlap these bytes of it."""
        places = self._places.get(process, [])
        at = bisect.bisect_left(places, (base,))
        if at and self._known[process, places[at - 1][1]].end > base:
            at -= 1
        return [
            serial
            for _, serial in itertools.takewhile(
                lambda place: place[0] < base + nbytes, itertools.islice(places, at, None)
            )
        ]

    def _forget(self, device: Device, process: int, serial: int) -> None:
        known = self._known.pop((process, serial))
        self._places[process].remove((known.base, serial))
        device.forget_memory(known.address)


class _MappingUse:
    """A mapping as one world uses it."""

    __slots__ = ("address", "nbytes", "used")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes
        self.used = 0
        """The number of its latest lookup."""


class Card(NamedTuple):
    """What a rank tells its peers once."""

    process: int
    """Of which process it is: a number that no other process has, whatever containers they are in."""
    device: int
    """The number by which that process knows its GPU."""
    events: tuple[int, ...]
    """Its events, as its own process knows them."""
    handles: tuple[bytes, ...]
    """Their names in other processes."""
    probe: Sequence[int]
    """Words of an address at which peers find the rank's number."""


class IpcMemory:
    """The device memory of the ranks of one host, as one of them sees it.

    Args:
        rank: this rank, in the group.
        device: that it uses.
        events: how many events peers can wait for.
        quiesce: waits until the device is done with whatever this rank has issued.

    Raises:
        TransportError: this system does not share device memory or events.
    """

    def __init__(self, rank: int, device: Device, events: int, quiesce: Callable[[], None]) -> None:
        self._rank = rank
        self._device = device
        self._mappings = _mappings_of(device)
        self._quiesce = quiesce
        self._exported: dict[int, tuple[int, ...] | str] = {}
        self._mapped: OrderedDict[tuple[int, int], _MappingUse] = OrderedDict()
        """By the owner's process and the allocation's number there; the latest used is the last."""
        self._mapped_bytes = self._lookups = 0
        self._processes: dict[int, int] = {}
        self._neighbours: set[int] = set()
        self._all_near = self._one_gpu = False
        self.events: dict[int, Sequence[int]] = {rank: [device.create_event(shared=True) for _ in range(events)]}
        """Every rank's events, by rank."""
        self._imported: list[int] = []
        self._probe = device.allocate(_PROBE_BYTES, shared=True)
        # A kernel, since copies reach more than kernels do. Made here: to load it may make the driver wait for the
        # whole device.
        self._look = Kernels(device).combination(None, np.dtype(np.int64), [(1, 1, 1)])

    def card(self, stream: int) -> Card:
        """What the peers need; the memory that they will look at is written on ``stream``, and done."""
        device, own = self._device, tuple(self.events[self._rank])
        number = device.pinned(8)
        number[:] = bytearray(struct.pack("q", self._rank))
        device.copy(self._probe, int(number.ctypes.data), 8, stream)
        device.drain(stream)
        return Card(
            _PROCESS, device.index, own, tuple(device.export_event(event) for event in own), self.describe(self._probe)
        )

    def connect(self, cards: dict[int, Card], stream: int) -> None:
        """Reach the peers, and look whether what is found there is theirs.

        Raises:
            TransportError: it is not, or they cannot be reached.
        """
        device = self._device
        seen, sees = device.pinned(8), self._look
        for peer, card in cards.items():
            if peer == self._rank:
                continue
            self._processes[peer] = card.process
            if card.process == _PROCESS:
                self._neighbours.add(peer)
                self.events[peer] = card.events
                if card.device != device.index:
                    device.reach(card.device)
            else:
                self.events[peer] = events = [device.import_event(handle) for handle in card.handles]
                self._imported += events
            sees.pointers[0, 0], sees.pointers[0, WAYS] = self.locate(peer, card.probe), seen.ctypes.data
            sees.launch(stream)
            device.drain(stream)
            found = struct.unpack("q", seen.tobytes())[0]
            if found != peer:
                raise TransportError(
                    f"rank {self._rank}: expected number {peer} in the device memory of rank {peer}, found {found}"
                )
        self._all_near = len(self._neighbours) == len(cards) - 1
        self._one_gpu = self._all_near and {card.device for card in cards.values()} == {device.index}

    def describe(self, address: int) -> tuple[int, ...]:
        """An address of this rank's device memory in `WORDS` words.

        Raises:
            TransportError: the memory cannot be shared.
        """
        if self._one_gpu:
            return (address, *_NAMELESS)
        allocation = self._device.allocation(address)
        name = self._exported.get(allocation.serial)
        if name is None:
            name = self._export(allocation)
        if isinstance(name, str):
            raise TransportError(name)
        return (address, allocation.serial, address - allocation.base, allocation.nbytes, *name)

    def _export(self, allocation: Allocation) -> tuple[int, ...] | str:
        """An allocation's name, or why it has none; remembered in either case."""
        name: tuple[int, ...] | str
        try:
            # The driver would share a small allocation's neighbours as well, and may refuse to map two of one block.
            # Between the GPUs of one process nothing is mapped, but what has no name is such memory as kernels of other
            # GPUs are not let into.
            if allocation.nbytes < self._device.shared_unit and not self._all_near:
                name = f"an allocation of {allocation.nbytes} bytes is not shared: it is part of a block with others"
            else:
                name = struct.unpack("8q", self._device.export_memory(allocation.base))
        except TransportError as error:
            name = str(error)
        if len(self._exported) >= _MOST_NAMES:
            self._exported.clear()
        self._exported[allocation.serial] = name
        return name

    def locate(self, peer: int, words: Sequence[int]) -> int:
        """Where this rank's kernels find what a peer has described."""
        if peer == self._rank or peer in self._neighbours:
            return words[0]
        address, serial, offset, nbytes = words[:4]
        key = (self._processes[peer], serial)
        known = self._mapped.get(key)
        if known is None:
            self._make_room(nbytes)
            handle = struct.pack("8q", *words[4:WORDS])
            known = self._mapped[key] = _MappingUse(
                self._mappings.take(self._device, *key, address - offset, nbytes, handle), nbytes
            )
            self._mapped_bytes += nbytes
        else:
            self._mapped.move_to_end(key)
        self._lookups += 1
        known.used = self._lookups
        return known.address + offset

    def _make_room(self, nbytes: int) -> None:
        """Give back what is to be given back before so many more bytes are mapped."""
        most = _BATCH if len(self._mapped) >= _MOST_MAPPINGS else 0
        if not most and self._mapped_bytes + nbytes <= _FILLED:
            return
        longest_unused: list[tuple[int, int]] = []
        for key, known in self._mapped.items():
            if len(longest_unused) >= most and self._lookups - known.used <= _OLD:
                break
            longest_unused.append(key)
        if longest_unused:
            self._quiesce()
            self._give(longest_unused)

    def _give(self, keys: Sequence[tuple[int, int]]) -> int:
        """Give mappings back, which the device is done with; the bytes that are mapped no more."""
        for key in keys:
            self._mapped_bytes -= self._mapped.pop(key).nbytes
        return sum(self._mappings.give(self._device, *key) for key in keys)

    def release(self) -> int:
        """Give back the peers' memory, to be mapped again where it is looked up again; the bytes that are mapped no
        more."""
        if not self._mapped:
            return 0
        self._quiesce()
        return self._give(list(self._mapped))

    def forget(self) -> None:
        """Give back the peers' memory and events; the device must be done with them."""
        self._give(list(self._mapped))
        for event in self._imported:
            self._device.destroy_event(event)
        self._imported.clear()

    def close(self) -> None:
        """Give back what is this rank's own, when no peer uses it any more."""
        self.forget()
        for event in self.events[self._rank]:
            self._device.destroy_event(event)
        self._device.free(self._probe)


_of_device: weakref.WeakKeyDictionary[Device, Mappings] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _mappings_of(device: Device) -> Mappings:
    with _lock:
        return _of_device.setdefault(device, Mappings())
