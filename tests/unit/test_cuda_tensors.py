"""Views of tensors on GPUs: frameworks' tensors in, the same kind out, in the order of streams; without a GPU.

Arrays of the emulated device stand for whatever speaks DLPack or ``__cuda_array_interface__``; the frameworks have a
file of their own.
"""

from __future__ import annotations

import contextlib
import gc
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from collectives.base import dtypes
from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.device import selection
from collectives.tensors import arrays, dlpack, streams
from collectives.tensors.cuda_tensors import DeviceArray, DeviceView, view
from collectives.tensors.detection import is_on_device
from tests.support.emulated.array import lent
from tests.support.emulated.cuda import EmulatedArray, EmulatedDevice, EmulatedProvider
from tests.support.emulated.gate import Gate


@pytest.fixture
def provider() -> Iterator[EmulatedProvider]:
    made = EmulatedProvider(2, delays=3)
    before = selection.use(made)
    made.device(0).activate()
    yield made
    selection.use(before)
    violations = [made.device(index).violations for index in range(2)]
    made.close()
    assert violations == [[], []]


@pytest.fixture
def device(provider: EmulatedProvider) -> EmulatedDevice:
    return provider.device(0)


class Interfaced:
    """Offers ``__cuda_array_interface__`` only."""

    def __init__(self, array: EmulatedArray, **changes: Any) -> None:
        self.array, self.dtype = array, array.dtype
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, **changes}


def read(found: DeviceArray, stream: int) -> np.ndarray[Any, Any]:
    """What is in memory when the stream's work is done."""
    host = np.empty(found.size, found.dtype)
    device: Any = found.device
    device.activate()
    pinned = device.pinned(max(found.nbytes, 1))
    device.copy(pinned.ctypes.data, found.address, found.nbytes, stream)
    device.drain(stream)
    host.view(np.uint8)[...] = pinned[: found.nbytes]
    return host


def write(found: DeviceArray, values: Any, stream: int) -> None:
    """As an operation does: fill it in the order of a stream, whose work is done then."""
    device: Any = found.device
    device.activate()
    pinned = device.pinned(max(found.nbytes, 1))
    pinned[: found.nbytes] = np.ascontiguousarray(values, found.dtype).reshape(-1).view(np.uint8)
    device.copy(found.address, pinned.ctypes.data, found.nbytes, stream)
    device.drain(stream)


# ---- DLPack and __cuda_array_interface__


@pytest.mark.parametrize("wrapped", [False, True], ids=["dlpack", "interface"])
@pytest.mark.parametrize("name", dtypes.NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (2, 0, 3)])
def test_a_contiguous_tensor_is_its_own_view(
    device: EmulatedDevice, name: str, shape: tuple[int, ...], wrapped: bool
) -> None:
    dtype = dtypes.resolve(name)
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    array = EmulatedArray.of(device, values)
    tensor = Interfaced(array) if wrapped else array
    found = arrays.view(tensor, writable=True)
    assert isinstance(found, DeviceView) and is_on_device(tensor)
    assert (found.shape, found.dtype, found.nbytes, found.stream) == (shape, dtype, array.nbytes, 0)
    assert found.writable and not found.copied and found.device is device is found.array.device
    assert (found.array.address, found.array.size, found.array.nbytes) == (array.address, array.size, array.nbytes)
    np.testing.assert_array_equal(read(found.array, found.stream), values.reshape(-1))
    write(found.array, values[::-1] if shape else values, found.stream)
    found.store()
    np.testing.assert_array_equal(array.get(), values[::-1] if shape else values)


def test_a_part_lies_where_its_elements_lie(device: EmulatedDevice) -> None:
    array = EmulatedArray.of(device, np.arange(10, dtype=np.int32))
    part = view(array).array.part(3, 4)
    assert (part.address, part.size, part.nbytes) == (array.address + 12, 4, 16)
    assert read(part, 0).tolist() == [3, 4, 5, 6] and read(part.part(1, 2), 0).tolist() == [4, 5]


@pytest.mark.parametrize("wrapped", [False, True], ids=["dlpack", "interface"])
def test_reading_comes_after_the_work_that_made_the_tensor(device: EmulatedDevice, wrapped: bool) -> None:
    making, named = device.create_stream(), device.create_stream()
    array = device.empty((4,), np.dtype(np.float32), making)
    tensor = Interfaced(array) if wrapped else array
    for given in (None, named):
        gate = Gate(device, making)
        array.set(np.full(4, 7 if given else 6), making)
        found = view(tensor, stream=given)
        assert found.stream == (given or (making if wrapped else 0))
        assert gate.holds(found.stream)
        gate.open()
        assert read(found.array, found.stream).tolist() == [7 if given else 6] * 4
    assert device.held()["events"] == 0


def test_the_current_stream_is_the_threads_own_and_a_named_one_stays(device: EmulatedDevice) -> None:
    array = EmulatedArray.of(device, np.zeros(3))
    first, second = device.create_stream(), device.create_stream()
    with device.use_stream(first):
        free = view(array)
    named = view(array, stream=first)
    with device.use_stream(second):
        assert (free.stream, free.current_stream(), named.stream, named.current_stream()) == (
            first,
            second,
            first,
            first,
        )


@pytest.mark.parametrize("entry", [None, "absent", 1, "own"])
def test_the_stream_of_an_interface_is_the_one_to_use(device: EmulatedDevice, entry: Any) -> None:
    own, current = device.create_stream(), device.create_stream()
    tensor = Interfaced(EmulatedArray.of(device, np.zeros(3)), stream={"own": own}.get(entry, entry))
    if entry == "absent":
        del tensor.__cuda_array_interface__["stream"]
    with device.use_stream(current):
        assert view(tensor).stream == {1: 0, "own": own}.get(entry, current)


def test_the_per_thread_default_stream_is_refused(device: EmulatedDevice) -> None:
    """It is another stream in the thread that carries the operation out."""
    array = EmulatedArray.of(device, np.zeros(3))
    found = view(array)
    with pytest.raises(InvalidArgumentError, match=r"stream: .*got the per-thread default stream.*pass it as stream="):
        view(array, stream=streams.PER_THREAD)
    with device.use_stream(streams.PER_THREAD):
        with pytest.raises(InvalidArgumentError, match=r"tensor: .*got the per-thread default stream"):
            view(array)
        with pytest.raises(InvalidArgumentError, match=r"stream: .*got the per-thread default stream"):
            found.current_stream()


def test_what_was_made_on_the_per_thread_default_stream_is_ordered_in_the_callers_thread(
    device: EmulatedDevice,
) -> None:
    current = device.create_stream()
    tensor = Interfaced(EmulatedArray.of(device, np.zeros(3)), stream=streams.PER_THREAD)
    with device.use_stream(current):
        gate = Gate(device, streams.PER_THREAD)
        assert view(tensor).stream == current
        assert gate.holds(current)
        gate.open()


@pytest.mark.parametrize("wrapped", [False, True], ids=["dlpack", "interface"])
def test_a_stream_that_is_being_captured_is_refused_before_it_is_made_to_wait(
    device: EmulatedDevice, wrapped: bool
) -> None:
    making, captured = device.create_stream(), device.create_stream()
    array = EmulatedArray.of(device, np.zeros(3), making)
    tensor = Interfaced(array) if wrapped else array
    before = view(tensor, stream=captured)
    device.capture(captured)
    with pytest.raises(InvalidArgumentError, match=r"tensor: .*captured into a CUDA graph.*outside of the capture"):
        before.on_host()
    with pytest.raises(InvalidArgumentError, match=r"tensor: .*captured into a CUDA graph.*outside of the capture"):
        view(tensor, stream=captured)
    if wrapped:  # it says on which stream it was made: to wait for that one would take the caller's into the capture
        made_there = Interfaced(EmulatedArray.of(device, np.zeros(3), captured))
        with pytest.raises(InvalidArgumentError, match=r"captured into a CUDA graph.*outside of the capture"):
            view(made_there, stream=making)
    device.destroy_graph(device.end_capture(captured))


def test_results_are_arrays_of_the_device(device: EmulatedDevice) -> None:
    stream = device.create_stream()
    found = view(Interfaced(EmulatedArray.of(device, np.zeros((2, 3), np.float32))), stream=stream)
    for shape, dtype in (((4, 3), None), ((), np.dtype(np.int64)), ((0, 3), None)):
        result, memory = found.empty(shape, dtype)
        assert (
            type(result) is EmulatedArray
            and result.shape == shape
            and result.dtype == (dtype or np.float32) == memory.dtype
        )
        assert memory.size == result.size and memory.address == result.address and result.stream == stream
        assert found.wrap(result, dtype) is result


def test_a_device_that_is_not_the_first_is_found_and_the_threads_own_stays_current(provider: EmulatedProvider) -> None:
    own, other = provider.device(0), provider.device(1)
    array = EmulatedArray.of(other, np.arange(3.0))
    for tensor in (array, Interfaced(array)):
        found = view(tensor)
        assert found.device is other and found.empty((2,))[0].device is other and found.current_stream() == 0
        own.destroy_event(own.create_event())
        assert own.violations == []


def test_read_only_tensors_can_be_read_and_not_written(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    array = EmulatedArray.of(device, np.arange(3.0))
    frozen = Interfaced(array, data=(array.address, True))
    monkeypatch.setattr(dlpack, "_READ_ONLY", 0)
    assert not view(frozen).writable and view(array).writable
    with pytest.raises(
        InvalidArgumentError, match=r"weights: .*read-only .*Interfaced of shape \(3,\) and dtype float64"
    ):
        view(frozen, argument="weights", writable=True)


class Lender:
    """Speaks DLPack as the function says."""

    def __init__(self, lend: Any, place: tuple[int, int] = (2, 0)) -> None:
        self.lend, self.place = lend, place

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place

    def __dlpack__(self, **options: Any) -> Any:
        return self.lend(**options)


def test_the_read_only_flag_of_a_capsule_counts(device: EmulatedDevice) -> None:
    array = EmulatedArray.of(device, np.arange(3.0))

    def lend(**options: Any) -> Any:
        capsule = array.__dlpack__(**options)
        dlpack._DLManagedTensorVersioned.from_address(dlpack._get_pointer(capsule, b"dltensor_versioned")).flags = 1
        return capsule

    assert not view(Lender(lend)).writable
    with pytest.raises(InvalidArgumentError, match="read-only"):
        view(Lender(lend), writable=True)


@pytest.mark.parametrize("given", [None, 0, 1, "own"])
def test_an_exporter_hears_of_the_stream_as_the_standard_says(device: EmulatedDevice, given: Any) -> None:
    own = device.create_stream()
    array = EmulatedArray.of(device, np.arange(3.0))
    heard: list[Any] = []

    def lend(stream: Any, max_version: Any) -> Any:
        heard.append((stream, max_version))
        return array.__dlpack__(stream=-1, max_version=max_version)

    with device.use_stream(own) if given is None else contextlib.nullcontext():
        found = view(Lender(lend), stream=own if given == "own" else given)
    assert heard == [({0: 1, 1: 1}.get(given, own), (1, 0))]
    assert found.stream == {0: 0, 1: 0}.get(given, own)


def test_an_exporter_from_before_versions_is_understood(device: EmulatedDevice) -> None:
    array = EmulatedArray.of(device, np.arange(3.0))

    def lend(stream: Any = None) -> Any:
        return array.__dlpack__(stream=stream)

    assert view(Lender(lend), writable=True).array.address == array.address


def test_an_exporter_that_refuses_is_reported(device: EmulatedDevice) -> None:
    def lend(**options: Any) -> Any:
        raise BufferError("not today")

    with pytest.raises(InvalidTypeError, match=r"grad: .*Lender cannot be read through DLPack: not today"):
        view(Lender(lend), argument="grad")
    with pytest.raises(InvalidTypeError, match="Lender on DLPack device kind 1"):
        view(Lender(np.zeros(3).__dlpack__ and (lambda **_: np.zeros(3).__dlpack__())))


def test_a_library_with_from_dlpack_gets_its_own_type_back(device: EmulatedDevice) -> None:
    array, stream = EmulatedArray.of(device, np.arange(3.0)), device.create_stream()

    class Library:
        @staticmethod
        def from_dlpack(tensor: Any) -> Any:
            assert tensor.__dlpack_device__() == (2, 0)
            return ("made", dlpack.read(tensor.__dlpack__(stream=1)).address)

    tensor = Lender(array.__dlpack__)
    tensor.__array_namespace__ = lambda: Library  # type: ignore[attr-defined]
    found = view(tensor, stream=stream)
    result, memory = found.empty((2,))
    assert found.wrap(result) == ("made", memory.address)


# ---- refusals


def test_other_layouts_are_refused_where_nobody_can_copy_them(device: EmulatedDevice) -> None:
    array = EmulatedArray.of(device, np.zeros((3, 4)))
    for tensor in (array.T, array[:, 1:], Interfaced(array[::2, ::2])):
        with pytest.raises(
            InvalidTypeError, match=r"loss: expected a contiguous tensor, .*strides .*make it contiguous first"
        ):
            view(tensor, argument="loss")
    assert not view(array[1:]).copied and not view(array[:, 1:][:0]).copied and not view(array[1:2].T[:1]).copied


def test_overlapping_elements_are_refused_in_place(device: EmulatedDevice) -> None:
    array = EmulatedArray.of(device, np.zeros(4))
    with pytest.raises(InvalidArgumentError, match="share memory"):
        view(Interfaced(array, shape=(3, 4), strides=(0, 8)), writable=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"typestr": ">f8"},
            r"loss \(.*Interfaced\): byte-swapped dtype >f8 is not supported on a GPU; convert it to float64",
        ),
        ({"typestr": "<M8[s]"}, "dtype datetime64.* is not supported; expected one of bool"),
        ({"typestr": "|V8"}, None),
        ({"version": 1}, "of version 2 or 3"),
        ({"mask": object()}, "masked .* is refused"),
        ({"stream": 1.5}, "stream: expected a CUDA stream"),
    ],
)
def test_an_interface_that_cannot_be_used_is_refused(
    device: EmulatedDevice, changes: dict[str, Any], words: str | None
) -> None:
    tensor = Interfaced(EmulatedArray.of(device, np.zeros(3)), **changes)
    if words is None:  # nameless there; the tensor's own attribute knows
        assert view(tensor).dtype == np.float64
        del tensor.dtype
        words = r"dtype \|V8 is not supported"
    with pytest.raises(InvalidTypeError, match=words):
        view(tensor, argument="loss")


def test_elements_off_their_places_are_refused(device: EmulatedDevice) -> None:
    array = EmulatedArray.of(device, np.zeros(3))
    with pytest.raises(InvalidTypeError, match=r"multiples of their size \(8 bytes\)"):
        view(Interfaced(array, data=(array.address + 4, False), shape=(2,)))


def test_what_is_on_no_gpu_is_refused(device: EmulatedDevice) -> None:
    for tensor in (3, "text", types.SimpleNamespace(__cuda_array_interface__=None)):
        with pytest.raises(InvalidTypeError, match="__cuda_array_interface__"):
            view(tensor)
    for tensor in (np.zeros(3), 3, None, Lender(None, (1, 0)), Lender(None, (8, 0))):
        assert not is_on_device(tensor)


# ---- lifetime


def test_memory_lives_as_long_as_an_array_of_it_and_is_given_back_once(device: EmulatedDevice) -> None:
    gc.collect()
    before, array = lent(), EmulatedArray.of(device, np.arange(4.0))
    gone = weakref.ref(array)
    found = view(array)
    part = found.array.part(1, 2)
    del array, found
    gc.collect()
    assert gone() is not None and lent() == before + 1 and read(part, 0).tolist() == [1, 2]
    del part
    gc.collect()
    assert gone() is None and lent() == before


def test_an_interfaces_tensor_lives_as_long_as_an_array_of_it(device: EmulatedDevice) -> None:
    tensor = Interfaced(EmulatedArray.of(device, np.arange(4.0)))
    gone = weakref.ref(tensor)
    memory = view(tensor).array
    del tensor
    gc.collect()
    assert gone() is not None and read(memory, 0).tolist() == [0, 1, 2, 3]
    del memory
    gc.collect()
    assert gone() is None


# ---- streams


@pytest.mark.parametrize(
    ("stream", "number"),
    [
        (0, 0),
        (1, 0),
        (2, 2),
        (np.int64(77), 77),
        (types.SimpleNamespace(ptr=78), 78),
        (types.SimpleNamespace(cuda_stream=79), 79),
        (types.SimpleNamespace(__cuda_stream__=lambda: (0, 80)), 80),
        (types.SimpleNamespace(__cuda_stream__=(0, 81)), 81),
        (types.SimpleNamespace(ptr=1), 0),
    ],
)
def test_streams_of_all_kinds_are_understood(stream: Any, number: int) -> None:
    assert streams.handle(stream) == number


@pytest.mark.parametrize("stream", ["0", 1.5, True, object(), None])
def test_what_is_no_stream_is_refused(stream: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r"stream: expected a CUDA stream .*got "):
        streams.handle(stream)
    with pytest.raises(InvalidArgumentError, match="0 or more, got -3"):
        streams.handle(-3)
