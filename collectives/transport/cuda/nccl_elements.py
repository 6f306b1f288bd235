"""Dtypes and reductions in NCCL's terms.

NCCL moves every dtype of `collectives.base.dtypes`; those that it lacks, as bytes or pairs. It reduces only those that
it reduces as this package does: see `reduces`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from collectives.base import dtypes
from collectives.base.errors import InvalidTypeError
from collectives.base.reduce_op import Op

Dtype = np.dtype[Any]

# The numbers are part of NCCL's binary interface and the same in every version.
_INT8, _UINT8, _INT32, _UINT32, _INT64, _UINT64, _FLOAT16, _FLOAT32, _FLOAT64, _BFLOAT16 = range(10)
_REDUCTIONS = {Op.SUM: 0, Op.PRODUCT: 1, Op.MAX: 2, Op.MIN: 3}
_AVERAGE = 4
"""Multiplies each contribution by 1/N before it is added, so that no intermediate result overflows."""

Word = tuple[int, int]
"""An NCCL element type (ncclDataType_t), and the number of such elements per element of a dtype."""

_WORDS = {
    "bool": (_UINT8, 1),
    "int8": (_INT8, 1),
    "int16": (_UINT8, 2),
    "int32": (_INT32, 1),
    "int64": (_INT64, 1),
    "uint8": (_UINT8, 1),
    "uint16": (_UINT8, 2),
    "uint32": (_UINT32, 1),
    "uint64": (_UINT64, 1),
    "float16": (_FLOAT16, 1),
    "bfloat16": (_BFLOAT16, 1),
    "float32": (_FLOAT32, 1),
    "float64": (_FLOAT64, 1),
    "complex64": (_FLOAT32, 2),
    "complex128": (_FLOAT64, 2),
}


@functools.cache
def word(dtype: Dtype) -> Word:
    """The NCCL elements as which elements of a supported dtype are moved."""
    return _WORDS[dtypes.name(dtype)]


@functools.cache
def reduction(op: Op, dtype: Dtype) -> int | None:
    """The ncclRedOp_t whose effect on the words of ``dtype`` is that of ``op`` on its elements; None if there is none.

    NCCL's Min and Max of floating-point numbers drop NaN (they are fmin and fmax); this package propagates it. NCCL has
    no 16-bit integers. Complex numbers are added as pairs; NCCL has no complex product. A bool is a byte of 0 or 1:
    "or" is the maximum, "and" the minimum.
    """
    if not op.elementwise or dtypes.name(dtype) in ("int16", "uint16"):
        return None
    combining = op.combining(dtype)
    if op.divides(dtype) and dtypes.is_half(dtype):
        return _AVERAGE
    if (dtypes.is_floating(dtype) or dtypes.is_complex(dtype)) and combining is not Op.SUM:
        return _REDUCTIONS[Op.PRODUCT] if combining is Op.PRODUCT and dtypes.is_floating(dtype) else None
    return _REDUCTIONS.get(combining)


def reduces(op: Op, dtype: Dtype) -> bool:
    """Whether NCCL reduces this dtype as this package does, up to rounding; an average as a sum, unless it is of
    halves."""
    return reduction(op, dtype) is not None


def required_reduction(op: Op, dtype: Dtype) -> int:
    """As `reduction`, which must exist.

    Raises:
        InvalidTypeError: there is none.
    """
    number = reduction(op, dtype)
    if number is None:
        raise InvalidTypeError(
            f"NCCL does not reduce op={op!r} of dtype {dtypes.name(dtype)} with the same result as this package; send "
            "the blocks, and reduce them with kernels [G36]"
        )
    return number
