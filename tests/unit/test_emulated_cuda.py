"""The emulated GPU keeps CUDA's rules: what is not ordered goes wrong, and what is, never does."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from collectives.base.errors import InvalidArgumentError, OutOfMemoryError, TransportError
from collectives.device.protocol import Array, Device, Provider, active
from tests import emulated_streams, host_kernels
from tests.emulated_array import lent
from tests.emulated_cuda import EmulatedArray, EmulatedDevice, EmulatedProvider
from tests.emulated_memory import GARBAGE
from tests.emulated_streams import GLOBAL, RELAXED, THREAD_LOCAL

ROOT = Path(__file__).resolve().parents[2]
BOUND = 20.0
needs_compiler = pytest.mark.skipif(host_kernels.COMPILER is None, reason=host_kernels.MISSING)


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    with opened() as device:
        yield device


@pytest.fixture
def slow() -> Iterator[EmulatedDevice]:
    with opened(delays=3) as device:
        yield device


@contextmanager
def opened(**options: Any) -> Iterator[EmulatedDevice]:
    device = EmulatedDevice(**options)
    device.activate()
    try:
        yield device
    finally:
        device.close()


class Gate:
    """Holds a stream until it is opened."""

    def __init__(self, device: EmulatedDevice, stream: int) -> None:
        self._open = threading.Event()
        device.enqueue(stream, self._pass)

    def _pass(self) -> None:
        assert self._open.wait(BOUND), "nobody opened the gate"

    def open(self) -> None:
        self._open.set()


def peek(address: int, nbytes: int) -> Array:
    return np.frombuffer(ctypes.string_at(address, nbytes), np.uint8)


def argument_array(*values: ctypes._SimpleCData[Any]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))


def test_it_is_a_device() -> None:
    provider: Provider = EmulatedProvider(1)
    device: Device = provider.device(0)
    assert {name for name in dir(Device) if not name.startswith("_")} <= set(dir(device))
    assert isinstance(provider, EmulatedProvider)
    provider.close()


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_new_memory_is_aligned_garbage_and_known_by_any_address_in_it(device: EmulatedDevice) -> None:
    first, second = device.allocate(1000), device.allocate(1000)
    assert first % 256 == second % 256 == 0
    assert set(peek(first, 1000)) == {GARBAGE}
    allocation = device.allocation(first + 999)
    assert (allocation.base, allocation.nbytes) == (first, 1000)
    assert device.allocation(second).serial != allocation.serial
    with pytest.raises(TransportError, match="not device memory"):
        device.allocation(first + 1000)
    with pytest.raises(TransportError, match="not device memory"):
        device.allocation(device.pinned(16).ctypes.data)
    assert device.allocate(0) == 0
    device.free(0)


def test_copy_and_clear_reach_device_and_pinned_memory(slow: EmulatedDevice) -> None:
    stream, memory, host = slow.create_stream(), slow.allocate(64), slow.pinned(64)
    host[:] = np.arange(64)
    slow.copy(memory, host.ctypes.data, 64, stream)
    slow.clear(memory + 8, 4, stream)
    slow.copy(host.ctypes.data, memory, 64, stream)
    slow.drain(stream)
    expected = np.arange(64, dtype=np.uint8)
    expected[8:12] = 0
    assert host.tolist() == expected.tolist()
    assert slow.violations == []


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


def test_an_address_can_come_again_with_another_serial() -> None:
    with opened(reuse_addresses=True) as device:
        first = device.allocate(5000)
        serial = device.allocation(first).serial
        device.free(first)
        assert device.allocate(5000) == first
        assert device.allocation(first).serial != serial


def test_memory_runs_out_and_the_pool_gives_back_what_it_keeps() -> None:
    with opened(capacity=1 << 20) as device:
        kept = device.allocate(600 << 10)
        with pytest.raises(TransportError, match="out of device memory"):
            device.allocate(600 << 10)
        device.free(kept)
        array = device.empty((600 << 10,), np.dtype(np.uint8), 0)
        with pytest.raises(TransportError, match="out of device memory"):
            device.allocate(600 << 10)
        del array
        device.allocate(600 << 10)


def test_pinned_memory_lives_as_long_as_its_array(device: EmulatedDevice) -> None:
    array, memory = device.pinned(100), device.allocate(100)
    assert array.ctypes.data % 4096 == 0
    address, view = array.ctypes.data, array[10:20]
    del array
    device.clear(address, 100, 0)
    device.drain(0)
    assert view.tolist() == [0] * 10 and device.violations == []
    del view
    device.copy(memory, address, 100, 0)
    device.drain(0)
    assert len(device.violations) == 1 and "freed memory" in device.violations[0]


# ---- the pool of arrays ----------------------------------------------------------------------------------------------


def test_a_dropped_array_is_handed_out_again_on_its_stream_only(device: EmulatedDevice) -> None:
    first, second, dtype = device.create_stream(), device.create_stream(), np.dtype(np.float32)
    gate = Gate(device, first)  # at once: although the stream has not come to it
    array = device.empty((1000,), dtype, first)
    address = array.address
    del array
    assert device.empty((1000,), dtype, second).address != address
    again = device.empty((1000,), dtype, first)
    assert again.address == address
    gate.open()
    again[:] = 1
    assert again.get().tolist() == [1] * 1000
    assert device.violations == []


def test_arrays_share_an_allocation(device: EmulatedDevice) -> None:
    arrays = [device.empty((100,), np.dtype(np.float32), 0) for _ in range(2)]
    allocations = [device.allocation(array.address) for array in arrays]
    assert allocations[0] == allocations[1] and allocations[1].base < arrays[1].address
    large = device.empty((1 << 20,), np.dtype(np.uint8), 0)
    assert device.allocation(large.address).base == large.address
    assert device.empty((0, 3), np.dtype(np.float32), 0).address == 0


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


def test_dropping_it_is_right_when_its_own_stream_waits_for_the_reader(slow: EmulatedDevice) -> None:
    made_on, read_on, target = slow.create_stream(), slow.create_stream(), slow.allocate(800)
    for number in range(20):
        array = EmulatedArray.of(slow, np.full(100, float(number)), made_on)
        slow.order(made_on, read_on)
        slow.copy(target, array.address, 800, read_on)
        slow.order(read_on, made_on)
        del array
        slow.drain(read_on)
        assert peek(target, 800).view(np.float64).tolist() == [number] * 100
    assert slow.violations == []


def test_memory_that_the_host_saw_given_back_is_free_for_any_stream(device: EmulatedDevice) -> None:
    made_on, used_on = device.create_stream(), device.create_stream()
    address = device.empty((100,), np.dtype(np.float32), made_on).address
    device.drain(made_on)
    gate = Gate(device, made_on)
    array = device.empty((100,), np.dtype(np.float32), made_on)
    assert array.address == address
    device.clear(array.address, 400, used_on)
    device.drain(used_on)
    assert device.violations == []
    gate.open()


def test_a_dropped_array_may_still_be_used_by_what_its_own_stream_was_given(slow: EmulatedDevice) -> None:
    stream, target = slow.create_stream(), slow.allocate(800)
    for number in range(20):
        array = EmulatedArray.of(slow, np.full(100, float(number)), stream)
        slow.copy(target, array.address, 800, stream)
        del array
        following = EmulatedArray.of(slow, np.zeros(100), stream)  # the same memory
        slow.drain(stream)
        assert peek(target, 800).view(np.float64).tolist() == [number] * 100
        del following
    assert slow.violations == []


# ---- streams and events ----------------------------------------------------------------------------------------------


def test_work_is_done_later_and_in_order(slow: EmulatedDevice) -> None:
    stream, seen = slow.create_stream(), list[int]()
    gate = Gate(slow, stream)
    for number in range(50):
        slow.enqueue(stream, lambda number=number: seen.append(number))  # type: ignore[misc]
    assert seen == []
    gate.open()
    slow.drain(stream)
    assert seen == list(range(50))


def test_streams_do_not_wait_for_each_other_nor_for_the_default_stream(device: EmulatedDevice) -> None:
    held, free, memory = device.create_stream(), device.create_stream(), device.allocate(8)
    gates = [Gate(device, held), Gate(device, 0)]
    device.clear(memory, 8, free)
    device.drain(free)
    assert peek(memory, 8).tolist() == [0] * 8
    for gate in gates:
        gate.open()


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


def test_delays_alone_show_that_a_wait_is_missing(slow: EmulatedDevice) -> None:
    writer, reader = slow.create_stream(), slow.create_stream()
    source, target = slow.allocate(8), slow.allocate(8)
    wrong = 0
    for _ in range(30):
        ctypes.memset(source, GARBAGE, 8)
        slow.clear(source, 8, writer)
        slow.copy(target, source, 8, reader)
        slow.drain(reader)
        slow.drain(writer)
        wrong += peek(target, 8)[0] == GARBAGE
    assert wrong > 0


def test_delays_differ_by_stream_and_are_the_same_for_the_same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: dict[str, list[float]] = {}

    def sleep(seconds: float) -> None:
        slept.setdefault(threading.current_thread().name, []).append(seconds)

    monkeypatch.setattr(emulated_streams, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    runs = []
    for seed in (5, 5, None):
        slept.clear()
        with opened(delays=seed) as device:
            for stream in (device.create_stream(), device.create_stream()):
                for _ in range(20):
                    device.enqueue(stream, int)
                device.drain(stream)
        runs.append(list(slept.values()))
    assert runs[0] == runs[1] and runs[2] == []
    first, second = runs[0]
    assert first != second and 5 < len(first) < 21 and all(1e-6 <= seconds <= 1e-3 for seconds in first + second)


def test_an_event_that_was_never_recorded_holds_nobody(device: EmulatedDevice) -> None:
    stream, event = device.create_stream(), device.create_event()
    assert device.passed(event)
    device.synchronize(event)
    device.wait(stream, event)
    device.drain(stream)
    assert device.failure is None


def test_a_record_captures_the_place_in_the_stream(device: EmulatedDevice) -> None:
    stream, event = device.create_stream(), device.create_event()
    first = Gate(device, stream)
    device.record(event, stream)
    second = Gate(device, stream)
    assert not device.passed(event)
    first.open()
    device.synchronize(event)  # what was given after the record is not waited for
    assert device.passed(event)
    second.open()


def test_a_wait_captures_the_latest_record_of_that_moment(device: EmulatedDevice) -> None:
    writer, reader, event = device.create_stream(), device.create_stream(), device.create_event()
    first = Gate(device, writer)
    device.record(event, writer)
    device.wait(reader, event)
    second = Gate(device, writer)
    device.record(event, writer)  # does not change what the reader waits for
    first.open()
    device.drain(reader)
    device.wait(reader, event)  # but this one waits for it
    done = threading.Event()
    device.enqueue(reader, done.set)
    assert not device.passed(event) and not done.is_set()
    second.open()
    device.drain(reader)
    assert done.is_set()


def test_a_new_record_replaces_the_old_one(device: EmulatedDevice) -> None:
    held, free, event = device.create_stream(), device.create_stream(), device.create_event()
    gate = Gate(device, held)
    device.record(event, held)
    assert not device.passed(event)
    device.record(event, free)
    device.synchronize(event)  # the record on the held stream no longer counts
    gate.open()


def test_a_destroyed_stream_finishes_what_it_was_given(slow: EmulatedDevice) -> None:
    stream, event, memory = slow.create_stream(), slow.create_event(), slow.allocate(8)
    slow.clear(memory, 8, stream)
    slow.record(event, stream)
    slow.destroy_stream(stream)
    slow.synchronize(event)
    assert peek(memory, 8).tolist() == [0] * 8
    with pytest.raises(TransportError, match="no stream"):
        slow.clear(memory, 8, stream)
    for thread in threading.enumerate():
        if thread.name == f"emulated-stream-{stream:#x}":
            thread.join(BOUND)
            assert not thread.is_alive()
    slow.destroy_event(event)
    with pytest.raises(TransportError, match="no event"):
        slow.record(event, 0)


def test_an_exception_in_a_stream_breaks_the_device_and_who_waits_for_it(device: EmulatedDevice) -> None:
    other, event = EmulatedDevice(1), device.create_event()
    gate = Gate(device, 0)
    device.enqueue(0, lambda: 1 // 0)
    device.record(event, 0)
    other.activate()
    stream = other.create_stream()
    other.wait(stream, event)
    gate.open()
    with pytest.raises(TransportError, match="ZeroDivisionError"):
        other.drain(stream)
    device.activate()
    with pytest.raises(TransportError, match="ZeroDivisionError"):
        device.drain(0)
    other.close()


def test_a_wait_without_end_breaks_the_device() -> None:
    with opened(patience=0.05) as device:
        held, waiting, event, over = (
            device.create_stream(),
            device.create_stream(),
            device.create_event(),
            threading.Event(),
        )
        device.enqueue(held, lambda: assert_true(over.wait(BOUND)))
        device.record(event, held)
        device.wait(waiting, event)
        with pytest.raises(TransportError, match=r"within 0\.05 s"):
            device.drain(waiting)
        over.set()


def assert_true(value: bool) -> None:
    assert value


def test_the_current_stream_and_device_belong_to_the_thread(device: EmulatedDevice) -> None:
    stream, seen = device.create_stream(), list[int]()

    def use() -> None:
        seen.append(device.current_stream())
        device.allocate(8)
        device.allocate(8)

    with device.use_stream(stream):
        assert device.current_stream() == stream
        thread = threading.Thread(target=use, name="stranger")
        thread.start()
        thread.join(BOUND)
    assert device.current_stream() == 0 and seen == [0]
    assert device.violations == ["thread stranger uses device 0 without activate()"]


def test_what_was_current_before_is_current_again() -> None:
    with opened(index=1) as first, opened(index=2) as second:  # which leaves the second one current
        with active(first):
            first.allocate(8)
        second.allocate(8)
        assert first.violations == second.violations == []
        first.allocate(8)
        assert len(first.violations) == 1


def test_devices_do_not_mix() -> None:
    provider = EmulatedProvider(2)
    first, second = provider.device(0), provider.device(1)
    assert provider.count() == 2 and first is provider.device(0) and first.identity != second.identity
    first.activate()
    memory, stream, event = first.allocate(100), first.create_stream(), first.create_event()
    assert provider.device_of(memory + 99) is first
    with pytest.raises(InvalidArgumentError, match="not device memory"):
        provider.device_of(first.pinned(8).ctypes.data)
    second.activate()
    assert provider.device_of(second.empty((3,), np.dtype(np.int8), 0).address) is second
    with pytest.raises(TransportError, match="no stream of this device"):
        second.clear(memory, 100, stream)
    with pytest.raises(TransportError, match="another device's"):
        second.record(event, second.create_stream())
    with pytest.raises(InvalidArgumentError, match="sees 2"):
        provider.device(2)
    assert first.violations == second.violations == []
    provider.close()


def test_two_devices_of_one_identity_are_one_gpu() -> None:
    ranks = [EmulatedDevice(identity="one"), EmulatedDevice(identity="one")]
    ranks[0].activate()
    event, stream, memory = ranks[0].create_event(), ranks[1].create_stream(), ranks[1].allocate(8)
    ranks[0].clear(memory, 8, stream)
    ranks[0].record(event, stream)
    ranks[1].synchronize(event)
    assert peek(memory, 8).tolist() == [0] * 8
    assert ranks[0].violations == ranks[1].violations == []
    for rank in ranks:
        rank.close()


# ---- other processes -------------------------------------------------------------------------------------------------

CHILD = """
import sys, threading
from tests.emulated_cuda import EmulatedDevice
device = EmulatedDevice(patience=20)
device.activate()
hold = threading.Event()
for line in sys.stdin:
    answer = eval(line)
    print(answer.hex() if isinstance(answer, bytes) else answer, flush=True)
device.close()
print(device.violations)
"""


class Child:
    """Another process with an emulated device, which evaluates expressions."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._variables = 0

    def __call__(self, expression: str) -> str:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(expression + "\n")
        return self.process.stdout.readline().strip()

    def keep(self, expression: str) -> str:
        """Evaluate and name the result."""
        self._variables += 1
        name = f"v{self._variables}"
        self(f"globals().update({name}={expression})")
        return name

    def end(self) -> str:
        assert self.process.stdin
        output, _ = self.process.communicate(timeout=BOUND)
        assert self.process.returncode == 0
        return output.strip()


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.process.kill()
    child.process.communicate(timeout=BOUND)


def test_memory_is_shared_between_processes(device: EmulatedDevice, child: Child) -> None:
    stream = device.create_stream()
    theirs = child.keep("device.allocate(10000)")
    imported = device.import_memory(bytes.fromhex(child(f"device.export_memory({theirs})")))
    assert device.allocation(imported + 9999).nbytes == 10000
    device.clear(imported + 1, 9998, stream)
    device.drain(stream)
    assert child(f"set(__import__('ctypes').string_at({theirs} + 1, 9998))") == "{0}"
    assert child(f"__import__('ctypes').string_at({theirs} + 9999, 1)[0]") == str(GARBAGE)
    device.forget_memory(imported)
    device.clear(imported, 1, stream)
    device.drain(stream)
    assert len(device.violations) == 1 and "freed memory" in device.violations[0]
    assert child.end() == "[]"


def test_importing_twice_gives_the_same_address_until_it_is_forgotten_twice(
    device: EmulatedDevice, child: Child
) -> None:
    handle = bytes.fromhex(child(f"device.export_memory({child.keep('device.allocate(100)')})"))
    assert len(handle) == 64
    first = device.import_memory(handle)
    assert device.import_memory(handle) == first and device.held()["imports"] == 1
    device.forget_memory(first)
    assert device.allocation(first).nbytes == 100
    device.forget_memory(first)
    assert device.held()["imports"] == 0
    with pytest.raises(TransportError):
        device.allocation(first)


def test_what_cannot_be_shared_is_refused(device: EmulatedDevice, child: Child) -> None:
    memory, event = device.allocate(100), device.create_event(shared=True)
    for wrong in (memory + 8, device.pinned(8).ctypes.data, device.empty((3, 100), np.dtype(np.int8), 0)[1].address):
        with pytest.raises(TransportError, match="cannot share"):
            device.export_memory(wrong)
    with pytest.raises(TransportError, match="not made to be shared"):
        device.export_event(device.create_event())
    with pytest.raises(TransportError, match="in the process"):
        device.import_memory(device.export_memory(memory))
    with pytest.raises(TransportError, match="in the process"):
        device.import_event(device.export_event(event))
    with pytest.raises(TransportError, match="no handle"):
        device.import_memory(device.export_event(event))
    theirs = child.keep("device.allocate(100)")
    handle = bytes.fromhex(child(f"device.export_memory({theirs})"))
    child(f"device.free({theirs})")
    child("device.allocate(100)")  # has the same file descriptor
    with pytest.raises(TransportError, match=r"given back|cannot open"):
        device.import_memory(handle)
    device.refuse_sharing = True
    refusals: list[Callable[[], object]] = [
        lambda: device.export_memory(memory),
        lambda: device.export_event(event),
        lambda: device.import_memory(handle),
        lambda: device.import_event(handle),
    ]
    for refused in refusals:
        with pytest.raises(TransportError, match="does not let processes share"):
            refused()


def test_what_was_freed_stays_allocated_while_another_process_has_it_mapped(child: Child) -> None:
    with opened(capacity=1 << 20) as device:
        memory = device.allocate(600 << 10)
        theirs = child.keep(f"device.import_memory(bytes.fromhex('{device.export_memory(memory).hex()}'))")
        device.free(memory)
        with pytest.raises(OutOfMemoryError):
            device.allocate(600 << 10)
        child(f"device.forget_memory({theirs})")
        device.free(device.allocate(600 << 10))


def test_another_process_waits_for_a_shared_event(slow: EmulatedDevice, child: Child) -> None:
    ours, event = slow.allocate(8), slow.create_event(shared=True)
    theirs = child.keep(f"device.import_memory(bytes.fromhex('{slow.export_memory(ours).hex()}'))")
    there = child.keep(f"device.import_event(bytes.fromhex('{slow.export_event(event).hex()}'))")
    child(f"device.wait(0, {there})")  # never recorded: holds nobody
    assert child(f"device.passed({there}), device.drain(0)") == "(True, None)"
    for _ in range(3):
        target = child.keep("device.allocate(8)")
        ctypes.memset(ours, GARBAGE, 8)
        gate = Gate(slow, 0)
        slow.clear(ours, 8, 0)
        slow.record(event, 0)
        child(f"device.wait(0, {there}), device.copy({target}, {theirs}, 8, 0)")
        assert child(f"device.passed({there})") == "False"
        gate.open()
        assert child(f"device.drain(0), set(__import__('ctypes').string_at({target}, 8))") == "(None, {0})"
        assert child(f"device.passed({there}), device.synchronize({there})") == "(True, None)"
    assert child.end() == "[]"


def test_a_shared_event_is_captured_by_record_and_wait_like_any_other(device: EmulatedDevice, child: Child) -> None:
    slow_stream, fast_stream, event = device.create_stream(), device.create_stream(), device.create_event(shared=True)
    there = child.keep(f"device.import_event(bytes.fromhex('{device.export_event(event).hex()}'))")
    gate = Gate(device, slow_stream)
    device.record(event, slow_stream)
    child(f"device.wait(0, {there}), device.enqueue(0, hold.set)")
    device.record(event, fast_stream)
    device.synchronize(event)
    assert (
        child(f"device.synchronize({there}), hold.is_set()") == "(None, False)"
    )  # it waits for the first record still
    gate.open()
    assert child("device.drain(0), hold.is_set()") == "(None, True)"
    child(f"hold.clear(), device.enqueue(0, lambda: hold.wait(20)), device.wait(0, {there})")
    gate = Gate(device, slow_stream)
    device.record(event, slow_stream)  # after the wait, which does not change although it is not carried out yet
    assert child(f"hold.set(), device.drain(0), device.passed({there})") == "(None, None, False)"
    gate.open()


def test_the_record_of_a_dead_process_never_completes(child: Child) -> None:
    with opened(patience=0.3) as device:
        event = child.keep("device.create_event(shared=True)")
        imported = device.import_event(bytes.fromhex(child(f"device.export_event({event})")))
        child("device.enqueue(0, lambda: hold.wait(20))")
        child(f"device.record({event}, 0)")
        assert not device.passed(imported)
        child.process.kill()
        child.process.wait(BOUND)
        device.wait(0, imported)
        with pytest.raises(TransportError, match="another process's event"):
            device.drain(0)
        assert device.failure is not None


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
def test_a_kernel_runs_in_its_stream_with_the_arguments_of_its_launch(device: EmulatedDevice) -> None:
    stream, array = device.create_stream(), EmulatedArray.of(device, np.zeros(100, np.float32))
    device.drain(0)
    function = device.function(SOURCE, "fill")
    assert device.function(SOURCE, "fill") == function
    gate = Gate(device, stream)
    pointer, number, value = ctypes.c_uint64(array.address), ctypes.c_int(90), ctypes.c_float(2.5)
    pointers = argument_array(pointer, number, value)
    device.launch(function, (3, 1), 32, ctypes.addressof(pointers), stream)
    value.value, number.value, pointer.value, pointers[0] = 9.0, 1, 0, 0  # read already
    assert not array.host.any()
    gate.open()
    assert array.get(stream).tolist() == [2.5] * 90 + [0] * 10
    assert device.launches == 1 and device.violations == []


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


@needs_compiler
@pytest.mark.parametrize(
    ("grid", "threads"), [((0, 1), 32), ((1, 0), 32), ((1, 65536), 32), ((1, 1), 1025), ((1, 1), 0)]
)
def test_launches_that_cuda_refuses(device: EmulatedDevice, grid: tuple[int, int], threads: int) -> None:
    function = device.function(SOURCE, "fill")
    with pytest.raises(TransportError, match="refuses this configuration"):
        device.launch(function, grid, threads, 0, 0)


# ---- graphs ----------------------------------------------------------------------------------------------------------


def test_a_capture_notes_and_a_graph_repeats(slow: EmulatedDevice) -> None:
    """The graph spans two streams: source -> middle on one, middle -> target on the other, which waits for the
    first."""
    stream, other = slow.create_stream(), slow.create_stream()
    source, middle, target = (slow.allocate(8) for _ in range(3))
    fork, join = slow.create_event(), slow.create_event()
    slow.begin_capture(stream)
    slow.copy(middle, source, 8, stream)
    slow.record(fork, stream)
    slow.wait(other, fork)
    slow.copy(target, middle, 8, other)
    slow.record(join, other)
    slow.wait(stream, join)
    graph = slow.end_capture(stream)
    slow.drain(stream)
    slow.drain(other)
    assert set(peek(target, 8)) == {GARBAGE}  # nothing was carried out
    for number in range(5):
        ctypes.memset(source, number, 8)
        slow.launch_graph(graph, stream)
        slow.drain(stream)
        assert set(peek(target, 8)) == {number}
    slow.destroy_graph(graph)
    assert slow.violations == []


def test_a_graph_orders_only_what_was_ordered() -> None:
    orders = set[tuple[str, ...]]()
    with opened(delays=1) as device:
        stream, other, event, seen = device.create_stream(), device.create_stream(), device.create_event(), list[str]()
        device.begin_capture(stream)
        device.record(event, stream)
        device.wait(other, event)
        device.enqueue(stream, lambda: seen.append("stream"))
        device.enqueue(other, lambda: seen.append("other"))
        device.record(event, other)
        device.wait(stream, event)
        device.enqueue(stream, lambda: seen.append("end"))
        graph = device.end_capture(stream)
        for _ in range(30):
            seen.clear()
            device.launch_graph(graph, stream)
            device.drain(stream)
            orders.add(tuple(seen))
    assert orders == {("stream", "other", "end"), ("other", "stream", "end")}


def test_captures_that_cuda_refuses(device: EmulatedDevice, child: Child) -> None:
    imported = device.import_event(
        bytes.fromhex(child(f"device.export_event({child.keep('device.create_event(shared=True)')})"))
    )
    shared, before, memory = device.create_event(shared=True), device.create_event(), device.allocate(8)
    device.record(before, 0)
    mistakes: list[Callable[[int], object]] = [
        lambda stream: device.wait(stream, imported),
        lambda stream: device.wait(stream, before),
        lambda stream: device.record(shared, stream),
        lambda stream: device.drain(stream),
        lambda stream: device.passed(before),
        lambda stream: device.synchronize(before),
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
        (RELAXED, True, False, False),
        (GLOBAL, True, True, True),
        (GLOBAL, False, True, False),
        (THREAD_LOCAL, True, True, True),
        (RELAXED, True, True, False),
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


def test_the_per_thread_default_stream_is_another_one_in_every_thread(device: EmulatedDevice) -> None:
    gate = Gate(device, 2)
    thread = threading.Thread(target=lambda: (device.activate(), device.drain(2)))
    thread.start()
    thread.join(BOUND)
    assert not thread.is_alive() and device.failure is None
    gate.open()
    device.drain(2)


# ---- arrays ----------------------------------------------------------------------------------------------------------


def test_an_array_arrives_in_the_order_of_the_current_stream(device: EmulatedDevice) -> None:
    stream = device.create_stream()
    gate = Gate(device, stream)
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    with device.use_stream(stream):
        array = EmulatedArray.of(device, values)
    values[:] = -1  # was read at the call
    assert array.stream == stream and set(array.host.view(np.uint8).reshape(-1).tolist()) == {GARBAGE}
    gate.open()
    assert array.get().tolist() == np.arange(12).reshape(3, 4).tolist()


def test_views_share_memory_and_keep_it(device: EmulatedDevice) -> None:
    values = np.arange(24, dtype=np.int32).reshape(4, 6)
    array = EmulatedArray.of(device, values)
    address = array.address
    views = {
        "strided": array[::2],
        "transposed": array.T,
        "flat": array.reshape(-1),
        "part": array[1:3, 2:4],
        "one": array[1, 2],
    }
    del array
    gc.collect()
    assert device.empty((4, 6), np.dtype(np.int32), 0).address != address  # its memory has not gone back
    assert views["strided"].get().tolist() == values[::2].tolist() and views["strided"].strides == (48, 4)
    assert views["transposed"].get().tolist() == values.T.tolist()
    assert views["part"].address == address + 4 * 8
    assert views["one"].shape == () and int(views["one"].get()) == 8
    views["part"].set(np.full((2, 2), -1))
    expected = values.copy()
    expected[1:3, 2:4] = -1
    assert views["flat"].get().tolist() == expected.reshape(-1).tolist()
    with pytest.raises(ValueError, match="would be a copy"):
        views["transposed"].reshape(-1)
    views.clear()
    assert device.empty((4, 6), np.dtype(np.int32), 0).address == address
    device.drain(0)
    assert device.violations == []


def test_the_cuda_array_interface(device: EmulatedDevice) -> None:
    stream = device.create_stream()
    array = device.empty((4, 6), np.dtype(np.float16), stream)
    interface = array.__cuda_array_interface__
    assert (interface["shape"], interface["typestr"], interface["version"]) == ((4, 6), "<f2", 3)
    assert (interface["data"], interface["strides"], interface["stream"]) == ((array.address, False), None, stream)
    assert array.T.__cuda_array_interface__["strides"] == (2, 12)
    assert device.empty((1,), np.dtype(np.int8), 0).__cuda_array_interface__["stream"] == 1
    half = EmulatedArray.of(device, np.arange(4).astype(ml_dtypes.bfloat16))
    assert half.dtype == ml_dtypes.bfloat16 and half.get().astype(np.float32).tolist() == [0, 1, 2, 3]


def test_dlpack_lends_and_takes_back(device: EmulatedDevice) -> None:
    api = ctypes.pythonapi
    name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", api))
    pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", api))
    set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", api))
    base = EmulatedArray.of(device, np.arange(6, dtype=np.float32).reshape(2, 3))
    address, before = base.address, lent()
    assert base.__dlpack_device__() == (2, 0)
    capsule = base.T.__dlpack__(stream=-1)
    del base
    gc.collect()
    assert name_of(capsule) == b"dltensor" and lent() == before + 1
    assert device.empty((2, 3), np.dtype(np.float32), 0).address != address  # what is lent is kept
    managed = pointer_of(capsule, b"dltensor")
    numbers = np.frombuffer(ctypes.string_at(managed, 64), np.uint8)
    assert numbers[:8].view(np.uint64)[0] == address
    assert numbers[8:20].view(np.int32).tolist() == [2, 0, 2]
    assert (numbers[20], numbers[21], numbers[22]) == (2, 32, 1)
    shape, strides = (
        (ctypes.c_int64 * 2).from_address(int(numbers[24:32].view(np.uint64)[0])),
        int(numbers[32:40].view(np.uint64)[0]),
    )
    assert list(shape) == [3, 2] and list((ctypes.c_int64 * 2).from_address(strides)) == [1, 3]
    set_name(capsule, b"used_dltensor")
    del capsule
    assert lent() == before + 1  # the consumer has it
    deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
        int(np.frombuffer(ctypes.string_at(managed + 56, 8), np.uint64)[0])
    )
    deleter(managed)
    assert lent() == before
    reused = [device.empty((2, 3), np.dtype(np.float32), 0) for _ in range(2)]
    assert address in [array.address for array in reused]
    again = EmulatedArray.of(device, np.zeros(2, ml_dtypes.bfloat16))
    capsule = again.__dlpack__(stream=-1, max_version=(1, 0))
    assert name_of(capsule) == b"dltensor_versioned" and lent() == before + 1
    del capsule  # nobody took it
    assert lent() == before


def test_dlpack_orders_the_consumers_stream(device: EmulatedDevice) -> None:
    producer, consumer = device.create_stream(), device.create_stream()
    gate = Gate(device, producer)
    array, target = EmulatedArray.of(device, np.zeros(8, np.uint8), producer), device.allocate(8)
    capsules = [array.__dlpack__(stream=-1)]
    device.copy(target, array.address, 8, consumer)
    device.drain(consumer)
    assert set(peek(target, 8)) == {GARBAGE}  # -1: nothing was ordered
    capsules.append(array.__dlpack__(stream=consumer))
    device.copy(target, array.address, 8, consumer)
    gate.open()
    device.drain(consumer)
    assert set(peek(target, 8)) == {0}
    with pytest.raises(BufferError):
        array.__dlpack__(dl_device=(1, 0))
    with pytest.raises(BufferError):
        EmulatedArray.of(device, np.zeros(2, "M8[s]")).__dlpack__()


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_closing_ends_threads_and_files_even_if_a_stream_is_stuck() -> None:
    EmulatedDevice().close()  # what is opened once stays open
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    device = EmulatedDevice(delays=1)
    device.activate()
    stream, waiting, event, over = (
        device.create_stream(),
        device.create_stream(),
        device.create_event(shared=True),
        threading.Event(),
    )
    array = EmulatedArray.of(device, np.zeros(10), stream)
    device.allocate(1 << 20)
    assert device.held() == {"streams": 2, "events": 1, "allocations": 1, "imports": 0}
    device.enqueue(stream, lambda: assert_true(over.wait(BOUND)))
    device.record(event, stream)
    device.wait(waiting, event)
    threading.Timer(0.05, over.set).start()
    device.close()
    device.close()
    with pytest.raises(TransportError, match="closed"):
        device.drain(0)
    del array
    gc.collect()
    assert set(threading.enumerate()) <= threads | {t for t in threading.enumerate() if isinstance(t, threading.Timer)}
    assert len(os.listdir("/proc/self/fd")) == files
