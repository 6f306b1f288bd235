"""Tasks on device tensors: as `collectives.engine.tasks`, in two halves between which the ranks meet.

    DeviceOne       an all-reduce, reduce-scatter or broadcast of one tensor, without packing it
    DeviceBucket    all-reduces of several tensors as one: packed by one kernel, reduced in a buffer, unpacked by one
    DeviceRows      an all-gather or an all-to-all; the ranks exchange the numbers of rows

A world's first task cannot prepare: the ranks connect their devices in its second half, and meet once more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.base.errors import CollectivesError, InvalidArgumentError, TransportError, bare
from collectives.base.logging import logger
from collectives.base.reduce_op import Op
from collectives.cuda.accelerator import Accelerator
from collectives.cuda.calibration import calibrate
from collectives.cuda.connection import ConnectError
from collectives.cuda.paths import DevicePath, HostPath, NcclPath, SchedulePath, Words, allreduce_path
from collectives.cuda.planner import DeviceChoice
from collectives.cuda.request_cache import CachedDeviceRequest
from collectives.cuda.transfer import DeviceBlock
from collectives.device.kernels import Combination, Scaling
from collectives.device.packing import Packing
from collectives.engine.handles import Handle
from collectives.tensors.cuda_tensors import DeviceArray
from collectives.transport.base import Array
from collectives.transport.cuda import nccl_elements
from collectives.transport.cuda.cuda_ipc import WORDS

_MOST_ROWS = 64
"""Lists of rows whose paths a task remembers."""


class _RefusedError(Exception):
    """Deterministic planner rejection; identical on every rank, so that it fails the operation alone.

    Other failures, such as memory that runs out, occur on one rank and end the world on all.
    """

    def __init__(self, error: CollectivesError, handle: Handle, rank: int) -> None:
        self.error = type(error)(f"rank {rank}: {handle.name}: {bare(rank, error)}")


class DeviceTask:
    """The two halves of a task, and connecting the devices between them; ``entry`` is a bucket's first request."""

    packs = False
    description = ""

    def __init__(self, accelerator: Accelerator, entry: CachedDeviceRequest) -> None:
        self.entry = entry
        self.token = entry.signature
        self.accelerator = accelerator
        self._problem: CollectivesError | None = None
        self._early = self._decided = False

    def prepare_handles(self, handles: Sequence[Handle]) -> Words:
        """The words to enter the negotiation round with; none before the devices are connected."""
        self._early = not self.accelerator.connection.established
        return () if self._early else self._prepare(handles)

    def withdraw(self) -> None:
        """Nothing to release: what was prepared are addresses."""

    def run_handles(self, handles: Sequence[Handle]) -> None:
        accelerator = self.accelerator
        if self._early:
            if not accelerator.connection.established:
                with accelerator.active():
                    accelerator.connection.establish()
                    calibrate(accelerator)
            accelerator.context.meet(self.token, self._prepare(handles))
        if self._problem is not None:
            _fail(handles, self._problem)
            return
        with accelerator.active():
            try:
                self._run(handles)
            except ConnectError as error:
                _fail(handles, error)
            completion = accelerator.complete([(handle.source, handle.out, handle.keep) for handle in handles])
        for handle in handles:
            if handle.fence is not None:
                handle.fence.completion = completion

    def _prepare(self, handles: Sequence[Handle]) -> Words:
        accelerator = self.accelerator
        self._problem = None
        with accelerator.active():
            followed = None
            for handle in handles:
                mark, handle.ready = handle.ready, None
                if mark is not None and mark is not followed:  # members of a grouped operation share one
                    accelerator.follow(mark)
                    followed = mark
            accelerator.tidy()
            try:
                if not self._decided:
                    # Loading kernels and allocating may make the driver wait for the whole device: see
                    # `transfer.DeviceBuffers`.
                    accelerator.wait()
                self._decide(handles[0])
                self._decided = True
            except _RefusedError as refused:
                self._problem = refused.error
                return ()
            return self._begin(handles)

    def _decide(self, handle: Handle) -> None:
        """Choose the path if that has not been done; raises _RefusedError if the planner rejects the request."""
        raise NotImplementedError

    def _begin(self, handles: Sequence[Handle]) -> Words:
        """First half: enqueue what precedes the meeting of the ranks; returns the words to enter with."""
        raise NotImplementedError

    def _run(self, handles: Sequence[Handle]) -> None:
        """Second half: issue the operation."""
        raise NotImplementedError

    def _choose(self, handle: Handle, collective: str, nbytes: int, native: bool) -> DeviceChoice:
        request, accelerator = self.entry.request, self.accelerator
        algorithm, transport = request.algorithm, request.transport
        try:
            choice = accelerator.connection.planner.choose(
                collective, nbytes, native=native, algorithm=algorithm, transport=transport
            )
        except (InvalidArgumentError, TransportError) as error:
            raise _RefusedError(error, handle, accelerator.context.rank) from None
        if nbytes and accelerator.context.rank == 0:
            way = choice.algorithm, choice.transport, choice.why
            logger.debug("%s of %d bytes on GPUs: %s over %s (%s)", collective, nbytes, *way)
        return choice


class DeviceOne(DeviceTask):
    """One tensor."""

    _path: DevicePath | None = None
    _scaling: Combination | None = None

    def _decide(self, handle: Handle) -> None:
        if self._path is None and self.entry.moves:
            self._path = self._choose_path(handle)

    def _choose_path(self, handle: Handle) -> DevicePath:
        entry, accelerator = self.entry, self.accelerator
        collective, dtype, op, count = entry.request.collective, entry.dtype, entry.op, entry.count
        shape, root = entry.request.shape or (), entry.request.root or 0
        if op is Op.ADASUM:
            return HostPath(accelerator, entry.host)
        native = collective == "broadcast" or (op is not None and nccl_elements.reduces(op, dtype))
        if collective == "reducescatter" and shape[0] % accelerator.context.size:
            native = False  # NCCL scatters equal shares only
        choice = self._choose(handle, collective, entry.nbytes, native)
        self.description = f"{choice.algorithm} over {choice.transport}"
        if entry.scale is not None and choice.transport != "host":
            # A reduce-scatter: an all-reduce with a factor is packed.
            self._scaling = accelerator.kernels.combination(None, dtype, [(1, 1, count)], entry.scale)
        if choice.transport == "host":
            return HostPath(accelerator, entry.host)
        if choice.native:
            return NcclPath(accelerator, collective, dtype, count, op, entry.divide, root)
        if collective == "broadcast":
            plan = accelerator.plans.broadcast((count,), dtype, root, choice)
        elif collective == "reducescatter":
            plan = accelerator.plans.reducescatter(shape, dtype, choice, op, entry.divide)
        else:
            plan = accelerator.plans.allreduce((count,), dtype, choice, op, entry.divide)
        return SchedulePath(accelerator, choice, plan, dtype)

    def _begin(self, handles: Sequence[Handle]) -> Words:
        handle = handles[0]
        self._source, self._out = _block(handle.source), _block(handle.out)
        accelerator, scaling = self.accelerator, self._scaling
        if self._path is None:
            return ()
        if scaling is not None and not accelerator.context.joined:
            scaled = accelerator.buffers.get("scaled", self._source.nbytes)
            scaling.move(self._source.address, scaled, accelerator.executor.main)
            self._source = DeviceBlock(scaled, self._source.nbytes)
        return self._path.prepare(self._source, self._out)

    def _run(self, handles: Sequence[Handle]) -> None:
        if self._path is not None:
            self._path.run(self._source, self._out)


class DeviceBucket(DeviceTask):
    """Several tensors, or one that is scaled or compressed before it travels."""

    packs = True
    _packing: Packing | None = None
    _unscaled: Packing | None = None
    _path: DevicePath | None = None

    def __init__(self, accelerator: Accelerator, entries: Sequence[CachedDeviceRequest]) -> None:
        super().__init__(accelerator, entries[0])
        self._counts = [entry.count for entry in entries]
        self._buffer = DeviceBlock(0, 0)
        self._addresses: Array = np.zeros(len(entries), np.int64)

    def _decide(self, handle: Handle) -> None:
        if self._path is not None:
            return
        accelerator, entry = self.accelerator, self.entry
        # Kept although the choice may be refused: the task may recur.
        packing = self._packing = self._packing or self._pack_with(entry.scale)
        dtype, total, op = entry.wire, packing.total, entry.op
        assert op is not None
        self._nbytes = total * dtype.itemsize
        choice = self._choose(handle, "allreduce", self._nbytes, nccl_elements.reduces(op, dtype))
        self.description = f"fused {choice.algorithm} over {choice.transport}"
        self._path = allreduce_path(accelerator, choice, total, dtype, op)

    def _pack_with(self, scale: Scaling | None) -> Packing:
        entry, accelerator = self.entry, self.accelerator
        packing = Packing(
            accelerator.device, accelerator.kernels, self._counts, entry.dtype, entry.wire, scale, entry.divide
        )
        return accelerator.adopt(packing, self)

    def _begin(self, handles: Sequence[Handle]) -> Words:
        accelerator = self.accelerator
        stream = accelerator.executor.main
        address = accelerator.buffers.get("bucket", self._nbytes)
        if address != self._buffer.address:
            self._buffer = DeviceBlock(address, self._nbytes)
            accelerator.device.clear(address, self._nbytes, stream)  # the gaps between tensors are reduced too
        self._addresses[:] = [handle.source.address for handle in handles]
        packing = self._packing
        assert packing is not None and self._path is not None
        if accelerator.context.joined and self.entry.scale is not None:
            # This rank contributes neutral elements, which must not be scaled.
            if self._unscaled is None:
                accelerator.wait()  # see `_prepare`
                self._unscaled = self._pack_with(None)
            packing = self._unscaled
        packing.pack(self._addresses, address, stream)
        return self._path.prepare(self._buffer, self._buffer)

    def _run(self, handles: Sequence[Handle]) -> None:
        assert self._packing is not None and self._path is not None
        self._path.run(self._buffer, self._buffer)
        self._addresses[:] = [handle.out.address for handle in handles]
        self._packing.unpack(self._buffer.address, self._addresses, self.accelerator.executor.main)


class DeviceRows(DeviceTask):
    """An all-gather or an all-to-all."""

    def __init__(self, accelerator: Accelerator, entry: CachedDeviceRequest) -> None:
        super().__init__(accelerator, entry)
        self._paths: dict[tuple[int, ...], DevicePath | None] = {}

    def _decide(self, handle: Handle) -> None:
        request = self.entry.request
        self._choose(handle, request.collective, 0, request.collective == "allgather")  # only to see if it is refused

    def _begin(self, handles: Sequence[Handle]) -> Words:
        handle = handles[0]
        self._source = _block(handle.source)
        return (*self.accelerator.transfer.describe(self._source), *handle.rows)

    def _run(self, handles: Sequence[Handle]) -> None:
        handle, accelerator, entry = handles[0], self.accelerator, self.entry
        context = accelerator.context
        every: list[Sequence[int]] = [
            handle.rows if peer == context.rank else context.control.words_of(peer)[WORDS:]
            for peer in range(context.size)
        ]
        gathers = entry.request.collective == "allgather"
        received = [words[0] if gathers else words[context.rank] for words in every]
        rows = tuple(words[0] for words in every) if gathers else tuple(itertools.chain.from_iterable(every))
        result, array = handle.fence.view.empty((sum(received), *(entry.request.shape or ())))
        # The caller's stream may have used this memory until now.
        accelerator.follow(accelerator.mark(handle.fence.view.stream))
        handle.gathered, handle.out = (result, received), array
        try:
            path = self._path_for(handle, rows, gathers)
        except _RefusedError as refused:  # on all ranks, which know the same rows
            handle.fail(refused.error)
            return
        if path is not None:
            out = _block(array)
            context.meet(self.token, path.prepare(self._source, out))
            path.run(self._source, out)

    def _path_for(self, handle: Handle, rows: tuple[int, ...], gathers: bool) -> DevicePath | None:
        """The path for these rows of all ranks; None if nothing moves."""
        if rows in self._paths:
            return self._paths[rows]
        if len(self._paths) >= _MOST_ROWS:
            self._paths.clear()
        accelerator, entry = self.accelerator, self.entry
        sizes = [count * math.prod(entry.request.shape or ()) for count in rows]
        nbytes = sum(sizes) * entry.dtype.itemsize // (1 if gathers else accelerator.context.size)
        # NCCL gathers equal shares only, and has no all-to-all of its own.
        choice = self._choose(handle, entry.request.collective, nbytes, gathers and len(set(sizes)) == 1)
        path: DevicePath | None = None
        if any(sizes) and choice.transport == "host":
            path = HostPath(accelerator, entry.host, handle.rows)
        elif any(sizes) and choice.native:
            path = NcclPath(accelerator, "allgather", entry.dtype, sizes[0])
        elif any(sizes):
            make: Callable[..., Any] = accelerator.plans.allgather if gathers else accelerator.plans.alltoall
            path = SchedulePath(accelerator, choice, make(sizes, entry.dtype, choice), entry.dtype)
        self._paths[rows] = path
        return path


def _fail(handles: Sequence[Handle], error: CollectivesError) -> None:
    for handle in handles:
        handle.fail(error)


def _block(array: DeviceArray) -> DeviceBlock:
    return DeviceBlock(array.address, array.nbytes)
