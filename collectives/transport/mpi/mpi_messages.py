"""Messages between any two ranks through MPI, and MPI's own all-reduce."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.base import dtypes
from collectives.base.reduce_op import Op
from collectives.transport.base import Array
from collectives.transport.mpi.channel import Channel

if TYPE_CHECKING:
    from mpi4py import MPI

_BLOCK_TAG = 1
"""Below those of notices, which travel on the same communicator."""
_MPI_NAMES = {Op.SUM: "SUM", Op.PRODUCT: "PROD", Op.MIN: "MIN", Op.MAX: "MAX"}
_REDUCED_AS_HERE = ("float32", "float64", "complex64", "complex128")
"""Besides integers: the dtypes whose sums and products are the same in MPI."""


class MpiMessages:
    """`base.MessageTransport` over MPI's point-to-point messages."""

    name = "mpi"

    def __init__(self, channel: Channel) -> None:
        self._comm = channel.comm
        self._waiter = channel.waiter
        self._requests: list[MPI.Request] = []
        self._memory: list[Array] = []
        """What they access; noted before they are posted, because an interrupt may come before there is a request."""
        channel.kept.append(self._memory)
        channel.users.append(self)

    def post_receive(self, peer: int, into: Array) -> MPI.Request:
        self._memory.append(into)
        request = self._comm.Irecv(into.view(np.uint8), peer, _BLOCK_TAG)
        self._requests.append(request)
        return request

    def post_send(self, peer: int, block: Array) -> None:
        self._memory.append(block)
        self._requests.append(self._comm.Isend(block.view(np.uint8), peer, _BLOCK_TAG))

    def await_arrival(self, message: MPI.Request, nbytes: int | None = None) -> None:
        self._waiter.wait(message, "a block from another rank")

    def drain(self) -> None:
        if self._requests:
            from mpi4py import MPI

            requests = self._requests
            self._waiter.until(lambda: bool(MPI.Request.Testall(requests)), "a block from or to another rank")
            self._requests.clear()
            self._memory.clear()

    def close(self) -> None:
        self._requests.clear()

    @property
    def busy(self) -> bool:
        """Whether MPI may still access posted memory."""
        return bool(self._memory)

    def knows(self, op: Op, dtype: np.dtype[Any]) -> bool:
        """Whether MPI's own reduction gives the same results as `tensors.reduction`.

        MPI has no halves and no sum of bool; Open MPI's sums of 8 and 16 bits saturate instead of wrapping (seen with
        5.0.11 on AVX-512); its Min and Max lose NaN.
        """
        combining = op.combining(dtype)
        if dtypes.is_integer(dtype):
            return dtype.itemsize >= 4 and combining in _MPI_NAMES
        return dtypes.name(dtype) in _REDUCED_AS_HERE and combining in (Op.SUM, Op.PRODUCT)

    def native_allreduce(self, source: Array, out: Array, op: Op) -> None:
        """MPI's own all-reduce, for blocks so small that only the number of messages counts.

        Args:
            source, out: 1-D, contiguous, equally long, of a dtype that MPI `knows`; may be the same array.
            op: Average is summed; the caller divides.
        """
        from mpi4py import MPI

        operation = getattr(MPI, _MPI_NAMES[op.combining(source.dtype)])
        send = MPI.IN_PLACE if source is out else source
        self._memory += [source, out]
        self._requests.append(self._comm.Iallreduce(send, out, operation))
        self.drain()
