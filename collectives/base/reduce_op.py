"""Reduction operations: their names, their properties, and the dtypes for which each is defined.

An operation is a member of `Op` and a row of `_TRAITS` here, and a row of `tensors.reduction` with its kernel and its
neutral element; on GPUs, a structure of its name in the kernels' sources. All other code uses the properties.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

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
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"

    # Members are unique. Enum's own hash is a Python function, which every look-up of a request would call.
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return self.value.capitalize()

    @property
    def elementwise(self) -> bool:
        """Whether each element of the result depends only on the ranks' elements at the same index."""
        return _TRAITS[self].combined_by is not None

    @property
    def linear(self) -> bool:
        """Whether the result is linear in the ranks' tensors: the adjoint is a sum, and rows of zeros may be
        omitted."""
        return _TRAITS[self].linear

    @property
    def idempotent(self) -> bool:
        """Whether reducing the same tensor on every rank yields that tensor."""
        return _TRAITS[self].idempotent

    def serves(self, dtype: np.dtype[Any]) -> bool:
        """Whether it is defined for elements of a dtype, if it is an operation on elements."""
        try:
            check(self, dtype)
        except InvalidTypeError:
            return False
        return True

    def divides(self, dtype: np.dtype[Any]) -> bool:
        """Whether combined elements are divided by the number of ranks; not for bool, whose truncated mean is "and"."""
        return self is Op.AVERAGE and not dtypes.is_bool(dtype)

    def combining(self, dtype: np.dtype[Any]) -> Op:
        """The operation that combines two elements, before any division; not for Adasum, which combines whole tensors.

        A bool is 0 or 1: "or" is MAX, "and" is MIN.
        """
        traits = _TRAITS[self]
        return Op(traits.of_bools if dtypes.is_bool(dtype) else traits.combined_by)


class _Traits(NamedTuple):
    combined_by: str | None
    """The operation that combines two elements; None: not element by element."""
    of_bools: str | None = None
    """The operation that combines two bools."""
    linear: bool = False
    idempotent: bool = False
    needs_order: bool = False
    """Whether it compares elements, which complex numbers do not allow."""
    needs_bits: bool = False
    """Whether it combines bits, which only integers and bools have."""


_TRAITS = {
    Op.AVERAGE: _Traits("sum", of_bools="min", linear=True, idempotent=True),
    Op.SUM: _Traits("sum", of_bools="max", linear=True),
    Op.MIN: _Traits("min", of_bools="min", idempotent=True, needs_order=True),
    Op.MAX: _Traits("max", of_bools="max", idempotent=True, needs_order=True),
    Op.PRODUCT: _Traits("product", of_bools="min"),
    Op.ADASUM: _Traits(None, idempotent=True),
    Op.BAND: _Traits("band", of_bools="min", idempotent=True, needs_bits=True),
    Op.BOR: _Traits("bor", of_bools="max", idempotent=True, needs_bits=True),
    Op.BXOR: _Traits("bxor", of_bools="bxor", needs_bits=True),
}


def check(op: Op, dtype: np.dtype[Any]) -> None:
    """Reject an operation that is not defined for a dtype.

    Raises:
        InvalidTypeError: Adasum, which is not element by element; Min or Max of complex numbers, which have no order;
            float8; bitwise operations on anything but integers and bools.
    """
    if not op.elementwise:
        raise InvalidTypeError(
            f"op={op!r} combines whole tensors, not elements, and only allreduce supports it; call allreduce, or pass "
            "another op [A1]"
        )
    if dtypes.is_float8(dtype):
        raise InvalidTypeError(
            f"op={op!r} is not defined for dtype {dtypes.name(dtype)}: float8 elements can be sent, but not reduced; "
            "convert the tensor to float16, bfloat16 or float32 first [A2]"
        )
    if _TRAITS[op].needs_bits and not (dtypes.is_integer(dtype) or dtypes.is_bool(dtype)):
        raise InvalidTypeError(
            f"op={op!r} is not defined for dtype {dtypes.name(dtype)}: expected integers or bools; pass a view of the "
            "bits as integers [A3]"
        )
    if dtypes.is_complex(dtype) and _TRAITS[op].needs_order:
        raise InvalidTypeError(
            f"op={op!r} is not defined for dtype {dtypes.name(dtype)}, because complex numbers have no order; reduce "
            ".real and .imag separately [A4]"
        )
