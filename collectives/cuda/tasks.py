"""Tasks on device tensors: as `collectives.engine.tasks`, in two halves between which the ranks meet.

    DeviceOne       an all-reduce, reduce-scatter or broadcast of one tensor, between the tensors themselves where they can be reached
    DeviceBucket    all-reduces of several tensors as one: packed by one kernel, reduced in the buffer, unpacked by one kernel
    DeviceRows      an allgather or an all-to-all: how many rows move is found out on the way

Before the first half of the first task of a world there is nothing to prepare with: the ranks then connect their
devices in the second half, where all of them are, and meet once more.
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
from collectives.cuda.paths import Hosted, Native, Planned, Way, allreduce_by, bring, messages_of
from collectives.cuda.planner import DeviceChoice
from collectives.cuda.request_cache import CachedDeviceRequest
from collectives.cuda.transfer import DeviceBlock
from collectives.device.kernel_sources import WAYS
from collectives.device.kernels import Combination
from collectives.device.packing import Packing
from collectives.engine.handles import Handle
from collectives.engine.tasks import Rows
from collectives.schedules import partition
from collectives.tensors.cuda_tensors import DeviceArray
from collectives.transport import nccl_elements
from collectives.transport.base import Array
from collectives.transport.cuda_ipc import WORDS

Words = Sequence[int] | memoryview


class _RefusedError(Exception):
    """The planner's answer to what was asked for. All ranks ask for the same and know the same, so that all of them are
    given it.

    Whatever else goes wrong, memory that runs out, say, does so on one rank, and must end the world on all.
    """

    def __init__(self, error: CollectivesError, handle: Handle, rank: int) -> None:
        self.error = type(error)(f"rank {rank}: {handle.name}: {bare(rank, error)}")


class DeviceTask:
    """What the tasks have in common: the two halves, and the detour when the devices have not met yet."""

    packs = False

    def __init__(self, accelerator: Accelerator, entry: CachedDeviceRequest) -> None:
        self.entry = entry
        self.token = entry.signature
        self.accelerator = accelerator
        self._problem: CollectivesError | None = None
        self._early = self._decided = False

    def prepare_handles(self, handles: Sequence[Handle]) -> Words:
        """The words to enter the round with; none before the devices have met."""
        self._early = not self.accelerator.connection.established
        return () if self._early else self._prepare(handles)

    def run_handles(self, handles: Sequence[Handle]) -> None:
        accelerator = self.accelerator
        if self._early:
            with accelerator.active():
                accelerator.connection.establish()
                calibrate(accelerator)
            accelerator.context.meet(self.token, self._prepare(handles))
        if self._problem is not None:
            for handle in handles:
                handle.fail(self._problem)
            return
        with accelerator.active():
            try:
                self._run(handles)
            except ConnectError as error:
                for handle in handles:
                    handle.fail(error)
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
                if mark is not None and mark is not followed:  # the members of a group have one
                    accelerator.follow(mark)
                    followed = mark
            accelerator.tidy()
            try:
                if not self._decided:
                    # To load kernels and to allocate may make the driver wait for the whole device: see
                    # `transfer.DeviceBuffers`.
                    accelerator.wait()
                self._decide(handles[0])
                self._decided = True
            except _RefusedError as refused:
                self._problem = refused.error
                return ()
            return self._begin(handles)

    def _decide(self, handle: Handle) -> None:
        """Choose a way, if it has not been chosen yet; raises _RefusedError where the one asked for cannot be had."""
        raise NotImplementedError

    def _begin(self, handles: Sequence[Handle]) -> Words:
        raise NotImplementedError

    def _run(self, handles: Sequence[Handle]) -> None:
        raise NotImplementedError

    def _choose(self, handle: Handle, collective: str, nbytes: int, native: bool) -> DeviceChoice:
        request, accelerator = self.entry.request, self.accelerator
        try:
            algorithm, transport = request.algorithm, request.transport
            choice = accelerator.connection.planner.choose(
                collective, nbytes, native=native, algorithm=algorithm, transport=transport
            )
        except (InvalidArgumentError, TransportError) as error:
            raise _RefusedError(error, handle, accelerator.context.rank) from None
        if nbytes and accelerator.context.rank == 0:
            asked = " (as asked for)" if algorithm or transport else ""
            logger.debug(
                "%s of %d bytes on GPUs: %s over %s%s", collective, nbytes, choice.algorithm, choice.transport, asked
            )
        return choice


class DeviceOne(DeviceTask):
    """One tensor."""

    _way: Way | None = None
    _scaling: Combination | None = None

    def _decide(self, handle: Handle) -> None:
        if self._way is not None or not self.entry.moves:
            return
        entry, accelerator = self.entry, self.accelerator
        collective, dtype, op, count = entry.request.collective, entry.dtype, entry.op, entry.count
        shape, size = entry.request.shape or (), accelerator.context.size
        share = (
            math.prod((_rows(shape, size, accelerator.context.rank), *shape[1:]))
            if collective == "reducescatter"
            else count
        )
        if op is Op.ADASUM:
            self._way = Hosted(accelerator, accelerator.context, entry.host, count, share)
            return
        native = collective == "broadcast" or (op is not None and nccl_elements.reduces(op, dtype))
        if collective == "reducescatter" and shape[0] % size:
            native = False  # NCCL scatters equal shares only
        choice = self._choose(handle, collective, entry.nbytes, native)
        self.description = f"{choice.algorithm} over {choice.transport}"
        if collective == "allreduce":
            assert op is not None
            self._way = allreduce_by(choice, accelerator, count, dtype, op, entry.divide, entry.host)
        elif choice.transport == "host":
            self._way = Hosted(accelerator, accelerator.context, entry.host, count, share)
        elif choice.native:
            self._way = Native(accelerator, collective, op, entry.request.root or 0, dtype, count).finished_by(
                entry.divide
            )
        elif collective == "broadcast":
            plan = accelerator.plans.broadcast(count, dtype, entry.request.root or 0, choice)
            self._way = Planned(accelerator, plan, dtype, messages_of(choice))
        else:
            assert op is not None
            plan = accelerator.plans.reducescatter(shape, dtype, op, choice, entry.divide)
            self._way = Planned(accelerator, plan, dtype, messages_of(choice))
        if entry.scale is not None and choice.transport != "host":
            # A reduce-scatter: an all-reduce with a factor is packed.
            self._scaling = accelerator.kernels.combination(None, dtype, [(1, 1, count)], entry.scale)

    def _begin(self, handles: Sequence[Handle]) -> Words:
        handle = handles[0]
        self._source, self._out = block(handle.source), block(handle.out)
        accelerator, scaling = self.accelerator, self._scaling
        if self._way is None:
            return ()
        if scaling is not None and not accelerator.context.joined:
            scaled = accelerator.buffers.get("scaled", self._source.nbytes)
            scaling.pointers[0, 0], scaling.pointers[0, WAYS] = self._source.address, scaled
            scaling.launch(accelerator.executor.main)
            self._source = DeviceBlock(scaled, self._source.nbytes)
        return self._way.prepare(self._source, self._out)

    def _run(self, handles: Sequence[Handle]) -> None:
        if self._way is not None:
            self._way.run(self._source, self._out)


class DeviceBucket(DeviceTask):
    """Several tensors, or one that is scaled or compressed on its way."""

    packs = True
    _packing: Packing | None = None
    _unscaled: Packing | None = None
    _way: Way | None = None

    def __init__(self, accelerator: Accelerator, entries: Sequence[CachedDeviceRequest]) -> None:
        super().__init__(accelerator, entries[0])
        self._counts = [entry.count for entry in entries]
        self._buffer = DeviceBlock(0, 0)
        self._addresses: Array = np.zeros(len(entries), np.int64)

    def _decide(self, handle: Handle) -> None:
        if self._way is not None:
            return
        accelerator, entry = self.accelerator, self.entry
        # Kept although the choice may be refused: the task may come again.
        packing = self._packing = self._packing or self._pack_with(entry.scale)
        dtype, total, op = entry.wire, packing.total, entry.op
        assert op is not None
        nbytes = total * dtype.itemsize
        choice = self._choose(handle, "allreduce", nbytes, nccl_elements.reduces(op, dtype))
        self.description = f"fused {choice.algorithm} over {choice.transport}"
        self._way = allreduce_by(choice, accelerator, total, dtype, op, None, accelerator.host_entry(total, dtype, op))
        self._nbytes = nbytes

    def _pack_with(self, scale: Any) -> Packing:
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
            accelerator.device.clear(address, self._nbytes, stream)  # what lies between the tensors is reduced too
        self._addresses[:] = [handle.source.address for handle in handles]
        packing = self._packing
        assert packing is not None and self._way is not None
        if accelerator.context.joined and self.entry.scale is not None:
            # This rank contributes neutral elements, which no factor may touch.
            if self._unscaled is None:
                accelerator.wait()  # see `_prepare`
                self._unscaled = self._pack_with(None)
            packing = self._unscaled
        packing.pack(self._addresses, address, stream)
        return self._way.prepare(self._buffer, self._buffer)

    def _run(self, handles: Sequence[Handle]) -> None:
        assert self._packing is not None and self._way is not None
        self._way.run(self._buffer, self._buffer)
        self._addresses[:] = [handle.out.address for handle in handles]
        self._packing.unpack(self._buffer.address, self._addresses, self.accelerator.executor.main)


class DeviceRows(DeviceTask):
    """An allgather or an all-to-all."""

    _inner: Rows | None = None

    def __init__(self, accelerator: Accelerator, entry: CachedDeviceRequest) -> None:
        super().__init__(accelerator, entry)
        self._plans: dict[tuple[int, ...], tuple[DeviceChoice, Way | None]] = {}

    def _decide(self, handle: Handle) -> None:
        request = self.entry.request
        self._choose(handle, request.collective, 0, request.collective == "allgather")  # refuses what cannot be had

    def _begin(self, handles: Sequence[Handle]) -> Words:
        handle = handles[0]
        self._source = block(handle.source)
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
        result, out = handle.fence.view.empty((sum(received), *(entry.request.shape or ())))
        # The memory may have been in use on the caller's stream until a moment ago.
        accelerator.follow(accelerator.mark(handle.fence.view.stream))
        handle.gathered, handle.out = (result, received), out
        try:
            choice, way = self._plan_for(handle, rows, gathers)
        except _RefusedError as refused:  # all ranks know the same rows
            handle.fail(refused.error)
            return
        if way is None:
            if choice.transport == "host":
                self._through_host(handle)
            return
        words = way.prepare(self._source, block(out))
        context.meet(self.token, words)
        way.run(self._source, block(out))

    def _plan_for(self, handle: Handle, rows: tuple[int, ...], gathers: bool) -> tuple[DeviceChoice, Way | None]:
        known = self._plans.get(rows)
        if known is not None:
            return known
        if len(self._plans) >= _MOST_ROWS:
            self._plans.clear()
        accelerator, entry = self.accelerator, self.entry
        sizes = [count * math.prod(entry.request.shape or ()) for count in rows]
        nbytes = sum(sizes) * entry.dtype.itemsize // (1 if gathers else accelerator.context.size)
        # NCCL gathers equal shares only, and it has no all-to-all of its own.
        choice = self._choose(handle, entry.request.collective, nbytes, gathers and len(set(sizes)) == 1)
        way: Way | None = None
        if any(sizes) and choice.native:
            way = Native(accelerator, "allgather", None, 0, entry.dtype, sizes[0])
        elif any(sizes) and choice.transport != "host":
            make: Callable[..., Any] = accelerator.plans.allgather if gathers else accelerator.plans.alltoall
            way = Planned(accelerator, make(sizes, entry.dtype, choice), entry.dtype, messages_of(choice))
        self._plans[rows] = (choice, way)
        return choice, way

    def _through_host(self, handle: Handle) -> None:
        """The host's own allgather or all-to-all, between page-locked copies."""
        accelerator, entry = self.accelerator, self.entry
        context, device, stream = accelerator.context, accelerator.device, accelerator.executor.main
        into = accelerator.pinned("source", self._source.nbytes // entry.dtype.itemsize, entry.dtype)
        bring(accelerator, self._source, into)
        accelerator.wait()
        self._inner = self._inner or Rows(context, entry.host)
        twin = Handle(entry.host, into, _EMPTY, lambda handle: None, rows=handle.rows)
        context.meet(self.token, self._inner.prepare_handles([twin]))
        self._inner.run_handles([twin])
        staging = accelerator.pinned("result", twin.out.size, entry.dtype)
        np.copyto(staging, twin.out)
        device.copy(handle.out.address, staging.ctypes.data, staging.nbytes, stream)
        accelerator.wait()


def block(array: DeviceArray) -> DeviceBlock:
    """The memory of some elements."""
    return DeviceBlock(array.address, array.nbytes)


def _rows(shape: Sequence[int], size: int, rank: int) -> int:
    """Rows of a rank's share."""
    return partition.rows(shape[0], size)[rank]


_EMPTY: Array = np.empty(0)
_MOST_ROWS = 64
