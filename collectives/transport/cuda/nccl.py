"""NCCL's interface to the engine: communicators, the library that makes them, and their first exchange.

`collectives.transport.cuda.nccl_library` implements these protocols by the binding that is installed, CuPy's or
nccl4py; no other module depends on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from collectives.base.bounded_call import TimeIsUpError, within
from collectives.base.errors import CollectiveTimeoutError, TransportError
from collectives.base.reduce_op import Op
from collectives.transport.cuda.nccl_elements import Dtype
from collectives.transport.cuda.nccl_library import NcclLibrary

if TYPE_CHECKING:
    from collectives.device.protocol import Device


class Communicator(Protocol):
    """An NCCL communicator as one of its ranks sees it.

    Addresses are device memory of this rank, streams the driver's handles. Every operation is enqueued on the stream
    and returns; all ranks issue the same collectives in the same order, and between two ranks sends and receives match
    in order. One thread issues operations at a time; another may call ``check`` and ``abort`` meanwhile. Errors are
    TransportErrors.
    """

    rank: int
    size: int

    def all_reduce(self, source: int, target: int, count: int, dtype: Dtype, op: Op, stream: int) -> None:
        """Reduce ``count`` elements of every rank into every rank's ``target``, which may be ``source``.

        An average is left as a sum.

        Raises:
            InvalidTypeError: `reduces` is False.
        """

    def reduce_scatter(self, source: int, target: int, count: int, dtype: Dtype, op: Op, stream: int) -> None:
        """Reduce ``size`` blocks of ``count`` elements, this rank's block into ``target``; as `all_reduce`.

        ``target`` may be this rank's block of ``source``.
        """

    def all_gather(self, source: int, target: int, count: int, dtype: Dtype, stream: int) -> None:
        """Concatenate every rank's ``count`` elements into ``target``; ``source`` may be its own block there."""

    def broadcast(self, source: int, target: int, count: int, dtype: Dtype, root: int, stream: int) -> None:
        """Copy the root's ``source`` to every rank's ``target``; other ranks' ``source`` is ignored."""

    def send(self, source: int, count: int, dtype: Dtype, peer: int, stream: int) -> None:
        """Send ``count`` elements to ``peer``, which must receive as many."""

    def receive(self, target: int, count: int, dtype: Dtype, peer: int, stream: int) -> None:
        """Receive ``count`` elements from ``peer``."""

    def begin_group(self) -> None:
        """Begin an NCCL group: operations until `end_group` form one stream operation, without waits among them."""

    def end_group(self) -> None:
        """End the group, in the thread that began it.

        Must be called even if an operation in between has raised: see `NcclGroup`.
        """

    def check(self) -> None:
        """Raise an asynchronous error that has occurred outside of any call; raises after `abort` and `close`, too."""

    def abort(self) -> None:
        """End all of this rank's work in bounded time and release all resources; never raises, and is idempotent."""

    def close(self) -> None:
        """Release all resources, in bounded time, when all work is done; the ranks of a host wait for each other.

        After a failure use `abort`. Both wait until no CUDA graph refers to the communicator: destroy graphs before
        `close`, and during `abort`.
        """


class NcclGroup:
    """Context manager of an NCCL group, which is ended in any case; the first error is raised."""

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
    """A source of communicators."""

    def why_not(self) -> str | None:
        """What is missing and how to install it; None if NCCL can be used, which the other methods require."""

    def version(self) -> tuple[int, int, int]: ...

    def shares_gpus(self) -> bool:
        """Whether several ranks may use one GPU."""

    def make_id(self) -> bytes:
        """128 bytes that identify a new communicator; one rank makes them, and all its ranks connect with them."""

    def connect(
        self, rank: int, size: int, unique_id: bytes, timeout: float, device: Device, *, sharers: int = 1
    ) -> Communicator:
        """Connect with the other ranks; called by all of them, each with its device, which ``sharers`` ranks use.

        Raises:
            CollectiveTimeoutError: a rank did not connect within ``timeout`` seconds.
            TransportError: NCCL failed.
        """


_library: Library = NcclLibrary()


def library() -> Library:
    """The library in use: that of the installed binding, unless replaced by `use`."""
    return _library


def use(library: Library) -> Library:
    """Replace the library, for tests. Returns the previous one."""
    global _library
    before, _library = _library, library
    return before


_BYTE = np.dtype(np.uint8)


def warm_up(communicator: Communicator, device: Device, scratch: int, stream: int, timeout: float) -> None:
    """Exchange a byte with every peer, so that later sends use established connections; called by all ranks.

    NCCL connects two ranks at their first send, which takes hundreds of milliseconds. All pairs are in one NCCL group,
    in which no operation waits for another, so no order of the ranks can deadlock.

    Args:
        scratch: two bytes of device memory per rank. Allocated before any rank's kernel can wait for this rank, because
            an allocation may wait for all kernels on the device.

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
            f"rank {rank}: NCCL could not connect with all of the {size - 1} other ranks within {timeout:g} s: does a "
            "firewall, or the wrong network (NCCL_SOCKET_IFNAME), keep them apart? NCCL_DEBUG=INFO shows who is there"
        ) from None
    communicator.check()
