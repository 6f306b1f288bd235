"""A device: one GPU as this process uses it, in about thirty methods. Everything above says what it needs in these
words.

Addresses, streams, events, functions and graphs are the driver's own numbers. Work given to a stream is carried out in
order, and later: every method that takes a stream returns at once. `collectives.device.cupy_device` is the real one;
the tests have another, on the CPU, with the same rules.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class Allocation(NamedTuple):
    """The piece of device memory, as the driver gave it out, that an address lies in."""

    base: int
    nbytes: int
    serial: int
    """Differs from that of every other allocation of this process, of earlier ones at the same address too."""


class Device(Protocol):
    """One GPU.

    Attributes:
        index: the number by which this process knows it.
        identity: names the physical GPU, alike in all processes of the host.
        name: for people.
        multiprocessors: that it has.
        shared_unit: bytes in which memory is shared: a smaller allocation is part of such a block, and its neighbours
            would be shared too.
    """

    index: int
    identity: str
    name: str
    multiprocessors: int
    shared_unit: int

    def activate(self) -> Any:
        """Make it the calling thread's current device, and let no capture of a graph restrict the thread: the program
        may be capturing, in this thread or another, and calls that might wait for the device would invalidate that.
        Returns what `deactivate` takes.

        A thread calls the methods below only while this is its current device: see `active`. A thread of our own leaves
        it so for good.
        """

    def deactivate(self, previous: Any) -> None:
        """Restore what was before `activate`: the calling thread's current device, and how captures restrict it."""

    # ---- memory

    def allocate(self, nbytes: int, *, shared: bool = False) -> int:
        """Memory outside of any pool: aligned to 256 bytes, contents undefined; ``shared``: that can be exported.

        Raises:
            OutOfMemoryError: there is none. What was freed, but is mapped by other processes still, is not free.
        """

    def free(self, address: int) -> None:
        """Give back what `allocate` gave; the device must be done with it."""

    def pinned(self, nbytes: int) -> Array:
        """Page-locked host memory as an array of uint8, which the device reaches at the same address; lives as long as
        the array, which is dropped when the device is done with it."""

    def allocation(self, address: int) -> Allocation:
        """What an address belongs to.

        Raises:
            TransportError: it is not device memory that the driver knows as one piece.
        """

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy between any two addresses: device memory, this process's or imported, and pinned host memory."""

    def clear(self, target: int, nbytes: int, stream: int) -> None:
        """Fill with zero bytes."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], stream: int) -> Any:
        """A new array of this device's own array type (CuPy's), to be used on ``stream``; it has
        ``__cuda_array_interface__``."""

    # ---- streams and events

    def create_stream(self) -> int:
        """A stream of high priority that does not wait for the default stream."""

    def destroy_stream(self, stream: int) -> None: ...

    def current_stream(self) -> int:
        """The stream that the calling thread's program works on (CuPy's current stream)."""

    def capturing(self, stream: int) -> bool:
        """Whether work given to the stream is being noted down for a graph, by whomever."""

    def drain(self, stream: int) -> None:
        """Block until all work given to the stream is done; other threads may run meanwhile."""

    def create_event(self, *, shared: bool = False) -> int:
        """An event without timing; ``shared``: that can be exported."""

    def destroy_event(self, event: int) -> None:
        """Also of an imported one."""

    def record(self, event: int, stream: int) -> None:
        """The event now stands for all work given to the stream so far."""

    def wait(self, stream: int, event: int) -> None:
        """Work given to the stream from now on waits for what the event stands for at this moment; nothing if it was
        never recorded."""

    def passed(self, event: int) -> bool:
        """Whether what the event stands for is done; True if it was never recorded."""

    def synchronize(self, event: int) -> None:
        """Block until it is; other threads may run meanwhile."""

    # ---- sharing with other processes of the host

    def export_memory(self, base: int) -> bytes:
        """64 bytes by which another process can reach an allocation; ``base`` is where it begins.

        Raises:
            TransportError: this memory, or this system, does not allow it.
        """

    def import_memory(self, handle: bytes) -> int:
        """Where another process's allocation begins in this one; raises as `export_memory`."""

    def forget_memory(self, address: int) -> None:
        """Give back what `import_memory` gave."""

    def export_event(self, event: int) -> bytes:
        """64 bytes by which another process can wait for a shared event; raises as `export_memory`."""

    def import_event(self, handle: bytes) -> int:
        """The other process's event, to wait for; raises as `export_memory`."""

    def reach(self, peer: int) -> None:
        """Let this device's kernels reach the memory of another GPU that this process uses, ``peer`` by its number.

        Imported memory needs no such leave, nor does `copy`.

        Raises:
            TransportError: there is no link between the two by which kernels could.
        """

    # ---- kernels

    def function(self, source: str, name: str) -> int:
        """The kernel ``name`` (``extern "C"``) of a CUDA C++ source, compiled at its first use and kept."""

    def launch(self, function: int, grid: tuple[int, int], threads: int, parameters: int, stream: int) -> None:
        """Launch a kernel.

        Args:
            grid: blocks in x and y.
            threads: of a block.
            parameters: the address of an array of pointers to the arguments, which are read before this returns.
        """

    # ---- graphs

    def begin_capture(self, stream: int) -> None:
        """From now on work given to the stream (and to those that are made to wait for it) is noted down and not
        carried out."""

    def end_capture(self, stream: int) -> int:
        """The noted work as a graph that can be launched."""

    def launch_graph(self, graph: int, stream: int) -> None: ...

    def destroy_graph(self, graph: int) -> None: ...


class Provider(Protocol):
    """Where devices come from."""

    def count(self) -> int:
        """How many devices this process sees."""

    def device(self, index: int) -> Device:
        """The device of that number; the same object every time."""

    def device_of(self, address: int) -> Device:
        """The device on which an address lies.

        Raises:
            InvalidArgumentError: it is no device memory.
        """


class active:
    """``with active(device)``: the device is the calling thread's current one; afterwards the program's own choice is
    again."""

    __slots__ = ("_device", "_previous")

    def __init__(self, device: Device) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._previous = self._device.activate()

    def __exit__(self, *_: object) -> None:
        self._device.deactivate(self._previous)
