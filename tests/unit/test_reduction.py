"""Kernels and scalings against oracles that are computed wider, or in Python's own integers."""

from __future__ import annotations

import math
import threading
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.base import dtypes
from collectives.base.errors import InvalidTypeError
from collectives.base.reduce_op import Op
from collectives.tensors import halves
from collectives.tensors.reduction import finish, identity, kernel, prescale, quiet, warns, weighted

ml_dtypes = pytest.importorskip("ml_dtypes")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(name) for name in dtypes.NAMES if name != "bfloat16"] + [BFLOAT16]
HALVES = [np.dtype(np.float16), BFLOAT16]
INTEGERS = [dtype for dtype in DTYPES if dtypes.is_integer(dtype)]
UFUNCS = {
    Op.SUM: np.add,
    Op.AVERAGE: np.add,
    Op.MIN: np.minimum,
    Op.MAX: np.maximum,
    Op.PRODUCT: np.multiply,
    Op.BAND: np.bitwise_and,
    Op.BOR: np.bitwise_or,
    Op.BXOR: np.bitwise_xor,
}
LENGTHS = [0, 1, 3, 31, 1024, 1025, 16383, 16384, 16385, 40001]

# Each test enters quiet() where the library promises nothing else; any warning outside it is a failure.
pytestmark = pytest.mark.filterwarnings("error")


ELEMENTWISE = [op for op in Op if op is not Op.ADASUM]


def defined(op: Op, dtype: np.dtype[Any]) -> bool:
    if op in (Op.BAND, Op.BOR, Op.BXOR):
        return dtype.kind in "biu"
    return not (dtypes.is_complex(dtype) and op in (Op.MIN, Op.MAX))


def anything(dtype: np.dtype[Any], count: int, seed: int) -> np.ndarray[Any, Any]:
    """Any bit patterns: infinities, NaN and subnormals are among them."""
    raw = np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, np.uint8)
    return raw % 2 == 1 if dtypes.is_bool(dtype) else raw.view(dtype)


def expected(op: Op, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if dtypes.is_bool(a.dtype):
        return a ^ b if op is Op.BXOR else a | b if op in (Op.SUM, Op.MAX, Op.BOR) else a & b
    wide = dtypes.accumulator(a.dtype)
    with quiet():
        if op is Op.AVERAGE and dtypes.is_half(a.dtype):
            return ((a.astype(np.float64) + b.astype(np.float64)) / 2).astype(wide).astype(a.dtype)
        return UFUNCS[op](a.astype(wide), b.astype(wide)).astype(a.dtype)


def assert_same(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> None:
    """Equal, NaN where NaN is wanted, and zeros of the same sign."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    if dtypes.is_complex(found.dtype):
        real = np.dtype(f"f{found.dtype.itemsize // 2}")
        found, wanted = found.view(real), wanted.view(real)
    if dtypes.is_half(found.dtype):
        with quiet():
            found, wanted = found.astype(np.float32), wanted.astype(np.float32)
    np.testing.assert_array_equal(found, wanted)
    if found.dtype.kind == "f":
        number = ~np.isnan(wanted)
        np.testing.assert_array_equal(np.signbit(found[number]), np.signbit(wanted[number]))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtypes.name)
@pytest.mark.parametrize("op", ELEMENTWISE)
def test_kernels_equal_the_widened_oracle_at_every_length_in_place_and_out_of_place(
    op: Op, dtype: np.dtype[Any]
) -> None:
    if not defined(op, dtype):
        pytest.skip("complex numbers have no order, and floating-point numbers no bits")
    combine = kernel(op, dtype)
    for count in LENGTHS:
        a, b = anything(dtype, count, seed=count), anything(dtype, count, seed=count + 1)
        a_before, b_before, wanted = a.copy(), b.copy(), expected(op, a, b)
        out = np.empty(count, dtype)
        with quiet():
            combine(a, b, out)
            assert_same(out, wanted)
            assert a.tobytes() == a_before.tobytes() and b.tobytes() == b_before.tobytes()
            combine(a, b, a)
            assert_same(a, wanted)
            combine(a_before, b, b)
            assert_same(b, wanted)


@pytest.mark.parametrize("dtype", HALVES, ids=dtypes.name)
@pytest.mark.parametrize("op", [Op.SUM, Op.AVERAGE, Op.MIN, Op.MAX, Op.PRODUCT])
def test_halves_are_right_for_all_bit_patterns(op: Op, dtype: np.dtype[Any]) -> None:
    everything = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    generator = np.random.default_rng(2)
    out = np.empty_like(everything)
    for _ in range(4):
        other = generator.permutation(everything.view(np.uint16)).view(dtype)
        with quiet():
            kernel(op, dtype)(everything, other, out)
        assert_same(out, expected(op, everything, other))


@pytest.mark.parametrize("dtype", HALVES, ids=dtypes.name)
@pytest.mark.parametrize("op", [Op.SUM, Op.PRODUCT, Op.MAX])
def test_halves_write_only_their_block_at_any_offset(op: Op, dtype: np.dtype[Any]) -> None:
    for count in range(0, 70):
        for offset in (0, 1, 5):
            a, b = anything(dtype, count + offset, 3)[offset:], anything(dtype, count, 4)
            memory = np.full(count + offset + 9, 7, dtype)
            with quiet():
                kernel(op, dtype)(a, b, memory[offset : offset + count])
            assert_same(memory[offset : offset + count], expected(op, a, b))
            assert (memory[:offset].astype(np.float32) == 7).all() and (
                memory[offset + count :].astype(np.float32) == 7
            ).all()


@pytest.mark.parametrize("dtype", HALVES, ids=dtypes.name)
@pytest.mark.parametrize("op", [op for op in ELEMENTWISE if defined(op, HALVES[0])])
def test_halves_without_numkong_give_the_same(op: Op, dtype: np.dtype[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "numkong", lambda half: None)
    combine = kernel.__wrapped__(op, dtype)
    a, b = anything(dtype, 20000, 5), anything(dtype, 20000, 6)
    wanted, out = expected(op, a, b), np.empty_like(a)
    with quiet():
        combine(a, b, out)
        assert_same(out, wanted)
        scale = prescale(dtype, 0.3)
        assert scale is not None
        scale(a, out)
        assert_same(out, (a.astype(np.float32) * np.float32(0.3)).astype(dtype))


def test_ranks_as_threads_do_not_share_scratch() -> None:
    dtype, count, failures = BFLOAT16, 50000, []
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        a, b = anything(dtype, count, seed), anything(dtype, count, seed + 100)
        wanted, out = expected(Op.MAX, a, b), np.empty(count, dtype)
        start.wait(30)
        with quiet():
            for _ in range(10):
                kernel(Op.MAX, dtype)(a, b, out)
                if not np.array_equal(out.astype(np.float32), wanted.astype(np.float32), equal_nan=True):
                    failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


@pytest.mark.parametrize("dtype", DTYPES, ids=dtypes.name)
@pytest.mark.parametrize("op", ELEMENTWISE)
def test_the_identity_changes_nothing(op: Op, dtype: np.dtype[Any]) -> None:
    if not defined(op, dtype):
        with pytest.raises(InvalidTypeError):
            identity(op, dtype)
        return
    neutral = identity(op, dtype)
    assert np.asarray(neutral).dtype == dtype
    a = anything(dtype, 501, seed=8)
    with quiet():
        a = a[np.isfinite(a.astype(np.complex128 if dtypes.is_complex(dtype) else np.float64))]
        out = np.empty_like(a)
        kernel(op, dtype)(a, np.full(a.size, neutral, dtype), out)
        wanted = expected(op, a, np.zeros_like(a)) if op.divides(dtype) and dtypes.is_half(dtype) else a
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_min_and_max_of_complex_numbers_are_refused_by_name(dtype: str) -> None:
    with pytest.raises(InvalidTypeError, match=f"op=Max .*{dtype}"):
        kernel(Op.MAX, np.dtype(dtype))
    with pytest.raises(InvalidTypeError, match=f"op=Min .*{dtype}"):
        kernel(Op.MIN, np.dtype(dtype))


@pytest.mark.parametrize("dtype", INTEGERS, ids=dtypes.name)
def test_integers_wrap_without_a_warning_and_without_quiet(dtype: np.dtype[Any]) -> None:
    limits = np.iinfo(dtype)
    a, b = np.full(9, limits.max, dtype), np.ones(9, dtype)
    kernel(Op.SUM, dtype)(a, b, a)
    assert (a == limits.min).all()
    assert not warns(dtype)


def test_float_overflow_is_silent_under_quiet_and_the_state_comes_back() -> None:
    before = np.geterr()
    a = np.full(5, np.finfo(np.float32).max, np.float32)
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("error")
        kernel(Op.SUM, a.dtype)(a, a.copy(), a)
    assert np.isinf(a).all() and np.geterr() == before
    assert warns(a.dtype)


# ---- finish and prescale


def test_nothing_to_do_is_none() -> None:
    for dtype in DTYPES:
        assert prescale(dtype, 1.0) is None
        assert finish(Op.SUM, dtype, 7) is None
        assert finish(Op.AVERAGE, dtype, 1) is None
    assert finish(Op.AVERAGE, np.dtype(bool), 5) is None


@given(
    data=st.data(),
    dtype=st.sampled_from(INTEGERS),
    size=st.one_of(st.integers(2, 600), st.sampled_from([127, 128, 129, 255, 256, 257, 32768, 65536])),
)
@settings(max_examples=150, deadline=None)
def test_integer_averages_truncate_toward_zero_exactly(data: st.DataObject, dtype: np.dtype[Any], size: int) -> None:
    limits = np.iinfo(dtype)
    edges = [limits.min, limits.min + 1, limits.max, limits.max - 1, 0, 1]
    values = data.draw(
        st.lists(st.one_of(st.sampled_from(edges), st.integers(int(limits.min), int(limits.max))), max_size=40)
    )
    a = np.array(values, dtype)
    scale = finish(Op.AVERAGE, dtype, size)
    assert scale is not None
    out = np.empty_like(a)
    scale(a, out)
    wanted = [abs(value) // size * (1 if value >= 0 else -1) for value in values]
    assert out.tolist() == wanted and a.tolist() == values
    scale(a, a)
    assert a.tolist() == wanted


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64"])
def test_integer_averages_are_right_beyond_one_block(dtype: str) -> None:
    a = anything(np.dtype(dtype), 40000, seed=1)
    wanted = [
        math.trunc(value / 3) if abs(value) < 1 << 50 else abs(value) // 3 * (1 if value > 0 else -1)
        for value in a.tolist()
    ]
    scale = finish(Op.AVERAGE, a.dtype, 3)
    assert scale is not None
    scale(a, a)
    assert a.tolist() == wanted


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "uint64"])
def test_integers_with_a_factor_are_multiplied_in_float64_and_truncated(dtype: str) -> None:
    a = np.arange(100, dtype=dtype)
    if a.dtype.kind == "i":
        a -= 50
    out = np.empty_like(a)
    scale = prescale(a.dtype, 0.37)
    assert scale is not None
    scale(a, out)
    assert out.tolist() == [math.trunc(value * 0.37) for value in a.tolist()]
    scale = finish(Op.AVERAGE, a.dtype, 4, 0.5)
    assert scale is not None
    scale(a, a)
    assert a.tolist() == [
        math.trunc(value * 0.125) for value in (np.arange(100) - (50 if a.dtype.kind == "i" else 0)).tolist()
    ]


def test_integers_that_leave_their_range_do_not_warn() -> None:
    a = np.array([100, -100], np.int8)
    scale = prescale(a.dtype, 1e30)
    assert scale is not None
    scale(a, a)


def test_bool_with_a_factor_is_true_where_the_product_is_not_zero() -> None:
    a = np.array([True, False, True])
    for factor, wanted in ((0.5, [True, False, True]), (0.0, [False, False, False])):
        out = np.empty_like(a)
        scale = prescale(a.dtype, factor)
        assert scale is not None
        scale(a, out)
        assert out.tolist() == wanted


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 10, 64, 1000])
def test_a_plain_average_is_the_correctly_rounded_quotient(dtype: str, size: int) -> None:
    a = anything(np.dtype(dtype), 3001, seed=size)
    real = np.dtype(f"f{a.itemsize // 2}") if a.dtype.kind == "c" else a.dtype
    with quiet():
        wanted = (a.view(real) / real.type(size)).view(a.dtype)
        scale = finish(Op.AVERAGE, a.dtype, size)
        assert scale is not None
        out = np.empty_like(a)
        scale(a, out)
        assert_same(out, wanted)
        scale(a, a)
    assert_same(a, wanted)


@pytest.mark.parametrize("dtype", HALVES, ids=dtypes.name)
@pytest.mark.parametrize("counts", [(1, 1), (2, 2), (2, 1), (1, 2), (4, 1), (5, 3), (1, 63), (511, 512), (1, 4095)])
def test_means_of_halves_weigh_by_their_numbers(dtype: np.dtype[Any], counts: tuple[int, int]) -> None:
    """Equal numbers have themselves as their mean; others the mean of float32, rounded once, in either order."""
    left, right = counts
    everything = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    other = np.random.default_rng(3).permutation(everything.view(np.uint16)).view(dtype)
    out, swapped = np.empty_like(everything), np.empty_like(everything)
    assert finish(Op.AVERAGE, dtype, left + right) is None
    with quiet():
        combine = weighted(kernel(Op.AVERAGE, dtype), left, right)
        combine(everything, everything, out)
        assert_same(out, everything)
        combine(everything, other, out)
        weighted(kernel(Op.AVERAGE, dtype), right, left)(other, everything, swapped)
        assert_same(out, swapped)
        mean = (everything.astype(np.float64) * left + other.astype(np.float64) * right) / (left + right)
        error = np.abs(out.astype(np.float64) - mean)
        unit = np.maximum(np.abs(mean) * ml_dtypes.finfo(dtype).eps, float(ml_dtypes.finfo(dtype).smallest_subnormal))
        largest = np.maximum(np.abs(everything.astype(np.float64)), np.abs(other.astype(np.float64)))
        finite = np.isfinite(mean)
        assert (error <= unit / 2 + largest * 2.0**-22)[finite].all()
        assert_same(np.isnan(out), np.isnan(mean))


@pytest.mark.parametrize("dtype", HALVES, ids=dtypes.name)
def test_weighted_means_without_numkong_are_the_same(dtype: np.dtype[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = anything(dtype, 40000, 5), anything(dtype, 40000, 6)
    results = []
    for numkong in (halves.numkong, lambda half: None):
        monkeypatch.setattr(halves, "numkong", numkong)
        for left, right in ((1, 1), (2, 1), (3, 4), (1, 100)):
            out = np.empty_like(a)
            with quiet():
                halves.averaging(dtype, left, right)(a, b, out)
            results.append(out)
    for fast, slow in zip(results[:4], results[4:], strict=True):
        assert_same(fast, slow)


@given(
    factor=st.floats(-1e6, 1e6, width=32),
    size=st.integers(1, 200),
    dtype=st.sampled_from([dtype for dtype in DTYPES if dtypes.is_floating(dtype)]),
)
@settings(max_examples=100, deadline=None)
def test_a_factor_is_one_product_rounded_once(factor: float, size: int, dtype: np.dtype[Any]) -> None:
    a = anything(dtype, 700, seed=11)
    wide = dtypes.accumulator(dtype)
    for op, total in ((Op.SUM, factor), (Op.AVERAGE, factor / size)):
        scale = finish(op, dtype, size, factor)
        if scale is None or (op is Op.AVERAGE and factor == 1.0):
            continue
        if op is Op.AVERAGE and dtypes.is_half(dtype):
            total = factor  # it is divided already
        out = np.empty_like(a)
        with quiet():
            scale(a, out)
            assert_same(out, (a.astype(wide) * wide.type(total)).astype(dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=dtypes.name)
@pytest.mark.parametrize("factor", [0.0, -0.0, 1e-60, 1e60, math.inf, math.nan])
def test_extreme_factors_of_halves(dtype: np.dtype[Any], factor: float) -> None:
    a = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    out = np.empty_like(a)
    with quiet():
        scale = prescale(dtype, factor)
        assert scale is not None
        scale(a, out)
        assert_same(out, (a.astype(np.float32) * np.float32(factor)).astype(dtype))


def test_a_complex_infinity_keeps_its_other_part() -> None:
    a = np.array([complex(math.inf, 1.0)], np.complex64)
    scale = prescale(a.dtype, 2.0)
    assert scale is not None
    scale(a, a)
    assert a[0].real == math.inf and a[0].imag == 2.0


def test_the_operations_have_short_names() -> None:
    assert [repr(op) for op in Op] == ["Average", "Sum", "Min", "Max", "Product", "Adasum", "Band", "Bor", "Bxor"]


def test_adasum_is_no_kernel() -> None:
    with pytest.raises(InvalidTypeError, match="whole tensors"):
        kernel(Op.ADASUM, np.dtype(np.float32))


@pytest.mark.parametrize("op", ELEMENTWISE)
def test_what_an_operation_says_of_itself_is_what_its_kernel_does(op: Op) -> None:
    dtype = np.dtype(np.float64 if defined(op, np.dtype(np.float64)) else np.int64)
    rows = anything(np.dtype(np.uint8), 2000, 7).astype(dtype).reshape(2, -1)

    def reduced(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        out = np.empty_like(a)
        kernel(op, dtype)(a, b, out)
        scale = finish(op, dtype, 2)
        if scale is not None:
            scale(out, out)
        return out

    a, b = rows
    assert np.array_equal(reduced(a, a), a) == op.idempotent
    assert np.array_equal(reduced(2 * a, 2 * b), 2 * reduced(a, b)) or not op.linear
    assert np.array_equal(reduced(a + b, b + a), reduced(a, b) + reduced(b, a)) == op.linear
    assert op.divides(dtype) == (op is Op.AVERAGE) and not op.divides(np.dtype(bool))
