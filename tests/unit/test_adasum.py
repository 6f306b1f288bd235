"""Adasum: the tree, the formula, and the distributed form against the formula on whole vectors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.base import dtypes
from collectives.engine import adasum
from collectives.schedules.partition import offsets, split
from collectives.tensors.halves import cast

ml_dtypes = pytest.importorskip("ml_dtypes")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]
EPS = {np.dtype(np.float16): 2**-10, BFLOAT16: 2**-7, np.dtype(np.float32): 2**-23, np.dtype(np.float64): 2**-52}

# Infinities and NaN are the caller's affair: nothing here may warn of them.
pytestmark = pytest.mark.filterwarnings("error")

Vectors = list[np.ndarray[Any, Any]]


def distributed(vectors: Vectors) -> np.ndarray[Any, Any]:
    """What the engine does, for all ranks in turn: slices, dot products summed over the ranks, the slices put
    together."""
    size, count = len(vectors), vectors[0].size
    slices = split(count, size)
    cuts = [slice(start, start + length) for start, length in zip(offsets(slices), slices, strict=True)]
    working = [adasum.widen(np.stack([vector[cut] for vector in vectors])) for cut in cuts]
    for pairs in adasum.tree(size):
        total = sum(adasum.dots(each, pairs) for each in working)
        for each in working:
            adasum.combine(each, pairs, total)
    result = np.empty(count, vectors[0].dtype)
    for each, cut in zip(working, cuts, strict=True):
        cast(each[0], result[cut])
    return result


def drawn(size: int, count: int, dtype: np.dtype[Any], seed: int) -> Vectors:
    """Vectors of different lengths at acute angles, so that no sum of them cancels and no result hangs on rounding."""
    rng = np.random.default_rng(seed)
    signs = rng.choice([-1.0, 1.0], count)
    return [(rng.uniform(0.1, 1, count) * signs * 2.0 ** rng.integers(-2, 3)).astype(dtype) for _ in range(size)]


def assert_close(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any], vectors: Vectors) -> None:
    """Each level adds some roundings of the working dtype, of numbers as large as the vectors; the end one of the
    vectors' own."""
    dtype = found.dtype
    reach = sum(float(np.linalg.norm(vector.astype(np.float64))) for vector in vectors)
    working = EPS[dtypes.accumulator(dtype)] * reach * 4 * max(1, len(adasum.tree(len(vectors))))
    last = EPS[dtype] / 2 * np.abs(wanted) if dtypes.is_half(dtype) else 0.0
    assert np.all(np.abs(found.astype(np.float64) - wanted) <= working + last)


# ---- the tree


def test_trees_are_written_as_levels_of_pairs() -> None:
    assert adasum.tree(1) == []
    assert adasum.tree(2) == [[(0, 1)]]
    assert adasum.tree(3) == [[(0, 1)], [(0, 2)]]
    assert adasum.tree(7) == [[(0, 1), (2, 3), (4, 5)], [(0, 2), (4, 6)], [(0, 4)]]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 64, 65])
def test_every_rank_is_combined_once_in_as_few_levels_as_possible(size: int) -> None:
    holds = [[rank] for rank in range(size)]
    levels = adasum.tree(size)
    for level in levels:
        rows = [row for pair in level for row in pair]
        assert len(rows) == len(set(rows))
        for left, right in level:
            holds[left] += holds[right]
            holds[right] = []
    assert holds[0] == list(range(size)) and not any(holds[1:])
    assert len(levels) == math.ceil(math.log2(size))


# ---- the formula


def test_the_formula_on_numbers_worked_out_by_hand() -> None:
    # a.b = 4, a.a = 4, b.b = 20: (1 - 1/2) (2, 0) + (1 - 1/10) (2, 4)
    np.testing.assert_allclose(adasum.reference([np.array([2.0, 0.0]), np.array([2.0, 4.0])]), [2.8, 3.6], rtol=1e-15)
    np.testing.assert_allclose(distributed([np.array([2.0, 0.0]), np.array([2.0, 4.0])]), [2.8, 3.6], rtol=1e-15)


def test_three_ranks_combine_the_first_two_first() -> None:
    a, b, c = drawn(3, 9, np.dtype(np.float64), seed=1)
    two = adasum.reference([a, b])
    np.testing.assert_allclose(distributed([a, b, c]), adasum.reference([two, c]), rtol=1e-13)
    assert not np.allclose(adasum.reference([a, b, c]), adasum.reference([b, c, a]), rtol=1e-3)


def test_a_coefficient_may_exceed_what_float32_holds() -> None:
    tiny, large = np.array([1e-32, 1e-32], np.float32), np.array([1e9, 0], np.float32)
    np.testing.assert_allclose(distributed([tiny, large]), [1e9 * 0.75, -1e9 * 0.25], rtol=1e-6)


def test_infinities_and_nan_come_through_in_silence() -> None:
    for bad in (np.inf, np.nan, 1e200):
        vectors = [np.array([bad, 1.0]), np.array([1.0, -1.0])]
        assert distributed(vectors).shape == (2,)
        assert np.isfinite(distributed(vectors)[0]) == np.isfinite(bad)


# ---- the distributed form


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(0, 60), st.sampled_from(DTYPES), st.integers(0, 9999))
def test_the_distributed_form_gives_the_reference(size: int, count: int, dtype: np.dtype[Any], seed: int) -> None:
    vectors = drawn(size, count, dtype, seed)
    assert_close(distributed(vectors), adasum.reference(vectors), vectors)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtypes.name)
def test_dots_are_summed_in_float64_whatever_the_dtype(dtype: np.dtype[Any]) -> None:
    vectors = np.stack(drawn(3, 20_000, dtype, seed=5))
    found = adasum.dots(vectors, [(0, 1), (2, 0)])
    assert found.dtype == np.float64 and found.shape == (2, 3)
    exact = vectors.astype(np.float64).tolist()
    for row, (i, j) in zip(found, [(0, 1), (2, 0)], strict=True):
        for total, (a, b) in zip(row, [(i, j), (i, i), (j, j)], strict=True):
            assert total == pytest.approx(math.fsum(x * y for x, y in zip(exact[a], exact[b], strict=True)), rel=1e-13)
    np.testing.assert_array_equal(found, adasum.dots(adasum.widen(vectors), [(0, 1), (2, 0)]))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtypes.name)
def test_only_halves_are_widened_and_nothing_but_left_rows_is_written(dtype: np.dtype[Any]) -> None:
    vectors = np.stack(drawn(4, 7, dtype, seed=2))
    before = vectors.copy()
    working = adasum.widen(vectors)
    assert working.dtype == dtypes.accumulator(dtype)
    assert (working is vectors) == (not dtypes.is_half(dtype))
    np.testing.assert_array_equal(working, before.astype(working.dtype))
    adasum.combine(working, [(2, 3)], adasum.dots(working, [(2, 3)]))
    np.testing.assert_array_equal(working[[0, 1, 3]], before[[0, 1, 3]].astype(working.dtype))
    assert not np.array_equal(working[2], before[2].astype(working.dtype))
