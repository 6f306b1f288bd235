"""Fusion on an emulated device: layouts, conversions and scalings bit for bit, and address tables while the device lags
behind."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.base import dtypes
from collectives.base.errors import InvalidTypeError
from collectives.base.reduce_op import Op
from collectives.device import kernels
from collectives.device.kernels import Kernels
from collectives.device.packing import Packing
from collectives.tensors import halves, reduction
from tests.support.emulated import host_kernels
from tests.support.emulated.cuda import EmulatedDevice

pytest.importorskip("ml_dtypes")
pytestmark = [
    pytest.mark.skipif(host_kernels.COMPILER is None, reason=host_kernels.MISSING),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.timeout(120),
]

Array = np.ndarray[Any, Any]
DTYPES = [dtypes.resolve(name) for name in dtypes.NAMES]
HALVES = [dtype for dtype in DTYPES if dtypes.is_half(dtype)]
PAIRS = [(dtype, dtype) for dtype in DTYPES] + [
    (np.dtype(wide), half) for wide in ("float32", "float64") for half in HALVES
]
FLOAT32 = np.dtype(np.float32)


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    device = EmulatedDevice(delays=5)
    device.activate()
    yield device
    assert device.violations == []
    device.close()


class Rig:
    """A packing with its tensors and its buffer, in memory of a device."""

    def __init__(
        self,
        device: EmulatedDevice,
        counts: Sequence[int],
        dtype: np.dtype[Any],
        wire: np.dtype[Any],
        shifts: Sequence[int] = (0,),
        **scalings: Any,
    ) -> None:
        self.device, self.dtype = device, dtype
        self.packing = Packing(device, Kernels(device), counts, dtype, wire, **scalings)
        self.stream = device.create_stream()
        self.held: list[int] = []
        step = dtype.itemsize // 2 if dtypes.is_complex(dtype) else dtype.itemsize
        self.places = [
            (count, shifts[number % len(shifts)] % (16 // step or 1) * step) for number, count in enumerate(counts)
        ]
        self.buffer_at = self._allocate(self.packing.total * wire.itemsize)
        self.buffer = view(self.buffer_at, self.packing.total, wire)
        self.buffer.view(np.uint8)[:] = 7

    def tensors(self) -> tuple[Array, list[Array]]:
        """New ones: their addresses, and what is in them."""
        # A guard of 7s follows each, up to the end of its allocation.
        bases = [(self._allocate(count * self.dtype.itemsize + 64), count, shift) for count, shift in self.places]
        for base, count, _ in bases:
            view(base, count * self.dtype.itemsize + 64, np.dtype(np.uint8))[:] = 7
        arrays = [view(base + shift, count, self.dtype) for base, count, shift in bases]
        return np.array([base + shift for base, _, shift in bases], np.int64), arrays

    def pack(self, addresses: Array, into: int | None = None) -> None:
        self.packing.pack(addresses, self.buffer_at if into is None else into, self.stream)

    def unpack(self, addresses: Array) -> None:
        self.packing.unpack(self.buffer_at, addresses, self.stream)

    def finish(self) -> None:
        self.device.drain(self.stream)

    def parts(self) -> list[Array]:
        """The tensors in the buffer."""
        return [
            self.buffer[offset : offset + count]
            for offset, (count, _) in zip(self.packing.offsets.tolist(), self.places, strict=True)
        ]

    def close(self) -> None:
        self.finish()
        self.packing.close()
        self.device.destroy_stream(self.stream)
        for address in self.held:
            self.device.free(address)

    def _allocate(self, nbytes: int) -> int:
        self.held.append(self.device.allocate(nbytes))
        return self.held[-1]


def view(address: int, count: int, dtype: np.dtype[Any]) -> Array:
    if count == 0:
        return np.empty(0, dtype)
    return np.frombuffer((ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address), np.uint8).view(dtype)


def fill(arrays: Sequence[Array], seed: int = 0) -> None:
    """Any bit patterns."""
    generator = np.random.default_rng(seed)
    for array in arrays:
        raw = generator.integers(0, 256, array.nbytes, np.uint8)
        array.view(np.uint8)[:] = raw % 2 if dtypes.is_bool(array.dtype) else raw


def assert_same(found: Array, wanted: Array) -> None:
    """The same bits, but for those of NaN."""
    if dtypes.is_complex(found.dtype):
        found, wanted = found.view(f"f{found.itemsize // 2}"), wanted.view(f"f{found.itemsize // 2}")
    different = found.view(f"u{found.itemsize}") != wanted.view(f"u{found.itemsize}")
    if dtypes.is_floating(found.dtype):
        different &= ~(np.isnan(found) & np.isnan(wanted))
    assert not different.any(), (np.flatnonzero(different)[:5], found[different][:5], wanted[different][:5])


def scaled(scaling: Callable[[Array, Array], None] | None, array: Array) -> Array:
    out = array.copy()
    if scaling is not None:
        scaling(out, out)
    return out


def cast(array: Array, dtype: np.dtype[Any]) -> Array:
    out = np.empty(array.size, dtype)
    halves.cast(array, out)
    return out


LENGTHS = st.one_of(st.integers(0, 40), st.integers(1000, 9000), st.sampled_from([0, 1, 4095, 4096, 4097, 8192]))


@settings(max_examples=40)
@given(
    st.lists(LENGTHS, max_size=12),
    st.sampled_from(PAIRS),
    st.lists(st.integers(0, 15), min_size=1, max_size=3),
    st.integers(0, 9),
)
def test_tensors_of_any_length_and_place_go_there_and_back(
    counts: list[int], pair: tuple[np.dtype[Any], np.dtype[Any]], shifts: list[int], seed: int
) -> None:
    dtype, wire = pair
    device = EmulatedDevice()
    device.activate()
    rig = Rig(device, counts, dtype, wire, shifts)
    packing = rig.packing
    assert packing.offsets.shape == (len(counts),) and packing.offsets.dtype == np.int64
    ends = [offset + count for offset, count in zip(packing.offsets.tolist(), counts, strict=True)]
    assert all(end <= start for end, start in zip(ends, [*packing.offsets[1:].tolist(), packing.total], strict=False))
    assert not (packing.offsets * dtype.itemsize % 128).any() and not (packing.offsets * wire.itemsize % 128).any()
    assert packing.total * wire.itemsize % 128 == 0 and packing.total - sum(counts) <= 128 * len(counts)

    addresses, tensors = rig.tensors()
    fill(tensors, seed)
    before = [tensor.copy() for tensor in tensors]
    launched = device.launches
    rig.pack(addresses)
    rig.finish()
    written = np.zeros(packing.total, bool)
    for part, old, tensor, offset in zip(rig.parts(), before, tensors, packing.offsets, strict=True):
        assert tensor.tobytes() == old.tobytes()
        assert_same(part, cast(old, wire) if wire != dtype else old)
        written[offset : offset + old.size] = True
    assert (rig.buffer.view(np.uint8).reshape(-1, wire.itemsize)[~written] == 7).all()

    addresses, outputs = rig.tensors()
    rig.unpack(addresses)
    rig.finish()
    assert device.launches - launched == (2 if sum(counts) else 0)
    for part, output, (count, shift), address in zip(rig.parts(), outputs, rig.places, addresses.tolist(), strict=True):
        assert_same(output, cast(part, dtype) if wire != dtype else part)
        whole = view(address - shift, count * dtype.itemsize + 64, np.dtype(np.uint8))
        assert (whole[:shift] == 7).all() and (whole[shift + count * dtype.itemsize :] == 7).all()
    rig.close()
    assert device.violations == []
    device.close()


@pytest.mark.parametrize(("dtype", "wire"), PAIRS, ids=lambda dtype: dtypes.name(dtype))
@pytest.mark.parametrize(("size", "prescale", "postscale"), [(3, 0.3, 1.0), (4, 0.5, 1.0), (5, 1.0, 0.7)])
def test_scalings_equal_the_hosts(
    dtype: np.dtype[Any], wire: np.dtype[Any], size: int, prescale: float, postscale: float, device: EmulatedDevice
) -> None:
    before, after = reduction.prescale(dtype, prescale), reduction.finish(Op.AVERAGE, dtype, size, postscale)
    rig = Rig(
        device,
        [1000, 1, 4097, 33],
        dtype,
        wire,
        (0, 1),
        prescale=kernels.prescale(dtype, prescale),
        finish=kernels.finish(Op.AVERAGE, dtype, size, postscale),
    )
    addresses, tensors = rig.tensors()
    fill(tensors)
    wanted = [scaled(before, tensor) for tensor in tensors]
    rig.pack(addresses)
    rig.finish()
    for part, tensor in zip(rig.parts(), wanted, strict=True):
        assert_same(part, cast(tensor, wire) if wire != dtype else tensor)
    rig.unpack(addresses)
    rig.finish()
    for part, tensor in zip(rig.parts(), tensors, strict=True):
        assert_same(tensor, scaled(after, cast(part, dtype) if wire != dtype else part))
    rig.close()


def test_addresses_are_uploaded_only_when_they_are_new(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(device, [100, 7, 5000], FLOAT32, FLOAT32)
    uploads, copy = [], device.copy
    monkeypatch.setattr(device, "copy", lambda *given: (uploads.append(given), copy(*given))[1])
    (inputs, tensors), (outputs, results) = rig.tensors(), rig.tensors()
    for number in range(5):
        rig.finish()
        fill(tensors, number)
        rig.pack(inputs)
        rig.unpack(inputs)
        rig.pack(inputs.copy())
        rig.unpack(outputs)
        rig.finish()
        for tensor, result in zip(tensors, results, strict=True):
            assert result.tobytes() == tensor.tobytes()
    assert len(uploads) == 2
    rig.close()


def test_address_tables_hold_while_the_device_is_far_behind(device: EmulatedDevice) -> None:
    rig = Rig(device, [100, 7, 5000], FLOAT32, FLOAT32)
    total = rig.packing.total
    rounds = []
    go = threading.Event()
    for number in range(9):
        addresses, tensors = rig.tensors()
        fill(tensors, number)
        rounds.append((addresses, tensors, rig._allocate(total * 4)))
    device.enqueue(rig.stream, lambda: go.wait(60))
    for addresses, _, buffer in rounds:
        given = addresses.copy()
        rig.pack(given, buffer)
        given[:] = 0  # the caller's again
    go.set()
    for _ in range(2):  # and once more, when all has been read
        rig.finish()
        for addresses, tensors, buffer in rounds:
            found = view(buffer, total, FLOAT32)
            for offset, tensor in zip(rig.packing.offsets.tolist(), tensors, strict=True):
                assert found[offset : offset + tensor.size].tobytes() == tensor.tobytes()
            found[:] = 0
            rig.pack(addresses, buffer)
    rig.close()


def test_a_dtype_travels_as_itself_or_as_a_half(device: EmulatedDevice) -> None:
    for dtype, wire in (
        ("float32", "float64"),
        ("float16", "bfloat16"),
        ("int16", "float16"),
        ("complex64", "float16"),
        ("int8", "uint8"),
    ):
        with pytest.raises(InvalidTypeError, match=f"got {wire} for {dtype}"):
            Packing(device, Kernels(device), [5], dtypes.resolve(dtype), dtypes.resolve(wire))
