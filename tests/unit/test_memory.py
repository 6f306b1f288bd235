"""Arrays in memory that peers can map: the public functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import collectives
from collectives.base.errors import InvalidArgumentError, InvalidTypeError


@pytest.mark.parametrize("shape", [5, (3, 4), [2, 3], (), np.int64(7), (1, np.int32(2))])
@pytest.mark.parametrize("dtype", ["bool", "uint8", "float32", "complex128", ">i4", "U5", "i4,f8", "M8[s]", "2f4"])
def test_arrays_are_as_numpys(shape: Any, dtype: str) -> None:
    for made, expected in (
        (collectives.empty(shape, dtype), np.empty(shape, dtype)),
        (collectives.zeros(shape, dtype), np.zeros(shape, dtype)),
    ):
        assert type(made) is np.ndarray and made.flags.carray and made.ctypes.data % 64 == 0
        assert made.shape == expected.shape and made.dtype == expected.dtype
        assert collectives.is_mapped(made)
    assert (made == expected).all()


def test_zeros_are_zeros_in_memory_that_was_used_before() -> None:
    collectives.empty(1000, np.uint8).fill(255)
    assert not collectives.zeros(1000, np.uint8).any()


def test_the_default_dtype_is_numpys() -> None:
    assert collectives.empty(3).dtype == collectives.zeros(3).dtype == np.empty(3).dtype


@pytest.mark.parametrize("shape", [0, (3, 0, 2)])
def test_arrays_without_elements(shape: Any) -> None:
    for made in (collectives.empty(shape, "f4"), collectives.zeros(shape, "f4")):
        assert made.shape == np.empty(shape).shape and not collectives.is_mapped(made)


def test_empty_like_takes_shape_and_dtype_and_not_the_order() -> None:
    like = collectives.empty_like(np.ones((3, 4), np.float32).T)
    assert like.shape == (4, 3) and like.dtype == np.float32 and like.flags.c_contiguous and collectives.is_mapped(like)
    other = collectives.empty_like(like, np.int8, shape=(7,))
    assert other.shape == (7,) and other.dtype == np.int8
    assert collectives.empty_like(2.5).shape == () and collectives.empty_like(b"four").shape == (4,)


def test_views_count() -> None:
    array = collectives.zeros((10, 10), np.float32)
    assert collectives.is_mapped(array[2:5]) and collectives.is_mapped(memoryview(array[3]))
    assert not collectives.is_mapped(array[:, 2:5]), "collectives use a copy of what has gaps"
    assert not collectives.is_mapped(np.zeros(10)) and not collectives.is_mapped(3.0)


@pytest.mark.parametrize("make", [collectives.empty, collectives.zeros])
def test_mistakes_are_named(make: Any) -> None:
    for shape in (-1, (-1, -1), (3, -2)):
        with pytest.raises(InvalidArgumentError, match="shape: expected dimensions of 0 or more"):
            make(shape)
    for shape in (2.5, "33", (1, "2"), None):
        with pytest.raises(InvalidTypeError, match="shape: expected an int or a sequence of ints"):
            make(shape)
    for dtype in (object, "i4,O"):
        with pytest.raises(InvalidTypeError, match="peers cannot use Python objects"):
            make(3, dtype)
    with pytest.raises((MemoryError, ValueError)):  # NumPy's own
        make(1 << 62)
    with pytest.raises(InvalidTypeError, match="prototype: expected"):
        collectives.empty_like([1, 2])
    with pytest.raises(InvalidTypeError, match="tensor: expected"):
        collectives.is_mapped([1, 2])
