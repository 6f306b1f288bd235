"""XLA's foreign function interface in Python: a compiled program on the CPU passes its buffers without a copy.

XLA calls a C function, here a ctypes callback, with a pointer to a *call frame*: structures with the addresses of
operands and results, and the attributes of the call. Their layout is that of ``xla/ffi/api/c_api.h``, which jaxlib
includes (`jax.ffi.include_dir`); every structure contains its size, so a different layout is detected.

    metadata    at registration XLA asks for the version of the interface that the function implements
    execute     read the frame, pass NumPy views of the buffers to Python, and return NULL or an error with a message

Only the stage *execute* is registered. Views are valid during the call only: XLA reuses its memory as soon as the call
returns, also with an error. Elsewhere the engine keeps memory that a peer may still access after a failure in mid-call;
here it can only wait for the peers' acknowledgement (at most a second) before the call returns.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from collectives.base import dtypes

_Pointer, _Size, _Long, _Int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int32


_HEAD = (("struct_size", _Size), ("extension", _Pointer))
"""The first fields of every structure."""


class _Extension(ctypes.Structure):
    _fields_ = (("struct_size", _Size), ("type", _Int), ("next", _Pointer), ("metadata", _Pointer))


class _Version(ctypes.Structure):
    _fields_ = (*_HEAD, ("major", _Int), ("minor", _Int))


class _Metadata(ctypes.Structure):
    _fields_ = (("struct_size", _Size), ("version", _Version))


class _Api(ctypes.Structure):
    _fields_ = (*_HEAD, ("version", _Version), ("internal", _Pointer), ("create_error", _Pointer))


class _Buffers(ctypes.Structure):
    _fields_ = (*_HEAD, ("size", _Long), ("types", _Pointer), ("items", _Pointer))


class _Attributes(ctypes.Structure):
    _fields_ = (
        *_HEAD,
        ("size", _Long),
        ("types", ctypes.POINTER(_Int)),
        ("names", _Pointer),
        ("items", ctypes.POINTER(_Pointer)),
    )


class _Frame(ctypes.Structure):
    _fields_ = (
        *_HEAD,
        ("api", ctypes.POINTER(_Api)),
        ("context", _Pointer),
        ("stage", _Int),
        ("operands", _Buffers),
        ("results", _Buffers),
        ("attributes", _Attributes),
    )


class _Buffer(ctypes.Structure):
    _fields_ = (*_HEAD, ("dtype", _Int), ("data", _Pointer), ("rank", _Long), ("dims", ctypes.POINTER(_Long)))


class _Span(ctypes.Structure):
    _fields_ = (("data", _Pointer), ("size", _Size))


class _Error(ctypes.Structure):
    _fields_ = (*_HEAD, ("message", ctypes.c_char_p), ("code", _Int))


_METADATA = 1
_EXECUTE = 3
_STRING = 4
_ABORTED = 10
_DATA_AT = _Buffer.data.offset
_KEPT = 8
"""Sets of buffer addresses per program whose views are cached: XLA often reuses the same memory."""

_DTYPES = {
    1: "bool",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "uint8",
    7: "uint16",
    8: "uint32",
    9: "uint64",
    10: "float16",
    11: "float32",
    12: "float64",
    15: "complex64",
    16: "bfloat16",
    18: "complex128",
    19: "float8_e5m2",
    20: "float8_e4m3fn",
    23: "float8_e4m3b11fnuz",
    24: "float8_e5m2fnuz",
    25: "float8_e4m3fnuz",
    28: "float8_e4m3",
    29: "float8_e3m4",
    33: "float8_e8m0fnu",
}
_TOKEN = 17

Array = np.ndarray[Any, np.dtype[Any]]
Function = Callable[[list[Array], list[Array]], object]


class Unreadable(Exception):
    """XLA passes a structure or dtype that this module does not support."""


def version_in(header: str) -> tuple[int, int] | None:
    """Return the interface version (major, minor) that a ``c_api.h`` defines; None if it defines none."""
    matches = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", header) for part in ("MAJOR", "MINOR")]
    major, minor = (None if each is None else int(each[1]) for each in matches)
    return None if major is None or minor is None else (major, minor)


def handler(find: Callable[[str], Function], version: tuple[int, int]) -> Any:
    """Return a C function for `jax.ffi.register_ffi_target`; the caller keeps it for the life of the process.

    Args:
        find: maps the attribute ``call`` to a function of the operands and the results, NumPy arrays in XLA's memory;
            the function writes the results. One list is passed twice if operands are replaced in place. An exception
            becomes XLA's error, with its type and message.
        version: XLA's version of the interface, the only one that XLA accepts.
    """
    programs: dict[bytes, _Program] = {}

    def handle(pointer: int) -> int | None:
        frame = _Frame.from_address(pointer)
        try:
            if frame.extension:
                extension = _Extension.from_address(frame.extension)
                if extension.type == _METADATA:
                    reported = _Metadata.from_address(extension.metadata).version
                    reported.major, reported.minor = version
                    return None
            if frame.stage != _EXECUTE:
                return None
            key = _attribute(frame.attributes)
            program = programs.get(key)
            if program is None:
                _check(frame)
                program = programs[key] = _Program(find(key.decode()))
            program.run(frame)
        except BaseException as error:  # an interrupt too, which the program gets as XLA's error
            return _error(frame, f"{type(error).__name__}: {error}")
        return None

    return _Handler(handle)


_Handler = ctypes.CFUNCTYPE(_Pointer, _Pointer)


class _Program:
    """A call in compiled programs, with cached views of its buffers."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._views: dict[tuple[int, ...], tuple[list[Array], list[Array]]] = {}

    def run(self, frame: Any) -> None:
        operands, results = _structures(frame.operands), _structures(frame.results)
        addresses = (*_addresses(operands), *_addresses(results))
        views = self._views.get(addresses)
        if views is None:
            inputs, made = [_view(each) for each in operands[:-1]], [_view(each) for each in results[:-1]]
            # Sizes are compared as well, because arrays without elements may have any address.
            in_place = [each.nbytes and (each.nbytes, each.ctypes.data) for each in inputs] == [
                each.nbytes and (each.nbytes, each.ctypes.data) for each in made
            ]
            views = made if in_place else inputs, made
            if len(self._views) >= _KEPT:
                self._views = {}  # a new dictionary, because other threads may be reading the old one
            self._views[addresses] = views
        self._function(*views)


def _attribute(attributes: Any) -> bytes:
    """Return the value of the only attribute, a string."""
    if attributes.size != 1 or attributes.types[0] != _STRING:
        raise Unreadable("expected one attribute, a string")
    span = _Span.from_address(attributes.items[0])
    return ctypes.string_at(span.data, span.size)


def _structures(buffers: Any) -> list[int]:
    """Return the addresses of the buffers' structures; the last one is the token that orders calls."""
    return list((_Size * buffers.size).from_address(buffers.items))


def _addresses(structures: list[int]) -> list[int]:
    """Return the addresses of the buffers' elements."""
    first, count = structures[0], len(structures)
    step = structures[1] - first if count > 1 else 0
    if step > 0 and structures == list(range(first, first + step * count, step)):  # XLA keeps them in one array
        memory: Any = (ctypes.c_char * (step * count)).from_address(first)
        addresses: list[int] = np.ndarray((count,), np.uintp, memory, _DATA_AT, (step,)).tolist()
        return addresses
    return [_Size.from_address(each + _DATA_AT).value for each in structures]


class _Memory:
    """XLA's memory, by NumPy's array interface."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


def _view(structure: int) -> Array:
    buffer = _Buffer.from_address(structure)
    if buffer.dtype not in _DTYPES:
        raise Unreadable(f"a buffer of XLA's type number {buffer.dtype}")
    dtype = dtypes.resolve(_DTYPES[buffer.dtype])
    shape = tuple(buffer.dims[: buffer.rank])
    count = math.prod(shape)
    if not count:
        return np.empty(shape, dtype)
    return np.asarray(_Memory(buffer.data, count * dtype.itemsize)).view(dtype).reshape(shape)


def _check(frame: Any) -> None:
    """Raise `Unreadable` for a frame of another layout, before any of its contents are used."""
    for structure in (frame, frame.operands, frame.results, frame.attributes):
        if structure.struct_size < ctypes.sizeof(structure):
            raise Unreadable(f"a structure of {structure.struct_size} bytes, expected {ctypes.sizeof(structure)}")
    for buffers in (frame.operands, frame.results):
        for each in _structures(buffers):
            buffer = _Buffer.from_address(each)
            if buffer.struct_size < ctypes.sizeof(buffer):
                raise Unreadable(f"a buffer of {buffer.struct_size} bytes, expected {ctypes.sizeof(buffer)}")
        if buffer.dtype != _TOKEN:
            raise Unreadable(f"no token behind the buffers, but type number {buffer.dtype}")


def _error(frame: Any, message: str) -> int | None:
    create = ctypes.CFUNCTYPE(_Pointer, ctypes.POINTER(_Error))(frame.api.contents.create_error)
    error = _Error(ctypes.sizeof(_Error), None, message.encode(), _ABORTED)
    made: int | None = create(ctypes.byref(error))
    return made
