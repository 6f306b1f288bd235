"""The supported dtypes: their names, and the dtypes in which they are accumulated.

bfloat16 and float8 are those of ml_dtypes. An array of them exists only in a program that has imported ml_dtypes, so
this module imports it only for their *names* (such as a benchmark's flag).
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np

from collectives.base.errors import InvalidTypeError, MissingDependencyError

NAMES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
"""The names of all dtypes that can be reduced. A dtype's position is its number in the envelopes of messages, so that a
new one goes to the end; CONTRIBUTING.md lists the other tables that it needs."""

FLOAT8 = (
    "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
"""Every dtype whose elements are moved, on the CPU, and not reduced: sums of eight bits would mean little."""

OFFER = f"expected one of {', '.join(NAMES)}; or a float8, which can be sent but not reduced"
"""What is served, in messages."""

SUPPORTED: dict[np.dtype[Any], str] = {np.dtype(name): name for name in NAMES if name != "bfloat16"}
"""Names by native dtype; bfloat16 and float8 are added at their first use. A lookup also rejects byte-swapped
dtypes."""

_FLOAT16 = np.dtype(np.float16)


def resolve(dtype: Any, *, argument: str = "dtype") -> np.dtype[Any]:
    """The supported dtype, in native byte order, that ``dtype`` denotes.

    Args:
        dtype: anything that ``numpy.dtype`` accepts, or the name of bfloat16 or a float8.
        argument: its name in messages.

    Raises:
        InvalidTypeError: not a dtype, or an unsupported one (objects, strings, dates, structures, longdouble).
        MissingDependencyError: a name of one of ml_dtypes' was given, which is not installed or has no such dtype.
    """
    if isinstance(dtype, np.dtype):
        resolved = dtype
    elif isinstance(dtype, str) and dtype in _OF_ML_DTYPES:
        return _of_ml_dtypes(dtype)
    else:
        try:
            resolved = np.dtype(dtype)
        except (TypeError, ValueError, SyntaxError):  # SyntaxError: strings such as "f4,,"
            raise InvalidTypeError(f"{argument}: {OFFER}; got {dtype!r} [T16]") from None
    # A structure has several byte orders; it is rejected below under its own name.
    native = resolved if resolved.isnative or resolved.kind == "V" else resolved.newbyteorder("=")
    if native in SUPPORTED:
        return native
    if native.name in _OF_ML_DTYPES and _is_of_ml_dtypes(native, native.name):
        SUPPORTED[native] = native.name
        return native
    raise InvalidTypeError(f"{argument}: dtype {resolved} is not supported; {OFFER} [T17]")


def name(dtype: Any) -> str:
    """The name of a supported dtype, equal on every rank and in every byte order.

    Raises:
        InvalidTypeError: the dtype is not supported.
    """
    listed_name = SUPPORTED.get(dtype) if isinstance(dtype, np.dtype) else None
    return SUPPORTED[resolve(dtype)] if listed_name is None else listed_name


def is_half(dtype: np.dtype[Any]) -> bool:
    """Whether it is float16 or bfloat16, which are accumulated in float32."""
    return dtype.itemsize == 2 and (dtype == _FLOAT16 or _is_of_ml_dtypes(dtype, "bfloat16"))


def is_bool(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "b"


def is_integer(dtype: np.dtype[Any]) -> bool:
    """Whether it is a signed or unsigned integer of 8 to 64 bits; bool is not."""
    return dtype.kind in "iu"


def is_complex(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "c"


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Whether it is float16, bfloat16, float32 or float64."""
    return (dtype.kind == "f" and dtype.itemsize > 1) or is_half(dtype)


def is_float8(dtype: np.dtype[Any]) -> bool:
    """Whether it is of `FLOAT8`."""
    return dtype.itemsize == 1 and dtype.name in FLOAT8


def accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which elements are combined before they are rounded: float32 for halves, else the dtype itself."""
    return np.dtype(np.float32) if is_half(dtype) else dtype


_OF_ML_DTYPES = ("bfloat16", *FLOAT8)


def _is_of_ml_dtypes(dtype: np.dtype[Any], name: str) -> bool:
    module = sys.modules.get("ml_dtypes")
    return module is not None and dtype.type is getattr(module, name, None)


def _of_ml_dtypes(name: str) -> np.dtype[Any]:
    try:
        dtype: np.dtype[Any] = np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    except (ImportError, AttributeError):
        raise MissingDependencyError(
            f"{name} needs the package ml_dtypes: pip install --upgrade ml_dtypes [T18]"
        ) from None
    SUPPORTED[dtype] = name
    return dtype
