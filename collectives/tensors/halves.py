"""float16 and bfloat16: conversion from and to wider dtypes, and arithmetic in float32 that rounds once.

NumPy's loops over halves are 50 to 100 times slower than its addition of float32. numkong's vectorized loops replace
them if it is installed (the extra ``halves``) and agrees with NumPy and ml_dtypes in a check.
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

_Array = npt.NDArray[Any]
_Dtype = np.dtype[Any]
_Unary = Callable[[_Array, _Array], object]
_Binary = Callable[[Any, Any, _Array], object]

_FLOAT32 = np.dtype(np.float32)
_BITS = np.dtype(np.uint16)
_BLOCK = 16384
"""Elements widened at a time: 128 KiB with two float32 operands, which stay in the L2 cache."""
_CAST_BLOCK = 65536
"""Elements in float32 at a time between float64 and a half: 256 KiB, which stay in the L2 cache."""
_TINY = 1024
"""Up to this many elements NumPy's own loop over halves, which rounds the same, is faster than widening."""
_NEGATIVE_ZEROS = np.full(_BLOCK, 0x8000, _BITS)
"""-0.0 in both halves: the neutral element of addition for all numbers, including signed zeros."""


class _Scratch(threading.local):
    """Buffers per thread, because ranks may be threads; allocated at a thread's first use."""

    def __init__(self) -> None:
        self.left = np.empty(_BLOCK, np.float32)
        self.right = np.empty(_BLOCK, np.float32)
        self.bits = np.empty(_BLOCK, _BITS)
        self.tensors: dict[int, Any] = {}
        """numkong's views of ``bits``, by length; creating one takes 6 µs."""


_scratch = _Scratch()


# ---- numkong


@functools.cache
def numkong(half: _Dtype) -> Any:
    """The module numkong, or None if it is missing or differs from NumPy or ml_dtypes on this processor."""
    module = _import_numkong()
    return module if module is not None and _agrees(module, half) else None


@functools.cache
def _import_numkong() -> Any:
    try:
        return importlib.import_module("numkong")
    except ImportError:
        logging.warn_on_first_rank(
            "float16 and bfloat16 are many times slower than float32 without numkong: pip install numkong [T60]"
        )
        return None


def _agrees(module: Any, half: _Dtype) -> bool:
    """Compare conversions, sums and products of a sample bit for bit.

    The sample has subnormals, ties and their neighbours, infinities and NaN.
    """
    bits = np.arange(0, 1 << 16, 41, dtype=np.uint16)
    narrow, following = bits.view(half), (bits + np.uint16(1)).view(half)
    with np.errstate(all="ignore"):
        single = narrow.astype(_FLOAT32)
        middle = (single + following.astype(_FLOAT32)) / np.float32(2)
        around = (middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf)))
        wide = np.concatenate([np.arange(0, 1 << 32, 1_000_003, dtype=np.uint32).view(_FLOAT32), *around])
        nans = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32).view(_FLOAT32)
        third = float(np.float32(1 / 3))
        try:
            return (
                _same(_results(_conversion_by(module, _FLOAT32), narrow, _FLOAT32), single)
                and all(
                    _same(_results(_conversion_by(module, half), sample, half), sample.astype(half))
                    for sample in (wide[~np.isnan(wide)], nans)
                )
                and _same(
                    _results(functools.partial(_sum(module, half), narrow[::-1].copy()), narrow, half),
                    (single[::-1] + single).astype(half),
                )
                and _same(
                    _results(functools.partial(_blend(module, half, 2 / 3, 1 / 3), narrow[::-1].copy()), narrow, half),
                    _weighted(single[::-1], single, 2 / 3, 1 / 3).astype(half),
                )
                and _same(
                    _results(_product(module, half, third), narrow, half), (single * np.float32(third)).astype(half)
                )
            )
        except (TypeError, ValueError, AttributeError, RuntimeError):
            return False


def _results(function: _Unary, inputs: _Array, dtype: _Dtype) -> _Array:
    out = np.empty(inputs.size, dtype)
    function(inputs, out)
    return out


def _same(actual: _Array, expected: _Array) -> bool:
    pattern = np.dtype(f"u{actual.dtype.itemsize}")
    return bool(np.all((actual.view(pattern) == expected.view(pattern)) | (np.isnan(actual) & np.isnan(expected))))


# ---- conversion


def cast(source: _Array, out: _Array) -> None:
    """Convert ``source`` to the dtype of ``out`` without warnings; each is float16, bfloat16, float32 or float64.

    Rounds to nearest, ties to even. Numbers beyond the range of ``out`` become infinity or zero; NaN stays NaN,
    possibly with other bits. Widening is exact, and narrowing rounds once, except from float64 to a half, which goes
    through float32 as in torch and ml_dtypes: a number that float32 rounds to the midpoint of two halves (one in
    20,000, for float16) may become the farther one, farther by at most 1/8000 of their distance.

    With numkong, 1e6 elements of float32 take 0.1 to 0.2 ms (NumPy: 2.5 ms to float16, 0.4 ms to bfloat16), of float64
    0.3 to 0.4 ms.

    Args:
        source: 1-D, contiguous, aligned, in native byte order.
        out: the same, equally long, in separate memory.
    """
    if source.size == 0:
        return
    halves = dtypes.is_half(source.dtype) + dtypes.is_half(out.dtype)
    with np.errstate(all="ignore"):
        if halves == 0 or source.dtype == out.dtype or _FLOAT32 in (source.dtype, out.dtype):
            _conversion(source.dtype, out.dtype)(source, out)
            return
        first, second = _conversion(source.dtype, _FLOAT32), _conversion(_FLOAT32, out.dtype)
        single = np.empty(min(_CAST_BLOCK, source.size), _FLOAT32)
        for start in range(0, source.size, _CAST_BLOCK):
            block = source[start : start + _CAST_BLOCK]
            between = single[: block.size]
            first(block, between)
            second(between, out[start : start + _CAST_BLOCK])


@functools.cache
def _conversion(source: _Dtype, target: _Dtype) -> _Unary:
    """NumPy's conversion; between float32 and a half numkong's, which is nearly as fast as a copy."""
    half = next((dtype for dtype in (source, target) if dtypes.is_half(dtype)), None)
    module = None if half is None or source == target else numkong(half)
    return _convert_numpy if module is None else _conversion_by(module, target)


def _convert_numpy(source: _Array, out: _Array) -> None:
    np.copyto(out, source, casting="unsafe")


def _conversion_by(module: Any, wanted: _Dtype) -> _Unary:
    name = dtypes.name(wanted)
    astype = module.astype

    def convert(source: _Array, out: _Array) -> None:
        astype(_tensor(module, source), name, out=_tensor(module, out))

    def convert_unless_nan(source: _Array, out: _Array) -> None:
        # numkong (7.8.6) rounds NaN as if it were a number: CUDA's, 0x7fffffff, becomes -0.0. The maximum is NaN if any
        # element is.
        if np.isnan(np.maximum.reduce(source)):
            _convert_numpy(source, out)
        else:
            convert(source, out)

    return convert_unless_nan if name == "bfloat16" else convert


def _tensor(module: Any, array: _Array) -> Any:
    """An array in the form that numkong accepts: bfloat16, which NumPy cannot export as a buffer, by its address."""
    if dtypes.name(array.dtype) != "bfloat16":
        return array
    return module.from_pointer(array.ctypes.data, array.shape, "bfloat16", owner=array)


# ---- arithmetic


def combining(function: _Binary, half: _Dtype) -> _Binary:
    """A kernel ``kernel(a, b, out)`` that applies ``function`` in float32 and rounds once."""
    module = numkong(half)
    # numkong has no elementwise minimum, and its multiply of float16 (7.8.6) returns NaN for some finite factors.
    if module is not None and function is np.add:
        return _sum(module, half)
    conversions = _block_conversions(half)

    def combine(a: _Array, b: _Array, out: _Array) -> None:
        if a.size <= _TINY:
            function(a, b, out)
        else:
            _widened(conversions, function, a, b, out)

    return combine


def averaging(half: _Dtype, left: int, right: int) -> _Binary:
    """A kernel ``kernel(a, b, out)`` for the mean of ``left + right`` values, of which ``a`` is the mean of ``left``.

    The two are weighted in float32 and rounded once; so the mean of equal numbers is that number, whatever its size.
    """
    if left < right:  # in one order on all ranks: the product by the first weight alone is rounded by itself
        swapped = averaging(half, right, left)
        return lambda a, b, out: swapped(b, a, out)
    first, second = left / (left + right), right / (left + right)
    module = numkong(half)
    if module is not None:
        return _blend(module, half, first, second)
    conversions = _block_conversions(half)

    def average(a: _Array, b: _Array, out: _Array) -> None:
        _widened(conversions, lambda x, y, wide: np.copyto(wide, _weighted(x, y, first, second)), a, b, out)

    return average


def _weighted(a: _Array, b: _Array, first: float, second: float) -> _Array:
    """What numkong's blend computes in float32: the fused multiply-add of ``second``, ``b`` and a rounded product."""
    return (
        np.multiply(a, np.float32(first)).astype(np.float64)
        + np.multiply(b, float(np.float32(second)), dtype=np.float64)
    ).astype(_FLOAT32)


def scaling(function: _Binary, half: _Dtype, number: float) -> _Unary:
    """``function(array, number)`` in float32, rounded once; ``number`` is rounded to float32 first."""
    operand = np.float32(number)
    module = numkong(half)
    if function is np.multiply and module is not None and operand != 0 and np.isfinite(operand):
        return _product(module, half, float(operand))
    conversions = _block_conversions(half)

    def scale(array: _Array, out: _Array) -> None:
        _widened(conversions, lambda a, _, wide: function(a, operand, wide), array, None, out)

    return scale


def _sum(module: Any, half: _Dtype) -> _Binary:
    """Addition by numkong's blend with both weights 1, which has half the overhead of its sum."""
    return _blend(module, half, 1.0, 1.0)


def _blend(module: Any, half: _Dtype, first: float, second: float) -> _Binary:
    """``first * a + second * b``. Like NumPy's larger loops, it releases the GIL."""
    blend = module.blend
    if dtypes.name(half) == "float16":

        def combine(a: _Array, b: _Array, out: _Array) -> None:
            blend(a, b, alpha=first, beta=second, out=out)

        return combine

    def combine_bits(a: _Array, b: _Array, out: _Array) -> None:
        # As bits, because numkong takes 6 µs to determine the dtype of an ml_dtypes array.
        blend(a.view(_BITS), b.view(_BITS), "bfloat16", alpha=first, beta=second, out=out.view(_BITS))

    return combine_bits


def _product(module: Any, half: _Dtype, factor: float) -> _Unary:
    """Multiplication by a blend: factor * a + 1 * -0.0, which equals factor * a.

    A blend with a zero weight would skip its operand, infinities included.
    """
    kind = dtypes.name(half)
    carrier = half if kind == "float16" else _BITS
    zeros = _NEGATIVE_ZEROS.view(carrier)
    blend = module.blend

    def scale(array: _Array, out: _Array) -> None:
        array, out = array.view(carrier), out.view(carrier)
        for start in range(0, array.size, _BLOCK):
            stop = min(start + _BLOCK, array.size)
            blend(array[start:stop], zeros[: stop - start], kind, alpha=factor, beta=1.0, out=out[start:stop])

    return scale


def _widened(conversions: tuple[_Unary, _Unary], function: _Binary, a: _Array, b: _Array | None, out: _Array) -> None:
    """Apply ``function`` in float32 on blocks that stay in cache, rounding once into ``out``.

    With ``b`` None it is a function of ``a`` alone.
    """
    widen, narrow = conversions
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


def _block_conversions(half: _Dtype) -> tuple[_Unary, _Unary]:
    """Conversions of a block of at most `_BLOCK` elements to float32 and back.

    bfloat16 is widened by ml_dtypes' vectorized loop. Values that were halves contain no NaN that requires the check in
    `_conversion_by`.
    """
    module = numkong(half)
    if module is None:
        return _convert_numpy, _convert_numpy
    astype = module.astype
    if dtypes.name(half) == "float16":
        return (
            lambda block, wide: astype(block, "float32", out=wide),
            lambda wide, block: astype(wide, "float16", out=block),
        )

    def narrow(wide: _Array, block: _Array) -> None:
        bits, tensors, size = _scratch.bits, _scratch.tensors, wide.size
        tensor = tensors.get(size)
        if tensor is None:
            if len(tensors) > 64:  # last blocks of various lengths; the view of full blocks is recreated at once
                tensors.clear()
            tensor = tensors[size] = module.from_pointer(bits.ctypes.data, (size,), "bfloat16", owner=bits)
        astype(wide, "bfloat16", out=tensor)
        np.copyto(block.view(_BITS), bits[:size])

    return _convert_numpy, narrow
