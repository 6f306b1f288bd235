"""What a world needs for tensors on GPUs, in one piece: made when the first such tensor comes, and not imported
before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from collectives.base.config import Config
from collectives.base.reduce_op import Op
from collectives.cuda.accelerator import Accelerator
from collectives.cuda.handles import DeviceHandles
from collectives.cuda.request_cache import DeviceRequestCache
from collectives.cuda.tasks import DeviceBucket, DeviceOne, DeviceRows, DeviceTask
from collectives.engine.context import Context
from collectives.transport.cuda.issue_order import Turn

_ALONE_FROM = 16 << 20
"""Bytes from which a tensor is reduced where it lies: packing it moves four more bytes for each of its own, which
takes longer than a separate operation."""


class DeviceBackend:
    """The accelerator of a world, and the handles and tasks of its device tensors; arguments as of `Accelerator`."""

    def __init__(
        self, context: Context, config: Config, local_rank: int, turn: Turn, on_failure: Callable[[Exception], None]
    ) -> None:
        self.accelerator = Accelerator(context, config, local_rank, turn, on_failure)
        requests = DeviceRequestCache(context.size, context.planner, context.entries)
        self.handles = DeviceHandles(context.rank, requests, self.accelerator)
        context.device_tasks = self._tasks
        context.release_devices = self.accelerator.release

    def free(self) -> None:
        """Free everything. No peer may use this rank's memory any more."""
        self.handles.requests.forget()
        self.accelerator.free()

    def _tasks(self, entries: Sequence[Any]) -> list[tuple[DeviceTask, Sequence[int]]]:
        """The tasks of requests that may be fused: large tensors alone, the others in buckets."""
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
