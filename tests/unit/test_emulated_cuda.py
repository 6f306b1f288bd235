"""The emulated GPU keeps CUDA's rules: what is not ordered goes wrong, and what is, never does."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import numpy as np
import pytest

from collectives.base.errors import TransportError
from collectives.device.protocol import Array
from tests.support.emulated import host_kernels
from tests.support.emulated.cuda import EmulatedArray, EmulatedDevice
from tests.support.emulated.gate import Gate
from tests.support.emulated.memory import GARBAGE
from tests.support.emulated.streams import GLOBAL, THREAD_LOCAL

BOUND = 20.0
needs_compiler = pytest.mark.skipif(host_kernels.COMPILER is None, reason=host_kernels.MISSING)


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    device = EmulatedDevice()
    device.activate()
    try:
        yield device
    finally:
        device.close()


def peek(address: int, nbytes: int) -> Array:
    return np.frombuffer(ctypes.string_at(address, nbytes), np.uint8)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_a_use_after_free_is_a_violation_and_reads_garbage(device: EmulatedDevice) -> None:
    stream, memory, other = device.create_stream(), device.allocate(4096), device.allocate(4096)
    gate = Gate(device, stream)
    device.copy(other, memory, 4096, stream)
    device.free(memory)  # too early: the copy has not begun
    gate.open()
    device.drain(stream)
    assert set(peek(other, 4096)) == {GARBAGE}
    assert len(device.violations) == 1 and "freed memory" in device.violations[0]
    with pytest.raises(TransportError, match="nothing that allocate"):
        device.free(memory)


def test_unknown_memory_and_overruns_break_the_device(device: EmulatedDevice) -> None:
    memory = device.allocate(100)
    device.clear(memory + 1, 100, 0)
    with pytest.raises(TransportError, match="beyond the end"):
        device.drain(0)
    assert peek(memory, 1)[0] == GARBAGE and len(device.violations) == 1
    with pytest.raises(TransportError, match="broken"):  # and it stays broken
        device.drain(0)
    ordinary = np.zeros(8)
    other = EmulatedDevice()
    other.activate()
    other.copy(other.allocate(64), ordinary.ctypes.data, 64, 0)
    with pytest.raises(TransportError, match="unknown memory"):
        other.drain(0)
    other.close()


def test_writing_beyond_an_end_is_found_when_it_is_given_back(device: EmulatedDevice) -> None:
    memory = device.allocate(100)
    ctypes.memset(memory + 100, 7, 1)
    device.free(memory)
    array = device.empty((5,), np.dtype(np.int8), 0)
    ctypes.memset(array.address + 5, 7, 1)
    del array
    device.drain(0)
    assert [text.split(" of ")[0] for text in device.violations] == [
        "something wrote beyond the end",
        "something wrote beyond the end",
    ]


# ---- the pool of arrays ----------------------------------------------------------------------------------------------


def test_dropping_an_array_that_another_stream_still_reads_spoils_its_data(device: EmulatedDevice) -> None:
    made_on, read_on = device.create_stream(), device.create_stream()
    array, target = EmulatedArray.of(device, np.full(100, 7.0), made_on), device.allocate(800)
    device.order(made_on, read_on)
    gate = Gate(device, read_on)
    device.copy(target, array.address, 800, read_on)
    del array  # read_on has not read it yet, and made_on knows nothing of that
    device.drain(made_on)
    gate.open()
    device.drain(read_on)
    assert set(peek(target, 800)) == {GARBAGE}
    assert len(device.violations) == 1 and "gone back to the pool" in device.violations[0]


# ---- streams and events ----------------------------------------------------------------------------------------------


def test_without_a_wait_stale_data_is_read_and_with_it_never(device: EmulatedDevice) -> None:
    writer, reader = device.create_stream(), device.create_stream()
    source, target = device.allocate(8), device.allocate(8)
    for ordered in (False, True):
        device.clear(target, 8, reader)
        EmulatedArray.of(device, np.zeros(8), reader)
        gate, event = Gate(device, writer), device.create_event()
        device.clear(source, 8, writer)
        device.record(event, writer)
        if ordered:
            device.wait(reader, event)
        device.copy(target, source, 8, reader)
        if not ordered:
            device.drain(reader)
        gate.open()
        device.drain(reader)
        assert set(peek(target, 8)) == ({0} if ordered else {GARBAGE})
        device.drain(writer)
        ctypes.memset(source, GARBAGE, 8)


# ---- kernels ---------------------------------------------------------------------------------------------------------

SOURCE = """
extern "C" __global__ void fill(float *target, int count, float value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) target[i] = value + blockIdx.y;
}
struct Table { float *targets[2]; };
extern "C" __global__ void fill_table(Table table, float value) { table.targets[blockIdx.x][threadIdx.x] = value; }
"""


@needs_compiler
def test_a_kernel_that_is_given_freed_memory_is_a_violation(device: EmulatedDevice) -> None:
    class Table(ctypes.Structure):
        _fields_ = (("targets", ctypes.c_void_p * 2),)

    kept, freed = device.allocate(64), device.allocate(64)
    table, value = Table((kept, freed)), ctypes.c_float(1)
    pointers = (ctypes.c_void_p * 2)(ctypes.addressof(table), ctypes.addressof(value))
    function = device.function(SOURCE, "fill_table")
    device.launch(function, (2, 1), 16, ctypes.addressof(pointers), 0)
    device.drain(0)
    assert device.violations == [] and peek(freed, 64).view(np.float32).tolist() == [1] * 16
    device.free(freed)
    device.launch(function, (2, 1), 16, ctypes.addressof(pointers), 0)
    device.drain(0)
    assert len(device.violations) == 1 and "fill_table" in device.violations[0]


# ---- graphs ----------------------------------------------------------------------------------------------------------


def test_captures_that_cuda_refuses(device: EmulatedDevice) -> None:
    shared, before, memory = device.create_event(shared=True), device.create_event(), device.allocate(8)
    device.record(before, 0)
    mistakes: list[Callable[[int], object]] = [
        lambda stream: device.wait(stream, before),
        lambda stream: device.record(shared, stream),
        lambda stream: device.drain(stream),
        lambda stream: device.passed(before),
        lambda stream: device.allocate(8),
        lambda stream: device.free(memory),
        lambda stream: device.pinned(8),
    ]
    for mistake in mistakes:
        stream = device.create_stream()
        device.forbid()
        device.begin_capture(stream)
        with pytest.raises(TransportError, match="capture"):
            mistake(stream)
        with pytest.raises(TransportError, match="spoilt"):
            device.end_capture(stream)
        device.drain(stream)  # and the stream works again
    with pytest.raises(TransportError, match="default stream"):
        device.begin_capture(0)
    device.free(memory)  # spoilt captures have not done it
    stream, other = device.create_stream(), device.create_stream()
    with pytest.raises(TransportError, match="no capture was begun"):
        device.end_capture(stream)
    device.begin_capture(stream)
    device.record(before, stream)
    device.wait(other, before)
    device.enqueue(other, lambda: None)
    with pytest.raises(TransportError, match="never waits"):
        device.end_capture(stream)
    with pytest.raises(TransportError, match="while it lasts"):
        device.wait(other, before)


@pytest.mark.parametrize(
    ("mode", "forbidden", "own", "spoilt"),
    [
        (GLOBAL, True, False, True),
        (GLOBAL, False, False, False),
        (THREAD_LOCAL, True, False, False),
        (THREAD_LOCAL, True, True, True),
    ],
)
def test_whose_calls_spoil_a_capture(
    mode: int, forbidden: bool, own: bool, spoilt: bool, device: EmulatedDevice
) -> None:
    """Those of the capturing thread, and in the global mode those of all threads; but none of a thread that captures do
    not restrict."""
    stream, event = device.create_stream(), device.create_event()

    def ask() -> None:
        device.activate()
        if forbidden:
            device.forbid()
        with pytest.raises(TransportError, match="capture") if spoilt else nullcontext():
            device.passed(event)

    device.capture(stream, mode)
    if own:
        ask()
    else:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(BOUND)
    with pytest.raises(TransportError, match="spoilt") if spoilt else nullcontext():
        device.end_capture(stream)
