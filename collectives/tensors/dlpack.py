"""DLPack without a framework: read the location and layout of another library's tensor.

A capsule holds a C structure, which `read` parses. The capsule is not consumed: it keeps the memory alive under its
original name, and its own destructor releases the memory.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

from collectives.base.dtypes import NAMES, resolve
from collectives.base.errors import InvalidTypeError

CUDA, MANAGED = 2, 13
ON_GPU = (CUDA, MANAGED)
VERSION = (1, 0)
"""The newest supported version of the structure."""

_READ_ONLY = 1
BFLOAT = 4
_KINDS = {0: "int", 1: "uint", 2: "float", BFLOAT: "bfloat", 5: "complex", 6: "bool"}


class _DLDevice(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("place", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


# Functions of this module's own: argument types set on ctypes.pythonapi's are shared with other libraries.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class ExportedTensor(NamedTuple):
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """In bytes; None: C order."""
    dtype: np.dtype[Any]
    """A supported dtype."""
    kind: int
    """DLPack's type of the device."""
    number: int
    """Of the device."""
    read_only: bool
    capsule: Any
    """Keeps the memory alive."""


def read(capsule: Any, *, argument: str = "tensor") -> ExportedTensor:
    """Read a capsule that ``__dlpack__`` returned.

    Raises:
        InvalidTypeError: not such a capsule, already consumed, or of an unsupported dtype.
    """
    tensor, flags = structure(capsule, argument)
    dtype = _dtype(tensor.dtype, argument)
    shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
    strides = tuple(step * dtype.itemsize for step in tensor.strides[: tensor.ndim]) if tensor.strides else None
    address = (tensor.data or 0) + tensor.byte_offset
    return ExportedTensor(
        address, shape, strides, dtype, tensor.place.kind, tensor.place.index, bool(flags & _READ_ONLY), capsule
    )


def structure(capsule: Any, argument: str) -> tuple[_DLTensor, int]:
    """The structure in a capsule, which lives as long as the capsule, and its flags."""
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = _DLManagedTensorVersioned.from_address(_get_pointer(capsule, b"dltensor_versioned"))
        if versioned.major > VERSION[0]:
            raise InvalidTypeError(
                f"{argument}: expected a DLPack capsule of version {VERSION[0]}, got version "
                f"{versioned.major}.{versioned.minor} [T53]"
            )
        return versioned.tensor, versioned.flags
    if _is_valid(capsule, b"dltensor"):
        return _DLManagedTensor.from_address(_get_pointer(capsule, b"dltensor")).tensor, 0
    raise InvalidTypeError(f"{argument}: expected a DLPack capsule that has not been consumed, got {capsule!r} [T54]")


def _dtype(dl_dtype: _DLDataType, argument: str) -> np.dtype[Any]:
    kind = _KINDS.get(dl_dtype.code, f"type code {dl_dtype.code} of ")
    name = "bool" if kind == "bool" and dl_dtype.bits == 8 else f"{kind}{dl_dtype.bits}"
    if name not in NAMES or dl_dtype.lanes != 1:
        vector = f" in vectors of {dl_dtype.lanes}" if dl_dtype.lanes != 1 else ""
        raise InvalidTypeError(
            f"{argument}: DLPack dtype {name}{vector} is not supported; expected one of {', '.join(NAMES)} [T24]"
        )
    return resolve(name)
