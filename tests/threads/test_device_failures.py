"""Work on GPUs that can never end, and tensors on the wrong GPU, with ranks as threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collectives.base.config import Config
from collectives.base.errors import (
    CollectiveTimeoutError,
    InvalidArgumentError,
    MismatchError,
    RankFailedError,
    TransportError,
)
from collectives.cuda import connection
from collectives.device import selection
from collectives.device.protocol import active
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World
from tests.support.emulated.cuda import EmulatedProvider
from tests.support.emulated.nccl import EmulatedCommunicator, EmulatedNccl
from tests.support.emulated.ranks import PATIENCE, emulated, on_threads, own_stream
from tests.support.scenarios.gpu_makers import Array, EmulatedMaker

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.timeout(100)]
BOUND = 10.0


def ones(maker: EmulatedMaker) -> Any:
    return maker.device(np.ones(1000, np.float32))


class Silent:
    """Ranks whose all-reduces never reach NCCL once this is armed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
        self.armed = threading.Event()
        issue = EmulatedCommunicator.all_reduce

        def all_reduce(communicator: EmulatedCommunicator, *arguments: Any) -> None:
            if communicator.rank != rank or not self.armed.is_set():
                issue(communicator, *arguments)

        monkeypatch.setattr(EmulatedCommunicator, "all_reduce", all_reduce)


@pytest.mark.parametrize("notices", ["NCCL", "host"])
def test_work_that_a_peer_never_issues_is_aborted(notices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either the communicator says that it failed, or the peer that has failed says so; the kernel that waits could not
    tell. Graphs that refer to the communicator do not hold that up."""
    silent, checked = Silent(monkeypatch, rank=1), threading.Event()
    seconds: list[float] = []

    def program(world: World) -> None:
        device = provider.device(world.rank)
        maker = EmulatedMaker(device)
        device.activate()
        with own_stream(device):
            assert (maker.host(world.allreduce(ones(maker), transport="nccl", algorithm="native")) == 1).all()
            replayed = ones(maker)
            for _ in range(3):
                world.allreduce_(replayed, transport="nccl", algorithm="ring")
            assert (maker.host(replayed) == 1).all() and device.graphs
            world.barrier()
            silent.armed.set()
            pending = world.allreduce_async(ones(maker), transport="nccl", algorithm="native", name="pending")
            if world.rank == 1:
                world.synchronize(pending)
                if notices == "host":
                    raise ValueError("the model exploded")
                assert checked.wait(2 * BOUND)
                return
            began = time.monotonic()
            world.synchronize(pending)  # it has been issued
            maker.host(ones(maker))
            device.drain(device.current_stream())
            while world._devices.accelerator.failure is None or device.graphs:  # type: ignore[union-attr]
                assert time.monotonic() - began < BOUND, "nobody noticed, or the graphs are still there"
                time.sleep(0.01)
            seconds.append(time.monotonic() - began)
            assert not device.violations, device.violations
            told = "the model exploded" if notices == "host" else "NCCL's communicator has failed"
            for call in (lambda: world.allreduce(ones(maker)), lambda: world.synchronize(pending)):
                with pytest.raises((RankFailedError, TransportError), match=told) as caught:
                    call()
                assert f"rank {world.rank}" in str(caught.value)
            checked.set()

    library = EmulatedNccl(2, timeout=1.0 if notices == "NCCL" else 30.0)
    with emulated(2, library=library) as provider:
        config = Config(timeout=30, host_until=0, cuda_graphs=True)
        with pytest.raises(ValueError, match="exploded") if notices == "host" else contextlib.nullcontext():
            thread_groups.run(
                2, program, timeout=20, make_world=lambda group: World(activated(provider, group), config)
            )
    assert seconds and seconds[0] < BOUND


def activated(provider: EmulatedProvider, group: Any) -> Any:
    provider.device(group.rank).activate()
    return group


def test_a_rank_uses_one_gpu() -> None:
    """The GPU of its first tensor; one on another is refused by name, and the next call works."""

    def program(world: World, maker: EmulatedMaker) -> None:
        other = provider.device(1 - world.rank)
        strange = EmulatedMaker(other)

        def elsewhere(values: Array) -> Any:
            previous = other.activate()
            try:
                return strange.device(values)
            finally:
                other.deactivate(previous)

        np.testing.assert_array_equal(maker.host(world.allreduce(ones(maker))), 1)
        moved = elsewhere(np.ones(10))
        with pytest.raises(
            InvalidArgumentError,
            match=f"rank {world.rank}: .*expected a tensor on GPU {world.rank}.*got one on GPU {other.index}",
        ):
            world.allreduce(moved)
        np.testing.assert_array_equal(maker.host(world.allreduce(ones(maker))), 1)
        # One rank alone is wrong: the others are told as well.
        with pytest.raises(InvalidArgumentError if world.rank else MismatchError, match="expected a tensor on GPU 1"):
            world.allreduce_(moved if world.rank else ones(maker))
        np.testing.assert_array_equal(maker.host(world.allreduce(ones(maker))), 1)
        np.testing.assert_array_equal(strange.host(moved), 1)

    with emulated(2) as provider:
        on_threads(2, program, provider)


@pytest.mark.parametrize("step", ["make_id", "connect"])
def test_nccl_that_cannot_connect_is_told_on_every_rank_at_once(step: str) -> None:
    """Also where one rank alone finds out: the others do not wait for it until their patience ends."""

    class Broken(EmulatedNccl):
        def make_id(self) -> bytes:
            if step == "make_id":
                raise TransportError("the cable is unplugged")
            return super().make_id()

        def connect(self, rank: int, *arguments: Any, **options: Any) -> EmulatedCommunicator:
            communicator = super().connect(rank, *arguments, **options)
            if rank == 1:
                raise TransportError("the cable is unplugged")
            return communicator

    seconds: list[float] = []

    def program(world: World, maker: EmulatedMaker) -> float:
        np.testing.assert_array_equal(maker.host(world.allreduce(ones(maker), transport="cuda-ipc")), 1)
        began = time.monotonic()
        with pytest.raises(TransportError, match=f"rank {world.rank}: .*the cable is unplugged"):
            world.allreduce(ones(maker), transport="nccl")
        took = time.monotonic() - began
        for forced in ({}, {"transport": "cuda-ipc"}, {"algorithm": "ring"}):
            np.testing.assert_array_equal(maker.host(world.allreduce(ones(maker), **forced)), 1)
        with pytest.raises(TransportError, match="the cable is unplugged"):
            world.allreduce_(ones(maker), transport="nccl")
        return took

    with emulated(3, library=Broken(3)) as provider:
        on_threads(
            3,
            lambda world, maker: seconds.append(program(world, maker)),
            provider,
            config=Config(timeout=30, host_until=0),
        )
    assert len(seconds) == 3 and max(seconds) < BOUND


@pytest.mark.parametrize("what", ["bucket", "scaled"])
def test_memory_that_runs_out_on_one_rank_ends_the_world_on_all(what: str) -> None:
    """It is no answer that all ranks are given alike: to fail this rank's operation alone would leave the others to
    wait for it."""
    raised: list[BaseException] = []

    def program(world: World, maker: EmulatedMaker) -> None:
        np.testing.assert_array_equal(maker.host(world.allreduce(ones(maker), average=False)), 2)
        tensors = [maker.device(np.ones(count, np.float32)) for count in (400_000, 300_000)]
        afterwards = ones(maker)
        if world.rank == 1:
            device = provider.device(1)
            device._capacity = (
                device._used + {"bucket": 0, "scaled": 1_000_000}[what]
            )  # enough for a result, but for nothing else
        try:
            if what == "bucket":
                world.grouped_allreduce_(tensors)
            else:
                world.reducescatter(tensors[0], prescale_factor=0.5)
        except (TransportError, RankFailedError) as error:
            raised.append(error)
        with pytest.raises(RankFailedError):
            world.allreduce_(afterwards)

    provider = EmulatedProvider(2, patience=PATIENCE)
    before = selection.use(provider)
    began = time.monotonic()
    try:
        thread_groups.run(
            2,
            lambda world: on_its_device(world, provider, program),
            make_world=lambda group: World(group, Config(host_until=0)),
        )
    finally:
        selection.use(before)
    assert len(raised) == 2 and all("out of device memory" in str(error) for error in raised), raised
    assert time.monotonic() - began < BOUND


def on_its_device(world: World, provider: EmulatedProvider, program: Callable[[World, EmulatedMaker], None]) -> None:
    device = provider.device(world.rank)
    with active(device), own_stream(device):
        program(world, EmulatedMaker(device))


def test_nccl_that_hangs_while_it_connects_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a time of its own, since all ranks are there, and not after that for ranks that are busy."""
    waited: list[float] = []

    class Stuck(EmulatedNccl):
        def connect(
            self, rank: int, size: int, unique_id: bytes, timeout: float, *arguments: Any, **options: Any
        ) -> Any:
            waited.append(timeout)
            if rank == 1:
                time.sleep(min(timeout, BOUND))  # the hang itself
                raise CollectiveTimeoutError(
                    f"rank 1: the {size} ranks did not all connect with NCCL within {timeout:g} s"
                )
            return super().connect(rank, size, unique_id, timeout, *arguments, **options)

    def program(world: World, maker: EmulatedMaker) -> None:
        np.testing.assert_array_equal(maker.host(world.allreduce(ones(maker))), 1)
        with pytest.raises(TransportError, match=r"within 0\.2 s"):
            world.allreduce(ones(maker), transport="nccl")

    assert connection._CONNECT_WITHIN == 120
    monkeypatch.setattr(connection, "_CONNECT_WITHIN", 0.2)
    with emulated(2, library=Stuck(2)) as provider:
        on_threads(2, program, provider, config=Config(timeout=1800, host_until=0))
    assert waited == [0.2, 0.2]


@pytest.mark.parametrize(("count", "sharers"), [(1, 4), (2, 2), (4, 1)])
def test_nccl_hears_how_many_ranks_share_a_gpu(count: int, sharers: int) -> None:
    heard: list[int] = []

    class Listening(EmulatedNccl):
        def connect(self, *arguments: Any, sharers: int = 1) -> Any:
            heard.append(sharers)
            return super().connect(*arguments)

    with emulated(count, library=Listening(4)) as provider:
        on_threads(
            4,
            lambda world, maker: world.allreduce(ones(maker), transport="nccl"),
            provider,
            config=Config(host_until=0),
        )
    assert heard == [sharers] * 4
