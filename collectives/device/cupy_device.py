"""The GPU as CuPy reaches it: CUDA's runtime and driver, with plain numbers for streams, events and addresses."""

from __future__ import annotations

import threading
from typing import Any

import cupy
import numpy as np
from cupy.cuda import driver, runtime
from cupy.cuda import stream as streams

from collectives.base.errors import TransportError
from collectives.base.exclusion import exclusive
from collectives.device import compiler, libcuda
from collectives.device.cuda_errors import Attempt, refused
from collectives.device.pinned import PinnedPool
from collectives.device.protocol import Allocation, Array

# Looked up once, because every round of every collective calls them.
_launch = driver.launchKernel
_copy = runtime.memcpyAsync
_record = runtime.eventRecord
_wait = runtime.streamWaitEvent
_query = runtime.eventQuery
_ANY_KIND = runtime.memcpyDefault
_PINNED = runtime.hostAllocPortable | runtime.hostAllocMapped

_NOT_READY = 600
_CAPABILITY = (75, 76)
"""Device attributes of the compute capability, major and minor; CuPy has no names for them."""
_PRIORITY = -100
"""Above every priority that exists; CUDA clamps it to the highest."""
_SHARED_UNIT = 2 << 20
"""CUDA cuts smaller allocations from blocks of this size and shares whole blocks, so shared memory is allocated in
multiples of it."""


class _ForeignStream:
    """A stream by its number, in the form in which CuPy accepts foreign streams."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.number


class CupyDevice:
    """`protocol.Device` by CuPy. Created only by `selection.provider`, which has checked that its requirements are
    met.

    Raises:
        TransportError: from any method, if CUDA refuses; names CUDA's error, the attempt, and a remedy where one is
            known.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.identity = libcuda.uuid(index)
        self.name = libcuda.name(index)
        self.multiprocessors: int = runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, index)
        self.shared_unit = _SHARED_UNIT
        self._lock = threading.RLock()
        self._known_to = threading.local()
        self._modules: dict[str, int] = {}
        self._functions: dict[tuple[str, str], int] = {}
        self._pinned = PinnedPool(lambda nbytes: runtime.hostAlloc(nbytes, _PINNED), runtime.freeHost)
        # Never dropped: some versions of CuPy destroy the stream together with the object.
        self._streams: dict[int, Any] = {}

    def activate(self) -> tuple[int, int]:
        mode = libcuda.capture_mode(libcuda.RELAXED)
        try:
            previous: int = runtime.getDevice()
            # Once per thread even if it is the same device: a thread that has never used CUDA reports 0, but has no
            # context yet.
            if previous != self.index or not hasattr(self._known_to, "thread"):
                runtime.setDevice(self.index)
                self._known_to.thread = True
        except RuntimeError as error:
            libcuda.capture_mode(mode)
            raise refused(self, "make it the current device", error) from error
        return previous, mode

    def deactivate(self, previous: tuple[int, int]) -> None:
        index, mode = previous
        libcuda.capture_mode(mode)
        if index == self.index:
            return
        with Attempt(self, f"make GPU {index} the current device again"):
            # A device that this process does not use was current by default only; setting it would create a context on
            # it, which takes memory.
            if libcuda.in_use(index):
                runtime.setDevice(index)

    # ---- memory

    def allocate(self, nbytes: int, *, shared: bool = False) -> int:
        with Attempt(self, f"allocate {nbytes} bytes"):
            return int(runtime.malloc(-(-nbytes // _SHARED_UNIT) * _SHARED_UNIT if shared else nbytes))

    def free(self, address: int) -> None:
        with Attempt(self, f"free the memory at {address:#x}"):
            runtime.free(address)

    def pinned(self, nbytes: int) -> Array:
        with Attempt(self, f"page-lock {nbytes} bytes of host memory"):
            return self._pinned.take(nbytes)

    def allocation(self, address: int) -> Allocation:
        try:
            base, nbytes = libcuda.span(address)
            return Allocation(base, nbytes, libcuda.attribute(address, libcuda.BUFFER_ID))
        except TransportError as error:
            raise TransportError(
                f"GPU {self.index} ({self.name}): {address:#x} is not inside one allocation of device memory that the "
                f"driver knows: {error} [G13]"
            ) from error

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        try:
            _copy(target, source, nbytes, _ANY_KIND, stream)
        except RuntimeError as error:
            raise refused(self, f"copy {nbytes} bytes from {source:#x} to {target:#x}", error) from error

    def clear(self, target: int, nbytes: int, stream: int) -> None:
        with Attempt(self, f"clear {nbytes} bytes at {target:#x}"):
            runtime.memsetAsync(target, 0, nbytes, stream)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], stream: int) -> Any:
        # CuPy's pool is per stream: memory freed on a stream is reused on that stream, and so after its last use there.
        with Attempt(self, f"make an array of {shape} {dtype}"), self._stream(stream):
            return cupy.empty(shape, dtype)

    def _stream(self, number: int) -> Any:
        stream = self._streams.get(number)
        if stream is None:
            stream = self._streams.setdefault(number, streams.Stream.from_external(_ForeignStream(number)))
        return stream

    # ---- streams and events

    def create_stream(self) -> int:
        with Attempt(self, "create a stream"):
            return int(runtime.streamCreateWithPriority(runtime.streamNonBlocking, _PRIORITY))

    def destroy_stream(self, stream: int) -> None:
        with Attempt(self, "destroy a stream"):
            runtime.streamDestroy(stream)

    def current_stream(self) -> int:
        try:
            return int(streams.get_current_stream(self.index).ptr)
        except RuntimeError as error:
            raise refused(self, "find the current stream", error) from error

    def capturing(self, stream: int) -> bool:
        try:
            return bool(runtime.streamIsCapturing(stream))
        except RuntimeError as error:
            # The legacy default stream, while a stream that synchronizes with it is being captured: work enqueued on it
            # would become part of the capture.
            if str(error).startswith("cudaErrorStreamCaptureImplicit"):
                return True
            raise refused(self, "look at a stream", error) from error

    def drain(self, stream: int) -> None:
        with Attempt(self, "finish the work of a stream"):
            runtime.streamSynchronize(stream)

    def create_event(self, *, shared: bool = False) -> int:
        flags = runtime.eventDisableTiming | (runtime.eventInterprocess if shared else 0)
        with Attempt(self, "create an event"):
            return int(runtime.eventCreateWithFlags(flags))

    def destroy_event(self, event: int) -> None:
        with Attempt(self, "destroy an event"):
            runtime.eventDestroy(event)

    def record(self, event: int, stream: int) -> None:
        try:
            _record(event, stream)
        except RuntimeError as error:
            raise refused(self, "record an event", error) from error

    def wait(self, stream: int, event: int) -> None:
        try:
            _wait(stream, event)
        except RuntimeError as error:
            raise refused(self, "have a stream wait for an event", error) from error

    def passed(self, event: int) -> bool:
        status = _query(event)
        if not status:
            return True
        if status == _NOT_READY:
            return False
        try:
            runtime.check_status(status)
        except RuntimeError as error:
            raise refused(self, "ask for an event", error) from error
        return True

    # ---- sharing with other processes of the host

    def export_memory(self, base: int) -> bytes:
        with Attempt(self, f"share the memory at {base:#x} with other processes", sharing=True):
            return bytes(runtime.ipcGetMemHandle(base))

    def import_memory(self, handle: bytes) -> int:
        with Attempt(self, "reach the memory of another process", sharing=True):
            return int(runtime.ipcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess))

    def forget_memory(self, address: int) -> None:
        with Attempt(self, "give back the memory of another process"):
            runtime.ipcCloseMemHandle(address)

    def export_event(self, event: int) -> bytes:
        with Attempt(self, "share an event with other processes", sharing=True):
            return bytes(runtime.ipcGetEventHandle(event))

    def import_event(self, handle: bytes) -> int:
        with Attempt(self, "reach an event of another process", sharing=True):
            return int(runtime.ipcOpenEventHandle(handle))

    def reach(self, peer: int) -> None:
        with Attempt(self, f"reach the memory of GPU {peer}", sharing=True):
            if not runtime.deviceCanAccessPeer(self.index, peer):
                raise TransportError(
                    f"GPU {self.index} ({self.name}): its kernels cannot reach the memory of GPU {peer}; nvidia-smi "
                    "topo -p2p r shows which GPUs can [G19]"
                )
            try:
                runtime.deviceEnablePeerAccess(peer)
            except RuntimeError as error:
                # It may be enabled already, by another world or by the program.
                if not str(error).startswith("cudaErrorPeerAccessAlreadyEnabled"):
                    raise

    # ---- kernels

    def function(self, source: str, name: str) -> int:
        compiled = self._functions.get((source, name))
        return self._compile(source, name) if compiled is None else compiled

    @exclusive
    def _compile(self, source: str, name: str) -> int:
        with Attempt(self, f"load the kernel {name!r}"):
            if source not in self._modules:
                major, minor = (runtime.deviceGetAttribute(which, self.index) for which in _CAPABILITY)
                self._modules[source] = driver.moduleLoadData(compiler.compiled(source, 10 * major + minor))
            if (source, name) not in self._functions:
                self._functions[source, name] = driver.moduleGetFunction(self._modules[source], name)
            return self._functions[source, name]

    def launch(self, function: int, grid: tuple[int, int], threads: int, parameters: int, stream: int) -> None:
        try:
            _launch(function, grid[0], grid[1], 1, threads, 1, 1, 0, stream, parameters, 0)
        except RuntimeError as error:
            raise refused(
                self, f"launch a kernel of {grid[0]} x {grid[1]} blocks of {threads} threads", error
            ) from error

    # ---- graphs

    def begin_capture(self, stream: int) -> None:
        with Attempt(self, "capture the work of a stream"):
            # Thread-local, so that the program's other threads may go on with calls that a capture forbids, such as
            # cudaMalloc.
            runtime.streamBeginCapture(stream, runtime.streamCaptureModeThreadLocal)

    def end_capture(self, stream: int) -> int:
        with Attempt(self, "make a graph of captured work"):
            captured = runtime.streamEndCapture(stream)
            try:
                return int(runtime.graphInstantiate(captured))
            finally:
                runtime.graphDestroy(captured)

    def launch_graph(self, graph: int, stream: int) -> None:
        try:
            runtime.graphLaunch(graph, stream)
        except RuntimeError as error:
            raise refused(self, "launch a graph", error) from error

    def destroy_graph(self, graph: int) -> None:
        with Attempt(self, "destroy a graph"):
            runtime.graphExecDestroy(graph)
