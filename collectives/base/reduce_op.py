"""Reduction operations: their names, and the dtypes for which each is defined."""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np

from collectives.base import dtypes
from collectives.base.errors import InvalidTypeError


class Op(Enum):
    """A reduction: associative and commutative, up to rounding."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    ADASUM = "adasum"
    """Not element by element: see `collectives.engine.adasum`."""

    def __repr__(self) -> str:
        return self.value.capitalize()


def check(op: Op, dtype: np.dtype[Any]) -> None:
    """Refuse an operation that is not defined for the elements of a dtype.

    Raises:
        InvalidTypeError: Adasum, which is not element by element; Min or Max of complex numbers, which have no order.
    """
    if op is Op.ADASUM:
        raise InvalidTypeError(
            "op=Adasum combines whole tensors and not elements: allreduce has it, other collectives do not"
        )
    if dtypes.is_complex(dtype) and op in (Op.MIN, Op.MAX):
        raise InvalidTypeError(
            f"op={op!r} is not defined for dtype {dtypes.name(dtype)}, because complex numbers have no order; reduce "
            f".real and .imag"
        )
