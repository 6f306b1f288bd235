"""CUDA IPC: kernels' access to peers' device memory on one host, and ordering of streams across processes.

Memory. The driver's handle of 64 bytes identifies a whole allocation. An address is therefore sent as the allocation's
handle and an offset; a process maps the allocation when it first receives the handle, and keeps the mapping. Ranks that
are threads of one process need no handle.

Order. Every rank has a row of interprocess events that its peers may wait for. A wait applies to the event's latest
record, and has no effect if there is none: so an event is always paired with a word on the board
(`transport.host.board`) that is written after the record and read before the wait. The host waits only until the peer
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
from collectives.base.exclusion import exclusive, exclusively
from collectives.base.interchange import exchangeable
from collectives.device.kernels import Kernels
from collectives.device.protocol import Allocation, Device

WORDS = 12
"""Words of a described address: the address; its allocation's number, offset and bytes; and the allocation's handle."""

_NAMELESS = (0,) * (WORDS - 1)
_PROCESS = secrets.randbits(63)
_MOST_MAPPINGS = 4096
_BATCH = 1024
"""Mappings released together when there are too many: the device is synchronized once for all."""
_FILLED = 16 << 30
_OLD = 20_000
"""Above ``_FILLED`` mapped bytes, a mapping that was not used in this many lookups is released.

Its owner may have freed the memory, which stays allocated while it is mapped.
"""
_MOST_NAMES = 4096
_PROBE_BYTES = 4096


class _Mapping:
    """Another process's allocation: its addresses there and here, and the number of worlds that use it."""

    __slots__ = ("address", "base", "end", "users")

    def __init__(self, address: int, base: int, nbytes: int) -> None:
        self.address = address
        self.base, self.end = base, base + nbytes
        self.users = 0


class Mappings:
    """Other processes' allocations on one device, mapped once per process for all worlds.

    If an owner frees an allocation and makes another at the same address, the driver refuses to map the new one while
    the old one is mapped. So mappings that overlap a new allocation of their process are released first, even while in
    use: no operation can use them again, because the owner may free an allocation only after waiting for all operations
    on it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._mapped: dict[tuple[int, int], _Mapping] = {}
        """By process and the allocation's number in it."""
        self._places: dict[int, list[tuple[int, int]]] = {}
        """Per process the start addresses and numbers of its allocations, ascending; they do not overlap."""

    @exclusive
    def take(self, device: Device, process: int, serial: int, base: int, nbytes: int, handle: bytes) -> int:
        """Map an allocation, or share its mapping. Returns its address in this process; pair each call with `give`."""
        mapping = self._mapped.get((process, serial))
        if mapping is None:
            for old in self._overlapping(process, base, nbytes):
                self._forget(device, process, old)
            mapping = self._mapped[process, serial] = _Mapping(device.import_memory(handle), base, nbytes)
            bisect.insort(self._places.setdefault(process, []), (base, serial))
        mapping.users += 1
        return mapping.address

    @exclusive
    def give(self, device: Device, process: int, serial: int) -> int:
        """Release one use of a mapping, if it still exists. Returns the bytes unmapped, 0 while others use it."""
        mapping = self._mapped.get((process, serial))
        if mapping is None:
            return 0
        mapping.users -= 1
        if mapping.users:
            return 0
        self._forget(device, process, serial)
        return mapping.end - mapping.base

    def _overlapping(self, process: int, base: int, nbytes: int) -> list[int]:
        """The numbers of a process's allocations that overlap this range of its addresses."""
        places = self._places.get(process, [])
        at = bisect.bisect_left(places, (base,))
        if at and self._mapped[process, places[at - 1][1]].end > base:
            at -= 1
        return [
            serial
            for _, serial in itertools.takewhile(
                lambda place: place[0] < base + nbytes, itertools.islice(places, at, None)
            )
        ]

    def _forget(self, device: Device, process: int, serial: int) -> None:
        mapping = self._mapped.pop((process, serial))
        self._places[process].remove((mapping.base, serial))
        device.forget_memory(mapping.address)


class _MappingUse:
    """One world's use of a mapping."""

    __slots__ = ("address", "nbytes", "used")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes
        self.used = 0
        """The number of the latest lookup."""


@exchangeable
class Card(NamedTuple):
    """The description of a rank that its peers receive once."""

    process: int
    """A number of the rank's process, unique across containers."""
    device: int
    """The GPU's number in that process."""
    events: tuple[int, ...]
    """The rank's events, as handles within its process."""
    handles: tuple[bytes, ...]
    """The events' interprocess handles."""
    probe: Sequence[int]
    """The description of an address that contains the rank's number."""


class IpcMemory:
    """Device memory of the ranks of one host, as one of them sees it.

    Args:
        events: number of events that peers can wait for.
        quiesce: waits until the device has finished all work that this rank has issued.

    Raises:
        TransportError: this system cannot share device memory or events.
    """

    def __init__(self, rank: int, device: Device, events: int, quiesce: Callable[[], None]) -> None:
        self._rank = rank
        self._device = device
        self._mappings = _mappings_of(device)
        self._quiesce = quiesce
        self._exported: dict[int, tuple[int, ...] | str] = {}
        self._mapped: OrderedDict[tuple[int, int], _MappingUse] = OrderedDict()
        """By the owner's process and the allocation's number in it; the most recently used is last."""
        self._mapped_bytes = self._lookups = 0
        self._processes: dict[int, int] = {}
        self._neighbours: set[int] = set()
        self._all_near = self._one_gpu = False
        self.events: dict[int, Sequence[int]] = {rank: [device.create_event(shared=True) for _ in range(events)]}
        """Every rank's events, by rank."""
        self._imported: list[int] = []
        self._probe = device.allocate(_PROBE_BYTES, shared=True)
        # A kernel, because copies can access memory that kernels cannot. Loaded here, because loading may make the
        # driver wait for the whole device.
        self._look = Kernels(device).combination(None, np.dtype(np.int64), [(1, 1, 1)])

    def card(self, stream: int) -> Card:
        """Describe this rank to its peers, after writing its probe on ``stream``."""
        device, own = self._device, tuple(self.events[self._rank])
        number = device.pinned(8)
        number[:] = bytearray(struct.pack("q", self._rank))
        device.copy(self._probe, int(number.ctypes.data), 8, stream)
        device.drain(stream)
        return Card(
            _PROCESS, device.index, own, tuple(device.export_event(event) for event in own), self.describe(self._probe)
        )

    def connect(self, cards: dict[int, Card], stream: int) -> None:
        """Open the peers' memory and events, and check that each probe contains the peer's number.

        Raises:
            TransportError: it does not, or a peer's memory or events cannot be opened.
        """
        device = self._device
        seen = device.pinned(8)
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
            self._look.move(self.locate(peer, card.probe), seen.ctypes.data, stream)
            device.drain(stream)
            number = struct.unpack("q", seen.tobytes())[0]
            if number != peer:
                raise TransportError(
                    f"rank {self._rank}: expected number {peer} in the device memory of rank {peer}, found {number} "
                    "[G20]"
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
        """An allocation's handle, or the reason why it has none; both are cached."""
        name: tuple[int, ...] | str
        try:
            # The driver would also share a small allocation's neighbours, and may refuse to map two of one block.
            # Between the GPUs of one process nothing is mapped, but memory without a handle cannot be accessed by
            # kernels of other GPUs.
            if allocation.nbytes < self._device.shared_unit and not self._all_near:
                name = (
                    f"an allocation of {allocation.nbytes} bytes is not shared: it is part of a block with others [G21]"
                )
            else:
                name = struct.unpack("8q", self._device.export_memory(allocation.base))
        except TransportError as error:
            name = str(error)
        if len(self._exported) >= _MOST_NAMES:
            self._exported.clear()
        self._exported[allocation.serial] = name
        return name

    def locate(self, peer: int, words: Sequence[int]) -> int:
        """The address at which this rank's kernels access memory that a peer has described."""
        if peer == self._rank or peer in self._neighbours:
            return words[0]
        address, serial, offset, nbytes = words[:4]
        key = (self._processes[peer], serial)
        use = self._mapped.get(key)
        if use is None:
            self._make_room(nbytes)
            handle = struct.pack("8q", *words[4:WORDS])
            use = self._mapped[key] = _MappingUse(
                self._mappings.take(self._device, *key, address - offset, nbytes, handle), nbytes
            )
            self._mapped_bytes += nbytes
        else:
            self._mapped.move_to_end(key)
        self._lookups += 1
        use.used = self._lookups
        return use.address + offset

    def _make_room(self, nbytes: int) -> None:
        """Release mappings beyond the limits before ``nbytes`` more are mapped."""
        most = _BATCH if len(self._mapped) >= _MOST_MAPPINGS else 0
        if not most and self._mapped_bytes + nbytes <= _FILLED:
            return
        longest_unused: list[tuple[int, int]] = []
        for key, use in self._mapped.items():
            if len(longest_unused) >= most and self._lookups - use.used <= _OLD:
                break
            longest_unused.append(key)
        if longest_unused:
            self._quiesce()
            self._give(longest_unused)

    def _give(self, keys: Sequence[tuple[int, int]]) -> int:
        """Release mappings that the device no longer uses. Returns the bytes unmapped."""
        for key in keys:
            self._mapped_bytes -= self._mapped.pop(key).nbytes
        return sum(self._mappings.give(self._device, *key) for key in keys)

    def release(self) -> int:
        """Release the peers' memory, which is mapped again at its next use. Returns the bytes unmapped."""
        if not self._mapped:
            return 0
        self._quiesce()
        return self._give(list(self._mapped))

    def forget(self) -> None:
        """Release the peers' memory and events, which the device must no longer use."""
        self._give(list(self._mapped))
        for event in self._imported:
            self._device.destroy_event(event)
        self._imported.clear()

    def close(self) -> None:
        """Release this rank's own resources; no peer may use them any more."""
        self.forget()
        for event in self.events[self._rank]:
            self._device.destroy_event(event)
        self._device.free(self._probe)


_of_device: weakref.WeakKeyDictionary[Device, Mappings] = weakref.WeakKeyDictionary()
_lock = threading.RLock()


def _mappings_of(device: Device) -> Mappings:
    return exclusively(_lock, _of_device.setdefault, device, Mappings())
