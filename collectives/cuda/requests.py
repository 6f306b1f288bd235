"""The door for device tensors: what a caller passes becomes a handle, or is refused. The counterpart of
`collectives.engine.requests`.

The handle notes where the caller's stream is, so that the operation comes after the work that made the tensor, and has
a fence, which puts what the caller does next behind the operation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from collectives.base import dtypes
from collectives.base.reduce_op import Op
from collectives.cuda.accelerator import Accelerator
from collectives.cuda.completion import Completion, Fence
from collectives.cuda.request_cache import CachedDeviceRequest, DeviceRequestCache
from collectives.device.kernel_sources import WAYS
from collectives.device.kernels import Combination, Scaling
from collectives.device.packing import Packing
from collectives.device.protocol import active
from collectives.engine import arguments
from collectives.engine.handles import Handle
from collectives.engine.negotiation import Request
from collectives.schedules import partition
from collectives.tensors import arrays, compression, cuda_tensors, reduction, streams
from collectives.tensors.cuda_tensors import DeviceArray, DeviceView


class DeviceHandleFactory:
    """Makes the handles of one world for device tensors.

    Args:
        rank, size: of the world.
        entries: of the world, for device tensors.
        accelerator: of the world.
    """

    def __init__(self, rank: int, size: int, entries: DeviceRequestCache, accelerator: Accelerator) -> None:
        self._rank, self._size = rank, size
        self._entries = entries
        self._accelerator = accelerator
        self._one_at_a_time = threading.Lock()
        """Of the threads of a world of one rank, which has no engine that sees to it."""

    def allreduce(
        self,
        view: DeviceView,
        tensor: Any,
        average: bool | None,
        op: Op | None,
        name: str | None,
        prescale: float,
        postscale: float,
        compressor: Any,
        algorithm: str | None,
        transport: str | None,
        in_place: bool,
    ) -> Handle:
        entry = self._entries.reducing(
            "allreduce", view, average, op, name, prescale, postscale, compressor, algorithm, transport
        )
        if in_place:
            return self._in_place(entry, view, tensor)
        return self._out_of_place(entry, view, view.shape)

    def reducescatter(
        self,
        view: DeviceView,
        op: Op | None,
        name: str | None,
        prescale: float,
        postscale: float,
        algorithm: str | None,
        transport: str | None,
    ) -> Handle:
        arguments.with_rows(view, "reducescatter")
        entry = self._entries.reducing(
            "reducescatter", view, None, op, name, prescale, postscale, None, algorithm, transport
        )
        return self._out_of_place(entry, view, self._share(view.shape))

    def broadcast(
        self,
        view: DeviceView,
        tensor: Any,
        root: int,
        name: str | None,
        algorithm: str | None,
        transport: str | None,
        in_place: bool,
    ) -> Handle:
        entry = self._entries.broadcasting(view, root, name, algorithm, transport)
        if in_place:
            return self._in_place(entry, view, tensor, stores=self._rank != root)
        return self._out_of_place(entry, view, view.shape)

    def allgather(self, view: DeviceView, name: str | None, algorithm: str | None, transport: str | None) -> Handle:
        arguments.with_rows(view, "allgather")
        entry = self._entries.gathering("allgather", view, name, algorithm, transport)
        return self._gathered(entry, view, (view.shape[0],), lambda result, received: result)

    def alltoall(
        self, view: DeviceView, splits: Any, name: str | None, algorithm: str | None, transport: str | None
    ) -> Handle:
        arguments.with_rows(view, "alltoall")
        rows = arguments.splits(splits, view.shape[0], self._size)
        entry = self._entries.gathering("alltoall", view, name, algorithm, transport)

        def with_splits(result: Any, received: Any) -> Any:
            if splits is None:
                return result
            counts = np.array(received, np.int64)
            given = arrays.view(splits) if hasattr(splits, "dtype") and splits.dtype == counts.dtype else None
            return result, given.wrap(counts) if isinstance(given, arrays.View) else counts

        return self._gathered(entry, view, rows, with_splits)

    def neutral(self, request: Request) -> Handle:
        """What a rank that has run out of data contributes."""
        device = self._accelerator.use(None)
        dtype, shape = dtypes.resolve(request.dtype), request.shape or ()
        how = (request.algorithm, request.transport)
        rows = request.collective in ("allgather", "alltoall")
        with active(device):
            stream = self._accelerator.executor.main
            view = cuda_tensors.view(device.empty((0, *shape) if rows else shape, dtype, stream), stream=stream)
            if rows:
                entry = self._entries.gathering(request.collective, view, request.name, *how)
                counts = (0,) * (1 if request.collective == "allgather" else self._size)
                return self._gathered(entry, view, counts, lambda result, received: None)
            op = None if request.root is not None else Op(request.op)
            value = 0 if op is None or op is Op.ADASUM else reduction.identity(op, dtype)
            content = self._accelerator.device.pinned(max(1, view.nbytes))[: view.nbytes].view(dtype)
            content[...] = value
            device.copy(view.array.address, content.ctypes.data, view.nbytes, stream)
            # Until it has been copied, whatever becomes of the operation.
            self._accelerator.keeper.keep(self._accelerator.mark(stream), content)
        if op is None:
            entry = self._entries.broadcasting(view, request.root, request.name, *how)
            return self._in_place(entry, view, None)
        compressor = compression.named(request.wire)
        entry = self._entries.reducing(
            request.collective, view, None, op, request.name, request.prescale, request.postscale, compressor, *how
        )
        if request.collective == "allreduce":
            return self._in_place(entry, view, None)
        return self._out_of_place(entry, view, self._share(shape))

    # ---- handles
    # ------------------------------------------------------------------------------------------------------------------

    def _in_place(self, entry: CachedDeviceRequest, view: DeviceView, tensor: Any, stores: bool = True) -> Handle:
        def finish() -> Any:
            if stores:
                view.store()
            return tensor

        return self._handle(entry, view, view.array, finish, (view, tensor), writes=stores)

    def _out_of_place(self, entry: CachedDeviceRequest, view: DeviceView, shape: tuple[int, ...]) -> Handle:
        with active(view.device):
            result, out = view.empty(shape)
        return self._handle(entry, view, out, lambda: view.wrap(result), (view, result))

    def _gathered(
        self, entry: CachedDeviceRequest, view: DeviceView, rows: tuple[int, ...], finish: Callable[[Any, Any], Any]
    ) -> Handle:
        def make() -> Any:
            result, received = handle.gathered
            return finish(view.wrap(result), received)

        handle = self._handle(entry, view, view.array.part(0, 0), make, view)
        handle.rows = rows
        return handle

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
        """Note where the caller's streams are, before the operation is submitted: it comes after what they have been
        given so far.

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
                    streams.free_of_capture(accelerator.device, stream, "tensor", streams.OUTSIDE)
                    mark = marks[stream] = accelerator.mark(stream)
                part.ready = mark

    def _share(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this rank's rows."""
        return (partition.rows(shape[0], self._size)[self._rank], *shape[1:])

    # ---- a world of one rank
    # ---------------------------------------------------------------------------------------------------------

    def alone(self, handle: Handle) -> None:
        """Carry an operation out without anybody else."""
        accelerator = self._accelerator
        entry: Any = handle.entry
        with self._one_at_a_time, accelerator.active():
            if handle.ready is not None:
                accelerator.follow(handle.ready)
                handle.ready = None
            if entry.request.collective in ("allgather", "alltoall"):
                rows = sum(handle.rows)
                result, handle.out = handle.fence.view.empty((rows, *(entry.request.shape or ())))
                accelerator.follow(accelerator.mark(handle.fence.view.stream))
                handle.gathered = (result, [rows])
            if handle.gathered is not None:
                accelerator.device.copy(
                    handle.out.address, handle.source.address, handle.out.nbytes, accelerator.executor.main
                )
            elif handle.source.size:
                entry.step = entry.step or _Alone(accelerator, entry, handle.source.size, handle.out.size)
                entry.step.run(handle.source.address, handle.out.address)
            handle.fence.completion = accelerator.complete((handle.source, handle.out, handle.keep))


class _Alone:
    """What one rank makes of a tensor: it is scaled as if all ranks had reduced it, and rounded as if it had travelled.

    Args:
        accelerator: of the world.
        entry: the request.
        source, out: elements of input and output.
    """

    def __init__(self, accelerator: Accelerator, entry: CachedDeviceRequest, source: int, out: int) -> None:
        self._accelerator = accelerator
        self._packing: Packing | None = None
        self._steps: list[Combination] = []
        if entry.packs:
            packing = Packing(
                accelerator.device, accelerator.kernels, [source], entry.dtype, entry.wire, entry.scale, entry.divide
            )
            self._packing = accelerator.adopt(packing, self)
            self._nbytes = packing.total * entry.wire.itemsize
        else:
            scalings: list[Scaling | None] = [
                scaling for scaling in (entry.scale, entry.divide) if scaling is not None
            ] or [None]
            self._steps = [
                accelerator.kernels.combination(None, entry.dtype, [(1, 1, out)], scaling) for scaling in scalings
            ]
            self._copies = scalings == [None]

    def run(self, source: int, out: int) -> None:
        stream = self._accelerator.executor.main
        if self._packing is not None:
            buffer = self._accelerator.buffers.get("bucket", self._nbytes)
            self._packing.pack(np.array([source], np.int64), buffer, stream)
            self._packing.unpack(buffer, np.array([out], np.int64), stream)
        elif not (self._copies and source == out):
            for step in self._steps:
                step.pointers[0, 0], step.pointers[0, WAYS] = source, out
                step.launch(stream)
                source = out


def _nothing(handle: Handle) -> None:
    """The caller's result is made when it is asked for: see `Fence`."""
