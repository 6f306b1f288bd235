"""The NCCL library in use, groups of NCCL operations, and the first exchange of a communicator's ranks.

The tests have a library and communicators of their own, with the methods of `nccl_library`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from collectives.base.bounded_call import TimeIsUpError, within
from collectives.base.errors import CollectiveTimeoutError, TransportError
from collectives.device.protocol import Device
from collectives.transport.cuda.nccl_library import NcclCommunicator, NcclLibrary


@contextlib.contextmanager
def group(communicator: NcclCommunicator) -> Iterator[None]:
    """An NCCL group, which is ended in any case; the first error is raised."""
    communicator.begin_group()
    try:
        yield
    except BaseException:
        with contextlib.suppress(TransportError):
            communicator.end_group()
        raise
    communicator.end_group()


_library = NcclLibrary()


def library() -> NcclLibrary:
    """The library in use: that of the installed binding, unless replaced by `use`."""
    return _library


def use(library: NcclLibrary) -> NcclLibrary:
    """Replace the library, for tests. Returns the previous one."""
    global _library
    before, _library = _library, library
    return before


_BYTE = np.dtype(np.uint8)


def warm_up(communicator: NcclCommunicator, device: Device, scratch: int, stream: int, timeout: float) -> None:
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
        with group(communicator):
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
            f"rank {rank}: NCCL could not connect with all of the {size - 1} other ranks within {timeout:g} s; check "
            "for a firewall between the hosts or a wrong network (NCCL_SOCKET_IFNAME), and set NCCL_DEBUG=INFO to "
            "see which ranks connect [G24]"
        ) from None
    communicator.check()
