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


def distributed(vectors: Vectors, slices: list[int] | None = None) -> np.ndarray[Any, Any]:
    """What the engine does, for all ranks in turn: slices, dot products summed over the ranks, the slices put
    together."""
    size, count = len(vectors), vectors[0].size
    slices = split(count, size) if slices is None else slices
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


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32])
def test_powers_of_two_pair_up_like_recursive_distance_doubling(size: int) -> None:
    for level, pairs in enumerate(adasum.tree(size)):
        # There every rank combines with rank ^ distance; all ranks of a group then hold the same, the lowest among
        # them.
        partners = {(rank, rank ^ 2**level) for rank in range(size)}
        lowest = {tuple(sorted(rank >> level << level for rank in pair)) for pair in partners}
        groups = {(a >> (level + 1) << (level + 1), b) for a, b in lowest}
        assert set(pairs) == groups and len(pairs) == size >> (level + 1)


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


@given(st.integers(1, 9), st.sampled_from(DTYPES), st.integers(0, 3))
def test_orthogonal_vectors_are_added(size: int, dtype: np.dtype[Any], spare: int) -> None:
    vectors = [np.zeros(size + spare, dtype) for _ in range(size)]
    for rank, vector in enumerate(vectors):
        vector[rank] = rank + 1.5
    wanted = np.append(np.arange(size) + 1.5, np.zeros(spare))
    np.testing.assert_array_equal(distributed(vectors).astype(np.float64), wanted)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from(DTYPES), st.integers(0, 30), st.integers(0, 99))
def test_equal_vectors_are_averaged(size: int, dtype: np.dtype[Any], count: int, seed: int) -> None:
    vector = drawn(1, count, dtype, seed)[0]
    np.testing.assert_array_equal(distributed([vector] * size), vector)


@given(st.sampled_from(DTYPES), st.integers(0, 30), st.integers(0, 99), st.integers(1, 9), st.data())
def test_zero_vectors_leave_the_other_as_it_is(
    dtype: np.dtype[Any], count: int, seed: int, size: int, data: st.DataObject
) -> None:
    vectors = [np.zeros(count, dtype) for _ in range(size)]
    rank = data.draw(st.integers(0, size - 1))
    vectors[rank] = drawn(1, count, dtype, seed)[0]
    np.testing.assert_array_equal(distributed(vectors), vectors[rank])


@given(st.integers(2, 9), st.sampled_from([-40, -14, 3, 40]), st.integers(1, 30), st.integers(0, 99))
def test_scaled_vectors_give_the_scaled_result_however_short_they_are(
    size: int, exponent: int, count: int, seed: int
) -> None:
    vectors = drawn(size, count, np.dtype(np.float32), seed)
    scale = np.float32(2.0**exponent)
    np.testing.assert_array_equal(distributed([vector * scale for vector in vectors]), distributed(vectors) * scale)


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
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_long_vectors_of_normal_numbers_give_the_reference(size: int, dtype: np.dtype[Any]) -> None:
    rng = np.random.default_rng(size)
    common = rng.standard_normal(3 * size * 8192 + 5)  # several blocks for each rank, and a part of one
    vectors = [(common / 2 + rng.standard_normal(common.size)).astype(dtype) for _ in range(size)]
    assert_close(distributed(vectors), adasum.reference(vectors), vectors)


@given(st.integers(2, 9), st.sampled_from(DTYPES), st.integers(0, 99), st.data())
def test_how_the_elements_are_sliced_does_not_matter(
    size: int, dtype: np.dtype[Any], seed: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, 40))
    cuts = sorted(data.draw(st.lists(st.integers(0, count), min_size=size - 1, max_size=size - 1)))
    slices = [stop - start for start, stop in zip([0, *cuts], [*cuts, count], strict=True)]
    vectors = drawn(size, count, dtype, seed)
    whole = distributed(vectors, [count] + [0] * (size - 1)).astype(np.float64)
    sliced = distributed(vectors, slices).astype(np.float64)
    np.testing.assert_allclose(sliced, whole, rtol=EPS[dtype] * 2, atol=EPS[dtypes.accumulator(dtype)] * 64)


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
