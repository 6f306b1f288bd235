"""Handles of operations on device tensors; the counterpart of `collectives.engine.host_handles`.

A handle records the position of the caller's stream, so that the operation comes after the work that made the tensor,
and has a fence, which orders the caller's later work after the operation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.base.exclusion import exclusive
from collectives.cuda.accelerator import Accelerator
from collectives.cuda.completion import Completion, Fence
from collectives.cuda.request_cache import CachedDeviceRequest, DeviceRequestCache
from collectives.device.packing import Packing
from collectives.device.protocol import active
from collectives.engine.handles import Handle
from collectives.tensors import cuda_tensors, streams
from collectives.tensors.cuda_tensors import DeviceArray, DeviceView


class DeviceHandles:
    """Makes the handles of one world for device tensors; see `collectives.engine.requests.Handles`.

    Args:
        requests: of the world, for device tensors.
    """

    def __init__(self, rank: int, requests: DeviceRequestCache, accelerator: Accelerator) -> None:
        self.requests = requests
        self._rank = rank
        self._accelerator = accelerator
        self._lock = threading.RLock()
        """Serializes the threads of a world of one rank, which has no engine to do so."""

    def in_place(self, entry: CachedDeviceRequest, view: DeviceView, tensor: Any, stores: bool = True) -> Handle:
        def finish() -> Any:
            if stores:
                view.store()
            return tensor

        return self._handle(entry, view, view.array, finish, (view, tensor), writes=stores)

    def out_of_place(
        self, entry: CachedDeviceRequest, view: DeviceView, shape: tuple[int, ...], out: Any = None
    ) -> Handle:
        """See `Handles.out_of_place`; the result is always a new tensor."""
        with active(view.device):
            result, elements = view.empty(shape)
        return self._handle(entry, view, elements, lambda: view.wrap(result), (view, result))

    def gathered(
        self,
        entry: CachedDeviceRequest,
        view: DeviceView,
        rows: Sequence[int],
        finish: Callable[[Any, Any], Any] | None = None,
        out: Any = None,
    ) -> Handle:
        """See `Handles.gathered`; the result is always a new tensor."""

        def make() -> Any:
            result, received = handle.gathered
            result = view.wrap(result)
            return result if finish is None else finish(result, received)

        handle = self._handle(entry, view, view.array.part(0, 0), make, view)
        handle.rows = rows
        return handle

    def filled(self, shape: tuple[int, ...], dtype: np.dtype[Any], value: Any) -> DeviceView:
        """The view of a new tensor of equal elements, on the engine's stream."""
        accelerator = self._accelerator
        device = accelerator.use(None)
        with active(device):
            stream = accelerator.executor.main
            view = cuda_tensors.view(device.empty(shape, dtype, stream), stream=stream)
            if view.nbytes:
                content = accelerator.device.pinned(view.nbytes)[: view.nbytes].view(dtype)
                content[...] = value
                device.copy(view.array.address, content.ctypes.data, view.nbytes, stream)
                # Until it has been copied, even if the operation fails.
                accelerator.keep(accelerator.mark(stream), content)
        return view

    def _handle(
        self,
        entry: CachedDeviceRequest,
        view: DeviceView,
        out: DeviceArray,
        finish: Callable[[], Any],
        keep: Any,
        writes: bool = False,
    ) -> Handle:
        accelerator = self._accelerator
        accelerator.use(view.device)
        handle = Handle(
            entry, view.array, out, _nothing, keep, reads=None if writes else view, writes=view if writes else None
        )
        handle.fence = Fence(view, finish, lambda: accelerator.failure)
        handle.fence.whose = f"rank {self._rank}: {entry.request.name or entry.request.collective}"
        return handle

    def mark(self, handle: Handle) -> None:
        """Record the positions of the caller's streams, before the operation is submitted: it comes after the work
        that they have been given so far.

        Raises:
            InvalidArgumentError: a stream is being captured into a graph.
        """
        accelerator = self._accelerator
        marks: dict[int, Completion] = {}
        with accelerator.active():
            for part in (handle, *handle.members):
                if part.fence is None:
                    continue
                stream = part.fence.view.stream
                mark = marks.get(stream)
                if mark is None:
                    streams.free_of_capture(accelerator.device, stream, "tensor")
                    mark = marks[stream] = accelerator.mark(stream)
                part.ready = mark

    @exclusive
    def run_alone(self, handle: Handle) -> None:
        """Carry out an operation in a world of one rank."""
        accelerator = self._accelerator
        entry: Any = handle.entry
        with accelerator.active():
            if handle.ready is not None:
                accelerator.follow(handle.ready)
                handle.ready = None
            if entry.request.collective in ("allgather", "alltoall"):
                rows = sum(handle.rows)
                result, handle.out = handle.fence.view.empty((rows, *(entry.request.shape or ())))
                accelerator.follow(accelerator.mark(handle.fence.view.stream))
                handle.gathered = (result, [rows])
            source, out = handle.source, handle.out
            if source.size and (entry.packs or entry.scale is not None or entry.divide is not None):
                entry.step = entry.step or _Alone(accelerator, entry, source.size)
                entry.step.run(source.address, out.address)
            elif source.size and source.address != out.address:
                accelerator.device.copy(out.address, source.address, out.nbytes, accelerator.executor.main)
            handle.fence.completion = accelerator.complete((handle.source, handle.out, handle.keep))


class _Alone:
    """Single-rank path: scale a tensor as if all ranks had reduced it, and round it as if it had travelled."""

    def __init__(self, accelerator: Accelerator, entry: CachedDeviceRequest, count: int) -> None:
        self._accelerator = accelerator
        packing = Packing(
            accelerator.device, accelerator.kernels, [count], entry.dtype, entry.wire, entry.scale, entry.divide
        )
        self._packing: Packing | None = accelerator.adopt(packing, self)
        self._nbytes = packing.total * entry.wire.itemsize

    def run(self, source: int, out: int) -> None:
        assert self._packing is not None
        accelerator, stream = self._accelerator, self._accelerator.executor.main
        buffer = accelerator.buffers.get("bucket", self._nbytes)
        self._packing.pack(np.array([source], np.int64), buffer, stream)
        self._packing.unpack(buffer, np.array([out], np.int64), stream)

    def release(self) -> None:
        """Drop the packing, which belongs to the accelerator."""
        self._packing = None


def _nothing(handle: Handle) -> None:
    """The fence makes the caller's result when it is fetched."""
