"""Paths: how one operation between blocks of device memory is carried out, once its transport is chosen.

A path has the two halves of a task (`collectives.engine.tasks`): `prepare` describes the blocks to the peers, once the
work that produces ``source`` has been enqueued, and returns the words with which this rank enters the negotiation
round; `run` issues the operation, once all ranks have prepared.

    SchedulePath   a schedule, over mapped memory or messages (`launches`, `executor`)
    NcclPath       NCCL's own collective
    HostPath       the host's engine, between page-locked copies
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.base import dtypes
from collectives.base.reduce_op import Op
from collectives.cuda.accelerator import Accelerator
from collectives.cuda.launches import DevicePlan
from collectives.cuda.planner import DeviceChoice
from collectives.cuda.transfer import DeviceBlock
from collectives.device.kernels import Combination, Scaling
from collectives.engine.handles import Handle
from collectives.engine.request_cache import CachedRequest, TensorSpec
from collectives.engine.rows import Rows
from collectives.engine.tasks import AdasumTensor, OneTensor
from collectives.schedules.registry import REPRODUCIBLE
from collectives.tensors.arrays import address

Words = Sequence[int] | memoryview


class SchedulePath:
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
    """An all-reduce, a reduce-scatter, an all-gather of equal shares, or a broadcast of NCCL's."""

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
            self._finishing.move(out.address, out.address, stream)


class HostPath:
    """The host's engine, between page-locked copies of the blocks.

    Args:
        request: the same one for host memory.
        rows: of this rank, in an all-gather or an all-to-all.
    """

    def __init__(self, accelerator: Accelerator, request: CachedRequest, rows: Sequence[int] = ()) -> None:
        self._accelerator = accelerator
        self._request = request
        self._rows = rows
        self._task = (Rows if rows else AdasumTensor if request.op is Op.ADASUM else OneTensor)(
            accelerator.context, request
        )
        self._handle: Handle | None = None

    def prepare(self, source: DeviceBlock, out: DeviceBlock) -> Words:
        accelerator, dtype = self._accelerator, self._request.dtype
        copy = accelerator.pinned("source", source.nbytes // dtype.itemsize, dtype)
        if source.nbytes:
            accelerator.device.copy(address(copy), source.address, source.nbytes, accelerator.executor.main)
        accelerator.wait()
        self._result = copy if out == source else accelerator.pinned("result", out.nbytes // dtype.itemsize, dtype)
        self._handle = Handle(self._request, copy, self._result, lambda handle: None, rows=self._rows)
        return self._task.prepare_handles([self._handle])

    def run(self, source: DeviceBlock, out: DeviceBlock) -> None:
        accelerator, handle, result = self._accelerator, self._handle, self._result
        assert handle is not None
        self._task.run_handles([handle])
        if handle.out is not result:  # rows are gathered in new memory
            np.copyto(result, handle.out)
        accelerator.device.copy(out.address, address(result), result.nbytes, accelerator.executor.main)
        accelerator.wait()  # because the page-locked memory is reused
        self._handle = None


DevicePath = SchedulePath | NcclPath | HostPath


def allreduce_path(
    accelerator: Accelerator, choice: DeviceChoice, count: int, dtype: np.dtype[Any], op: Op
) -> DevicePath:
    """The path of an all-reduce whose result is not scaled, such as that of a packed bucket: an average is left as a
    sum, unless it is of halves."""
    if choice.transport == "host":
        shape: Any = TensorSpec((count,), dtype)
        keywords = {
            "op": op if dtypes.is_half(dtype) else op.combining(dtype),
            **({"algorithm": REPRODUCIBLE} if choice.stepwise else {}),
        }
        request = accelerator.context.entries.reducing("allreduce", shape, None, keywords)
        return HostPath(accelerator, request)
    if choice.native:
        return NcclPath(accelerator, "allreduce", dtype, count, op)
    plan = accelerator.plans.allreduce((count,), dtype, choice, op, None)
    return SchedulePath(accelerator, choice, plan, dtype)
