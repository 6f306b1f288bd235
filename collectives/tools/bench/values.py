"""Test values and the result that they must give, computed without the engine.

Every rank has its own values, so that a contribution that is lost and another that is counted twice cannot cancel out.
They are small integers: their sum over all ranks is exact in every dtype, whatever the order of the additions, so that
a result is compared for equality. (An average is compared to within two roundings.) The values repeat after a prime
number of elements: one table per rank is enough for a buffer of any size, and no chunk boundary falls into step with
it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

PERIOD = 65_521
"""Elements after which the values repeat: the largest prime below 2**16."""

_EXACT = {
    "float16": 2**11,
    "bfloat16": 2**8,
    "float32": 2**24,
    "float64": 2**53,
    "complex64": 2**24,
    "complex128": 2**53,
}
"""The integers up to which a floating-point dtype has them all."""


class Values:
    """The values of ``size`` ranks for one dtype and operation: sum, prod, min, max, avg or none."""

    def __init__(self, dtype: np.dtype, op: str, size: int) -> None:
        self.dtype, self.op, self.size = dtype, op, size

    def fill(self, out: np.ndarray, rank: int) -> None:
        """Write ``rank``'s values into ``out``, a 1-D array of this dtype."""
        table = _table(self.dtype, self.op, self.size, rank)
        for start in range(0, out.size, PERIOD):
            block = out[start : start + PERIOD]
            block[...] = table[: block.size]

    def wrong(self, result: np.ndarray, rank: int, start: int = 0) -> int:
        """How many elements of ``result`` differ from ``rank``'s values from element ``start`` on."""
        return _differing(result, np.roll(_table(self.dtype, self.op, self.size, rank), -start), 0.0)

    def wrong_reduced(self, result: np.ndarray, start: int = 0) -> int:
        """How many elements of ``result`` differ from the reduction over all ranks, from element ``start`` on."""
        rounding = 0.0
        if self.op == "avg" and self.dtype.name in _EXACT:
            # Averages of halves are rounded in every step.
            steps = self.size - 1 if self.dtype.itemsize == 2 else 1
            rounding = max(2.0, steps) / _EXACT[self.dtype.name]
        return _differing(result, np.roll(_reduced(self.dtype, self.op, self.size), -start), rounding)


def _differing(result: np.ndarray, expected: np.ndarray, rounding: float) -> int:
    wrong = 0
    for begin in range(0, result.size, PERIOD):
        block = result[begin : begin + PERIOD]
        wanted = expected[: block.size]
        if rounding:
            wide = np.complex128 if block.dtype.kind == "c" else np.float64
            wanted = wanted.astype(wide)
            # Written so that a NaN counts as wrong.
            wrong += int(
                block.size - np.count_nonzero(np.abs(block.astype(wide) - wanted) <= rounding * np.abs(wanted))
            )
        else:
            wrong += int(np.count_nonzero(block != wanted))
    return wrong


@lru_cache(maxsize=4)
def _table(dtype: np.dtype, op: str, size: int, rank: int) -> np.ndarray:
    """``rank``'s values, PERIOD of them."""
    scrambled = (np.arange(PERIOD, dtype=np.int64) * 2_654_435_761 >> 7) & 0xFFFFFF
    if op == "prod":
        # Ones and at most three twos: the product is exact, and neither overflows nor vanishes.
        return np.where((scrambled + rank) % (size + 3) < 3, 2, 1).astype(dtype)
    if dtype.kind == "b":
        return ((scrambled + rank) % 2).astype(dtype)
    limit = _EXACT.get(dtype.name) or int(np.iinfo(dtype).max)
    levels = max(2, min(1021, limit // size))
    values = (scrambled + rank * max(1, levels // size)) % levels
    if dtype.kind != "u":
        values -= levels // 2
    if dtype.kind == "c":
        return (values + 1j * values[::-1]).astype(dtype)
    return values.astype(dtype)


@lru_cache(maxsize=2)
def _reduced(dtype: np.dtype, op: str, size: int) -> np.ndarray:
    """The reduction over all ranks, PERIOD elements, computed in the widest type of the kind and then cast."""
    if dtype.kind == "b":
        wide: np.dtype = np.dtype(bool)
        combine: np.ufunc = np.logical_or if op in ("sum", "max") else np.logical_and
    else:
        wide = {"u": np.dtype(np.uint64), "i": np.dtype(np.int64), "c": np.dtype(np.complex128)}.get(
            dtype.kind, np.dtype(np.float64)
        )
        others: dict[str, np.ufunc] = {"prod": np.multiply, "min": np.minimum, "max": np.maximum}
        combine = others.get(op, np.add)
    result: np.ndarray = _table(dtype, op, size, 0).astype(wide)
    for rank in range(1, size):
        combine(result, _table(dtype, op, size, rank).astype(wide), out=result)
    if op == "avg" and wide.kind in "ui":
        result = np.sign(result) * (np.abs(result) // wide.type(size))
    elif op == "avg" and wide.kind != "b":
        result = result / size
    return result.astype(dtype)
