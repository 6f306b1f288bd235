"""The GPU as CuPy reaches it: CUDA's runtime and driver, with plain numbers for streams, events and addresses."""

from __future__ import annotations

import threading
from typing import Any

import cupy
import numpy as np
from cupy.cuda import driver, runtime
from cupy.cuda import stream as streams

from collectives.base.errors import CollectivesError, OutOfMemoryError, TransportError
from collectives.device import compiler, libcuda
from collectives.device.pinned import PinnedPool
from collectives.device.protocol import Allocation, Array

# Looked up once: these are called for every round of every collective.
_launch = driver.launchKernel
_copy = runtime.memcpyAsync
_record = runtime.eventRecord
_wait = runtime.streamWaitEvent
_query = runtime.eventQuery
_ANY_KIND = runtime.memcpyDefault
_PINNED = runtime.hostAllocPortable | runtime.hostAllocMapped

_NOT_READY = 600
_CAPABILITY = (75, 76)
"""The attributes of the compute capability, major and minor, which CuPy does not name."""
_PRIORITY = -100
"""Above all that there are; CUDA takes the highest instead."""
_SHARED_UNIT = 2 << 20
"""CUDA cuts smaller allocations from blocks of this size, and shares whole blocks: what is shared has blocks of its
own."""

_OUT_OF_MEMORY = (
    "; the memory is taken by this process, its framework's pool (which can give back what it does not use: "
    "torch.cuda.empty_cache(), cupy.get_default_memory_pool().free_all_blocks()), other ranks that have mapped what "
    "was freed "
    "(collectives.empty_cache(), on every rank), or other processes (nvidia-smi lists them)"
)
_BROKEN = (
    "; work given to this GPU has failed, perhaps earlier, and perhaps the program's own: this process must be "
    "started anew; "
    "compute-sanitizer, or CUDA_LAUNCH_BLOCKING=1, shows which work it was"
)
_ADVICE = {
    "cudaErrorMemoryAllocation": _OUT_OF_MEMORY,
    "CUDA_ERROR_OUT_OF_MEMORY": _OUT_OF_MEMORY,
    "cudaErrorIllegalAddress": _BROKEN,
    "CUDA_ERROR_ILLEGAL_ADDRESS": _BROKEN,
    "cudaErrorLaunchFailure": _BROKEN,
    "CUDA_ERROR_LAUNCH_FAILED": _BROKEN,
    "cudaErrorMisalignedAddress": _BROKEN,
    "CUDA_ERROR_MISALIGNED_ADDRESS": _BROKEN,
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "; the driver is older than CuPy's CUDA: update the driver, or install the CuPy "
    "for its CUDA",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "; the driver is older than CuPy's CUDA: update the driver, or install the "
    "CuPy for its CUDA",
}
_SHARING = frozenset(
    f"cudaError{name}"
    for name in (
        "DeviceUninitialized",
        "InvalidContext",
        "InvalidDevice",
        "InvalidResourceHandle",
        "InvalidValue",
        "MapBufferObjectFailed",
        "NotPermitted",
        "NotSupported",
        "PeerAccessUnsupported",
    )
)
"""With these CUDA refuses to share memory or events."""
_SHARING_ADVICE = (
    "; memory of expandable segments (PYTORCH_CUDA_ALLOC_CONF) and of cudaMallocAsync's pools cannot be shared; both "
    "processes must see "
    "both GPUs (CUDA_VISIBLE_DEVICES); containers need --ipc=host, and --pid=host where each has its own"
)


class _Foreign:
    """A stream by its number, as CuPy takes streams of others."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.number


class _Attempt:
    """Within it CUDA's errors become ours. Where every microsecond counts, the methods below do the same in place."""

    __slots__ = ("_attempt", "_device", "_sharing")

    def __init__(self, device: CupyDevice, attempt: str, *, sharing: bool = False) -> None:
        self._device, self._attempt, self._sharing = device, attempt, sharing

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (RuntimeError, MemoryError)) and not isinstance(error, CollectivesError):
            raise self._device._refused(self._attempt, error, sharing=self._sharing) from error


class CupyDevice:
    """`device.Device` by CuPy. To be made by `devices.provider` alone, which has checked that all it needs is there.

    Raises:
        TransportError: everywhere, if CUDA refuses; names CUDA's error, what was tried, and what to do where that is
            known.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.identity = libcuda.uuid(index)
        self.name = libcuda.name(index)
        self.multiprocessors: int = runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, index)
        self.shared_unit = _SHARED_UNIT
        self._compiling = threading.Lock()
        self._known_to = threading.local()
        self._modules: dict[str, int] = {}
        self._functions: dict[tuple[str, str], int] = {}
        self._pinned = PinnedPool(lambda nbytes: runtime.hostAlloc(nbytes, _PINNED), runtime.freeHost)
        # Kept for good: some versions of CuPy destroy the stream together with the object.
        self._streams: dict[int, Any] = {}

    def activate(self) -> tuple[int, int]:
        mode = libcuda.capture_mode(libcuda.RELAXED)
        try:
            previous: int = runtime.getDevice()
            # Once in each thread even if it is the same: a thread that has never used CUDA says 0, but has no context
            # yet.
            if previous != self.index or not hasattr(self._known_to, "thread"):
                runtime.setDevice(self.index)
                self._known_to.thread = True
        except RuntimeError as error:
            libcuda.capture_mode(mode)
            raise self._refused("make it the current device", error) from error
        return previous, mode

    def deactivate(self, previous: tuple[int, int]) -> None:
        index, mode = previous
        libcuda.capture_mode(mode)
        if index == self.index:
            return
        with _Attempt(self, f"make GPU {index} the current device again"):
            # A device that this process does not use was current by default only; to set it would take up memory on it.
            if libcuda.in_use(index):
                runtime.setDevice(index)

    # ---- memory
    # ----------------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, *, shared: bool = False) -> int:
        with _Attempt(self, f"allocate {nbytes} bytes"):
            address: int = runtime.malloc(-(-nbytes // _SHARED_UNIT) * _SHARED_UNIT if shared else nbytes)
        return address

    def free(self, address: int) -> None:
        with _Attempt(self, f"free the memory at {address:#x}"):
            runtime.free(address)

    def pinned(self, nbytes: int) -> Array:
        with _Attempt(self, f"page-lock {nbytes} bytes of host memory"):
            return self._pinned.take(nbytes)

    def allocation(self, address: int) -> Allocation:
        try:
            base, nbytes = libcuda.span(address)
            return Allocation(base, nbytes, libcuda.attribute(address, libcuda.BUFFER_ID))
        except TransportError as error:
            raise TransportError(
                f"GPU {self.index} ({self.name}): {address:#x} is not device memory that the driver knows as one "
                f"piece: {error}"
            ) from error

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        try:
            _copy(target, source, nbytes, _ANY_KIND, stream)
        except RuntimeError as error:
            raise self._refused(f"copy {nbytes} bytes from {source:#x} to {target:#x}", error) from error

    def clear(self, target: int, nbytes: int, stream: int) -> None:
        try:
            runtime.memsetAsync(target, 0, nbytes, stream)
        except RuntimeError as error:
            raise self._refused(f"clear {nbytes} bytes at {target:#x}", error) from error

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], stream: int) -> Any:
        # CuPy's pool gives memory out by stream: what was freed on one is used again on it, and so after its last use
        # there.
        with _Attempt(self, f"make an array of {shape} {dtype}"), self._stream(stream):
            return cupy.empty(shape, dtype)

    def _stream(self, number: int) -> Any:
        found = self._streams.get(number)
        if found is None:
            found = self._streams.setdefault(number, streams.Stream.from_external(_Foreign(number)))
        return found

    # ---- streams and events
    # ------------------------------------------------------------------------------------------------------

    def create_stream(self) -> int:
        with _Attempt(self, "create a stream"):
            created: int = runtime.streamCreateWithPriority(runtime.streamNonBlocking, _PRIORITY)
        return created

    def destroy_stream(self, stream: int) -> None:
        with _Attempt(self, "destroy a stream"):
            runtime.streamDestroy(stream)

    def current_stream(self) -> int:
        try:
            number: int = streams.get_current_stream(self.index).ptr
        except RuntimeError as error:
            raise self._refused("find the current stream", error) from error
        return number

    def capturing(self, stream: int) -> bool:
        try:
            return bool(runtime.streamIsCapturing(stream))
        except RuntimeError as error:
            # The legacy default stream, while a stream that waits for it is being captured: work given to it would be
            # part of that.
            if str(error).startswith("cudaErrorStreamCaptureImplicit"):
                return True
            raise self._refused("look at a stream", error) from error

    def drain(self, stream: int) -> None:
        try:
            runtime.streamSynchronize(stream)
        except RuntimeError as error:
            raise self._refused("finish the work of a stream", error) from error

    def create_event(self, *, shared: bool = False) -> int:
        flags = runtime.eventDisableTiming | (runtime.eventInterprocess if shared else 0)
        with _Attempt(self, "create an event"):
            created: int = runtime.eventCreateWithFlags(flags)
        return created

    def destroy_event(self, event: int) -> None:
        with _Attempt(self, "destroy an event"):
            runtime.eventDestroy(event)

    def record(self, event: int, stream: int) -> None:
        try:
            _record(event, stream)
        except RuntimeError as error:
            raise self._refused("record an event", error) from error

    def wait(self, stream: int, event: int) -> None:
        try:
            _wait(stream, event)
        except RuntimeError as error:
            raise self._refused("have a stream wait for an event", error) from error

    def passed(self, event: int) -> bool:
        status = _query(event)
        if not status:
            return True
        if status == _NOT_READY:
            return False
        try:
            runtime.check_status(status)
        except RuntimeError as error:
            raise self._refused("ask for an event", error) from error
        return True

    def synchronize(self, event: int) -> None:
        try:
            runtime.eventSynchronize(event)
        except RuntimeError as error:
            raise self._refused("wait for an event", error) from error

    # ---- sharing with other processes of the host
    # ----------------------------------------------------------------------------------

    def export_memory(self, base: int) -> bytes:
        with _Attempt(self, f"share the memory at {base:#x} with other processes", sharing=True):
            handle: bytes = runtime.ipcGetMemHandle(base)
        return handle

    def import_memory(self, handle: bytes) -> int:
        with _Attempt(self, "reach the memory of another process", sharing=True):
            address: int = runtime.ipcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess)
        return address

    def forget_memory(self, address: int) -> None:
        with _Attempt(self, "give back the memory of another process"):
            runtime.ipcCloseMemHandle(address)

    def export_event(self, event: int) -> bytes:
        with _Attempt(self, "share an event with other processes", sharing=True):
            handle: bytes = runtime.ipcGetEventHandle(event)
        return handle

    def import_event(self, handle: bytes) -> int:
        with _Attempt(self, "reach an event of another process", sharing=True):
            event: int = runtime.ipcOpenEventHandle(handle)
        return event

    def reach(self, peer: int) -> None:
        with _Attempt(self, f"reach the memory of GPU {peer}", sharing=True):
            if not runtime.deviceCanAccessPeer(self.index, peer):
                raise TransportError(
                    f"GPU {self.index} ({self.name}): its kernels cannot reach the memory of GPU {peer}: nvidia-smi "
                    f"topo -p2p r shows "
                    f"which GPUs can"
                )
            try:
                runtime.deviceEnablePeerAccess(peer)
            except RuntimeError as error:
                if not str(error).startswith(
                    "cudaErrorPeerAccessAlreadyEnabled"
                ):  # by another world, or by the program
                    raise

    # ---- kernels
    # -----------------------------------------------------------------------------------------------------------------

    def function(self, source: str, name: str) -> int:
        found = self._functions.get((source, name))
        return self._compile(source, name) if found is None else found

    def _compile(self, source: str, name: str) -> int:
        with self._compiling, _Attempt(self, f"load the kernel {name!r}"):
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
            raise self._refused(
                f"launch a kernel of {grid[0]} x {grid[1]} blocks of {threads} threads", error
            ) from error

    # ---- graphs
    # ------------------------------------------------------------------------------------------------------------------

    def begin_capture(self, stream: int) -> None:
        with _Attempt(self, "capture the work of a stream"):
            # Of this thread: the program's other threads may go on with what a capture does not allow, such as
            # cudaMalloc.
            runtime.streamBeginCapture(stream, runtime.streamCaptureModeThreadLocal)

    def end_capture(self, stream: int) -> int:
        with _Attempt(self, "make a graph of captured work"):
            captured = runtime.streamEndCapture(stream)
            try:
                graph: int = runtime.graphInstantiate(captured)
            finally:
                runtime.graphDestroy(captured)
            return graph

    def launch_graph(self, graph: int, stream: int) -> None:
        try:
            runtime.graphLaunch(graph, stream)
        except RuntimeError as error:
            raise self._refused("launch a graph", error) from error

    def destroy_graph(self, graph: int) -> None:
        with _Attempt(self, "destroy a graph"):
            runtime.graphExecDestroy(graph)

    def _refused(self, attempt: str, error: BaseException, *, sharing: bool = False) -> TransportError:
        """CUDA's error in our words."""
        name = str(error).partition(":")[0]
        advice = _OUT_OF_MEMORY if isinstance(error, MemoryError) else _ADVICE.get(name, "")
        if sharing and name in _SHARING:
            advice = _SHARING_ADVICE
        kind = OutOfMemoryError if advice is _OUT_OF_MEMORY else TransportError
        return kind(f"GPU {self.index} ({self.name}): cannot {attempt}: {error}{advice}")
