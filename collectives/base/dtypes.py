"""The supported dtypes: their names, and the dtypes in which they are accumulated.

bfloat16 is ``ml_dtypes.bfloat16``. An array of it exists only in a program that has imported ml_dtypes, so this module
imports it only for the *name* "bfloat16" (such as a benchmark's flag).
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
"""Every supported dtype by name, in the order of messages."""

SUPPORTED: dict[np.dtype[Any], str] = {np.dtype(name): name for name in NAMES if name != "bfloat16"}
"""Names by native dtype; bfloat16 is added at its first use. A lookup also rejects byte-swapped dtypes."""

_FLOAT16 = np.dtype(np.float16)


def resolve(dtype: Any, *, argument: str = "dtype") -> np.dtype[Any]:
    """The supported dtype, in native byte order, that ``dtype`` denotes.

    Args:
        dtype: anything that ``numpy.dtype`` accepts, or the name ``"bfloat16"``.
        argument: its name in messages.

    Raises:
        InvalidTypeError: not a dtype, or an unsupported one (objects, strings, dates, structures, longdouble).
        MissingDependencyError: the name "bfloat16" was given and ml_dtypes is not installed.
    """
    if isinstance(dtype, np.dtype):
        found = dtype
    elif isinstance(dtype, str) and dtype == "bfloat16":
        return _bfloat16()
    else:
        try:
            found = np.dtype(dtype)
        except (TypeError, ValueError, SyntaxError):  # SyntaxError: strings such as "f4,,"
            raise InvalidTypeError(f"{argument}: expected one of {', '.join(NAMES)}; got {dtype!r}") from None
    # A structure has several byte orders; it is rejected below under its own name.
    native = found if found.isnative or found.kind == "V" else found.newbyteorder("=")
    if native in SUPPORTED:
        return native
    if _is_bfloat16(native):
        SUPPORTED[native] = "bfloat16"
        return native
    raise InvalidTypeError(f"{argument}: dtype {found} is not supported; expected one of {', '.join(NAMES)}")


def name(dtype: Any) -> str:
    """The name of a supported dtype, equal on every rank and in every byte order.

    Raises:
        InvalidTypeError: the dtype is not supported.
    """
    known = SUPPORTED.get(dtype) if isinstance(dtype, np.dtype) else None
    return SUPPORTED[resolve(dtype)] if known is None else known


def is_half(dtype: np.dtype[Any]) -> bool:
    """Whether it is float16 or bfloat16, which are accumulated in float32."""
    return dtype.itemsize == 2 and (dtype == _FLOAT16 or _is_bfloat16(dtype))


def is_bool(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "b"


def is_integer(dtype: np.dtype[Any]) -> bool:
    """Whether it is a signed or unsigned integer of 8 to 64 bits; bool is not."""
    return dtype.kind in "iu"


def is_complex(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "c"


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Whether it is float16, bfloat16, float32 or float64."""
    return dtype.kind == "f" or is_half(dtype)


def accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which elements are combined before they are rounded: float32 for halves, else the dtype itself."""
    return np.dtype(np.float32) if is_half(dtype) else dtype


def _is_bfloat16(dtype: np.dtype[Any]) -> bool:
    module = sys.modules.get("ml_dtypes")
    return module is not None and dtype.type is getattr(module, "bfloat16", None)


def _bfloat16() -> np.dtype[Any]:
    try:
        module = importlib.import_module("ml_dtypes")
    except ImportError:
        raise MissingDependencyError("bfloat16 needs the package ml_dtypes: pip install ml_dtypes") from None
    dtype: np.dtype[Any] = np.dtype(module.bfloat16)
    SUPPORTED[dtype] = "bfloat16"
    return dtype
