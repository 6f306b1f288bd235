"""Buckets: what is fused with what; and pieces: many tensors as one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from collectives import fusion
from collectives.fusion import Pieces

KEYS = st.lists(st.sampled_from(["float32 sum", "float64 sum", "float32 max", None]), max_size=40)


@given(KEYS, st.data(), st.integers(1, 200))
def test_every_operation_is_in_one_bucket_with_its_like(
    keys: list[str | None], data: st.DataObject, threshold: int
) -> None:
    sizes = data.draw(st.lists(st.integers(0, 100), min_size=len(keys), max_size=len(keys)))
    buckets = fusion.plan(keys, sizes, threshold)
    assert sorted(number for bucket in buckets for number in bucket) == list(range(len(keys)))
    assert [bucket[0] for bucket in buckets] == sorted(bucket[0] for bucket in buckets)
    for bucket in buckets:
        assert list(bucket) == sorted(bucket)
        assert len({keys[number] for number in bucket}) == 1
        if len(bucket) > 1:
            assert keys[bucket[0]] is not None
            assert sum(sizes[number] for number in bucket) <= threshold


def test_a_bucket_looks_past_what_does_not_fit() -> None:
    buckets = fusion.plan(["a", "b", "a", None, "b", "a"], [10, 10, 10, 10, 10, 10], 25)
    assert [bucket for bucket in buckets] == [(0, 2), (1, 4), (3,), (5,)]


def test_a_bucket_has_no_more_tensors_than_a_system_call_takes_blocks() -> None:
    buckets = fusion.plan(["a"] * 2500, [4] * 2500, 1 << 30)
    assert [len(bucket) for bucket in buckets] == [1024, 1024, 452]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any), st.data())
def test_pieces_of_blocks_tile_the_tensors(counts: list[int], data: st.DataObject) -> None:
    pieces = Pieces(counts)
    whole = np.arange(sum(counts), dtype=np.float64)
    ends = np.cumsum(counts)
    pieces.sources = [whole[end - count : end].copy() for count, end in zip(counts, ends, strict=True)]
    at = data.draw(st.integers(0, pieces.total - 1))
    count = data.draw(st.integers(1, pieces.total - at))
    out = np.empty(count)
    pieces.gather(at, count, out)
    np.testing.assert_array_equal(out, whole[at : at + count])
    place = 0
    for number, start, end, first, last in pieces.cut(at, count):
        assert (first, last) == (place, place + end - start) and 0 <= start < end <= counts[number]
        place = last
    assert place == count


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any))
def test_scatter_is_the_inverse_of_gather(counts: list[int]) -> None:
    pieces = Pieces(counts)
    packed = np.arange(pieces.total, dtype=np.int32)
    for _ in range(2):
        pieces.outs = [np.full(count, -1, np.int32) for count in counts]
        pieces.scatter(packed)
        np.testing.assert_array_equal(np.concatenate(pieces.outs), packed)


def test_what_is_packed_is_scaled_if_asked() -> None:
    pieces = Pieces([2, 3])
    pieces.sources = [np.ones(2), np.ones(3)]
    pieces.scale = lambda array, out: np.multiply(array, 3.0, out=out)
    out = np.empty(4)
    pieces.gather(1, 4, out)
    np.testing.assert_array_equal(out, 3.0)
