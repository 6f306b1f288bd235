"""Bindings to the driver's library, for the few calls that CuPy lacks. None of them creates a CUDA context."""

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
RELAXED = 2
"""The capture mode in which captures forbid a thread no calls: see `capture_mode`."""
_one_int = ctypes.c_int * 1


@functools.cache
def load() -> ctypes.CDLL:
    """The library; raises TransportError if there is no driver."""
    try:
        # PyDLL holds the interpreter lock: these calls are shorter than reacquiring it can take.
        return ctypes.PyDLL(LIBRARY)
    except OSError as error:
        raise TransportError(f"no NVIDIA driver: {error} [G4]") from None


def _call(name: str, *arguments: Any) -> None:
    library = load()
    status = getattr(library, name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        library.cuGetErrorName(status, ctypes.byref(text))
        raise TransportError(f"{name}: {text.value.decode() if text.value else f'error {status}'}")


def version() -> tuple[int, int]:
    """The newest CUDA version that the driver supports, such as (13, 0); needs no GPU."""
    number = ctypes.c_int()
    _call("cuDriverGetVersion", ctypes.byref(number))
    return number.value // 1000, number.value % 1000 // 10


def count() -> int:
    """The number of GPUs that this process sees; raises TransportError with the driver's reason if it sees none."""
    number = ctypes.c_int()
    _call("cuInit", 0)
    _call("cuDeviceGetCount", ctypes.byref(number))
    return number.value


def name(index: int) -> str:
    """The name of a GPU's model. Like the functions below, to be called after `count`, which initializes the driver."""
    text = ctypes.create_string_buffer(256)
    _call("cuDeviceGetName", text, len(text), _device(index))
    return text.value.decode()


def uuid(index: int) -> str:
    """The identity of the physical GPU, or of its MIG instance; the same in all processes."""
    raw = (ctypes.c_ubyte * 16)()
    _call("cuDeviceGetUuid_v2", ctypes.byref(raw), _device(index))
    return str(uuids.UUID(bytes=bytes(raw)))


def in_use(index: int) -> bool:
    """Whether this process uses a GPU: whether its primary context exists."""
    flags, active = ctypes.c_uint(), ctypes.c_int()
    _call("cuDevicePrimaryCtxGetState", _device(index), ctypes.byref(flags), ctypes.byref(active))
    return bool(active.value)


def capture_mode(mode: int) -> int:
    """Set the calling thread's capture mode; returns the previous one.

    While a program captures (torch does so in the global mode, 0), CUDA forbids calls that may wait for the device,
    such as querying an event, allocating, or loading a kernel: to the capturing thread, and to all other threads in the
    global mode, which is the default. A forbidden call fails and invalidates the capture. `RELAXED` lifts this, except
    for what a capture cannot contain.
    """
    value = _one_int(mode)
    # Not by `_call`, because it is called twice for every operation.
    if status := load().cuThreadExchangeStreamCaptureMode(value):
        raise TransportError(f"cuThreadExchangeStreamCaptureMode failed: error {status} [G14]")
    return value[0]


def _device(index: int) -> ctypes.c_int:
    device = ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(device), index)
    return device


def attribute(address: int, which: int) -> int:
    """An attribute of an address; raises TransportError if the driver does not know it, as for pageable host memory."""
    value = ctypes.c_uint64()
    _call("cuPointerGetAttribute", ctypes.byref(value), which, ctypes.c_uint64(address))
    return value.value


def span(address: int) -> tuple[int, int]:
    """The first address and the bytes of the allocation that contains an address."""
    base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(address))
    return base.value, nbytes.value
