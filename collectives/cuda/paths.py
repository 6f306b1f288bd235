"""Paths: how one operation between blocks of device memory is carried out, once its transport is chosen.

A path has the two halves of a task (`collectives.engine.tasks`): `prepare` before the ranks meet, whose words travel
with the meeting, and `run` after it.

    SchedulePath   a schedule, over mapped memory or messages (`launches`, `executor`)
    NcclPath       NCCL's own collective
    HostPath       the host's engine, between page-locked copies
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from collectives.base.reduce_op import Op
from collectives.cuda.accelerator import Accelerator
from collectives.cuda.launches import DevicePlan
from collectives.cuda.planner import DeviceChoice
from collectives.cuda.transfer import DeviceBlock
from collectives.device.kernel_sources import WAYS
from collectives.device.kernels import Combination, Scaling
from collectives.engine.handles import Handle
from collectives.engine.request_cache import CachedRequest
from collectives.engine.tasks import AdasumTensor, OneTensor
from collectives.tensors.arrays import address
from collectives.transport.base import Array

Words = Sequence[int] | memoryview


class DevicePath(Protocol):
    """How an operation is carried out."""

    def prepare(self, source: DeviceBlock, out: DeviceBlock) -> Words:
        """Describe the blocks to the peers; called when the work that produces ``source`` has been enqueued.

        Returns:
            The words with which this rank enters the negotiation round.
        """

    def run(self, source: DeviceBlock, out: DeviceBlock) -> None:
        """Issue the operation; all ranks have prepared."""


class SchedulePath:
    """A schedule."""

    def __init__(self, accelerator: Accelerator, choice: DeviceChoice, plan: DevicePlan, dtype: np.dtype[Any]) -> None:
        self._accelerator = accelerator
        self._plan = plan
        self._dtype = dtype
        self._over_nccl = choice.transport == "nccl"

    def prepare(self, source: DeviceBlock, out: DeviceBlock) -> Words:
        return self._accelerator.transfer.prepare(self._plan, source, out, replayed=self._over_nccl)

    def run(self, source: DeviceBlock, out: DeviceBlock) -> None:
        accelerator, plan = self._accelerator, self._plan
        states: Sequence[int] = ()
        if self._over_nccl:
            states = accelerator.transfer.capture_states(plan)
            # Also if this rank has no message in the plan: connecting and taking turns are collective.
            accelerator.connection.use_messages("nccl")
            accelerator.take_turn()
        elif plan.messages:
            accelerator.connection.use_messages("mpi")
        accelerator.transfer.run(plan, self._dtype, states)


class NcclPath:
    """NCCL's own all-reduce, reduce-scatter, all-gather of equal shares, or broadcast."""

    def __init__(
        self,
        accelerator: Accelerator,
        collective: str,
        dtype: np.dtype[Any],
        count: int,
        op: Op | None = None,
        finish: Scaling | None = None,
        root: int = 0,
    ) -> None:
        self._accelerator = accelerator
        self._collective = collective
        self._op = op
        self._root = root
        self._dtype = dtype
        self._count = count
        self._finishing: Combination | None = None
        if finish is not None:
            share = count // (accelerator.context.size if collective == "reducescatter" else 1)
            self._finishing = accelerator.kernels.combination(None, dtype, [(1, 1, share)], finish)

    def prepare(self, source: DeviceBlock, out: DeviceBlock) -> Words:
        return ()

    def run(self, source: DeviceBlock, out: DeviceBlock) -> None:
        accelerator, count, dtype = self._accelerator, self._count, self._dtype
        communicator, stream = accelerator.connection.communicator(), accelerator.executor.main
        accelerator.take_turn()
        if self._collective == "broadcast":
            communicator.broadcast(source.address, out.address, count, dtype, self._root, stream)
            return
        if self._collective == "allgather":
            communicator.all_gather(source.address, out.address, count, dtype, stream)
            return
        assert self._op is not None
        if self._collective == "reducescatter":
            share = count // communicator.size
            communicator.reduce_scatter(source.address, out.address, share, dtype, self._op, stream)
        else:
            communicator.all_reduce(source.address, out.address, count, dtype, self._op, stream)
        if self._finishing is not None:
            self._finishing.pointers[0, 0] = self._finishing.pointers[0, WAYS] = out.address
            self._finishing.launch(stream)


class HostPath:
    """The host's engine, between page-locked copies of the blocks; ``request`` is the same one for host memory."""

    def __init__(self, accelerator: Accelerator, request: CachedRequest) -> None:
        context = accelerator.context
        self._accelerator = accelerator
        self._request = request
        self._task = (AdasumTensor if request.op is Op.ADASUM else OneTensor)(context, request)
        self._handle: Handle | None = None

    def prepare(self, source: DeviceBlock, out: DeviceBlock) -> Words:
        accelerator, dtype = self._accelerator, self._request.dtype
        copy = copy_to_host(accelerator, source, dtype)
        in_place = out.address == source.address
        result = copy if in_place else accelerator.pinned("result", out.nbytes // dtype.itemsize, dtype)
        self._handle = Handle(self._request, copy, result, lambda handle: None)
        return self._task.prepare_handles([self._handle])

    def run(self, source: DeviceBlock, out: DeviceBlock) -> None:
        assert self._handle is not None
        self._task.run_handles([self._handle])
        copy_to_device(self._accelerator, self._handle.out, out.address)
        self._handle = None


def allreduce_path(
    accelerator: Accelerator,
    choice: DeviceChoice,
    count: int,
    dtype: np.dtype[Any],
    op: Op,
    finish: Scaling | None,
    host: CachedRequest,
) -> DevicePath:
    """The path of an all-reduce; ``host`` is the same request for host memory."""
    if choice.transport == "host":
        return HostPath(accelerator, host)
    if choice.native:
        return NcclPath(accelerator, "allreduce", dtype, count, op, finish)
    plan = accelerator.plans.allreduce((count,), dtype, choice, op, finish)
    return SchedulePath(accelerator, choice, plan, dtype)


def copy_to_host(accelerator: Accelerator, source: DeviceBlock, dtype: np.dtype[Any]) -> Array:
    """A page-locked copy of a block, as elements of ``dtype``; waits until it has arrived. The next call reuses its
    memory."""
    copy = accelerator.pinned("source", source.nbytes // dtype.itemsize, dtype)
    if source.nbytes:
        accelerator.device.copy(address(copy), source.address, source.nbytes, accelerator.executor.main)
    accelerator.wait()
    return copy


def copy_to_device(accelerator: Accelerator, array: Array, target: int) -> None:
    """Copy a page-locked array to an address; waits until it has arrived, because the memory is reused."""
    accelerator.device.copy(target, address(array), array.nbytes, accelerator.executor.main)
    accelerator.wait()
