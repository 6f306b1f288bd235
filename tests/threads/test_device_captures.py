"""Programs that capture their own work into CUDA graphs, in CUDA's global mode as torch does, with ranks as threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from collectives.base.config import Config
from collectives.base.errors import InvalidArgumentError, MismatchError
from collectives.base.reduce_op import Op
from collectives.worlds.world import World
from tests.support.emulated.cuda import EmulatedDevice
from tests.support.emulated.gate import Gate
from tests.support.emulated.ranks import PATIENCE, emulated, on_threads
from tests.support.scenarios.gpu_makers import EmulatedMaker

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.timeout(100)]
CONFIG = Config(timeout=PATIENCE, host_until=0)


class Captured:
    """A capture of the calling thread, of a stream on which there is nothing else; within it the stream is the current
    one.

    One rank captures while the others' programs make no calls of their own, which would spoil its capture in CUDA too.
    """

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self._stream = device.create_stream()
        self._memory = device.allocate(64)

    def __enter__(self) -> int:
        self._device.capture(self._stream)
        self._using = self._device.use_stream(self._stream)
        self._device.clear(self._memory, 64, self._stream)
        return self._using.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._using.__exit__(*error)
        graph = self._device.end_capture(self._stream)  # raises if the capture was spoilt
        self._device.launch_graph(graph, self._stream)
        self._device.drain(self._stream)
        self._device.destroy_graph(graph)

    def free(self) -> None:
        self._device.destroy_stream(self._stream)
        self._device.free(self._memory)


def full(world: World, maker: EmulatedMaker, count: int = 1000) -> Any:
    return maker.device(np.full(count, float(world.rank), np.float32))


def check(maker: EmulatedMaker, result: Any) -> None:
    np.testing.assert_array_equal(maker.host(result), 1.0)


def looked(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Is released whenever the watch has asked for an event, whatever came of it."""
    asked, passed = threading.Semaphore(0), device.passed

    def ask(event: int) -> bool:
        try:
            return passed(event)
        finally:
            if threading.current_thread().name == "collectives-watch":
                asked.release()

    monkeypatch.setattr(device, "passed", ask)
    return asked


def test_a_capture_outlives_the_looks_of_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch asks for events while another thread captures, because an operation is under way."""

    def program(world: World, maker: EmulatedMaker) -> None:
        device = provider.device(world.rank)
        tensor = full(world, maker)
        check(
            maker, world.allreduce(tensor, average=False, name="held back")
        )  # what is new makes the host wait for the GPU
        capturing = Captured(device)
        gate = Gate(device, device.current_stream())
        result = world.allreduce(tensor, average=False, name="held back")
        world.barrier()  # from here on its work is under way, and nobody's program does anything
        if world.rank == 0:
            asked = looked(device, monkeypatch)
            with capturing:
                for _ in range(2):
                    assert asked.acquire(timeout=PATIENCE), "the watch does not look"
        world.barrier()
        gate.open()
        check(maker, result)
        check(maker, world.allreduce(tensor, average=False))
        capturing.free()

    with emulated(2) as provider:
        on_threads(2, program, provider, config=CONFIG)


@pytest.mark.parametrize("transport", ["cuda-ipc", "nccl", "host"])
def test_a_capture_outlives_the_collectives_of_another_thread(transport: str) -> None:
    """Of all that a first operation does too: devices meet, memory is allocated, kernels are loaded."""

    def program(world: World, maker: EmulatedMaker) -> None:
        device = provider.device(world.rank)
        tensors = [full(world, maker, 10**k) for k in range(5)]
        capturing = Captured(device)
        results: list[Any] = []
        gathered: list[Any] = []
        stream = device.current_stream()

        def work() -> None:
            device.activate()
            device.forbid()
            for tensor in tensors:
                results.append(world.allreduce(tensor, average=False, transport=transport, stream=stream))
            results.append(world.grouped_allreduce(tensors, average=False, transport=transport, stream=stream)[3])
            results.append(world.reducescatter(tensors[3], op=Op.SUM, transport=transport, stream=stream))
            gathered.append(world.allgather(tensors[3], transport=transport, stream=stream))

        world.barrier()
        if world.rank == 0:
            with capturing:
                thread = threading.Thread(target=work)
                thread.start()
                thread.join(PATIENCE)
        else:
            work()
        world.barrier()
        assert len(results) == 7
        for result in results:
            check(maker, result)
        np.testing.assert_array_equal(maker.host(gathered[0]), np.repeat([0.0, 1.0], 1000))
        capturing.free()

    with emulated(2) as provider:
        on_threads(2, program, provider, config=CONFIG)


def test_collectives_and_waits_are_refused_in_a_capture_and_spoil_nothing() -> None:
    """Neither the capture nor the handle, whose result is fetched afterwards."""

    def program(world: World, maker: EmulatedMaker) -> None:
        tensor = full(world, maker)
        check(maker, world.allreduce(tensor, average=False))
        handle = world.allreduce_async(tensor, average=False, name="one")
        group = world.grouped_allreduce_async([tensor, tensor], average=False, name="several")
        capturing = Captured(provider.device(world.rank))
        world.barrier()
        if world.rank == 0:
            with capturing as stream:
                for call in (
                    lambda: world.synchronize(handle),
                    lambda: world.synchronize(group),
                    lambda: world.allreduce(tensor, stream=stream),
                ):
                    with pytest.raises(
                        InvalidArgumentError, match=r"rank 0: .*captured into a CUDA graph.*(before|outside)"
                    ):
                        call()
                assert handle.poll() in (True, False)
        else:
            with pytest.raises(MismatchError, match="captured into a CUDA graph"):
                world.allreduce(tensor)
        world.barrier()
        check(maker, world.synchronize(handle))
        for result in world.synchronize(group):
            check(maker, result)
        check(maker, world.allreduce(tensor, average=False))
        capturing.free()

    with emulated(2, delays=4) as provider:
        on_threads(2, program, provider, config=CONFIG)
