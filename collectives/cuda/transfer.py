"""Carrying a plan out between addresses: what is told to the peers before, and what is found out from them after the
ranks have met.

Memory that cannot be shared with other processes (some allocators map it piecemeal) is copied to memory that can, and
the result back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from collectives.base.errors import TransportError
from collectives.cuda.executor import DeviceExecutor
from collectives.cuda.launches import SPACES, DevicePlan, entry_of
from collectives.device.protocol import Array, Device
from collectives.plan.lowering import Space
from collectives.transport.base import Control
from collectives.transport.cuda_ipc import WORDS

_NOWHERE = (0,) * WORDS


class DeviceBuffers:
    """Pieces of device memory by name, that grow when they must and stay until the world ends, because peers may have
    mapped them.

    Args:
        device: whose memory it is.
        idle: waits until the device is done with all that was issued. To allocate may make the driver wait for the
            whole device, and where ranks are threads of one process it would wait for kernels that wait for this rank.
    """

    def __init__(self, device: Device, idle: Callable[[], None]) -> None:
        self._device = device
        self._idle = idle
        self._pieces: dict[str, tuple[int, int]] = {}
        self._outgrown: list[tuple[int, int]] = []

    def get(self, name: str, nbytes: int) -> int:
        """The address of at least ``nbytes`` bytes; what they held is lost when they grow."""
        address, size = self._pieces.get(name, (0, 0))
        if size < nbytes:
            larger = max(
                1 << 16, 1 << (nbytes - 1).bit_length() if nbytes <= 1 << 30 else -(-nbytes // (1 << 26)) << 26
            )
            self._idle()
            found = self._device.allocate(larger, shared=True)
            if address:
                self._outgrown.append((address, size))
            self._pieces[name] = (address, size) = (found, larger)
        return address

    def trim(self) -> int:
        """Free what was outgrown, which neither the device nor a peer uses any more; the bytes."""
        freed = 0
        while self._outgrown:
            address, size = self._outgrown.pop()
            self._device.free(address)
            freed += size
        return freed

    def close(self) -> None:
        """Give everything back; nobody may use it any more."""
        self._outgrown += self._pieces.values()
        self._pieces.clear()
        self.trim()


@dataclass(slots=True)
class Block:
    """Some bytes of this rank's device memory."""

    address: int
    nbytes: int


class Transfer:
    """Runs plans between this rank's blocks and those of its peers.

    Args:
        rank, size: of the world.
        control: of the world.
        device: of this rank.
        executor: that runs plans.
        buffers: of the world.
    """

    def __init__(
        self, rank: int, size: int, control: Control, device: Device, executor: DeviceExecutor, buffers: DeviceBuffers
    ) -> None:
        self._rank, self._size = rank, size
        self._control = control
        self._device = device
        self._executor = executor
        self._buffers = buffers
        self._table: Array = np.zeros(size * SPACES + 1, np.int64)
        self._back: tuple[Block, Block] | None = None

    def prepare(self, plan: DevicePlan, source: Block, out: Block, *, replayed: bool) -> Sequence[int]:
        """Everything that peers will read has been given to the stream; the words by which they find it.

        ``replayed``: the plan uses nothing but NCCL on any rank, and may be replayed as a graph, of which the ranks
        must have the same.
        """
        own = self._table[entry_of(self._rank, Space.INPUT) :]
        self._back = None
        words: list[int] = []
        if plan.partners:
            at, described = self._shared("source", source, copies=True)
            words += described
            if out.address == source.address:
                there = at
            else:
                there, described = self._shared("result", out, copies=False)
            words += described
            if there != out.address and out.nbytes:
                self._back = (Block(there, out.nbytes), out)
        else:
            at, there = source.address, out.address
        window = self._buffers.get("window", plan.window_bytes) if plan.window_bytes else 0
        if plan.window_bytes and plan.partners:
            words += self._describe(window)
        own[:SPACES] = (at, there, window)
        self._table[-1] = self._buffers.get("letters", plan.scratch_bytes) if plan.scratch_bytes else 0
        if plan.partners:
            self._executor.begin()
        elif self._executor.graphs and replayed:
            words.append(self._executor.standing(plan, self._table))
        # Over messages all ranks must show each other as many words, also one that is alone on its host.
        words += [0] * (plan.least_words - len(words))
        return words

    def standings(self, plan: DevicePlan) -> Sequence[int]:
        """How all ranks stand with a plan that is replayed where graphs are; read before the ranks meet again."""
        if not self._executor.graphs:
            return ()
        own = self._executor.standing(plan, self._table)
        return [own if peer == self._rank else self._control.words_of(peer)[0] for peer in range(self._size)]

    def run(self, plan: DevicePlan, dtype: np.dtype[Any], standings: Sequence[int] = ()) -> None:
        """All ranks have prepared this plan and met with their words."""
        memory, table = self._executor.memory, self._table
        if plan.partners:
            assert memory is not None
            for peer in plan.partners:
                words = self._control.words_of(peer)
                for space, at in ((Space.INPUT, 0), (Space.OUTPUT, WORDS), (Space.WINDOW, 2 * WORDS)):
                    if (peer, space) in plan.reached:
                        table[entry_of(peer, space)] = memory.locate(peer, words[at : at + WORDS])
        self._executor.run(plan, table, dtype, standings)
        if self._back is not None:
            shared, out = self._back
            self._device.copy(out.address, shared.address, out.nbytes, self._executor.main)
            self._back = None

    def describe(self, block: Block) -> Sequence[int]:
        """A block that peers are going to read, in words; copied to where they can if need be. Zeros where memory is
        not shared."""
        if self._executor.memory is None:
            return _NOWHERE
        address, words = self._shared("source", block, copies=True)
        block.address = address
        return words

    def _shared(self, name: str, block: Block, *, copies: bool) -> tuple[int, Sequence[int]]:
        """The block, or a copy of it that can be shared; and its words."""
        if not block.nbytes:
            return block.address, _NOWHERE
        try:
            return block.address, self._describe(block.address)
        except TransportError:
            address = self._buffers.get(name, block.nbytes)
            if copies:
                self._device.copy(address, block.address, block.nbytes, self._executor.main)
            return address, self._describe(address)

    def _describe(self, address: int) -> Sequence[int]:
        assert self._executor.memory is not None
        return self._executor.memory.describe(address)
