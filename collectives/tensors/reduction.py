"""What happens to two blocks that meet: kernels for every operation and dtype, and the scaling of a finished block.

A kernel is the hot loop of every algorithm: for float32, float64, integers and complex numbers it is NumPy's ufunc.
float16 and bfloat16 are widened to float32, combined, and rounded once; NumPy alone does that 50 to 100 times slower
than it adds float32, so that numkong's vectorised loops take over where it is installed (the extra ``halves``) and
passes a check against NumPy.

NumPy warns of overflow and NaN through Python, once per block. Who calls kernels on floating-point blocks does it under
``quiet()``, entered once per collective and not per block.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.base import dtypes, logging
from collectives.base.reduce_op import Op, check

_Array = npt.NDArray[Any]
_Dtype = np.dtype[Any]
Kernel = Callable[[_Array, _Array, _Array], object]
"""``kernel(a, b, out)`` writes ``a op b`` into ``out``: 1-D, contiguous, aligned, equally long; ``out`` may be ``a`` or
``b``."""
Scaling = Callable[[_Array, _Array], None]
"""``scaling(array, out)`` writes the scaled ``array`` into ``out``, which may be ``array``."""


def quiet() -> np.errstate:
    """A context in which kernels and scalings let overflow and NaN pass without a RuntimeWarning (for this thread,
    about 1 µs).

    Integers and bools, and halves where numkong serves, never warn and do not need it: see ``warns``.
    """
    return np.errstate(all="ignore")


def warns(dtype: _Dtype) -> bool:
    """Whether kernels or scalings of this dtype can emit RuntimeWarnings outside ``quiet()``."""
    return not (dtypes.is_bool(dtype) or dtypes.is_integer(dtype))


def identity(op: Op, dtype: _Dtype) -> Any:
    """The scalar of ``dtype`` that leaves every other element as it is.

    Raises:
        InvalidTypeError: the operation is not defined for the dtype.
    """
    check(op, dtype)
    value: Any
    if dtypes.is_bool(dtype):
        value = op in (Op.AVERAGE, Op.MIN, Op.PRODUCT)
    elif op in (Op.AVERAGE, Op.SUM):
        value = 0
    elif op is Op.PRODUCT:
        value = 1
    elif dtypes.is_integer(dtype):
        limits = np.iinfo(dtype)
        value = limits.max if op is Op.MIN else limits.min
    else:
        value = np.inf if op is Op.MIN else -np.inf
    return dtype.type(value)


@functools.cache
def kernel(op: Op, dtype: _Dtype) -> Kernel:
    """The function that combines two blocks.

    An average is a sum until ``finish``. Integers wrap. Min and Max pass NaN on. For bool, Sum and Max are "or";
    Product and Min are "and", and so is Average: the mean, truncated, is true only where all are.

    Raises:
        InvalidTypeError: Min or Max of complex numbers, which have no order.
    """
    check(op, dtype)
    if dtypes.is_bool(dtype):
        return np.logical_or if op in (Op.SUM, Op.MAX) else np.logical_and
    if dtypes.is_half(dtype):
        return _half_kernel(op, dtype)
    return _KERNELS[op]


def finish(op: Op, dtype: _Dtype, size: int, postscale: float = 1.0) -> Scaling | None:
    """What is applied once to a block that ``size`` ranks have fully reduced, or None if that is nothing.

    Floating point and complex: an average alone is the correctly rounded quotient; with a factor it is ONE product with
    ``postscale / size``, which is computed in float64. Halves do so in float32 and round once. Integers: an average
    truncates toward zero and is exact for all 64 bits; with a factor the product is taken in float64 and truncated
    (where it leaves the dtype's range, the result is the hardware's). Bool: an average is complete already; with a
    factor, true where the product is not zero.
    """
    average = op is Op.AVERAGE and not dtypes.is_bool(dtype)
    if not average or size == 1:
        return prescale(dtype, postscale)
    if postscale != 1.0:
        return prescale(dtype, float(postscale) / size)
    if dtypes.is_integer(dtype):
        return _integer_quotient(dtype, size)
    if size & (size - 1) == 0 or (dtypes.is_half(dtype) and size % 2 == 1 and size < 1024):
        # Quicker than a division, and equal: exact for powers of two; and for halves, float32's error of the product by
        # an odd size's reciprocal is too small to cross a midpoint between two halves (checked exhaustively).
        return prescale(dtype, 1.0 / size)
    return _floating(dtype, np.divide, float(size))


def prescale(dtype: _Dtype, factor: float) -> Scaling | None:
    """What multiplies a block by ``factor``, rounding as in ``finish``, or None if that changes nothing."""
    if factor == 1.0:
        return None
    if dtypes.is_bool(dtype) or dtypes.is_integer(dtype):
        return functools.partial(_scale_whole, factor=np.float64(factor))
    return _floating(dtype, np.multiply, float(factor))


# np.minimum and np.maximum deprecate a positional out; the others take it as it comes.
def _minimum(a: _Array, b: _Array, out: _Array) -> object:
    return np.minimum(a, b, out=out)


def _maximum(a: _Array, b: _Array, out: _Array) -> object:
    return np.maximum(a, b, out=out)


_KERNELS: dict[Op, Kernel] = {
    Op.AVERAGE: np.add,
    Op.SUM: np.add,
    Op.PRODUCT: np.multiply,
    Op.MIN: _minimum,
    Op.MAX: _maximum,
}


# ---- scaling
# -------------------------------------------------------------------------------------------------------------


def _floating(dtype: _Dtype, function: np.ufunc, number: float) -> Scaling:
    """``function(array, number)`` for a real number; a complex array is scaled as pairs, so that inf + 1j keeps its
    1j."""
    if dtypes.is_half(dtype):
        operand = np.float32(number)
        if function is np.multiply and _numkong() is not None and operand != 0 and np.isfinite(operand):
            return _half_product(_numkong(), dtype, float(operand))

        def scale_half(array: _Array, out: _Array) -> None:
            _widened(dtype, lambda a, _, wide: function(a, operand, wide), array, None, out)

        return scale_half
    real = np.dtype(f"f{dtype.itemsize // 2}") if dtypes.is_complex(dtype) else dtype
    scalar = real.type(number)
    if real is dtype:

        def scale(array: _Array, out: _Array) -> None:
            function(array, scalar, out)

        return scale

    def scale_pairs(array: _Array, out: _Array) -> None:
        function(array.view(real), scalar, out.view(real))

    return scale_pairs


def _scale_whole(array: _Array, out: _Array, factor: np.float64) -> None:
    """Integers and bools: multiply in float64, truncate toward zero."""
    wide = _scratch.doubles
    with np.errstate(all="ignore"):  # the executor is not asked to be quiet for integers
        for start in range(0, array.size, _BLOCK):
            stop = min(start + _BLOCK, array.size)
            product = np.multiply(array[start:stop], factor, wide[: stop - start])
            np.copyto(out[start:stop], product, casting="unsafe")


def _integer_quotient(dtype: _Dtype, size: int) -> Scaling:
    """Truncated division by ``size`` without a detour through floats: floor((a + (size - 1 where a is negative)) /
    size)."""
    # 8 or 16 bits and more ranks than they can count: the size itself needs a wider type.
    work = np.dtype(np.int64) if size > np.iinfo(dtype).max else dtype
    divisor, addend = work.type(size), work.type(size - 1)
    last_bit = work.type(work.itemsize * 8 - 1)
    shift = work.type(size.bit_length() - 1) if size & (size - 1) == 0 else None

    def divide(array: _Array, out: _Array) -> None:
        scratch = _scratch.doubles.view(work)
        for start in range(0, array.size, _BLOCK):
            stop = min(start + _BLOCK, array.size)
            block, temporary = array[start:stop], scratch[: stop - start]
            if work is not dtype:
                block = block.astype(work)
            if work.kind == "i":
                np.right_shift(block, last_bit, temporary)  # -1 where negative
                np.bitwise_and(temporary, addend, temporary)
                block = np.add(temporary, block, temporary)
            if shift is None:
                np.floor_divide(block, divisor, temporary)
            else:
                np.right_shift(block, shift, temporary)
            np.copyto(out[start:stop], temporary, casting="unsafe")

    return divide


# ---- halves
# --------------------------------------------------------------------------------------------------------------

_BLOCK = 16384
"""Elements that are widened at a time: with two float32 operands, an eighth of a megabyte, which stays in the L2
cache."""


class _Scratch(threading.local):
    """Per thread, because ranks may be threads; made at a thread's first use and kept."""

    def __init__(self) -> None:
        self.doubles = np.empty(_BLOCK, np.float64)
        self.left = np.empty(_BLOCK, np.float32)
        self.right = np.empty(_BLOCK, np.float32)
        self.bits = np.empty(_BLOCK, np.uint16)
        # By length. NumPy offers bfloat16 to nobody (it is no buffer format): numkong is told the address and the type.
        self.tensors: dict[int, Any] = {}


_TINY = 1024
"""Elements up to which NumPy's own loop over halves, which rounds alike, is quicker than widening them."""

_scratch = _Scratch()
_BITS = np.dtype(np.uint16)
_NEGATIVE_ZEROS = np.full(_BLOCK, 0x8000, np.uint16)
"""-0.0 in both halves: what leaves every number as it is when it is added, the zeros' signs included."""


@functools.cache
def import_numkong() -> Any:
    """The module numkong, or None where it is not installed, which is said once."""
    try:
        return importlib.import_module("numkong")
    except ImportError:
        logging.warn_on_first_rank(
            "float16 and bfloat16 are many times slower than float32 without numkong: pip install numkong"
        )
        return None


@functools.cache
def _numkong() -> Any:
    """The module numkong, or None where it is missing or differs from NumPy's widened sum on this processor."""
    module = import_numkong()
    return module if module is not None and _agrees(module) else None


def _agrees(numkong: Any) -> bool:
    """A sample of all float16s, with subnormals, ties, infinities and NaN: sums, products and conversions bit for
    bit."""
    a = np.arange(0, 1 << 16, 41, dtype=np.uint16).view(np.float16)
    b = a[::-1].copy()
    zeros = np.full(a.size, -0.0, np.float16)
    out, wide = np.empty_like(a), np.empty(a.size, np.float32)
    with np.errstate(all="ignore"):
        total = a.astype(np.float32) + b.astype(np.float32)
        third = a.astype(np.float32) * np.float32(1 / 3)

        def same(found: _Array, expected: _Array) -> bool:
            return np.array_equal(found, expected.astype(found.dtype), equal_nan=True)

        try:
            numkong.blend(a, b, out=out)
            agrees = same(out, total)
            numkong.blend(a, zeros, "float16", alpha=float(np.float32(1 / 3)), beta=1.0, out=out)
            agrees &= same(out, third)
            numkong.astype(a, "float32", out=wide)
            agrees &= same(wide, a)
            numkong.astype(total, "float16", out=out)
            return agrees and same(out, total)
        except (TypeError, ValueError, AttributeError, RuntimeError):
            return False


def _half_kernel(op: Op, dtype: _Dtype) -> Kernel:
    numkong = _numkong()
    if numkong is not None and op in (Op.SUM, Op.AVERAGE):
        return _half_sum(numkong, dtype)
    # numkong has no elementwise minimum, and its multiply of float16 (7.8.6) makes NaN of some finite factors.
    function = _KERNELS[op]

    def combine(a: _Array, b: _Array, out: _Array) -> None:
        if a.size <= _TINY:
            function(a, b, out)
        else:
            _widened(dtype, function, a, b, out)

    return combine


def _half_sum(numkong: Any, dtype: _Dtype) -> Kernel:
    """numkong's blend with both weights 1 is its sum with half the overhead. It gives the GIL away, as NumPy's larger
    loops do."""
    blend = numkong.blend
    if dtypes.name(dtype) == "float16":

        def add(a: _Array, b: _Array, out: _Array) -> None:
            blend(a, b, out=out)

        return add

    def add_bits(a: _Array, b: _Array, out: _Array) -> None:
        # As bits, because numkong needs 6 µs to find out what an ml_dtypes array holds.
        blend(a.view(_BITS), b.view(_BITS), "bfloat16", out=out.view(_BITS))

    return add_bits


def _half_product(numkong: Any, dtype: _Dtype, factor: float) -> Scaling:
    """factor * a + 1 * -0.0, which is factor * a. (A blend with a zero weight would skip its operand, infinities
    included.)"""
    kind = dtypes.name(dtype)
    carrier = dtype if kind == "float16" else _BITS
    zeros = _NEGATIVE_ZEROS.view(carrier)
    blend = numkong.blend

    def scale(array: _Array, out: _Array) -> None:
        array, out = array.view(carrier), out.view(carrier)
        for start in range(0, array.size, _BLOCK):
            stop = min(start + _BLOCK, array.size)
            blend(array[start:stop], zeros[: stop - start], kind, alpha=factor, beta=1.0, out=out[start:stop])

    return scale


def _widened(dtype: _Dtype, function: Kernel, a: _Array, b: _Array | None, out: _Array) -> None:
    """``function`` in float32 on blocks that stay in cache, rounded once into ``out``. ``b`` None: a function of ``a``
    alone."""
    numkong = _numkong()
    widen, narrow = (_widen_numpy, _narrow_numpy) if numkong is None else _CONVERSIONS[dtypes.name(dtype)]
    left, right = _scratch.left, _scratch.right
    for start in range(0, a.size, _BLOCK):
        stop = min(start + _BLOCK, a.size)
        x = left[: stop - start]
        y = right[: stop - start]
        widen(a[start:stop], x)
        if b is not None:
            widen(b[start:stop], y)
        function(x, y, x)
        narrow(x, out[start:stop])


def _widen_numpy(half: _Array, wide: _Array) -> None:
    np.copyto(wide, half)  # bfloat16: ml_dtypes' loop, which is vectorised


def _narrow_numpy(wide: _Array, half: _Array) -> None:
    np.copyto(half, wide, casting="unsafe")


def _widen_float16(half: _Array, wide: _Array) -> None:
    _numkong().astype(half, "float32", out=wide)


def _narrow_float16(wide: _Array, half: _Array) -> None:
    _numkong().astype(wide, "float16", out=half)


def _narrow_bfloat16(wide: _Array, half: _Array) -> None:
    bits, tensors, size = _scratch.bits, _scratch.tensors, wide.size
    tensor = tensors.get(size)
    if tensor is None:
        if len(tensors) > 64:  # ragged last blocks; full ones come back at once
            tensors.clear()
        tensor = tensors[size] = _numkong().from_pointer(bits.ctypes.data, (size,), "bfloat16", owner=bits)
    _numkong().astype(wide, "bfloat16", out=tensor)
    np.copyto(half.view(_BITS), bits[:size])


_CONVERSIONS: dict[str, tuple[Callable[[_Array, _Array], None], Callable[[_Array, _Array], None]]] = {
    "float16": (_widen_float16, _narrow_float16),
    "bfloat16": (_widen_numpy, _narrow_bfloat16),
}
