"""`EmulatedArray`: an array on an emulated GPU, as CuPy's ndarray is on a real one.

It offers ``__cuda_array_interface__`` (version 3) and DLPack. Its memory is host memory, but its contents are valid
only in the order of its stream.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.device.protocol import Array

if TYPE_CHECKING:
    from tests.support.emulated.cuda import EmulatedDevice

_CUDA = 2
"""DLPack's number of the device type."""


class EmulatedArray:
    """An array of an emulated device; created by `EmulatedDevice.empty` and `of`. Slices, transposes and reshapes share
    its memory.

    Attributes:
        device: that has the memory.
        host: a NumPy array of the memory, without any synchronization.
        stream: for which it was created.
    """

    def __init__(self, device: EmulatedDevice, host: Array, stream: int) -> None:
        self.device, self.host, self.stream = device, host, stream

    @classmethod
    def of(cls, device: EmulatedDevice, values: Any, stream: int | None = None) -> EmulatedArray:
        """A copy of a NumPy array, in the order of the stream (None: the current one)."""
        values = np.asarray(values)
        stream = device.current_stream() if stream is None else stream
        array = device.empty_array(values.shape, values.dtype, stream)
        array.set(values, stream)
        return array

    def set(self, values: Any, stream: int | None = None) -> None:
        """Overwrite it in the order of the stream (None: its own). ``values`` may change as soon as this returns."""
        kept, host = np.array(values), self.host
        # The work does not keep the memory alive, as on a GPU.
        address, shape, dtype, strides, nbytes = self.address, host.shape, host.dtype, host.strides, _span(host)
        device = self.device
        del host

        def run() -> None:
            if nbytes:
                device.touch("write to", address, nbytes)
                memory = memoryview((ctypes.c_uint8 * nbytes).from_address(address))
                np.ndarray(shape, dtype, memory, 0, strides)[...] = kept

        self.device.enqueue(self.stream if stream is None else stream, run)

    def get(self, stream: int | None = None) -> Array:
        """A host copy of its contents once the stream (None: its own) has done all its work."""
        self.device.finish(self.stream if stream is None else stream)
        return self.host.copy()

    @property
    def address(self) -> int:
        return self.host.ctypes.data if self.host.size else 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.host.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.host.dtype

    @property
    def strides(self) -> tuple[int, ...]:
        """In bytes."""
        return tuple(self.host.strides)

    @property
    def size(self) -> int:
        return self.host.size

    @property
    def ndim(self) -> int:
        return self.host.ndim

    @property
    def nbytes(self) -> int:
        return self.host.nbytes

    @property
    def T(self) -> EmulatedArray:
        return self._view(self.host.T)

    def __len__(self) -> int:
        return len(self.host)

    def __getitem__(self, key: Any) -> EmulatedArray:
        keys = key if isinstance(key, tuple) else (key,)
        # The ellipsis makes one element a 0-d array, as in CuPy, and not a NumPy scalar.
        return self._view(self.host[keys if Ellipsis in keys else (*keys, Ellipsis)])

    def __setitem__(self, key: Any, values: Any) -> None:
        self[key].set(values)

    def reshape(self, *shape: Any) -> EmulatedArray:
        return self._view(self.host.reshape(*shape))

    def view(self, dtype: Any) -> EmulatedArray:
        return self._view(self.host.view(dtype))

    def __repr__(self) -> str:
        where = f"device {self.device.index}, address {self.address:#x}, stream {self.stream:#x}"
        return f"EmulatedArray({self.shape}, {self.dtype}, {where})"

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": [("", self.dtype.str)],
            "data": (self.address, False),
            "strides": None if self.host.flags.c_contiguous else self.strides,
            # 0 is not allowed here; 1 is the default stream.
            "stream": self.stream or 1,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, self.device.index

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule whose data is valid on the given stream; None is the default stream, -1 orders nothing.

        Raises:
            BufferError: another device or a copy is requested, or there is no code for the dtype.
        """
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("an emulated array is lent as it is and where it is")
        if stream == 0:
            raise ValueError("DLPack: stream 0 says nothing; 1 is the default stream")
        if stream != -1:
            consumer = 0 if stream in (None, 1) else stream
            if consumer != self.stream:
                self.device.order(self.stream, consumer)
        return _lend(self, versioned=max_version is not None and max_version[0] >= 1)

    def _view(self, host: Array) -> EmulatedArray:
        if host.size and not np.may_share_memory(host, self.host):
            raise ValueError("this would be a copy; an emulated array has only views")
        return EmulatedArray(self.device, host, self.stream)


def _span(host: Array) -> int:
    """Bytes from the first element to the end of the last one."""
    if not host.size:
        return 0
    if any(stride < 0 for stride in host.strides):
        raise ValueError("an emulated array that runs backwards cannot be written")
    return int(host.itemsize + sum((n - 1) * stride for n, stride in zip(host.shape, host.strides, strict=True)))


# ---- DLPack


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = (("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


class ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


_CODES = {"i": 0, "u": 1, "f": 2, "V": 4, "c": 5, "b": 6}
"""V: bfloat16, for which NumPy has no kind."""

# Own prototypes, because the functions of ctypes.pythonapi are shared with all code that sets their argument types.
new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)

_lent: dict[int, tuple[Any, ...]] = {}
"""By the address of the managed tensor: objects that must live until its deleter is called."""


def _give_back(managed: int) -> None:
    _lent.pop(managed, None)


def _drop_capsule(capsule: int) -> None:
    for name in (b"dltensor", b"dltensor_versioned"):
        if _is_valid(capsule, name):  # not consumed: a consumer renames it
            _lent.pop(_pointer_of(capsule, name), None)


_give_back_pointer = _Deleter(_give_back)
_drop_capsule_pointer = _Deleter(_drop_capsule)


def lent() -> int:
    """The number of tensors whose consumers have not called the deleter."""
    return len(_lent)


def _lend(array: EmulatedArray, *, versioned: bool) -> Any:
    dtype, ndim = array.dtype, array.ndim
    if dtype.kind not in _CODES or (dtype.kind == "V" and dtype.name != "bfloat16"):
        raise BufferError(f"DLPack has no code for {dtype}")
    shape = (ctypes.c_int64 * ndim)(*array.shape)
    strides = (ctypes.c_int64 * ndim)(*(stride // dtype.itemsize for stride in array.strides))
    managed = ManagedVersioned() if versioned else Managed()
    tensor = managed.tensor
    tensor.data, tensor.device_type, tensor.device_index = array.address, *array.__dlpack_device__()
    tensor.ndim, tensor.code, tensor.bits, tensor.lanes = ndim, _CODES[dtype.kind], 8 * dtype.itemsize, 1
    tensor.shape, tensor.strides = (
        ctypes.cast(numbers, ctypes.POINTER(ctypes.c_int64)) for numbers in (shape, strides)
    )
    managed.deleter = _give_back_pointer
    if isinstance(managed, ManagedVersioned):
        managed.major, managed.minor = 1, 0
    at = ctypes.addressof(managed)
    _lent[at] = (managed, array, shape, strides)
    return new_capsule(
        at, b"dltensor_versioned" if versioned else b"dltensor", ctypes.cast(_drop_capsule_pointer, ctypes.c_void_p)
    )
