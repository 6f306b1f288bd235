"""An emulated GPU: `EmulatedDevice` is a `Device` on the CPU with CUDA's rules, so that code that relies on more than
those fails in a test.

    device = EmulatedDevice(delays=7)
    device.activate()
    array = EmulatedArray.of(device, numpy_array)
    ...
    assert device.violations == []
    device.close()

Its parts are in ``emulated_memory.py``, ``emulated_streams.py`` and ``emulated_array.py``. Kernels are the CUDA sources
themselves, compiled by g++ (``host_kernels.py``).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np

from collectives.base.errors import InvalidArgumentError, OutOfMemoryError, TransportError
from collectives.device.protocol import Allocation, Array
from tests.support.emulated.array import EmulatedArray
from tests.support.emulated.memory import SPACE, Piece, Pool, as_allocation
from tests.support.emulated.streams import (
    GLOBAL,
    RELAXED,
    THREAD_LOCAL,
    Capture,
    Event,
    Graph,
    Health,
    Page,
    Stream,
    Work,
)

__all__ = ["EmulatedArray", "EmulatedDevice", "EmulatedProvider"]

_handles = count(0x7E0001)
_streams: dict[int, Stream] = {}
_events: dict[int, Event] = {}
_current = threading.local()
"""Of the calling thread: the identity of the current device, and the capture mode."""
_captures: list[Capture] = []
"""Captures in progress in this process."""
_MOST_THREADS = 1024
_MOST_ROWS = 65535


class EmulatedDevice:
    """An emulated GPU.

    Args:
        index: its number in this process.
        identity: of the GPU in all processes; devices of one process with the same identity are one GPU.
        delays: seed of random delays before each piece of work on a stream; None: no delays.
        capacity: bytes of memory; None: no limit.
        patience: seconds after which a stream that waits for an event breaks the device.
        refuse_peers: kernels cannot access other GPUs' memory, as without a link between them.
        refuse_sharing: exporting and importing are refused, as in some containers.
        reuse_addresses: new allocations reuse the addresses of freed ones of that size, as the real driver does. A use
            after free is then silent.

    Attributes:
        launches: number of kernels launched or captured so far, without replays of graphs.
        graphs: that were created and not destroyed.
        violations: errors of the program that a GPU need not notice: accesses to freed memory, writes beyond an end,
            calls from a thread in which the device is not current. Access to unknown memory also breaks the device.
    """

    def __init__(
        self,
        index: int = 0,
        *,
        identity: str | None = None,
        delays: int | None = None,
        capacity: int | None = None,
        patience: float = 20.0,
        refuse_peers: bool = False,
        refuse_sharing: bool = False,
        reuse_addresses: bool = False,
    ) -> None:
        self.index = index
        self.identity = identity or f"GPU-emulated-{index}"
        self.name = "Emulated GPU"
        self.multiprocessors = 4
        self.shared_unit = 4096
        self.violations: list[str] = []
        self.launches = 0
        self.refuse_peers = refuse_peers
        self.refuse_sharing = refuse_sharing
        self._peers: set[int] = set()
        self._delays, self._capacity, self._reuse = delays, capacity, reuse_addresses
        self._health = Health(patience)
        self._lock = threading.RLock()
        self._used = 0
        self._made = count()
        self._local = threading.local()
        self._streams: list[Stream] = []
        self._events: set[int] = set()
        self._functions: dict[tuple[str, str], int] = {}
        self._kernels: dict[int, Any] = {}
        self.graphs: dict[int, Graph] = {}
        self._default = self._new_stream(0)
        self._pool = Pool(self._allocate, self._submit_for_pool, self.violations.append)

    def activate(self) -> tuple[str | None, int]:
        previous = getattr(_current, "identity", None), getattr(_current, "mode", GLOBAL)
        _current.identity, _current.mode = self.identity, RELAXED
        return previous

    def deactivate(self, previous: tuple[str | None, int]) -> None:
        _current.identity, _current.mode = previous

    # ---- memory

    def allocate(self, nbytes: int, *, shared: bool = False) -> int:
        self._check_current()
        nbytes = -(-nbytes // self.shared_unit) * self.shared_unit if shared else nbytes
        return self._allocate(nbytes).base if nbytes else 0

    def free(self, address: int) -> None:
        self._check_current()
        self._check_not_capturing("free memory")
        if address == 0:
            return
        piece = SPACE.find(address)
        if piece is None or piece.freed or piece.base != address or piece.kind != "device" or piece.blocks is not None:
            raise TransportError(f"free: at {address:#x} there is nothing that allocate() gave")
        self._free(piece)

    def pinned(self, nbytes: int) -> Array:
        self._check_current()
        self._check_not_capturing("page-lock memory")
        return SPACE.pinned(nbytes, self)

    def allocation(self, address: int) -> Allocation:
        return as_allocation(SPACE.allocation(address))

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._check_current()

        def run() -> None:
            self.touch("copy to", target, nbytes)
            self.touch("copy from", source, nbytes)
            if abs(target - source) < nbytes:
                self.violations.append(f"copy of {nbytes} bytes from {source:#x} to {target:#x}, which overlap")
            ctypes.memmove(target, source, nbytes)

        if nbytes:
            self._stream(stream).submit(run)

    def clear(self, target: int, nbytes: int, stream: int) -> None:
        self._check_current()

        def run() -> None:
            self.touch("clear", target, nbytes)
            ctypes.memset(target, 0, nbytes)

        if nbytes:
            self._stream(stream).submit(run)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], stream: int) -> EmulatedArray:
        self._check_current()
        return self.empty_array(shape, dtype, stream)

    # ---- streams and events

    def create_stream(self) -> int:
        self._check_current()
        return self._new_stream(next(_handles)).handle

    def destroy_stream(self, stream: int) -> None:
        self._check_current()
        found = self._stream(stream)
        if found is self._default:
            raise TransportError("the default stream cannot be destroyed")
        del _streams[stream]
        found.stop()

    def current_stream(self) -> int:
        return getattr(self._local, "stream", 0)

    def capturing(self, stream: int) -> bool:
        return self._stream(stream).capture is not None

    def drain(self, stream: int) -> None:
        self._check_current()
        self._check_not_capturing("wait for a stream")
        self._stream(stream).drain()

    def create_event(self, *, shared: bool = False) -> int:
        self._check_current()
        return self._add_event(Event(self.identity, *Page.make()) if shared else Event(self.identity))

    def destroy_event(self, event: int) -> None:
        self._event(event).close()
        del _events[event]
        self._events.discard(event)

    def record(self, event: int, stream: int) -> None:
        self._check_current()
        self._health.check()
        found = self._event(event)
        if found.owner != self.identity:
            raise TransportError(f"event {event:#x} is another device's and cannot be recorded on this one")
        found.record(self._stream(stream))

    def wait(self, stream: int, event: int) -> None:
        self._check_current()
        self._health.check()
        self._event(event).wait_on(self._stream(stream))

    def passed(self, event: int) -> bool:
        self._health.check()
        self._check_not_capturing("ask for an event")
        return self._event(event).passed()

    # ---- sharing with other processes of the host

    def export_memory(self, base: int) -> bytes:
        self._check_sharing()
        return SPACE.export(base)

    def import_memory(self, handle: bytes) -> int:
        self._check_sharing()
        self._check_not_capturing("map memory")
        return SPACE.import_(handle, self).base

    def forget_memory(self, address: int) -> None:
        self._check_current()
        self._check_not_capturing("unmap memory")
        piece = SPACE.find(address)
        if piece is None or piece.freed or piece.base != address or piece.kind != "imported":
            raise TransportError(f"forget_memory: at {address:#x} there is nothing that import_memory() gave")
        SPACE.forget_import(piece)

    def export_event(self, event: int) -> bytes:
        self._check_sharing()
        found = self._event(event)
        if not found.handle:
            raise TransportError(f"event {event:#x} was not made to be shared")
        return found.handle

    def import_event(self, handle: bytes) -> int:
        self._check_sharing()
        return self._add_event(Event(self.identity, theirs=Page.open(handle)))

    def reach(self, peer: int) -> None:
        self._check_current()
        if self.refuse_peers:
            raise TransportError(f"kernels of device {self.index} cannot reach the memory of device {peer}")
        self._peers.add(peer)

    # ---- kernels

    def function(self, source: str, name: str) -> int:
        from tests.support.emulated import host_kernels  # here: only what launches kernels needs a compiler

        self._check_current()
        with self._lock:
            handle = self._functions.get((source, name))
            if handle is None:
                self._check_not_capturing("load a kernel")
                handle = self._functions[source, name] = next(_handles)
                self._kernels[handle] = host_kernels.function(source, name)
            return handle

    def launch(self, function: int, grid: tuple[int, int], threads: int, parameters: int, stream: int) -> None:
        self._check_current()
        kernel = self._kernels[function]
        if not (0 < grid[0] < 1 << 31 and 0 < grid[1] <= _MOST_ROWS and 0 < threads <= _MOST_THREADS):
            raise TransportError(f"a launch of {grid} blocks of {threads} threads: CUDA refuses this configuration")
        pointers = (ctypes.c_void_p * len(kernel.argument_sizes)).from_address(parameters)
        # Copied now, because the caller's may be gone when the kernel runs.
        values = [
            ctypes.create_string_buffer(ctypes.string_at(p or 0, n), n)
            for p, n in zip(pointers, kernel.argument_sizes, strict=True)
        ]
        kept = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))

        def run() -> None:
            for value in values:
                # Every word may be an address; it is one if it lies in device memory.
                for word in memoryview(value).cast("B").cast("Q") if len(value) % 8 == 0 else ():
                    self._check_reach(kernel.name, word)
                    if (problem := SPACE.illegal(word, 1)) and not problem.fatal:
                        self.violations.append(f"kernel {kernel.name} was given an address: {problem.text}")
            kernel(grid, threads, ctypes.addressof(kept))

        self.launches += 1
        self._stream(stream).submit(run)

    # ---- graphs

    def begin_capture(self, stream: int) -> None:
        self.capture(stream, THREAD_LOCAL)

    def end_capture(self, stream: int) -> int:
        self._check_current()
        found = self._stream(stream)
        capture = found.capture
        if capture is None or capture.origin is not found:
            raise TransportError("end_capture: no capture was begun on this stream")
        if capture.thread != threading.get_ident():
            raise TransportError("end_capture: the capture was begun by another thread")
        _captures.remove(capture)
        graph = capture.end()
        handle = next(_handles)
        self.graphs[handle] = graph
        return handle

    def launch_graph(self, graph: int, stream: int) -> None:
        self._check_current()
        found, on = self.graphs[graph], self._stream(stream)
        on.submit(lambda: found.run(on.random, on.health))

    def destroy_graph(self, graph: int) -> None:
        del self.graphs[graph]

    # ---- beyond the protocol, for tests

    @contextmanager
    def use_stream(self, stream: int) -> Iterator[int]:
        """Make it the calling thread's current stream."""
        before = self.current_stream()
        self._local.stream = stream
        try:
            yield stream
        finally:
            self._local.stream = before

    def capture(self, stream: int, mode: int = GLOBAL) -> None:
        """Begin a capture as programs do; torch's is of the global mode."""
        self._check_current()
        found = self._stream(stream)
        if found is self._default or found.capture is not None:
            raise TransportError("this stream cannot be captured: it is the default stream, or being captured already")
        _captures.append(Capture(found, mode))

    def enqueue(self, stream: int, function: Callable[[], object]) -> None:
        """Enqueue a function on a stream; an exception in it breaks the device."""
        self._stream(stream).submit(function)

    def empty_array(self, shape: tuple[int, ...], dtype: np.dtype[Any], stream: int) -> EmulatedArray:
        """`empty`, for programs that do not set the current device."""
        nbytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        self._stream(stream)
        host = self._pool.array(nbytes, stream).view(dtype).reshape(shape) if nbytes else np.empty(shape, dtype)
        return EmulatedArray(self, host, stream)

    def order(self, before: int, after: int) -> None:
        """Order all later work of the stream ``after`` after the present work of ``before``."""
        event = Event(self.identity)
        event.record(self._stream(before))
        event.wait_on(self._stream(after))

    def touch(self, what: str, address: int, nbytes: int) -> None:
        """Called by running work: records a violation if these bytes must not be accessed.

        Raises:
            TransportError: there is no such memory; the device is broken.
        """
        if problem := SPACE.illegal(address, nbytes):
            self.violations.append(f"{what} {problem.text}")
            if problem.fatal:
                raise TransportError(f"illegal memory access: {what} {problem.text}")

    def forbid(self) -> None:
        """Set the calling thread's capture mode to global, CUDA's default: captures of other threads restrict it."""
        _current.mode = GLOBAL

    def finish(self, stream: int) -> None:
        """`drain`, for programs that do not set the current device."""
        self._stream(stream).drain()

    def held(self) -> dict[str, int]:
        """The numbers of resources that were created here and not released, without allocations of the pool."""
        return {
            "streams": sum(s.handle in _streams for s in self._streams),
            "events": len(self._events),
            **SPACE.held(self),
        }

    @property
    def failure(self) -> str | None:
        """Why the device is broken; None if it works."""
        return self._health.failure

    def close(self) -> None:
        """Drop all work that has not begun, end the threads, and free everything; idempotent."""
        with self._lock:
            self._health.fail("it was closed")
            streams, self._streams = self._streams, []
        _captures[:] = [capture for capture in _captures if capture.origin not in streams]
        for stream in streams:
            _streams.pop(stream.handle, None)
            stream.stop()
        for stream in streams:
            stream.thread.join(self._health.patience)
            if stream.thread.is_alive():
                raise TransportError(f"{stream.thread.name} does not end: some work in it hangs")
        for handle in self._events:
            if event := _events.pop(handle, None):
                event.close()
        self.violations += SPACE.free_all(self)

    # ---- private

    def _check_current(self) -> None:
        if getattr(_current, "identity", None) != self.identity and not getattr(self._local, "warned", False):
            self._local.warned = True
            self.violations.append(
                f"thread {threading.current_thread().name} uses device {self.index} without activate()"
            )

    def _check_not_capturing(self, what: str) -> None:
        """Invalidate captures that forbid a call that may wait for the device: to the capturing thread unless its mode
        is relaxed, and for a capture of the global mode to all other threads in that mode."""
        mode, thread = getattr(_current, "mode", GLOBAL), threading.get_ident()
        for capture in list(_captures):
            own = capture.thread == thread and RELAXED not in (mode, capture.mode)
            if own or GLOBAL == mode == capture.mode:
                capture.refuse(f"a thread must not {what} while this is captured")

    def _check_reach(self, kernel: str, address: int) -> None:
        """Raise if a kernel accesses the memory of another GPU of this process without peer access."""
        piece = SPACE.find(address)
        owner = piece.owner if piece is not None and piece.kind == "device" and not piece.freed else None
        if isinstance(owner, EmulatedDevice) and owner.identity != self.identity and owner.index not in self._peers:
            raise TransportError(
                f"illegal memory access: kernel {kernel} of device {self.index} at {address:#x} of device "
                f"{owner.index}: no peer access"
            )

    def _check_sharing(self) -> None:
        self._check_current()
        if self.refuse_sharing:
            raise TransportError("this system does not let processes share the memory and the events of GPUs")

    def _new_stream(self, handle: int) -> Stream:
        seed = None if self._delays is None else f"{self._delays}-{next(self._made)}"
        with self._lock:
            self._health.check()
            stream = Stream(handle, self.identity, self._health, seed)
            self._streams.append(stream)
            if handle:
                _streams[handle] = stream
            return stream

    def _stream(self, handle: int) -> Stream:
        if handle in (0, 1):  # 1: its number in __cuda_array_interface__ and DLPack
            return self._default
        if handle == 2:  # per-thread default stream
            if not hasattr(self._local, "default"):
                self._local.default = self._new_stream(0)
            own: Stream = self._local.default
            return own
        stream = _streams.get(handle)
        if stream is None or stream.owner != self.identity:
            raise TransportError(f"{handle:#x} is no stream of this device")
        return stream

    def _add_event(self, event: Event) -> int:
        handle = next(_handles)
        self._events.add(handle)
        _events[handle] = event
        return handle

    def _event(self, handle: int) -> Event:
        event = _events.get(handle)
        if event is None:
            raise TransportError(f"{handle:#x} is no event")
        return event

    def _allocate(self, nbytes: int) -> Piece:
        self._health.check()
        self._check_not_capturing("allocate memory")
        if self._capacity is not None and self._used + SPACE.still_mapped(self) + nbytes > self._capacity:
            self._trim()
        with self._lock:
            if self._capacity is not None and self._used + SPACE.still_mapped(self) + nbytes > self._capacity:
                raise OutOfMemoryError(
                    f"out of device memory: {nbytes} bytes asked for, {self._capacity - self._used} are free"
                )
            self._used += nbytes
        return SPACE.allocate(nbytes, self, again=self._reuse)

    def _trim(self) -> None:
        """Free the pool's unused memory. Waits for the whole device, as the driver does when it frees memory."""
        alive = [stream for stream in self._streams if stream.handle == 0 or stream.handle in _streams]
        if any(stream.capture for stream in alive):  # by another thread
            return
        for stream in alive:
            stream.drain()
        for piece in self._pool.trim():
            self._free(piece)

    def _submit_for_pool(self, handle: int, work: Work) -> None:
        stream = self._default if handle in (0, 1) else _streams.get(handle)
        if stream is not None:  # otherwise it was destroyed, and gets no arrays any more
            stream.submit_now(work)

    def _free(self, piece: Piece) -> None:
        with self._lock:
            self._used -= piece.nbytes
        if problem := SPACE.free(piece):
            self.violations.append(problem)


class EmulatedProvider:
    """A `Provider` of emulated devices.

    Args:
        count: of GPUs, each with its own identity.
        options: of `EmulatedDevice`, for all of them.
    """

    def __init__(self, count: int = 1, **options: Any) -> None:
        self._devices = [EmulatedDevice(index, **options) for index in range(count)]

    def count(self) -> int:
        return len(self._devices)

    def device(self, index: int) -> EmulatedDevice:
        if not 0 <= index < len(self._devices):
            raise InvalidArgumentError(f"device {index}: this process sees {len(self._devices)}")
        return self._devices[index]

    def device_of(self, address: int) -> EmulatedDevice:
        piece = SPACE.find(address)
        if piece is None or piece.freed or piece.kind == "pinned" or piece.owner not in self._devices:
            raise InvalidArgumentError(f"the address {address:#x} is not device memory")
        return self._devices[self._devices.index(piece.owner)]

    def close(self) -> None:
        for device in self._devices:
            device.close()
