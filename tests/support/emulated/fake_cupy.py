"""A CuPy without a GPU, and a driver's library without a driver: what the real device calls, held to the real
signatures.

The signatures are those of CuPy 14.2, nccl4py 0.6 and CUDA 13.5, word for word as `signature` and the driver's header
give them; where the packages are installed a test compares them. `tests/unit/test_calls.py` holds every call to them.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

SIGNATURES = {
    "cupy.cuda.runtime": """
        check_status(int status)
        deviceCanAccessPeer(int device, int peerDevice) -> int
        deviceEnablePeerAccess(int peerDevice)
        deviceGetAttribute(int attrib, int device) -> int
        eventCreateWithFlags(unsigned int flags) -> intptr_t
        eventDestroy(intptr_t event)
        eventQuery(intptr_t event)
        eventRecord(intptr_t event, intptr_t stream)
        free(intptr_t ptr)
        freeHost(intptr_t ptr)
        getDevice() -> int
        graphDestroy(intptr_t graph)
        graphExecDestroy(intptr_t graphExec)
        graphInstantiate(intptr_t graph) -> intptr_t
        graphLaunch(intptr_t graphExec, intptr_t stream)
        hostAlloc(size_t size, unsigned int flags) -> intptr_t
        ipcCloseMemHandle(intptr_t devPtr)
        ipcGetEventHandle(intptr_t event)
        ipcGetMemHandle(intptr_t devPtr)
        ipcOpenEventHandle(bytes handle)
        ipcOpenMemHandle(bytes handle, unsigned int flags=cudaIpcMemLazyEnablePeerAccess)
        malloc(size_t size) -> intptr_t
        memcpyAsync(intptr_t dst, intptr_t src, size_t size, int kind, intptr_t stream)
        memsetAsync(intptr_t ptr, int value, size_t size, intptr_t stream)
        runtimeGetVersion() -> int
        setDevice(int device)
        streamBeginCapture(intptr_t stream, int mode=streamCaptureModeRelaxed)
        streamCreateWithPriority(unsigned int flags, int priority) -> intptr_t
        streamDestroy(intptr_t stream)
        streamEndCapture(intptr_t stream) -> intptr_t
        streamIsCapturing(intptr_t stream) -> bool
        streamSynchronize(intptr_t stream)
        streamWaitEvent(intptr_t stream, intptr_t event, unsigned int flags=0)
    """,
    "cupy.cuda.driver": """
        launchKernel(intptr_t f, unsigned int grid_dim_x, unsigned int grid_dim_y, unsigned int grid_dim_z,\
 unsigned int block_dim_x, unsigned int block_dim_y, unsigned int block_dim_z, unsigned int shared_mem_bytes,\
 intptr_t stream, intptr_t kernel_params, intptr_t extra)
        moduleGetFunction(intptr_t module, str funcname) -> intptr_t
        moduleLoadData(bytes image) -> intptr_t
    """,
    "cupy.cuda.nvrtc": """
        compileProgram(intptr_t prog, options)
        createProgram(str src, str name, headers, include_names) -> intptr_t
        destroyProgram(intptr_t prog)
        getCUBIN(intptr_t prog) -> bytes
        getPTX(intptr_t prog) -> bytes
        getProgramLog(intptr_t prog) -> str
        getSupportedArchs() -> tuple
        getVersion() -> tuple
    """,
    "cupy.cuda.stream": """
        get_current_stream(int device_id=-1)
        Stream.from_external(cls, obj)
    """,
    "cupy": """
        ascontiguousarray(a, dtype=None)
        empty(shape, dtype=<class 'float'>, order='C')
        ndarray(shape, dtype=float, memptr=None, strides=None, order='C')
    """,
    "cupy.cuda": """
        MemoryPointer(BaseMemory mem, ptrdiff_t offset)
        UnownedMemory(intptr_t ptr, size_t size, owner, int device_id=-1)
        get_current_stream(int device_id=-1)
    """,
    "cupy.cuda.nccl": """
        NcclCommunicator(int ndev, bytes commId, int rank, NcclConfig config=None)
        NcclCommunicator.abort(self)
        NcclCommunicator.allGather(self, intptr_t sendbuf, intptr_t recvbuf, size_t count, int datatype,\
 intptr_t stream)
        NcclCommunicator.allReduce(self, intptr_t sendbuf, intptr_t recvbuf, size_t count, int datatype, int op,\
 intptr_t stream)
        NcclCommunicator.broadcast(self, intptr_t sendbuff, intptr_t recvbuff, size_t count, int datatype, int root,\
 intptr_t stream)
        NcclCommunicator.check_async_error(self)
        NcclCommunicator.destroy(self)
        NcclCommunicator.recv(self, intptr_t recvbuf, size_t count, int datatype, int peer, intptr_t stream)
        NcclCommunicator.reduceScatter(self, intptr_t sendbuf, intptr_t recvbuf, size_t recvcount, int datatype,\
 int op, intptr_t stream)
        NcclCommunicator.send(self, intptr_t sendbuf, size_t count, int datatype, int peer, intptr_t stream)
        get_unique_id()
        get_version()
        groupEnd()
        groupStart()
    """,
    "nccl.bindings.nccl": """
        NCCLError(status)
        UniqueId.from_buffer(buffer)
        all_gather(intptr_t sendbuff, intptr_t recvbuff, size_t sendcount, int datatype, comm, intptr_t stream)
        all_reduce(intptr_t sendbuff, intptr_t recvbuff, size_t count, int datatype, int op, comm, intptr_t stream)
        broadcast(intptr_t sendbuff, intptr_t recvbuff, size_t count, int datatype, int root, comm, intptr_t stream)
        comm_abort(comm)
        comm_destroy(comm)
        comm_get_async_error(comm) -> int
        comm_init_rank(int nranks, comm_id, int rank)
        get_unique_id()
        get_version() -> int
        group_end()
        group_start()
        recv(intptr_t recvbuff, size_t count, int datatype, int peer, comm, intptr_t stream)
        reduce_scatter(intptr_t sendbuff, intptr_t recvbuff, size_t recvcount, int datatype, int op, comm,\
 intptr_t stream)
        send(intptr_t sendbuff, size_t count, int datatype, int peer, comm, intptr_t stream)
    """,
    "cuda.pathfinder": """
        find_nvidia_header_directory(libname)
    """,
    "libcuda": """
        cuDeviceGet(CUdevice *device, int ordinal)
        cuDeviceGetCount(int *count)
        cuDeviceGetName(char *name, int len, CUdevice dev)
        cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice dev)
        cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active)
        cuDriverGetVersion(int *driverVersion)
        cuGetErrorName(CUresult error, const char **pStr)
        cuInit(unsigned int Flags)
        cuMemGetAddressRange_v2(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr)
        cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
        cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
    """,
}
CONSTANTS = {
    "cudaDevAttrMultiProcessorCount": 16,
    "cudaIpcMemLazyEnablePeerAccess": 1,
    "eventDisableTiming": 2,
    "eventInterprocess": 4,
    "hostAllocMapped": 2,
    "hostAllocPortable": 1,
    "memcpyDefault": 4,
    "streamCaptureModeThreadLocal": 1,
    "streamNonBlocking": 1,
}


def signature(function: Any) -> str:
    """A real function's signature: as its docstring begins, if it is compiled, without its annotations otherwise."""
    name, first = function.__name__, (function.__doc__ or "").strip().partition("\n")[0]
    if first.startswith("__init__("):
        return name + first.removeprefix("__init__")
    if re.match(rf"(\w+\.)?{name}\(", first):
        return first
    parameters = inspect.signature(function).parameters.values()
    return f"{name}({', '.join(str(parameter.replace(annotation=parameter.empty)) for parameter in parameters)})"


def parameters(text: str) -> list[str]:
    """The parameters of a signature."""
    return [parameter for parameter in text.partition("(")[2].rpartition(")")[0].split(", ") if parameter]


def signatures(module: str) -> dict[str, str]:
    """By the function's name."""
    return {line.partition("(")[0]: line for line in map(str.strip, SIGNATURES[module].splitlines()) if line}


class Call(NamedTuple):
    """A call, with the arguments in their order."""

    name: str
    arguments: tuple[Any, ...]


def checked(signature: str, arguments: tuple[Any, ...]) -> None:
    """Refuse arguments that the real function would refuse."""
    name, expected = signature.partition("(")[0], [text for text in parameters(signature) if text != "self"]
    needed = [parameter for parameter in expected if "=" not in parameter]
    assert len(needed) <= len(arguments) <= len(expected), f"{signature}: got {arguments}"
    for parameter, value in zip(expected, arguments, strict=False):
        kind = parameter.partition("=")[0].rpartition(" ")[0]
        if kind in ("intptr_t", "int", "size_t", "unsigned int"):
            bits = 31 if kind == "int" else 32 if kind == "unsigned int" else 63
            lowest = 0 if kind in ("size_t", "unsigned int") else -(1 << bits)
            assert type(value) is int and lowest <= value < 1 << bits, f"{name}: {parameter}: {value!r}"
        elif kind:
            assert type(value).__name__ == kind, f"{name}: {parameter}: {value!r}"


class CudaError(RuntimeError):
    """As CuPy raises them: the message begins with CUDA's name for the error."""


class FakeCupy:
    """CuPy's modules, which note what they are called with.

    Attributes:
        calls: what was called, in order.
        failures: by function, the error that its next calls raise.
        results: by function, what it returns instead of a number of its own.
        modules: to be put into ``sys.modules``.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.failures: dict[str, Exception] = {}
        self.current = 0
        self._numbers = itertools.count(0x7F00_0000_0000, 0x100)
        self._host: list[Any] = []
        self.results: dict[str, Any] = {
            "check_status": self._check_status,
            "deviceCanAccessPeer": 1,
            "deviceGetAttribute": lambda attribute, device: {16: 132, 75: 9, 76: 0}[attribute],
            "eventQuery": 0,
            "getDevice": 0,
            "getCUBIN": b"\x7fELF and so on",
            "getPTX": b"// PTX",
            "getProgramLog": "collectives.cu(1): error: identifier",
            "getSupportedArchs": (75, 80, 90, 100),
            "getVersion": (13, 0),
            "hostAlloc": self._host_alloc,
            "ipcGetEventHandle": bytes(range(64)),
            "ipcGetMemHandle": bytes(64),
            "runtimeGetVersion": 13000,
        }
        parts = {name: SimpleNamespace(**self._functions(name)) for name in ("runtime", "driver", "nvrtc")}
        vars(parts["runtime"]).update(CONSTANTS)
        parts["nvrtc"].NVRTCError = type("NVRTCError", (RuntimeError,), {})
        parts["stream"] = SimpleNamespace(
            get_current_stream=lambda device_id=-1: SimpleNamespace(ptr=self.current),
            Stream=SimpleNamespace(from_external=lambda stream: self._using(stream.__cuda_stream__())),
        )
        cuda, cupy = ModuleType("cupy.cuda"), ModuleType("cupy")
        vars(cuda).update(parts)
        vars(cupy).update(cuda=cuda, __version__="14.2.0", __path__=[], empty=self._empty)
        self.modules = {"cupy": cupy, "cupy.cuda": cuda}

    def called(self, *names: str) -> list[tuple[Any, ...]]:
        """The arguments of all calls of these functions."""
        return [call.arguments for call in self.calls if call.name in names]

    def _functions(self, module: str) -> dict[str, Callable[..., Any]]:
        return {name: self._function(name, text) for name, text in signatures(f"cupy.cuda.{module}").items()}

    def _function(self, name: str, signature: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            checked(signature, arguments)
            self.calls.append(Call(name, arguments))
            if name in self.failures:
                raise self.failures[name]
            if name in self.results:
                result = self.results[name]
                return result(*arguments) if callable(result) else result
            return next(self._numbers) if "-> intptr_t" in signature or "Open" in name else None

        return call

    def _check_status(self, status: int) -> None:
        if status:
            raise CudaError(f"cudaError{status}: as the runtime says it")

    def _host_alloc(self, nbytes: int, flags: int) -> int:
        self._host.append(ctypes.create_string_buffer(nbytes))
        return ctypes.addressof(self._host[-1])

    def _using(self, stream: tuple[int, int]) -> Any:
        version, number = stream
        assert version == 0

        class Using:
            def __enter__(using) -> None:
                using.before, self.current = self.current, number

            def __exit__(using, *error: object) -> None:
                self.current = using.before

        return Using()

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        if "empty" in self.failures:
            raise self.failures["empty"]
        return SimpleNamespace(shape=shape, dtype=dtype, stream=self.current)


_LIBRARY = r"""
#include <stdlib.h>
#include <string.h>
#if __has_include(<cuda.h>)
#include <cuda.h>
#else
typedef int CUresult, CUdevice;
typedef int CUpointer_attribute;
typedef int CUstreamCaptureMode;
typedef unsigned long long CUdeviceptr;
typedef struct { char bytes[16]; } CUuuid;
#endif
static int setting(const char *name) { const char *text = getenv(name); return text ? atoi(text) : 0; }
CUresult cuGetErrorName(CUresult error, const char **text) {
    *text = error == 100 ? "CUDA_ERROR_NO_DEVICE" : 0; return 0;
}
CUresult cuDriverGetVersion(int *version) { *version = setting("FAKE_CUDA"); return 0; }
CUresult cuInit(unsigned int flags) { return setting("FAKE_INIT"); }
CUresult cuDeviceGetCount(int *count) { *count = setting("FAKE_GPUS"); return 0; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = 40 + ordinal; return ordinal < setting("FAKE_GPUS") ? 0 : 101;
}
CUresult cuDeviceGetName(char *name, int length, CUdevice device) { strncpy(name, "NVIDIA H200", length); return 0; }
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    memset(uuid->bytes, 0, 16); uuid->bytes[15] = device; return 0;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) {
    *flags = 0, *active = device - 40 == setting("FAKE_IN_USE");
    return 0;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    static __thread CUstreamCaptureMode current;
    CUstreamCaptureMode before = current;
    if ((int)*mode > 2) return 1;
    current = *mode, *mode = before;
    return 0;
}
/* Page-locked memory at 0x1000, and device memory of GPU 1 at 0x7f0000000000. */
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address) {
    int device = address >= 0x7f0000000000ull;
    if (!device && address != 0x1000) return 1;
    if (attribute == 7) *(unsigned long long *)data = 0x123456789abull;
    else if (attribute == 2) *(unsigned int *)data = device ? 2 : 1;
    else if (attribute == 9) *(int *)data = 1;
    else return 1;
    return 0;
}
CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    if (address < 0x7f0000000000ull) return 1;
    *base = 0x7f0000000000ull, *size = 8ull << 30;
    return 0;
}
"""


def build_library(folder: Path, compiler: str) -> Path:
    """Make a ``libcuda.so.1`` that answers as the environment says.

    FAKE_CUDA is the driver's version (13000), FAKE_GPUS how many there are, FAKE_INIT the error that it starts with,
    and FAKE_IN_USE the GPU that the process uses already.
    """
    source, library = folder / "libcuda.c", folder / "libcuda.so.1"
    source.write_text(_LIBRARY)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Werror=implicit", "-I/usr/local/cuda/include", "-o", library, source],
        check=True,
        timeout=60,
    )
    return library
