"""Ways: how one operation between blocks of device memory is carried out, once it is known by which transport.

Each has the two halves of a task (`collectives.engine.tasks`): `prepare` before the ranks meet, whose words travel with
them, and `run` after.

    Planned   one of our schedules, over mapped memory or messages (`launches`, `executor`)
    Native    NCCL's own collective
    Hosted    the host's engine, between page-locked copies
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
from collectives.engine.context import Context
from collectives.engine.handles import Handle
from collectives.engine.request_cache import CachedRequest
from collectives.engine.tasks import Combine, One
from collectives.transport.base import Array


class Way(Protocol):
    """How an operation is carried out.

    Attributes:
        description: for people.
    """

    description: str

    def prepare(self, source: DeviceBlock, out: DeviceBlock) -> Sequence[int] | memoryview:
        """What peers will read has been given to the stream; the words to enter the round with."""

    def run(self, source: DeviceBlock, out: DeviceBlock) -> None:
        """All ranks have prepared."""


class Planned:
    """One of our schedules.

    Args:
        accelerator: of the world.
        plan: that is run.
        dtype: of the elements.
        transport: that carries messages.
    """

    def __init__(self, accelerator: Accelerator, plan: DevicePlan, dtype: np.dtype[Any], transport: str) -> None:
        self.description = plan.description
        self._accelerator = accelerator
        self._plan = plan
        self._dtype = dtype
        self._transport = transport

    def prepare(self, source: DeviceBlock, out: DeviceBlock) -> Sequence[int]:
        return self._accelerator.transfer.prepare(self._plan, source, out, replayed=self._transport == "nccl")

    def run(self, source: DeviceBlock, out: DeviceBlock) -> None:
        accelerator, plan = self._accelerator, self._plan
        states: Sequence[int] = ()
        if self._transport == "nccl":
            states = accelerator.transfer.capture_states(plan)
            # Also where this rank has no message in it: all ranks connect, and take their turns, together.
            accelerator.connection.use_messages("nccl")
            accelerator.take_turn()
        elif plan.messages:
            accelerator.connection.use_messages(self._transport)
        accelerator.transfer.run(plan, self._dtype, states)


class Native:
    """NCCL's own all-reduce, reduce-scatter, allgather of equal shares, or broadcast.

    Args:
        accelerator: of the world.
        collective: which.
        op: what reduces, or None.
        root: of a broadcast.
        dtype, count: of the input's elements.
    """

    description = "NCCL's own"

    def __init__(
        self, accelerator: Accelerator, collective: str, op: Op | None, root: int, dtype: np.dtype[Any], count: int
    ) -> None:
        self._accelerator = accelerator
        self._collective = collective
        self._op = op
        self._root = root
        self._dtype = dtype
        self._count = count
        self._finishing: Combination | None = None

    def finished_by(self, finish: Scaling | None) -> Native:
        """The same, with something applied to the result."""
        if finish is not None:
            share = self._count // (self._accelerator.context.size if self._collective == "reducescatter" else 1)
            self._finishing = self._accelerator.kernels.combination(None, self._dtype, [(1, 1, share)], finish)
        return self

    def prepare(self, source: DeviceBlock, out: DeviceBlock) -> Sequence[int]:
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
            communicator.reduce_scatter(
                source.address, out.address, count // communicator.size, dtype, self._op, stream
            )
        else:
            communicator.all_reduce(source.address, out.address, count, dtype, self._op, stream)
        if self._finishing is not None:
            self._finishing.pointers[0, 0] = self._finishing.pointers[0, WAYS] = out.address
            self._finishing.launch(stream)


class Hosted:
    """The host's engine, between page-locked copies of the tensor.

    Args:
        accelerator: of the world.
        context: of the host's tasks.
        entry: the twin of the request.
        source, out: elements of input and output.
    """

    def __init__(self, accelerator: Accelerator, context: Context, entry: CachedRequest, source: int, out: int) -> None:
        self.description = "through host memory"
        self._accelerator = accelerator
        self._entry = entry
        self._sizes = (source, out)
        self._task = Combine(context, entry) if entry.op is Op.ADASUM else One(context, entry)
        self._handle: Handle | None = None

    def prepare(self, source: DeviceBlock, out: DeviceBlock) -> Sequence[int] | memoryview:
        accelerator, dtype = self._accelerator, self._entry.dtype
        into = accelerator.pinned("source", self._sizes[0], dtype)
        result = into if out.address == source.address else accelerator.pinned("result", self._sizes[1], dtype)
        bring(accelerator, source, into)
        accelerator.wait()
        self._handle = Handle(self._entry, into, result, _nothing)
        return self._task.prepare_handles([self._handle])

    def run(self, source: DeviceBlock, out: DeviceBlock) -> None:
        assert self._handle is not None
        self._task.run_handles([self._handle])
        accelerator, result = self._accelerator, self._handle.out
        accelerator.device.copy(out.address, _address(result), out.nbytes, accelerator.executor.main)
        # Until it has arrived, nobody else may use this host memory.
        accelerator.wait()
        self._handle = None


def allreduce_by(
    choice: DeviceChoice,
    accelerator: Accelerator,
    count: int,
    dtype: np.dtype[Any],
    op: Op,
    finish: Scaling | None,
    host: CachedRequest,
) -> Way:
    """How an all-reduce is carried out as the planner has chosen.

    Args:
        choice: the planner's.
        accelerator: of the world.
        count, dtype, op: of the elements.
        finish: what is applied to the result, or None.
        host: the entry with which the host's engine does the same.
    """
    if choice.transport == "host":
        return Hosted(accelerator, accelerator.context, host, count, count)
    if choice.native:
        return Native(accelerator, "allreduce", op, 0, dtype, count).finished_by(finish)
    plan = accelerator.plans.allreduce(count, dtype, op, choice, finish)
    return Planned(accelerator, plan, dtype, messages_of(choice))


def messages_of(choice: DeviceChoice) -> str:
    """By what the messages of a choice travel, if it has any."""
    return "nccl" if choice.transport == "nccl" else "mpi"


def bring(accelerator: Accelerator, source: DeviceBlock, into: Array) -> None:
    """Copy a block to page-locked host memory, behind what the stream has been given."""
    if source.nbytes:
        accelerator.device.copy(_address(into), source.address, source.nbytes, accelerator.executor.main)


def _address(array: Array) -> int:
    at: int = array.__array_interface__["data"][0]
    return at


def _nothing(handle: Handle) -> None:
    """The host's part has no result of its own."""
