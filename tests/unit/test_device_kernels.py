"""The device kernels, compiled for the CPU, against NumPy and `collectives.tensors.reduction`. (`make gpu-compile`
compiles them for GPUs.)"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.base import dtypes
from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.base.reduce_op import Op
from collectives.device import kernel_sources, kernels
from collectives.device.kernels import Kernels, Scaling, ScalingKind
from collectives.schedules.proof.replay import tree
from collectives.tensors import halves, reduction
from tests.support.emulated import host_kernels

ml_dtypes = pytest.importorskip("ml_dtypes")

Array = np.ndarray[Any, Any]
DTYPES = [dtypes.resolve(name) for name in dtypes.NAMES]
HALVES = [dtype for dtype in DTYPES if dtypes.is_half(dtype)]
BITWISE = {Op.BAND: np.bitwise_and, Op.BOR: np.bitwise_or, Op.BXOR: np.bitwise_xor}
OPS = [Op.SUM, Op.AVERAGE, Op.MIN, Op.MAX, Op.PRODUCT, *BITWISE]
UFUNCS = {
    Op.SUM: np.add,
    Op.AVERAGE: np.add,
    Op.MIN: np.minimum,
    Op.MAX: np.maximum,
    Op.PRODUCT: np.multiply,
    **BITWISE,
}

needs_compiler = pytest.mark.skipif(host_kernels.COMPILER is None, reason=host_kernels.MISSING)


class Device:
    """As much of a device as kernels need: it launches them, here and now."""

    index, identity, name = 0, "host", "host"
    multiprocessors = 1

    def __init__(self) -> None:
        self.functions: list[host_kernels.HostKernel] = []
        self.grids: list[tuple[int, int]] = []

    def function(self, source: str, name: str) -> int:
        self.functions.append(host_kernels.function(source, name))
        return len(self.functions) - 1

    def launch(self, function: int, grid: tuple[int, int], threads: int, parameters: int, stream: int) -> None:
        self.grids.append(grid)
        self.functions[function](grid, threads, parameters)


@pytest.fixture
def device() -> Iterator[Device]:
    with np.errstate(all="ignore"):
        yield Device()


def anything(dtype: np.dtype[Any], count: int, generator: np.random.Generator) -> Array:
    """Any bit patterns: infinities, NaN and subnormals are among them."""
    raw = generator.integers(0, 256, count * dtype.itemsize, np.uint8)
    return raw % 2 == 1 if dtypes.is_bool(dtype) else raw.view(dtype)


def numbers(dtype: np.dtype[Any], count: int, generator: np.random.Generator) -> Array:
    """Without floats that overflow or are hardly there, so that sums and products say something."""
    if dtypes.is_floating(dtype) or dtypes.is_complex(dtype):
        parts = generator.normal(size=2 * count)
        return (
            (parts[:count] + 1j * parts[count:]).astype(dtype)
            if dtypes.is_complex(dtype)
            else parts[:count].astype(dtype)
        )
    return anything(dtype, count, generator)


def product(a: Array, b: Array) -> Array:
    if not dtypes.is_complex(a.dtype):
        return a * b
    # NumPy's own may fuse the products and the sum.
    out = np.empty_like(a)
    out.real, out.imag = a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real
    return out


def combined(op: Op, sources: list[Array], scaling: Scaling | None, host_scaling: reduction.Scaling | None) -> Array:
    dtype = sources[0].dtype

    def combine(a: Array, b: Array) -> Array:
        if dtypes.is_bool(dtype):
            either = op in (Op.SUM, Op.MAX, Op.BOR)
            result: Array = (np.bitwise_xor if op is Op.BXOR else np.bitwise_or if either else np.bitwise_and)(a, b)
            return result
        return product(a, b) if op is Op.PRODUCT else np.asarray(UFUNCS[op](a, b))

    if op is Op.AVERAGE and dtypes.is_half(dtype):

        def mean(one: tuple[Array, int], other: tuple[Array, int]) -> tuple[Array, int]:
            (a, left), (b, right) = (one, other) if one[1] >= other[1] else (other, one)
            return halves._weighted(a, b, left / (left + right), right / (left + right)), left + right

        total = tree([(source.astype(np.float32), 1) for source in sources], mean)[0]
    else:
        total = tree([source.astype(dtypes.accumulator(dtype)) for source in sources], combine)
    if dtypes.is_half(dtype) and scaling is not None:
        operand = np.float32(scaling.factor)
        total = total * operand if scaling.kind is ScalingKind.MULTIPLY else total / operand
    elif host_scaling is not None:
        host_scaling(total, total)
    return total.astype(dtype)


def assert_same(found: Array, wanted: Array, *, zeros: bool = True) -> None:
    """The same bits; NaN where NaN is wanted; with ``zeros`` False a zero may have another sign."""
    if dtypes.is_complex(found.dtype):
        found, wanted = found.view(f"f{found.itemsize // 2}"), wanted.view(f"f{found.itemsize // 2}")
    bits = f"u{found.itemsize}"
    different = found.view(bits) != wanted.view(bits)
    if dtypes.is_floating(found.dtype):
        with np.errstate(all="ignore"):
            different &= ~(np.isnan(found) & np.isnan(wanted))
            if not zeros:
                different &= ~((found == 0) & (wanted == 0))
    assert not different.any(), (np.flatnonzero(different)[:5], found[different][:5], wanted[different][:5])


def memory(count: int, dtype: np.dtype[Any], misalignment: int) -> tuple[Array, Array]:
    """Bytes, and an array in their midst that begins ``misalignment`` bytes after a multiple of 16; 7 everywhere
    else."""
    size = count * dtype.itemsize
    raw = np.full(size + 64, 7, np.uint8)
    start = -raw.ctypes.data % 16 + 16 + misalignment
    return raw, raw[start : start + size].view(dtype)


def run(
    kernels_of: Kernels, op: Op | None, jobs: list[tuple[list[Array], list[Array]]], scaling: Scaling | None = None
) -> None:
    shape = [(len(sources), len(targets), sources[0].size) for sources, targets in jobs]
    combination = kernels_of.combination(op, jobs[0][0][0].dtype, shape, scaling)
    assert combination.pointers.shape == (len(jobs), 16) and combination.pointers.dtype == np.int64
    for row, (sources, targets) in zip(combination.pointers, jobs, strict=True):
        row[:] = 1  # what a job does not have is never looked at
        row[: len(sources)] = [source.ctypes.data for source in sources]
        row[8 : 8 + len(targets)] = [target.ctypes.data for target in targets]
    combination.launch(0)


def defined(op: Op, dtype: np.dtype[Any]) -> bool:
    if op in BITWISE:
        return dtypes.is_integer(dtype) or dtypes.is_bool(dtype)
    return not (dtypes.is_complex(dtype) and op in (Op.MIN, Op.MAX))


def steps(dtype: np.dtype[Any]) -> int:
    """What addresses are multiples of, in bytes."""
    return dtype.itemsize // 2 if dtypes.is_complex(dtype) else dtype.itemsize


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=dtypes.name)
@pytest.mark.parametrize("op", OPS)
def test_jobs_of_every_shape_and_alignment_equal_numpy(op: Op, dtype: np.dtype[Any], device: Device) -> None:
    if not defined(op, dtype):
        with pytest.raises(InvalidTypeError, match=r"no order|expected integers or bools"):
            Kernels(device).combination(op, dtype, [(2, 1, 1)])
        return
    generator = np.random.default_rng([OPS.index(op), DTYPES.index(dtype)])
    step, number = steps(dtype), 0
    for alignment in ("words", "together", "each"):
        jobs, checks, before = [], [], []
        for count in (0, 1, 2, 3, 7, 8, 15, 17, 31, 64, 129, 1000, 1, 16, 33, 255, 501):
            sources_of, targets_of = number % 8 + 1, (number * 5) % 8 + 1
            number += 1
            together = int(generator.integers(0, 16 // step)) * step

            def place(alignment: str = alignment, together: int = together) -> int:
                return {"words": 0, "together": together, "each": int(generator.integers(0, 16 // step)) * step}[
                    alignment
                ]

            fill = anything if number % 2 else numbers
            sources = [memory(count, dtype, place())[1] for _ in range(sources_of)]
            for source in sources:
                source[:] = fill(dtype, count, generator)
            wholes, targets = map(list, zip(*(memory(count, dtype, place()) for _ in range(targets_of)), strict=True))
            wanted = combined(op, sources, None, None)
            in_place = number % 3 == 0
            if in_place:
                targets[-1] = sources[-1]
            jobs.append((sources, targets))
            checks.append((wanted, wholes, targets, in_place))
            before.append([source.tobytes() for source in (sources[:-1] if in_place else sources)])
        run(Kernels(device), op, jobs)
        for (sources, _), (wanted, wholes, targets, in_place), old in zip(jobs, checks, before, strict=True):
            for target in targets:
                assert_same(target, wanted, zeros=op not in (Op.MIN, Op.MAX))
            for source, was in zip(sources, old, strict=not in_place):
                assert source.tobytes() == was
            for whole, target in zip(wholes, targets, strict=True):
                if not np.shares_memory(whole, target) or target.size == 0:
                    assert (whole == 7).all()
                    continue
                start = target.ctypes.data - whole.ctypes.data
                assert (whole[:start] == 7).all() and (whole[start + target.nbytes :] == 7).all()


@needs_compiler
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "complex128"])
@pytest.mark.parametrize("sources", [1, 2, 4, 8])
@pytest.mark.parametrize("offset", [0, 1])
def test_threads_go_round_until_all_is_done(name: str, sources: int, offset: int, device: Device) -> None:
    dtype, generator, count = dtypes.resolve(name), np.random.default_rng(sources), 70001
    arrays = [numbers(dtype, count + offset, generator)[offset:] for _ in range(sources)]
    target = np.empty(count, dtype)
    run(Kernels(device), Op.SUM, [(arrays, [target])])
    assert_same(target, combined(Op.SUM, arrays, None, None))
    assert device.grids == [(2, 1)]


@needs_compiler
def test_the_grid_is_as_large_as_the_jobs_and_no_larger_than_the_device(device: Device) -> None:
    device.multiprocessors = 132
    made = Kernels(device)
    for shape, grid in (
        ([(1, 1, 1)], (1, 1)),
        ([(2, 1, 512 * 4)], (1, 1)),
        ([(2, 1, 512 * 4 + 1)], (2, 1)),
        ([(2, 1, 1 << 24)], (264, 1)),
        ([(2, 1, 1 << 24)] * 8, (33, 8)),
        ([(2, 1, 100), (2, 1, 0), (2, 1, 512 * 12)], (3, 3)),
    ):
        combination = made.combination(Op.SUM, np.dtype(np.float32), shape)
        assert [launched for launched, _ in combination._launches] == [grid]
    assert made.combination(Op.SUM, np.dtype(np.float32), [(2, 1, 5)] * 17).launches == 3
    empty = made.combination(Op.SUM, np.dtype(np.float32), [(2, 1, 0)] * 3)
    empty.launch(0)
    assert empty.launches == 0 and device.grids == []


@needs_compiler
def test_pointers_may_change_from_launch_to_launch_and_nothing_else_is_needed(device: Device) -> None:
    combination = Kernels(device).combination(Op.SUM, np.dtype(np.int32), [(2, 1, 3)])
    for number in range(3):
        a, b, out = np.full(3, number, np.int32), np.full(3, 10, np.int32), np.zeros(3, np.int32)
        combination.pointers[0, [0, 1, 8]] = a.ctypes.data, b.ctypes.data, out.ctypes.data
        combination.launch(0)
        assert out.tolist() == [number + 10] * 3


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=dtypes.name)
def test_a_copy_keeps_every_bit(dtype: np.dtype[Any], device: Device) -> None:
    generator = np.random.default_rng(1)
    for op in (None, Op.SUM):
        for shift in (0, steps(dtype)):
            source = anything(dtype, 777, generator)
            targets = [memory(777, dtype, misalignment)[1] for misalignment in (0, shift % 16)]
            run(Kernels(device), op, [([source], targets)])
            assert all(target.tobytes() == source.tobytes() for target in targets)


def test_jobs_of_other_shapes_are_refused() -> None:
    for op, job, wrong in (
        (Op.SUM, (9, 1, 5), "1 to 8 sources.*got 9 sources"),
        (Op.SUM, (0, 1, 5), "got 0 sources"),
        (Op.SUM, (2, 9, 5), "1 to 8 targets.*9 targets"),
        (Op.SUM, (2, 0, 5), "0 targets"),
        (Op.SUM, (2, 1, -1), "-1 elements"),
        (None, (2, 1, 5), "1 to 1 sources"),
    ):
        with pytest.raises(InvalidArgumentError, match=wrong):
            Kernels(Device()).combination(op, np.dtype(np.float32), [job])


# ---- halves

CONVERSIONS = """
template <class Half> __device__ void convert(unsigned short *halves, float *wides, long long count, int narrow) {
    for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        if (narrow) halves[i] = Half::narrow(wides[i]);
        else wides[i] = Half::widen(halves[i]);
}
extern "C" __global__ void float16(unsigned short *h, float *w, long long n, int narrow) {
    convert<Float16>(h, w, n, narrow);
}
extern "C" __global__ void bfloat16(unsigned short *h, float *w, long long n, int narrow) {
    convert<BFloat16>(h, w, n, narrow);
}
"""


def convert(dtype: np.dtype[Any], halves: Array, wides: Array, narrow: bool) -> None:
    values = [np.array([value], np.int64) for value in (halves.ctypes.data, wides.ctypes.data, halves.size, narrow)]
    parameters = np.array([value.ctypes.data for value in values], np.int64)
    host_kernels.function(kernel_sources.source() + CONVERSIONS, dtypes.name(dtype))((4, 1), 64, parameters.ctypes.data)


@needs_compiler
@pytest.mark.parametrize("dtype", HALVES, ids=dtypes.name)
def test_every_half_is_widened_and_comes_back(dtype: np.dtype[Any]) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    wides, back = np.empty(1 << 16, np.float32), np.empty(1 << 16, np.uint16)
    convert(dtype, halves, wides, narrow=False)
    with np.errstate(all="ignore"):
        assert_same(wides, halves.view(dtype).astype(np.float32))
    convert(dtype, back, wides, narrow=True)
    assert_same(back.view(dtype), halves.view(dtype))


@needs_compiler
@pytest.mark.parametrize("dtype", HALVES, ids=dtypes.name)
def test_floats_are_rounded_to_the_nearest_half_and_ties_to_even(dtype: np.dtype[Any]) -> None:
    everything = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(all="ignore"):
        low, high = (
            everything.view(dtype).astype(np.float32),
            (everything + np.uint16(1)).view(dtype).astype(np.float32),
        )
        middle = (low.astype(np.float64) + high).astype(np.float32) / np.float32(2)
        middle = np.where(np.isfinite(middle), middle, low)
        wides = np.concatenate(
            [
                middle,
                np.nextafter(middle, np.float32(np.inf)),
                np.nextafter(middle, np.float32(-np.inf)),
                np.arange(0, 1 << 32, 65521, dtype=np.uint32).view(np.float32),
                np.array(
                    [0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x477FEFFF, 0x477FF000, 0x7F7FFFFF], np.uint32
                ).view(np.float32),
            ]
        )
        found = np.empty(wides.size, np.uint16)
        convert(dtype, found, wides, narrow=True)
        assert_same(found.view(dtype), wides.astype(dtype))


@needs_compiler
@pytest.mark.parametrize("dtype", HALVES, ids=dtypes.name)
def test_halves_are_rounded_once_after_all_sources_and_the_scaling(dtype: np.dtype[Any], device: Device) -> None:
    one, small = np.ones(9, dtype), np.full(9, float(ml_dtypes.finfo(dtype).eps) / 4, dtype)
    target = np.empty(9, dtype)
    run(Kernels(device), Op.SUM, [([one] + [small] * 7, [target])])
    assert (target > one).all()  # each alone would be lost
    largest = np.full(9, ml_dtypes.finfo(dtype).max, dtype)
    if dtypes.name(dtype) == "float16":
        run(Kernels(device), Op.AVERAGE, [([largest] * 8, [target])], kernels.finish(Op.AVERAGE, dtype, 8))
        assert (target == largest).all()


# ---- scaling


@given(
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(OPS),
    size=st.integers(1, 300),
    factor=st.one_of(st.just(1.0), st.floats(-4, 4)),
)
def test_a_scaling_is_nothing_where_the_hosts_is_nothing(
    dtype: np.dtype[Any], op: Op, size: int, factor: float
) -> None:
    assert (kernels.finish(op, dtype, size, factor) is None) == (reduction.finish(op, dtype, size, factor) is None)
    assert (kernels.prescale(dtype, factor) is None) == (reduction.prescale(dtype, factor) is None)


SCALINGS = [
    (Op.AVERAGE, 2, 1.0),
    (Op.AVERAGE, 3, 1.0),
    (Op.AVERAGE, 300, 1.0),
    (Op.AVERAGE, 5, 0.7),
    (Op.SUM, 4, 0.3),
    (Op.SUM, 4, -0.5),
]


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=dtypes.name)
@pytest.mark.parametrize(("op", "size", "factor"), SCALINGS)
def test_scalings_equal_the_hosts_bit_for_bit(
    dtype: np.dtype[Any], op: Op, size: int, factor: float, device: Device
) -> None:
    if dtype.kind == "u" and factor < 0:
        factor = -factor  # a negative product has no meaning there, and every processor another idea of it
    generator = np.random.default_rng(size)
    scaling, host = kernels.finish(op, dtype, size, factor), reduction.finish(op, dtype, size, factor)
    everything = (
        np.arange(1 << 16, dtype=np.uint16).view(dtype) if dtypes.is_half(dtype) else anything(dtype, 3001, generator)
    )
    wanted, target = everything.copy(), np.empty_like(everything)
    if host is not None:
        host(wanted, wanted)
    run(Kernels(device), op, [([everything], [target])], scaling)
    assert_same(target, wanted)
    sources = [numbers(dtype, 501, generator) for _ in range(3)]
    wanted, target = combined(op, sources, scaling, host), np.empty(501, dtype)
    run(Kernels(device), op, [(sources, [target])], scaling)
    assert_same(target, wanted)


@needs_compiler
@pytest.mark.parametrize("name", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
@pytest.mark.parametrize("size", [2, 3, 127, 128, 255, 256, 257, 65536, 100003])
def test_integer_averages_truncate_toward_zero_and_are_exact(name: str, size: int, device: Device) -> None:
    limits = np.iinfo(name)
    values = [limits.min, limits.min + 1, limits.max, limits.max - 1, 0, 1, limits.max // 2, limits.max // 2 + 1]
    source, target = np.array(values, name), np.empty(len(values), name)
    run(Kernels(device), Op.AVERAGE, [([source], [target])], kernels.finish(Op.AVERAGE, source.dtype, size))
    assert target.tolist() == [abs(value) // size * (1 if value >= 0 else -1) for value in values]


@needs_compiler
def test_a_bool_with_a_factor_is_true_where_the_product_is_not_zero(device: Device) -> None:
    source, target = np.array([True, False, True]), np.empty(3, bool)
    for factor in (0.5, 0.0, math.nan, math.inf):
        scaling, host, wanted = (
            kernels.prescale(source.dtype, factor),
            reduction.prescale(source.dtype, factor),
            np.empty(3, bool),
        )
        assert host is not None
        host(source, wanted)
        run(Kernels(device), Op.SUM, [([source], [target])], scaling)
        assert target.tolist() == wanted.tolist()


@needs_compiler
@pytest.mark.parametrize("dtype", HALVES, ids=dtypes.name)
@pytest.mark.parametrize("factor", [0.0, -0.0, 1e-60, 1e60, math.inf, math.nan])
def test_extreme_factors_of_halves_equal_the_hosts(dtype: np.dtype[Any], factor: float, device: Device) -> None:
    source = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    wanted, target, host = np.empty_like(source), np.empty_like(source), reduction.prescale(dtype, factor)
    assert host is not None
    host(source, wanted)
    run(Kernels(device), Op.SUM, [([source], [target])], kernels.prescale(dtype, factor))
    assert_same(target, wanted)


@needs_compiler
def test_a_complex_infinity_keeps_its_other_part(device: Device) -> None:
    source, target = np.array([complex(math.inf, 1.0)], np.complex64), np.empty(1, np.complex64)
    run(Kernels(device), Op.SUM, [([source], [target])], kernels.prescale(source.dtype, 2.0))
    assert target[0].real == math.inf and target[0].imag == 2.0
