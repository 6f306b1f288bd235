"""Elements and reductions as NCCL names them.

NCCL moves every dtype of `collectives.base.dtypes`, those that it does not know as bytes or as pairs. It is asked to
reduce only what it reduces as this package does: see `reduces`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from collectives.base import dtypes
from collectives.base.errors import InvalidTypeError
from collectives.base.reduce_op import Op

Dtype = np.dtype[Any]

# The numbers are NCCL's binary interface, the same in every version.
_INT8, _UINT8, _INT32, _UINT32, _INT64, _UINT64, _FLOAT16, _FLOAT32, _FLOAT64, _BFLOAT16 = range(10)
_REDUCTIONS = {Op.SUM: 0, Op.PRODUCT: 1, Op.MAX: 2, Op.MIN: 3}


class Word(NamedTuple):
    """What an element consists of in NCCL's terms."""

    code: int
    """ncclDataType_t."""
    per_element: int


_WORDS = {
    "bool": Word(_UINT8, 1),
    "int8": Word(_INT8, 1),
    "int16": Word(_UINT8, 2),
    "int32": Word(_INT32, 1),
    "int64": Word(_INT64, 1),
    "uint8": Word(_UINT8, 1),
    "uint16": Word(_UINT8, 2),
    "uint32": Word(_UINT32, 1),
    "uint64": Word(_UINT64, 1),
    "float16": Word(_FLOAT16, 1),
    "bfloat16": Word(_BFLOAT16, 1),
    "float32": Word(_FLOAT32, 1),
    "float64": Word(_FLOAT64, 1),
    "complex64": Word(_FLOAT32, 2),
    "complex128": Word(_FLOAT64, 2),
}


@functools.cache
def word(dtype: Dtype) -> Word:
    """How elements of a supported dtype are moved."""
    return _WORDS[dtypes.name(dtype)]


@functools.cache
def reduction(op: Op, dtype: Dtype) -> int | None:
    """The ncclRedOp_t that does on the words of ``dtype`` what ``op`` does on its elements; None if there is none.

    NCCL's Min and Max of floating-point numbers lose a NaN (they are fmin and fmax), where this package passes it on.
    It has no 16-bit integers. Complex numbers add up as pairs, and multiply otherwise. A bool is a byte of 0 or 1: "or"
    is its maximum, "and" its minimum.
    """
    if not op.elementwise or dtypes.name(dtype) in ("int16", "uint16"):
        return None
    combining = op.combining(dtype)
    if (dtypes.is_floating(dtype) or dtypes.is_complex(dtype)) and combining is not Op.SUM:
        return _REDUCTIONS[Op.PRODUCT] if combining is Op.PRODUCT and dtypes.is_floating(dtype) else None
    return _REDUCTIONS.get(combining)


def reduces(op: Op, dtype: Dtype) -> bool:
    """Whether NCCL reduces this dtype as this package does, up to the order of additions; an average as the sum it
    begins with."""
    return reduction(op, dtype) is not None


def required_reduction(op: Op, dtype: Dtype) -> int:
    """`reduction`, where there is one.

    Raises:
        InvalidTypeError: there is none.
    """
    number = reduction(op, dtype)
    if number is None:
        raise InvalidTypeError(
            f"NCCL does not reduce op={op!r} of dtype {dtypes.name(dtype)} as this package does: move the blocks, "
            f"and reduce with kernels"
        )
    return number
