"""The device side of a world, in one piece: it is made when the first tensor on a GPU comes, and nothing of it is
imported before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from collectives.base.config import Config
from collectives.base.reduce_op import Op
from collectives.cuda.accelerator import Accelerator
from collectives.cuda.request_cache import DeviceRequestCache
from collectives.cuda.requests import DeviceHandleFactory
from collectives.cuda.tasks import DeviceBucket, DeviceOne, DeviceRows, DeviceTask
from collectives.engine.context import Context
from collectives.transport.issue_order import Turn

_ALONE_FROM = 16 << 20
"""Bytes from which a tensor is reduced where it is: packing it would move four bytes more for each of its own, which
takes longer than an operation of its own costs."""


class DeviceBackend(DeviceHandleFactory):
    """The door for device tensors, and what is behind it.

    Args:
        context, config: of the world.
        local_rank: this rank among those of its host.
        turn: of this rank.
        on_failure: told when work on the device has been aborted.
    """

    def __init__(
        self, context: Context, config: Config, local_rank: int, turn: Turn, on_failure: Callable[[Exception], None]
    ) -> None:
        self.accelerator = Accelerator(context, config, local_rank, turn, on_failure)
        super().__init__(
            context.rank,
            context.size,
            DeviceRequestCache(context.size, context.planner, context.entries),
            self.accelerator,
        )
        context.device_tasks = self._tasks
        context.release_devices = self.release

    def settle(self, within: float) -> bool:
        """Give the GPU so many seconds to be done with all that was issued; whether it is."""
        return self.accelerator.settle(within)

    def release(self) -> int:
        """Give back the peers' memory, which is mapped again where it is used again; the bytes that are mapped no
        more."""
        return self.accelerator.release()

    def trim(self) -> int:
        """Give back what this rank has outgrown, when no peer has it mapped; the bytes."""
        return self.accelerator.trim()

    def close(self) -> None:
        """Stop using the peers' memory; the GPU is done."""
        self.accelerator.close()

    def free(self) -> None:
        """Give everything back, when no peer uses this rank's memory any more."""
        self._entries.forget()
        self.accelerator.free()

    def _tasks(self, entries: Sequence[Any]) -> list[tuple[DeviceTask, Sequence[int]]]:
        """The tasks of entries that may be fused: large tensors alone, the others in buckets."""
        accelerator = self.accelerator
        tasks: list[tuple[DeviceTask, Sequence[int]]] = []
        small: list[int] = []
        for number, entry in enumerate(entries):
            if entry.request.collective in ("allgather", "alltoall"):
                tasks.append((DeviceRows(accelerator, entry), (number,)))
            elif entry.moves and entry.packs:
                small.append(number)
            elif entry.nbytes >= _ALONE_FROM or not entry.moves or entry.op is Op.ADASUM or len(entries) == 1:
                tasks.append((DeviceOne(accelerator, entry), (number,)))
            else:
                small.append(number)
        if len(small) == 1 and not entries[small[0]].packs:
            tasks.append((DeviceOne(accelerator, entries[small[0]]), small))
        elif small:
            tasks.append((DeviceBucket(accelerator, [entries[number] for number in small]), small))
        return tasks
