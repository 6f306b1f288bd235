"""Reduction of two blocks: kernels for every operation and dtype, and the scaling of a reduced block.

A kernel is the innermost loop of every algorithm: for float32, float64, integers and complex numbers it is NumPy's
ufunc. float16 and bfloat16 are widened to float32, combined, and rounded once: see `collectives.tensors.halves`.

An average of halves is no sum that is divided in the end, because the sum may overflow where the average does not, and
numbers that were divided before would lose bits where they are tiny. Every intermediate result is the *mean* of the
values in it: `weighted` gives the kernel that combines the means of so many values each.

NumPy reports overflow and NaN as Python warnings, once per block. Callers run kernels on floating-point blocks under
``quiet()``, entered once per collective and not per block.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from collectives.base import dtypes
from collectives.base.reduce_op import Op, check
from collectives.schedules import fixed_tree
from collectives.tensors import halves

_Array = npt.NDArray[Any]
_Dtype = np.dtype[Any]
Kernel = Callable[[_Array, _Array, _Array], object]
"""``kernel(a, b, out)`` writes ``a op b`` into ``out``, which may be ``a`` or ``b``.

All are 1-D, contiguous, aligned and of equal length.
"""
Scaling = Callable[[_Array, _Array], object]
"""``scaling(array, out)`` writes the scaled ``array`` into ``out``, which may be ``array``."""


def quiet() -> np.errstate:
    """A context that suppresses RuntimeWarnings about overflow and NaN in kernels (for this thread, about 1 µs).

    Integers, bools, and halves with numkong never warn and do not need it: see ``warns``.
    """
    return np.errstate(all="ignore")


def warns(dtype: _Dtype) -> bool:
    """Whether kernels or scalings of this dtype can emit RuntimeWarnings outside ``quiet()``."""
    return not (dtypes.is_bool(dtype) or dtypes.is_integer(dtype))


def identity(op: Op, dtype: _Dtype) -> Any:
    """The neutral element of an operation, a scalar of ``dtype``.

    Raises:
        InvalidTypeError: the operation is not defined for the dtype.
    """
    check(op, dtype)
    return dtype.type(_COMBINATIONS[op.combining(dtype)].identity(dtype))


@functools.cache
def kernel(op: Op, dtype: _Dtype) -> Kernel:
    """The function that combines two blocks.

    An average is a sum until ``finish``; of halves it is a mean at any time (`weighted`). Integers wrap around. Min and
    Max propagate NaN. For bool, Sum and Max are "or"; Product and Min are "and", and so is Average: the truncated mean
    is true only if all elements are.

    Raises:
        InvalidTypeError: Min or Max of complex numbers, which have no order.
    """
    check(op, dtype)
    combining = op.combining(dtype)
    if dtypes.is_bool(dtype):
        return _BOOL_KERNELS[combining]
    if dtypes.is_half(dtype) and op.divides(dtype):
        return _Mean(dtype)
    function = _COMBINATIONS[combining].kernel
    return halves.combining(function, dtype) if dtypes.is_half(dtype) else function


def weighted(kernel: Kernel, left: int, right: int) -> Kernel:
    """The kernel that combines what ``left`` ranks have contributed to with what ``right`` ranks have: ``kernel``, if
    it makes no difference, as everywhere but in averages of halves."""
    if not isinstance(kernel, _Mean):
        return kernel
    divisor = math.gcd(left, right)
    return kernel.of(left // divisor, right // divisor)


def weighs(kernel: Kernel) -> bool:
    """Whether `weighted` makes a difference."""
    return isinstance(kernel, _Mean)


def merging(kernel: Kernel, counts: Sequence[int], first: int = 0) -> tuple[tuple[fixed_tree.Merge, Kernel], ...]:
    """The fixed tree over values of which each has the contributions of so many ranks, with a kernel for each merge;
    ``first`` is the value with which the order begins."""
    ranks = [*counts, *[0] * fixed_tree.intermediates(len(counts))]
    steps = []
    for merge in fixed_tree.merges(len(counts), first):
        left, right = ranks[merge.left], ranks[merge.right]
        steps.append((merge, weighted(kernel, left, right)))
        if len(counts) > 2:
            ranks[len(counts) + merge.depth] = left + right
    return tuple(steps)


def combine(
    steps: Sequence[tuple[fixed_tree.Merge, Kernel]], values: Sequence[_Array], spares: Sequence[_Array], out: _Array
) -> None:
    """Combine two values or more by the steps that `merging` returns into ``out``, which may be one of the values.

    Args:
        spares: `fixed_tree.intermediates` of their number, of their size.
    """
    operands, count = (*values, *spares), len(values)
    *inner, (last, kernel) = steps
    for (left, right, depth, _), combine_two in inner:
        combine_two(operands[left], operands[right], operands[count + depth])
    kernel(operands[last.left], operands[last.right], out)


def finish(op: Op, dtype: _Dtype, size: int, postscale: float = 1.0) -> Scaling | None:
    """The function to apply once to a block that ``size`` ranks have fully reduced; None if nothing remains to do.

    Floating point and complex: an average alone is the correctly rounded quotient; with a factor it is one product with
    ``postscale / size``, which is computed in float64. An average of halves is complete but for its factor. Integers:
    an average truncates toward zero and is exact for all 64 bits; with a factor the product is taken in float64 and
    truncated (beyond the dtype's range the result depends on the hardware). Bool: an average is already complete; with
    a factor, true if the product is not zero.

    Whatever completes a block applies it: `plan.binder`, `fast_paths`, `one_reduction`, `mapped_loops`, `bucket_loop`
    and `packing_binder`; without a plan `engine.inline`, `tasks` and `buckets`.
    """
    if not op.divides(dtype) or dtypes.is_half(dtype) or size == 1:
        return prescale(dtype, postscale)
    if postscale != 1.0:
        return prescale(dtype, float(postscale) / size)
    if dtypes.is_integer(dtype):
        return _integer_quotient(dtype, size)
    if size & (size - 1) == 0:
        return prescale(dtype, 1.0 / size)  # faster than a division, and exact
    return _floating(dtype, np.divide, float(size))


def prescale(dtype: _Dtype, factor: float) -> Scaling | None:
    """A function that multiplies a block by ``factor``, rounding as ``finish`` does; None if the factor is 1."""
    if factor == 1.0:
        return None
    if dtypes.is_bool(dtype) or dtypes.is_integer(dtype):
        return functools.partial(_scale_whole, factor=np.float64(factor))
    return _floating(dtype, np.multiply, float(factor))


# np.minimum and np.maximum deprecate a positional out; the other ufuncs accept it.
def _minimum(a: _Array, b: _Array, out: _Array) -> object:
    return np.minimum(a, b, out=out)


def _maximum(a: _Array, b: _Array, out: _Array) -> object:
    return np.maximum(a, b, out=out)


def _lowest(dtype: _Dtype) -> Any:
    return -np.inf if dtypes.is_floating(dtype) else 0 if dtypes.is_bool(dtype) else np.iinfo(dtype).min


def _highest(dtype: _Dtype) -> Any:
    return np.inf if dtypes.is_floating(dtype) else 1 if dtypes.is_bool(dtype) else np.iinfo(dtype).max


class _Mean:
    """The kernel of an average of halves; called as a kernel, it combines two values of equally many ranks."""

    def __init__(self, half: _Dtype) -> None:
        self._half = half
        self.of = functools.cache(functools.partial(halves.averaging, half))
        self._even = self.of(1, 1)

    def __call__(self, a: _Array, b: _Array, out: _Array) -> object:
        return self._even(a, b, out)


class _Combination(NamedTuple):
    kernel: Kernel
    identity: Callable[[_Dtype], Any]


_COMBINATIONS = {
    Op.SUM: _Combination(np.add, lambda dtype: 0),
    Op.PRODUCT: _Combination(np.multiply, lambda dtype: 1),
    Op.MIN: _Combination(_minimum, _highest),
    Op.MAX: _Combination(_maximum, _lowest),
    Op.BAND: _Combination(np.bitwise_and, lambda dtype: ~dtype.type(0)),
    Op.BOR: _Combination(np.bitwise_or, lambda dtype: 0),
    Op.BXOR: _Combination(np.bitwise_xor, lambda dtype: 0),
}
_BOOL_KERNELS: dict[Op, Kernel] = {Op.MIN: np.logical_and, Op.MAX: np.logical_or, Op.BXOR: np.logical_xor}


# ---- scaling


def _floating(dtype: _Dtype, function: np.ufunc, number: float) -> Scaling:
    """``function(array, number)`` for a real number.

    A complex array is scaled as pairs, so that inf + 1j keeps its 1j.
    """
    if dtypes.is_half(dtype):
        return halves.scaling(function, dtype, number)
    real = np.dtype(f"f{dtype.itemsize // 2}") if dtypes.is_complex(dtype) else dtype
    scalar = np.array(number, real)  # an array, which a ufunc takes in half of the time that it needs for a scalar
    if real is dtype:

        def scale(array: _Array, out: _Array) -> None:
            function(array, scalar, out)

        return scale

    def scale_pairs(array: _Array, out: _Array) -> None:
        function(array.view(real), scalar, out.view(real))

    return scale_pairs


_BLOCK = 16384
"""Elements in a wider type at a time: 128 KiB of float64 or int64, which stay in the L2 cache."""


class _Scratch(threading.local):
    """Buffers per thread, because ranks may be threads; allocated at a thread's first use."""

    def __init__(self) -> None:
        self.doubles = np.empty(_BLOCK, np.float64)


_scratch = _Scratch()


def _scale_whole(array: _Array, out: _Array, factor: np.float64) -> None:
    """Multiply integers or bools in float64 and truncate toward zero."""
    wide = _scratch.doubles
    with np.errstate(all="ignore"):  # the executor does not enter quiet() for integers
        for start in range(0, array.size, _BLOCK):
            stop = min(start + _BLOCK, array.size)
            product = np.multiply(array[start:stop], factor, wide[: stop - start])
            np.copyto(out[start:stop], product, casting="unsafe")


def _integer_quotient(dtype: _Dtype, size: int) -> Scaling:
    """Truncated integer division by ``size``: floor((a + (size - 1 if a is negative)) / size), without floats."""
    # With more ranks than an 8- or 16-bit type can represent, the division needs a wider type.
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
