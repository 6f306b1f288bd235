"""NCCL as the engine asks for it: communicators, the library that makes them, and their first exchange.

CuPy's binding (`collectives.transport.nccl_cupy`) implements these protocols; nothing else knows whose binding it is,
so that NVIDIA's own can take its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from collectives.base.errors import CollectiveTimeoutError, TransportError
from collectives.base.reduce_op import Op
from collectives.transport.bounded_call import TimeIsUpError, within
from collectives.transport.nccl_cupy import CupyNccl
from collectives.transport.nccl_elements import Dtype

if TYPE_CHECKING:
    from collectives.device.protocol import Device


class Communicator(Protocol):
    """Some ranks that NCCL connects, as one of them sees them.

    Addresses are device memory of this rank, streams the driver's. Every operation is given to the stream and returns;
    all ranks issue the same collectives in the same order, and between two ranks sends and receives pair up in order.
    One thread issues operations at a time. ``check`` and ``abort`` may be called by another one meanwhile. Errors are
    TransportErrors.
    """

    rank: int
    size: int

    def all_reduce(self, source: int, target: int, count: int, dtype: Dtype, op: Op, stream: int) -> None:
        """Reduce ``count`` elements of every rank into every rank's ``target``, which may be ``source``. An average
        stays a sum.

        Raises:
            InvalidTypeError: `reduces` says no.
        """

    def reduce_scatter(self, source: int, target: int, count: int, dtype: Dtype, op: Op, stream: int) -> None:
        """Reduce ``size`` blocks of ``count`` elements; this rank's block goes to ``target``, which may be that block;
        as `all_reduce`."""

    def all_gather(self, source: int, target: int, count: int, dtype: Dtype, stream: int) -> None:
        """Put every rank's ``count`` elements behind one another into ``target``; ``source`` may be its own block in
        there."""

    def broadcast(self, source: int, target: int, count: int, dtype: Dtype, root: int, stream: int) -> None:
        """Copy the root's ``source`` to every rank's ``target``; the other ranks' ``source`` is not looked at."""

    def send(self, source: int, count: int, dtype: Dtype, peer: int, stream: int) -> None:
        """Send ``count`` elements to ``peer``, which receives as many."""

    def receive(self, target: int, count: int, dtype: Dtype, peer: int, stream: int) -> None:
        """Receive ``count`` elements from ``peer``."""

    def begin_group(self) -> None:
        """Operations until `end_group` are one operation of the stream: none of them waits for another."""

    def end_group(self) -> None:
        """To be called by the thread that began the group, also when an operation in between has raised: see
        `NcclGroup`."""

    def check(self) -> None:
        """Raise what has gone wrong since, outside of any call; also after `abort` and `close`."""

    def abort(self) -> None:
        """End everything that this rank has under way, in bounded time, and let go of it all; never raises, and twice
        is once."""

    def close(self) -> None:
        """Let go, in bounded time, when all work is done: the ranks of a host wait for each other. After a failure
        `abort`.

        Both wait until no CUDA graph refers to the communicator: destroy those first; with `abort`, meanwhile.
        """


class NcclGroup:
    """``with NcclGroup(communicator)``: an NCCL group (of calls), which is ended whatever happens; the first error is
    the one that is raised."""

    __slots__ = ("_communicator",)

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def __enter__(self) -> None:
        self._communicator.begin_group()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._communicator.end_group()
        except TransportError:
            if error is None:
                raise


class Library(Protocol):
    """Where communicators come from."""

    def why_not(self) -> str | None:
        """What is missing and what to do about it; None if NCCL can be used. The methods below are for after that."""

    def version(self) -> tuple[int, int, int]: ...

    def shares_gpus(self) -> bool:
        """Whether several ranks may use one GPU."""

    def make_id(self) -> bytes:
        """128 bytes that name a new communicator; one rank makes them, and every rank of it connects with them."""

    def connect(
        self, rank: int, size: int, unique_id: bytes, timeout: float, device: Device, *, sharers: int = 1
    ) -> Communicator:
        """Meet the other ranks; called by all of them, each with its device, which ``sharers`` of them use.

        Raises:
            CollectiveTimeoutError: one did not come within ``timeout`` seconds.
            TransportError: NCCL refused.
        """


_library: Library = CupyNccl()


def library() -> Library:
    """The library in use: CuPy's, unless `use` has said otherwise."""
    return _library


def use(library: Library) -> Library:
    """Take communicators from ``library`` from now on; returns the one used before. For tests, and for other
    bindings."""
    global _library
    before, _library = _library, library
    return before


_BYTE = np.dtype(np.uint8)


def warm_up(communicator: Communicator, device: Device, scratch: int, stream: int, timeout: float) -> None:
    """Exchange a byte with every peer, so that the first real send finds its connection; called by all ranks.

    NCCL connects two ranks when they first send, which takes hundreds of milliseconds. All pairs are one group, in
    which nobody waits for anybody in particular: no order of the ranks can deadlock it.

    Args:
        scratch: two bytes of device memory for each rank. Allocated before any rank's kernel can wait for this rank,
            because to allocate may wait for all kernels on the device.
        stream: on which it is done.

    Raises:
        CollectiveTimeoutError: it took longer than ``timeout`` seconds. The communicator has been aborted.
        TransportError: NCCL could not connect two ranks.
    """
    rank, size = communicator.rank, communicator.size

    def talk() -> None:
        device.activate()
        with NcclGroup(communicator):
            for distance in range(1, size):
                to, origin = (rank + distance) % size, (rank - distance) % size
                communicator.send(scratch + to, 1, _BYTE, to, stream)
                communicator.receive(scratch + size + origin, 1, _BYTE, origin, stream)
        device.drain(stream)

    if size == 1:
        return
    try:
        within(timeout, "collectives-nccl-warm-up", talk)
    except TimeIsUpError:
        communicator.abort()
        raise CollectiveTimeoutError(
            f"rank {rank}: NCCL could not connect with all of the {size - 1} other ranks within {timeout:g} s: does "
            f"a firewall, or the "
            f"wrong network (NCCL_SOCKET_IFNAME), keep them apart? NCCL_DEBUG=INFO shows who is there"
        ) from None
    communicator.check()
