"""The benchmarks' test values: right expectations for every dtype and operation, and every kind of mistake is
counted."""

from __future__ import annotations

from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from benchmarks.values import PERIOD, Values

INTEGERS = ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]


def dtype_of(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def filled(values: Values, count: int, rank: int) -> np.ndarray:
    out = np.empty(count, values.dtype)
    values.fill(out, rank)
    return out


def combine(op: str, numbers: list[Any]) -> Any:
    """The reduction in Python's own exact numbers."""
    total = {
        "sum": sum,
        "avg": sum,
        "prod": lambda found: reduce(lambda left, right: left * right, found),
        "min": min,
        "max": max,
    }[op](numbers)
    if op != "avg":
        return total
    return int(total / len(numbers)) if isinstance(total, int) else total / len(numbers)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "avg"])
@pytest.mark.parametrize("name", [*INTEGERS, *FLOATS, *COMPLEX])
def test_expectation_agrees_with_exact_arithmetic(name: str, op: str, size: int) -> None:
    if name in COMPLEX and op in ("min", "max"):
        pytest.skip("complex numbers have no order")
    dtype = dtype_of(name)
    values = Values(dtype, op, size)
    kind: Any = int if name in INTEGERS else complex if name in COMPLEX else float
    columns = [[kind(value) for value in filled(values, 300, rank)] for rank in range(size)]
    expected = np.array([combine(op, list(column)) for column in zip(*columns, strict=True)]).astype(dtype)
    assert values.wrong_reduced(expected) == 0
    if name not in (*COMPLEX, "float16", "bfloat16"):
        stray = expected.copy()
        stray[7] += 1
        assert values.wrong_reduced(stray) == 1


@pytest.mark.parametrize("op", ["sum", "max", "prod", "min", "avg"])
def test_booleans(op: str) -> None:
    values = Values(np.dtype(bool), op, 3)
    rows = np.array([filled(values, 100, rank) for rank in range(3)])
    expected = rows.any(axis=0) if op in ("sum", "max") else rows.all(axis=0)
    assert values.wrong_reduced(expected) == 0
    assert values.wrong_reduced(~expected) == 100


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("name", ["float32", "int32", "uint8", "float16", "bfloat16"])
def test_mistakes_are_counted(name: str, size: int) -> None:
    values = Values(dtype_of(name), "sum", size)
    rows = np.array([filled(values, 1000, rank).astype(np.float64) for rank in range(size)])
    right = rows.sum(axis=0)

    def wrong(result: np.ndarray) -> int:
        return values.wrong_reduced(result.astype(values.dtype))

    assert wrong(right) == 0
    assert wrong(right - rows[1]) > 900, "a contribution that was lost"
    assert wrong(right + rows[0]) > 900, "a contribution that was counted twice"
    assert wrong(right - rows[1] + rows[0]) > 900, "one lost, another counted twice"
    assert wrong(np.roll(right, 4)) > 800, "values in the wrong place"


def test_not_a_number_is_wrong() -> None:
    for op in ("sum", "avg"):
        values = Values(np.dtype(np.float32), op, 2)
        assert values.wrong_reduced(np.full(10, np.nan, np.float32)) == 10


def test_average_allows_rounding_and_no_more() -> None:
    values = Values(np.dtype(np.float32), "avg", 3)
    rows = np.array([filled(values, 1000, rank).astype(np.float64) for rank in range(3)])
    right = rows.mean(axis=0).astype(np.float32)
    assert values.wrong_reduced(np.nextafter(right, np.float32(np.inf))) <= np.count_nonzero(right == 0)
    assert values.wrong_reduced(right * np.float32(1 + 1e-6)) > 900


def test_start_and_more_than_one_period() -> None:
    values = Values(np.dtype(np.int32), "sum", 2)
    count = 2 * PERIOD + 100
    rows = [filled(values, count, rank) for rank in range(2)]
    assert np.array_equal(rows[0][:100], rows[0][PERIOD : PERIOD + 100])
    for start in (0, 1, PERIOD - 3, PERIOD, PERIOD + 5):
        assert values.wrong(rows[1][start:], 1, start) == 0
        assert values.wrong(rows[1][start:], 0, start) > count // 3
        assert values.wrong_reduced(rows[0][start:] + rows[1][start:], start) == 0
    assert values.wrong_reduced(rows[0][1:] + rows[1][1:], 0) > count // 3


def test_every_rank_has_its_own_values() -> None:
    for name in ("float32", "uint8", "int8", "bfloat16"):
        rows = [filled(Values(dtype_of(name), "sum", 4), 500, rank) for rank in range(4)]
        for one in range(4):
            for other in range(one):
                assert np.count_nonzero(rows[one] == rows[other]) == 0
