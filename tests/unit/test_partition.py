"""How elements are divided among chunks, and rows among ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.schedules.partition import offsets, rows, split


@given(count=st.integers(0, 10_000), parts=st.integers(1, 70), align=st.integers(1, 64))
def test_parts_cover_everything_in_whole_units(count: int, parts: int, align: int) -> None:
    sizes = split(count, parts, align)
    assert len(sizes) == parts and sum(sizes) == count and min(sizes) >= 0
    assert sizes == sorted(sizes, reverse=True)
    boundaries = [start for start, size in zip(offsets(sizes), sizes, strict=True) if size]
    assert all(boundary % align == 0 for boundary in boundaries)
    units = [-(-size // align) for size in sizes]
    assert max(units) - min(units) <= 1


@pytest.mark.parametrize(
    ("count", "parts", "align", "expected"),
    [
        (0, 3, 1, [0, 0, 0]),
        (2, 4, 1, [1, 1, 0, 0]),
        (10, 3, 1, [4, 3, 3]),
        (12, 3, 4, [4, 4, 4]),
        (13, 3, 4, [8, 4, 1]),
        (5, 3, 4, [4, 1, 0]),
        (3, 2, 16, [3, 0]),
        (33, 1, 16, [33]),
    ],
)
def test_split(count: int, parts: int, align: int, expected: list[int]) -> None:
    assert split(count, parts, align) == expected


def test_offsets_are_where_parts_begin() -> None:
    assert offsets([4, 3, 0, 3]) == [0, 4, 7, 7]
    assert offsets([]) == []


@given(count=st.integers(0, 1000), parts=st.integers(1, 70))
def test_the_first_ranks_get_one_row_more(count: int, parts: int) -> None:
    few, extra = divmod(count, parts)
    assert rows(count, parts) == [few + 1] * extra + [few] * (parts - extra)
