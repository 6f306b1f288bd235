"""Runs plans between blocks of device memory: describes this rank's blocks to the peers before the ranks meet, and
locates theirs afterwards.

Memory that cannot be shared with other processes (some allocators map it piecemeal) is copied to memory that can, and
the result is copied back.
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
from collectives.plan.program import Space
from collectives.transport.base import Control
from collectives.transport.cuda.cuda_ipc import WORDS

_NOWHERE = (0,) * WORDS


class DeviceBuffers:
    """Buffers in device memory, by name. They grow on demand, and are kept until the world ends, because peers may have
    mapped them.

    Args:
        device: that owns the memory.
        idle: blocks until the device has done all issued work. An allocation may make the driver wait for the whole
            device; where ranks are threads of one process it would wait for kernels that wait for this rank.
    """

    def __init__(self, device: Device, idle: Callable[[], None]) -> None:
        self._device = device
        self._idle = idle
        self._buffers: dict[str, tuple[int, int]] = {}
        self._outgrown: list[tuple[int, int]] = []

    def get(self, name: str, nbytes: int) -> int:
        """The address of a buffer of at least ``nbytes`` bytes; its contents are lost when it grows."""
        address, size = self._buffers.get(name, (0, 0))
        if size < nbytes:
            larger = max(
                1 << 16, 1 << (nbytes - 1).bit_length() if nbytes <= 1 << 30 else -(-nbytes // (1 << 26)) << 26
            )
            self._idle()
            allocated = self._device.allocate(larger, shared=True)
            if address:
                self._outgrown.append((address, size))
            self._buffers[name] = (address, size) = (allocated, larger)
        return address

    def trim(self) -> int:
        """Free outgrown buffers, which neither the device nor a peer uses any more. Returns their bytes."""
        freed = 0
        while self._outgrown:
            address, size = self._outgrown.pop()
            self._device.free(address)
            freed += size
        return freed

    def close(self) -> None:
        """Free all buffers, which neither the device nor a peer uses any more."""
        self._outgrown += self._buffers.values()
        self._buffers.clear()
        self.trim()


@dataclass(slots=True)
class DeviceBlock:
    """Bytes of this rank's device memory."""

    address: int
    nbytes: int


class Transfer:
    def __init__(
        self, rank: int, size: int, control: Control, device: Device, executor: DeviceExecutor, buffers: DeviceBuffers
    ) -> None:
        self._rank, self._size = rank, size
        self._control = control
        self._device = device
        self._executor = executor
        self._buffers = buffers
        self._table: Array = np.zeros(size * SPACES + 1, np.int64)
        self._back: tuple[DeviceBlock, DeviceBlock] | None = None

    def prepare(self, plan: DevicePlan, source: DeviceBlock, out: DeviceBlock, *, replayed: bool) -> Sequence[int]:
        """See `paths`.

        Args:
            replayed: the plan uses only NCCL, on all ranks, and may be replayed as a graph.
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
                self._back = (DeviceBlock(there, out.nbytes), out)
        else:
            at, there = source.address, out.address
        window = self._buffers.get("window", plan.window_bytes) if plan.window_bytes else 0
        if plan.window_bytes and plan.partners:
            words += self._describe(window)
        own[:SPACES] = (at, there, window)
        self._table[-1] = self._buffers.get("scratch", plan.scratch_bytes) if plan.scratch_bytes else 0
        if plan.partners:
            self._executor.begin()
        elif self._executor.graphs and replayed:
            words.append(self._executor.capture_state(plan, self._table))
        # Over messages all ranks must send equally many words, also a rank that is alone on its host.
        words += [0] * (plan.least_words - len(words))
        return words

    def capture_states(self, plan: DevicePlan) -> Sequence[int]:
        """`DeviceExecutor.capture_state` of all ranks; empty without graphs. Called before the ranks meet again."""
        if not self._executor.graphs:
            return ()
        own = self._executor.capture_state(plan, self._table)
        return [own if peer == self._rank else self._control.words_of(peer)[0] for peer in range(self._size)]

    def run(self, plan: DevicePlan, dtype: np.dtype[Any], states: Sequence[int] = ()) -> None:
        """Issue a plan that all ranks have prepared, after they have met with their words."""
        memory, table = self._executor.memory, self._table
        if plan.partners:
            assert memory is not None
            for peer in plan.partners:
                words = self._control.words_of(peer)
                for space, at in ((Space.INPUT, 0), (Space.OUTPUT, WORDS), (Space.WINDOW, 2 * WORDS)):
                    if (peer, space) in plan.reached:
                        table[entry_of(peer, space)] = memory.locate(peer, words[at : at + WORDS])
        self._executor.run(plan, table, dtype, states)
        if self._back is not None:
            shared, out = self._back
            self._device.copy(out.address, shared.address, out.nbytes, self._executor.main)
            self._back = None

    def describe(self, block: DeviceBlock) -> Sequence[int]:
        """The words that describe a block that peers will read; zeros where memory is not shared. The block is replaced
        by a copy if it cannot be shared."""
        if self._executor.memory is None:
            return _NOWHERE
        address, words = self._shared("source", block, copies=True)
        block.address = address
        return words

    def _shared(self, name: str, block: DeviceBlock, *, copies: bool) -> tuple[int, Sequence[int]]:
        """The address of the block, or of a buffer in place of it that can be shared, and its words; ``copies``: the
        block's contents, to the buffer."""
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
