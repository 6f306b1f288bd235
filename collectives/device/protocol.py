"""The interface of a GPU: all that the engine asks of one, in about thirty methods.

Addresses, streams, events, functions and graphs are the driver's own numbers. Work on a stream runs in order and
asynchronously: every method that takes a stream returns at once. `collectives.device.cupy_device` implements the
interface; the tests have an emulated device, on the CPU, with the same rules.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class Allocation(NamedTuple):
    """The driver's allocation that contains an address."""

    base: int
    nbytes: int
    serial: int
    """Unique among all allocations of this process, including earlier ones at the same address."""


class Device(Protocol):
    """One GPU.

    Attributes:
        index: its number in this process.
        identity: of the physical GPU, the same in all processes of the host.
        name: of the model, for messages.
        multiprocessors: their number.
        shared_unit: granularity of sharing, in bytes: a smaller allocation is part of a block of this size, and would
            be shared together with its neighbours.
    """

    index: int
    identity: str
    name: str
    multiprocessors: int
    shared_unit: int

    def activate(self) -> Any:
        """Make this the calling thread's current device, and set the thread's capture mode to relaxed: the program may
        be capturing a graph, in this thread or another, which calls that may wait for the device would invalidate.

        The methods below are called only while this is the thread's current device: see `active`. The engine's own
        threads never deactivate it.

        Returns:
            The argument of `deactivate`.
        """

    def deactivate(self, previous: Any) -> None:
        """Restore the thread's current device and capture mode from before `activate`."""

    # ---- memory

    def allocate(self, nbytes: int, *, shared: bool = False) -> int:
        """Allocate uninitialized memory outside of any pool, aligned to 256 bytes; ``shared``: so that it can be
        exported.

        Raises:
            OutOfMemoryError: there is not enough. Freed memory that other processes still map is not available.
        """

    def free(self, address: int) -> None:
        """Free memory of `allocate`; the device must be done with it."""

    def pinned(self, nbytes: int) -> Array:
        """Page-locked host memory as an array of uint8, which the device accesses at the same address. Freed with the
        array, which may be dropped only when the device is done with it."""

    def allocation(self, address: int) -> Allocation:
        """The allocation that contains an address.

        Raises:
            TransportError: the address is not in device memory that the driver allocated as one piece.
        """

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy between two addresses in device memory (own or imported) or pinned host memory."""

    def clear(self, target: int, nbytes: int, stream: int) -> None:
        """Fill with zero bytes."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], stream: int) -> Any:
        """A new array of the device's own type (CuPy's), for use on ``stream``; it has
        ``__cuda_array_interface__``."""

    # ---- streams and events

    def create_stream(self) -> int:
        """Create a non-blocking stream (with respect to the default stream) of the highest priority."""

    def destroy_stream(self, stream: int) -> None: ...

    def current_stream(self) -> int:
        """The calling thread's current stream in the device's own framework (CuPy)."""

    def capturing(self, stream: int) -> bool:
        """Whether the stream is being captured into a graph."""

    def drain(self, stream: int) -> None:
        """Block until all work on the stream is done. Releases the interpreter lock."""

    def create_event(self, *, shared: bool = False) -> int:
        """Create an event without timing; ``shared``: an interprocess event, which can be exported."""

    def destroy_event(self, event: int) -> None:
        """Destroy an event, own or imported."""

    def record(self, event: int, stream: int) -> None:
        """Record the event: it stands for all work enqueued on the stream so far."""

    def wait(self, stream: int, event: int) -> None:
        """Order all later work on the stream after the work that the event stands for now; none if it was never
        recorded."""

    def passed(self, event: int) -> bool:
        """Whether the work that the event stands for is done; True if it was never recorded."""

    # ---- sharing with other processes of the host

    def export_memory(self, base: int) -> bytes:
        """A handle of 64 bytes by which another process can map the allocation that begins at ``base``.

        Raises:
            TransportError: this memory cannot be shared, or this system does not allow it.
        """

    def import_memory(self, handle: bytes) -> int:
        """Map another process's allocation; returns its address here. Raises as `export_memory`."""

    def forget_memory(self, address: int) -> None:
        """Unmap memory of `import_memory`."""

    def export_event(self, event: int) -> bytes:
        """A handle of 64 bytes by which another process can wait for a shared event; raises as `export_memory`."""

    def import_event(self, handle: bytes) -> int:
        """Open another process's event, for waiting; raises as `export_memory`."""

    def reach(self, peer: int) -> None:
        """Enable peer access: let this device's kernels access the memory of GPU ``peer`` of this process. Imported
        memory and `copy` do not need it.

        Raises:
            TransportError: there is no suitable link between the two.
        """

    # ---- kernels

    def function(self, source: str, name: str) -> int:
        """The kernel ``name`` (``extern "C"``) of a CUDA C++ source; compiled at first use and cached."""

    def launch(self, function: int, grid: tuple[int, int], threads: int, parameters: int, stream: int) -> None:
        """Launch a kernel.

        Args:
            grid: blocks in x and y.
            parameters: the address of an array of pointers to the arguments, which are read before this returns.
        """

    # ---- graphs

    def begin_capture(self, stream: int) -> None:
        """Capture the later work of the stream, and of streams that are made to wait for it, instead of running it."""

    def end_capture(self, stream: int) -> int:
        """End the capture; returns an executable graph."""

    def launch_graph(self, graph: int, stream: int) -> None: ...

    def destroy_graph(self, graph: int) -> None: ...


class active:
    """Context manager: makes a device the calling thread's current one, and restores the previous one afterwards."""

    __slots__ = ("_device", "_previous")

    def __init__(self, device: Device) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._previous = self._device.activate()

    def __exit__(self, *_: object) -> None:
        self._device.deactivate(self._previous)
