"""Free ranges, against a model: one flag per unit."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.tensors.free_ranges import FreeRanges

UNIT, UNITS = 64, 96


def free_units(ranges: FreeRanges) -> list[bool]:
    """The model of what is free; checks that ranges do not overlap, and that none begins where another ends."""
    units = [False] * UNITS
    found = sorted(ranges.of_at_least(1))
    for start, end in found:
        assert 0 <= start < end <= UNITS * UNIT
        assert not any(units[start // UNIT : end // UNIT])
        units[start // UNIT : end // UNIT] = [True] * ((end - start) // UNIT)
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(found))
    return units


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 1, 4, 16]), st.integers(0, 1 << 30))))
def test_what_is_taken_was_free_and_what_fits_is_found(steps: list[tuple[int, int, int]]) -> None:
    """Sizes of 0 give back; any other takes so many units."""
    ranges, model, taken = FreeRanges(UNITS * UNIT), [True] * UNITS, []
    for size, align, chosen in steps:
        if size == 0:
            if taken:
                start, length = taken.pop(chosen % len(taken))
                ranges.give_back(start * UNIT, (start + length) * UNIT)
                model[start : start + length] = [True] * length
        else:
            at = ranges.take(size * UNIT, align * UNIT)
            fits = [start for start in range(0, UNITS - size + 1, align) if all(model[start : start + size])]
            assert (at is None) == (not fits)
            if at is not None:
                assert at // UNIT in fits and at % (align * UNIT) == 0
                model[at // UNIT : at // UNIT + size] = [False] * size
                taken.append((at // UNIT, size))
        assert free_units(ranges) == model
    for start, length in taken:
        ranges.give_back(start * UNIT, (start + length) * UNIT)
    assert list(ranges.of_at_least(1)) == [(0, UNITS * UNIT)]


def test_the_smallest_range_that_fits_is_taken() -> None:
    ranges = FreeRanges(1000)
    for start in (0, 100, 200, 300):
        assert ranges.take(100, 1) == start
    ranges.give_back(100, 200)
    assert ranges.take(60, 1) == 100 and ranges.take(60, 1) == 400 and ranges.take(40, 1) == 160


def test_ranges_of_a_size() -> None:
    ranges = FreeRanges(1000)
    assert [ranges.take(size, 1) for size in (10, 100, 20, 800)] == [0, 10, 110, 130]
    for start, end in ((0, 10), (110, 130)):
        ranges.give_back(start, end)
    assert list(ranges.of_at_least(20)) == [(110, 130), (930, 1000)]
    assert list(ranges.of_at_least(70)) == [(930, 1000)] and not list(ranges.of_at_least(71))
