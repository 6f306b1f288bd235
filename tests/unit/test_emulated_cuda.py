"""The emulated GPU keeps CUDA's rules: what is not ordered goes wrong, and what is, never does."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest

from collectives.base.errors import TransportError
from collectives.device.protocol import Array
from tests.support.emulated.cuda import EmulatedArray, EmulatedDevice
from tests.support.emulated.gate import Gate
from tests.support.emulated.memory import GARBAGE


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
