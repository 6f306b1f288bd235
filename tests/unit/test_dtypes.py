"""Which dtypes are admitted, and under which name."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from collectives.base import dtypes
from collectives.base.errors import InvalidTypeError


@pytest.mark.parametrize("name", [name for name in dtypes.NAMES if name != "bfloat16"])
def test_every_numpy_dtype_is_found_by_dtype_by_type_and_by_name(name: str) -> None:
    dtype = np.dtype(name)
    assert dtypes.resolve(name) == dtypes.resolve(dtype) == dtypes.resolve(dtype.type) == dtype
    assert dtypes.name(dtype) == name


@pytest.mark.parametrize("swapped", [">f4", "<f4", ">i8", "<i8", ">c16", "<c16", ">f2", "<f2"])
def test_any_byte_order_resolves_to_the_native_one(swapped: str) -> None:
    found = dtypes.resolve(np.dtype(swapped))
    assert found.isnative
    assert dtypes.name(np.dtype(swapped)) == dtypes.name(found)


def test_bfloat16_is_found_by_dtype_and_by_name() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = np.dtype(ml_dtypes.bfloat16)
    assert dtypes.is_half(dtype) and dtypes.is_floating(dtype)
    assert dtypes.resolve(dtype) == dtypes.resolve("bfloat16") == dtypes.resolve(ml_dtypes.bfloat16) == dtype
    assert dtypes.name(dtype) == "bfloat16"
    assert dtypes.accumulator(dtype) == np.float32


def test_bfloat16_is_recognised_when_its_array_is_the_first_thing_seen() -> None:
    pytest.importorskip("ml_dtypes")
    program = (
        "import sys\nfrom collectives.base import dtypes\nassert 'ml_dtypes' not in sys.modules\n"
        "import ml_dtypes, numpy\nd = numpy.dtype(ml_dtypes.bfloat16)\n"
        "assert dtypes.is_half(d) and dtypes.name(d) == 'bfloat16' and d in dtypes.SUPPORTED\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    "dtype",
    [object, "U3", "S3", "M8[s]", "m8[ns]", "V8", np.dtype([("a", "f4"), ("b", "i4")]), np.dtype((np.float32, (2,)))],
)
def test_other_dtypes_are_refused_and_the_message_lists_the_supported_ones(dtype: object) -> None:
    with pytest.raises(InvalidTypeError, match=r"weights: .*bool, int8.*complex128"):
        dtypes.resolve(dtype, argument="weights")


@pytest.mark.skipif(np.dtype(np.longdouble) == np.dtype(np.float64), reason="longdouble is float64 on this platform")
def test_longdouble_is_refused() -> None:
    with pytest.raises(InvalidTypeError):
        dtypes.resolve(np.longdouble)
    with pytest.raises(InvalidTypeError):
        dtypes.name(np.dtype(np.clongdouble))


@pytest.mark.parametrize("thing", ["float33", 17, "f4,f4,,"])
def test_what_is_no_dtype_is_refused(thing: object) -> None:
    with pytest.raises(InvalidTypeError):
        dtypes.resolve(thing)


def test_the_predicates_part_the_dtypes() -> None:
    for name in dtypes.NAMES:
        if name == "bfloat16":
            continue
        dtype = np.dtype(name)
        kinds = [dtypes.is_bool(dtype), dtypes.is_integer(dtype), dtypes.is_floating(dtype), dtypes.is_complex(dtype)]
        assert kinds.count(True) == 1, name
        assert dtypes.is_half(dtype) == (name == "float16")
        assert dtypes.accumulator(dtype) == (np.float32 if name == "float16" else dtype)


@pytest.mark.parametrize("name", dtypes.FLOAT8)
def test_float8_is_found_and_belongs_to_no_other_kind(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    if not hasattr(ml_dtypes, name):
        pytest.skip(f"ml_dtypes {ml_dtypes.__version__} has no {name}")
    dtype = np.dtype(getattr(ml_dtypes, name))
    assert dtypes.resolve(dtype) == dtypes.resolve(name) == dtype and dtypes.name(dtype) == name
    kinds = [dtypes.is_float8, dtypes.is_bool, dtypes.is_integer, dtypes.is_floating, dtypes.is_complex, dtypes.is_half]
    assert [kind(dtype) for kind in kinds] == [True] + [False] * 5


def test_a_dtype_that_is_smaller_than_a_byte_is_refused() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name in ("int4", "uint4", "float4_e2m1fn"):
        if hasattr(ml_dtypes, name):
            with pytest.raises(InvalidTypeError, match=rf"{name} is not supported; expected one of bool.* float8"):
                dtypes.resolve(getattr(ml_dtypes, name))
