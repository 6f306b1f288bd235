"""The driver's own library, for the few questions that CuPy does not answer. Asking creates no CUDA context on any
GPU."""

from __future__ import annotations

import ctypes
import functools
import uuid as uuids
from typing import Any

from collectives.base.errors import TransportError

LIBRARY = "libcuda.so.1"

MEMORY_TYPE = 2
BUFFER_ID = 7
DEVICE_ORDINAL = 9
DEVICE_MEMORY = 2
"""The `MEMORY_TYPE` of device memory."""
_one_int = ctypes.c_int * 1
RELAXED = 2
"""The mode of a thread whose calls no capture of a graph forbids: see `capture_mode`."""


@functools.cache
def load() -> ctypes.CDLL:
    """The library itself; raises TransportError if there is no driver."""
    try:
        # PyDLL keeps the interpreter lock: each of these calls is shorter than winning it back can take.
        return ctypes.PyDLL(LIBRARY)
    except OSError as error:
        raise TransportError(f"no NVIDIA driver: {error}") from None


def _call(name: str, *arguments: Any) -> None:
    library = load()
    status = getattr(library, name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        library.cuGetErrorName(status, ctypes.byref(text))
        raise TransportError(f"{name}: {text.value.decode() if text.value else f'error {status}'}")


def version() -> tuple[int, int]:
    """The newest CUDA that the driver serves, such as (13, 0); needs no GPU."""
    number = ctypes.c_int()
    _call("cuDriverGetVersion", ctypes.byref(number))
    return number.value // 1000, number.value % 1000 // 10


def count() -> int:
    """How many GPUs this process sees; raises TransportError with the driver's own reason where it is none."""
    number = ctypes.c_int()
    _call("cuInit", 0)
    _call("cuDeviceGetCount", ctypes.byref(number))
    return number.value


def name(index: int) -> str:
    """What a GPU is called; like the functions below after `count`, which starts the driver."""
    text = ctypes.create_string_buffer(256)
    _call("cuDeviceGetName", text, len(text), _device(index))
    return text.value.decode()


def uuid(index: int) -> str:
    """Names the physical GPU, or the part of one that is served as a GPU of its own; alike in all processes."""
    raw = (ctypes.c_ubyte * 16)()
    _call("cuDeviceGetUuid_v2", ctypes.byref(raw), _device(index))
    return str(uuids.UUID(bytes=bytes(raw)))


def in_use(index: int) -> bool:
    """Whether this process has begun to use a GPU: whether there is its primary context."""
    flags, active = ctypes.c_uint(), ctypes.c_int()
    _call("cuDevicePrimaryCtxGetState", _device(index), ctypes.byref(flags), ctypes.byref(active))
    return bool(active.value)


def capture_mode(mode: int) -> int:
    """Set how captures of graphs restrict the calling thread; the mode before.

    While a program captures (torch does so in the global mode, 0), CUDA forbids calls that might wait for the device,
    such as asking for an event, allocating, or loading a kernel: to the capturing thread, and to every other thread in
    the global mode, which is a thread's first. A forbidden call fails, and invalidates the capture. `RELAXED` lifts
    this; what a capture cannot have in itself stays forbidden.
    """
    value = _one_int(mode)
    if status := load().cuThreadExchangeStreamCaptureMode(
        value
    ):  # called twice for every operation, and so without `_call`
        raise TransportError(f"cuThreadExchangeStreamCaptureMode: error {status}")
    return value[0]


def _device(index: int) -> ctypes.c_int:
    device = ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(device), index)
    return device


def attribute(address: int, which: int) -> int:
    """What the driver knows about an address; raises TransportError if it does not know it: ordinary host memory."""
    value = ctypes.c_uint64()
    _call("cuPointerGetAttribute", ctypes.byref(value), which, ctypes.c_uint64(address))
    return value.value


def span(address: int) -> tuple[int, int]:
    """Where the allocation begins that an address lies in, and how many bytes it has."""
    base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(address))
    return base.value, nbytes.value
