"""Mapping other processes' memory: once, as often as it is needed, and never the old beside the new; and how long it
stays mapped."""

from __future__ import annotations

from typing import Any

import pytest

from collectives.device.protocol import Allocation, active
from collectives.transport.cuda import cuda_ipc
from collectives.transport.cuda.cuda_ipc import WORDS, IpcMemory, Mappings
from tests.support.emulated import host_kernels
from tests.support.emulated.cuda import EmulatedDevice


class Driver:
    """Refuses to map what overlaps something mapped, as CUDA does (cudaErrorAlreadyMapped); a handle is (base,
    bytes)."""

    def __init__(self) -> None:
        self.mapped: dict[int, tuple[int, int]] = {}
        self.imports = 0

    def import_memory(self, handle: bytes) -> int:
        base, nbytes = (int.from_bytes(handle[at : at + 8], "little") for at in (0, 8))
        assert all(base + nbytes <= old or old + size <= base for old, size in self.mapped.values()), "already mapped"
        self.imports += 1
        self.mapped[self.imports << 20] = (base, nbytes)
        return self.imports << 20

    def forget_memory(self, address: int) -> None:
        del self.mapped[address]


def handle(base: int, nbytes: int) -> bytes:
    return base.to_bytes(8, "little") + nbytes.to_bytes(8, "little")


def take(mappings: Mappings, driver: Any, serial: int, base: int, nbytes: int, pid: int = 7) -> int:
    return mappings.take(driver, pid, serial, base, nbytes, handle(base if pid == 7 else base + (1 << 40), nbytes))


def test_an_allocation_is_mapped_once_for_all_and_until_the_last() -> None:
    driver: Any = Driver()
    mappings = Mappings()
    first = take(mappings, driver, 1, 4096, 4096)
    assert take(mappings, driver, 1, 4096, 4096) == first and driver.imports == 1
    mappings.give(driver, 7, 1)
    assert driver.mapped
    mappings.give(driver, 7, 1)
    assert not driver.mapped


def test_what_an_owner_has_freed_is_given_back_before_its_place_is_mapped_anew() -> None:
    driver: Any = Driver()
    mappings = Mappings()
    for serial, base in ((1, 0), (2, 8192), (3, 16384)):
        take(mappings, driver, serial, base, 8192)
    take(mappings, driver, 9, 0, 8192, pid=8)  # another process's, at the same address there
    new = take(mappings, driver, 4, 4096, 8192)  # overlaps the first two
    assert sorted(driver.mapped.values()) == [(4096, 8192), (16384, 8192), (1 << 40, 8192)]
    # Worlds that have used them give them back later: there is nothing to do.
    for serial in (1, 2):
        mappings.give(driver, 7, serial)
    assert new in driver.mapped and len(driver.mapped) == 3
    for pid, serial in ((7, 3), (7, 4), (8, 9)):
        mappings.give(driver, pid, serial)
    assert not driver.mapped


# ---- how long memory stays mapped


class Reached:
    """A rank's view of peers that are other processes, on a driver that counts: what is waited for, mapped and
    unmapped."""

    def __init__(self, peers: int) -> None:
        self.waits = 0
        self.driver: Any = Driver()
        device = EmulatedDevice()
        with active(device):
            self.memory = IpcMemory(0, device, 1, self._quiesce)
        device.close()
        self.memory._device, self.memory._mappings = self.driver, Mappings()
        self.memory._processes = {peer: 1000 + peer for peer in range(1, peers + 1)}

    def _quiesce(self) -> None:
        self.waits += 1

    def look(self, peer: int, allocation: Allocation, offset: int = 0) -> int:
        words = (allocation.base + offset, allocation.serial, offset, allocation.nbytes, *([0] * (WORDS - 4)))
        name = handle(allocation.base + (peer << 50), allocation.nbytes)
        words = (*words[:4], *(int.from_bytes(name[at : at + 8], "little") for at in (0, 8)), *words[6:])
        return self.memory.locate(peer, words)


def allocations(count: int, nbytes: int = 1 << 20) -> list[Allocation]:
    return [Allocation(number * nbytes, nbytes, number) for number in range(count)]


pytestmark = pytest.mark.skipif(host_kernels.COMPILER is None, reason=host_kernels.MISSING)


def test_tensors_that_come_again_and_again_are_mapped_once() -> None:
    """4 ranks and 30 large tensors: 90 mappings, whichever of them an operation needs."""
    reached = Reached(3)
    tensors = allocations(30, 64 << 20)
    first = {}
    for step in range(300):
        tensor = tensors[step * 7 % 30]
        for peer in (1, 2, 3):
            at = reached.look(peer, tensor, offset=4096)
            assert first.setdefault((peer, tensor.serial), at) == at
    assert (reached.driver.imports, len(reached.driver.mapped), reached.waits) == (90, 90, 0)


def test_where_there_are_too_many_the_longest_unused_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_ipc._MOST_MAPPINGS >= 1000 and cuda_ipc._BATCH >= 100
    monkeypatch.setattr(cuda_ipc, "_MOST_MAPPINGS", 64)
    monkeypatch.setattr(cuda_ipc, "_BATCH", 16)
    reached = Reached(1)
    tensors = allocations(cuda_ipc._MOST_MAPPINGS + 1)
    for tensor in (*tensors[:-1], tensors[0]):
        reached.look(1, tensor)
    assert reached.waits == 0
    reached.look(1, tensors[-1])
    assert reached.waits == 1 and len(reached.driver.mapped) == cuda_ipc._MOST_MAPPINGS + 1 - cuda_ipc._BATCH
    before = reached.driver.imports
    for tensor in (tensors[0], *tensors[cuda_ipc._BATCH + 1 :]):  # all but the longest unused are there
        reached.look(1, tensor)
    assert reached.driver.imports == before
    for tensor in tensors[1 : cuda_ipc._BATCH]:  # and these fit in again, without another wait
        reached.look(1, tensor)
    assert reached.waits == 1


def test_where_much_is_mapped_what_is_old_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """But nothing that is in use, however much that is."""
    monkeypatch.setattr(cuda_ipc, "_FILLED", 10 << 20)
    monkeypatch.setattr(cuda_ipc, "_OLD", 100)
    reached = Reached(1)
    tensors = allocations(40)
    for _ in range(5):
        for tensor in tensors[:20]:
            reached.look(1, tensor)
    assert reached.waits == 0 and len(reached.driver.mapped) == 20
    for step in range(200):
        reached.look(1, tensors[20 + step % 3])
    assert reached.waits == 0  # nothing is looked for until more is mapped
    reached.look(1, tensors[30])
    assert reached.waits == 1 and len(reached.driver.mapped) == 4


def test_everything_is_given_back_when_that_is_asked_for() -> None:
    reached = Reached(2)
    for peer in (1, 2):
        for tensor in allocations(5):
            reached.look(peer, tensor)
    key = (reached.memory._processes[1], 0)
    reached.memory._mappings.take(reached.driver, *key, 0, 1 << 20, b"")  # another world uses this one too
    assert reached.memory.release() == 9 << 20
    assert reached.waits == 1 and len(reached.driver.mapped) == 1
    assert reached.memory.release() == 0 and reached.waits == 1
    reached.look(2, allocations(5)[3])
    assert len(reached.driver.mapped) == 2
