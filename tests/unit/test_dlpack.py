"""The reader of DLPack capsules, over host memory: it never touches what they point to. And results as others take
them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

from collectives.base import dtypes
from collectives.base.errors import InvalidTypeError
from collectives.tensors import dlpack
from collectives.tensors.cuda_protocols import Export
from tests.support.emulated.array import Managed, ManagedVersioned, Tensor, new_capsule
from tests.support.emulated.cuda import EmulatedArray, EmulatedDevice
from tests.support.emulated.gate import Gate

NUMPY_NAMES = [name for name in dtypes.NAMES if name != "bfloat16"]


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    made = EmulatedDevice()
    made.activate()
    yield made
    assert made.violations == []
    made.close()


class Made:
    """A capsule whose every field is chosen. It has no destructor: what it points to lives on."""

    kept: ClassVar[list[Made]] = []

    def __init__(
        self,
        shape: tuple[int, ...] = (2, 3),
        strides: tuple[int, ...] | None = None,
        *,
        data: int = 0x1000,
        offset: int = 0,
        place: tuple[int, int] = (2, 0),
        dtype: tuple[int, int, int] = (2, 32, 1),
        version: tuple[int, int] | None = None,
        flags: int = 0,
    ) -> None:
        numbers = ctypes.c_int64 * len(shape)
        self.managed: Any = Managed()
        if version is not None:
            self.managed = ManagedVersioned(major=version[0], minor=version[1], flags=flags)
        given = numbers(*shape) if shape else None, None if strides is None else numbers(*strides)
        self.managed.tensor = Tensor(data, *place, len(shape), *dtype, *given, offset)
        name = b"dltensor" if version is None else b"dltensor_versioned"
        self.kept.append(self)
        self.capsule = new_capsule(ctypes.addressof(self.managed), name, None)


# ---- real exporters


@pytest.mark.parametrize("name", NUMPY_NAMES)
@pytest.mark.parametrize("version", [None, (1, 0)])
def test_numpys_capsules_say_what_the_array_is(name: str, version: tuple[int, int] | None) -> None:
    array = np.zeros((4, 6, 5), name)[1:, ::2, :3]
    found = dlpack.read(array.__dlpack__(max_version=version))
    assert (found.address, found.shape, found.strides) == (array.ctypes.data, array.shape, array.strides)
    assert found.dtype == array.dtype and (found.kind, found.number) == (1, 0) and not found.read_only


def test_a_scalar_and_an_empty_array() -> None:
    for array in (np.zeros(()), np.zeros((0,)), np.zeros((3, 0, 2))):
        found = dlpack.read(array.__dlpack__())
        assert found.shape == array.shape and found.strides in (None, array.strides)


@pytest.mark.parametrize("name", ["bool", "int8", "uint8", "int64", "float16", "bfloat16", "float32", "complex64"])
def test_torchs_capsules_say_what_the_tensor_is(name: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros((4, 6), dtype=getattr(torch, name))[1:, ::2]
    found = dlpack.read(tensor.__dlpack__())
    assert found.address == tensor.data_ptr() and dtypes.name(found.dtype) == name
    assert found.shape == (3, 3) and found.strides == tuple(step * tensor.element_size() for step in tensor.stride())


# ---- chosen fields


@pytest.mark.parametrize("version", [None, (1, 0), (1, 7)])
def test_a_cuda_capsule_is_read_field_by_field(version: tuple[int, int] | None) -> None:
    made = Made((2, 3), (8, 2), data=0x7000, offset=64, place=(2, 3), version=version)
    found = dlpack.read(made.capsule)
    assert found == (0x7040, (2, 3), (32, 8), np.dtype("f4"), dlpack.CUDA, 3, False, made.capsule)


def test_strides_that_are_left_out_mean_c_order() -> None:
    assert dlpack.read(Made((2, 3, 4)).capsule).strides is None


def test_no_data_is_address_0() -> None:
    assert dlpack.read(Made((0,), data=0).capsule).address == 0


@pytest.mark.parametrize(("flags", "read_only"), [(0, False), (1, True), (2, False), (3, True)])
def test_only_the_first_flag_forbids_writing(flags: int, read_only: bool) -> None:
    assert dlpack.read(Made(version=(1, 0), flags=flags).capsule).read_only == read_only


def test_bfloat16_is_the_known_dtype() -> None:
    assert dlpack.read(Made(dtype=(4, 16, 1)).capsule).dtype == np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        ((2, 8, 1), "float8"),
        ((2, 128, 1), "float128"),
        ((0, 4, 1), "int4"),
        ((6, 32, 1), "bool32"),
        ((4, 32, 1), "bfloat32"),
        ((10, 8, 1), "type code 10 of 8"),
        ((3, 64, 1), "type code 3 of 64"),
        ((2, 32, 4), "float32 in vectors of 4"),
    ],
)
def test_what_is_no_supported_number_is_refused_by_name(dtype: tuple[int, int, int], words: str) -> None:
    with pytest.raises(InvalidTypeError, match=f"loss: DLPack dtype {words} is not supported; expected one of bool"):
        dlpack.read(Made(dtype=dtype).capsule, argument="loss")


def test_a_structure_from_the_future_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match=r"expected a DLPack capsule of version 1, got version 2\.5"):
        dlpack.read(Made(version=(2, 5)).capsule)


def test_what_is_no_capsule_or_consumed_is_refused() -> None:
    capsule = np.zeros(3).__dlpack__()
    np.from_dlpack(
        type("Lender", (), {"__dlpack__": lambda self, **_: capsule, "__dlpack_device__": lambda self: (1, 0)})()
    )
    for given in (capsule, None, 7):
        with pytest.raises(InvalidTypeError, match="expected a DLPack capsule that has not been consumed"):
            dlpack.read(given)


# ---- results for others


@pytest.mark.parametrize("name", ["bool", "int32", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("version", [None, (1, 0)])
def test_an_export_is_the_array_and_bfloat16_is_named_rightly(
    device: EmulatedDevice, name: str, version: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = EmulatedArray.__dlpack__

    def without_bfloat16(self: EmulatedArray, **options: Any) -> Any:
        assert self.dtype.kind != "V", "CuPy cannot export this"
        return export(self, **options)

    monkeypatch.setattr(EmulatedArray, "__dlpack__", without_bfloat16)
    dtype = dtypes.resolve(name)
    array = device.empty((2, 3), dtype, 0)
    exported = Export(array, dtype, device, 0)
    assert exported.__dlpack_device__() == (2, device.index)
    found = dlpack.read(exported.__dlpack__(stream=1, max_version=version))
    assert (found.address, found.shape, found.dtype) == (array.address, (2, 3), dtype)


@pytest.mark.parametrize("named", [None, 1, "other"])
def test_who_takes_an_export_waits_for_what_fills_it(device: EmulatedDevice, named: Any) -> None:
    filling, other = device.create_stream(), device.create_stream()
    consumer = {None: 0, 1: 0, "other": other}[named]
    array = device.empty((4,), np.dtype(np.float32), filling)
    seen: list[Any] = []
    gate = Gate(device, filling)
    array.set(np.full(4, 7, np.float32), filling)
    exported = Export(array, array.dtype, device, filling)
    exported.__dlpack__(stream=other if named == "other" else named)
    device.enqueue(consumer, lambda: seen.append(array.host.copy()))
    assert gate.holds(consumer)
    gate.open()
    device.drain(consumer)
    assert seen[0].tolist() == [7, 7, 7, 7] and device.held()["events"] == 0


def test_an_export_without_ordering_waits_for_nothing(device: EmulatedDevice) -> None:
    filling, consumer = device.create_stream(), device.create_stream()
    gate = Gate(device, filling)
    Export(device.empty((4,), np.dtype(np.float32), filling), np.dtype(np.float32), device, filling).__dlpack__(
        stream=-1
    )
    device.drain(consumer)  # which would not come to an end
    gate.open()
