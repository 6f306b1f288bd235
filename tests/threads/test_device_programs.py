"""Random programs on host and device tensors with ranks as threads on emulated GPUs; and what such programs have found,
one by one.

More of them by hand: ``python -m tests.support.random.programs 0 1000 --as devices``.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from collectives.base.config import Config
from collectives.base.errors import TransportError
from collectives.base.reduce_op import Op
from collectives.device.protocol import active
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World
from tests.support.emulated.nccl import EmulatedNccl
from tests.support.emulated.ranks import PATIENCE, check, emulated, on_threads, own_stream
from tests.support.random.device_programs import run_seed
from tests.support.scenarios.gpu_makers import EmulatedMaker
from tests.support.scenarios.worlds import expected, sample

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.timeout(100)]

FLOAT = np.dtype(np.float32)
NO_NCCL = EmulatedNccl(1, missing="NCCL is not here")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_program(seed: int) -> None:
    run_seed(seed)


def parts_of(size: int, count: int) -> list[Any]:
    return [sample(FLOAT, count, rank) for rank in range(size)]


@pytest.mark.parametrize("transport", ["cuda-ipc", "nccl", "host"])
@pytest.mark.parametrize("count", [63, 64])
def test_a_scaled_reducescatter_gives_each_rank_its_share_only(transport: str, count: int) -> None:
    """It was carried out as the all-reduce that factors are packed for, far beyond the result's end."""
    parts = parts_of(2, count)

    def program(world: World, maker: EmulatedMaker) -> None:
        tensor = maker.device(parts[world.rank])
        result = world.reducescatter(tensor, Op.SUM, prescale_factor=2.0, postscale_factor=3.0, transport=transport)
        share = np.array_split(expected(Op.SUM, parts) * 6, 2)[world.rank]
        np.testing.assert_allclose(maker.host(result), share, rtol=1e-5, atol=1e-5)

    with emulated(2) as provider:
        on_threads(2, program, provider)


def test_cuda_ipc_between_hosts_is_refused_where_no_algorithm_spans_them() -> None:
    """On every rank, and the world goes on: there was a KeyError, which ended it."""

    def program(world: World, maker: EmulatedMaker) -> None:
        tensor = maker.device(np.full((4, 2), float(world.rank), np.float32))
        for call in (
            lambda: world.alltoall(tensor, transport="cuda-ipc"),
            lambda: world.broadcast(tensor, 0, transport="cuda-ipc"),
            lambda: world.allgather(tensor, transport="cuda-ipc"),
        ):
            with pytest.raises(TransportError, match="use 'nccl' or 'host'"):
                call()
        np.testing.assert_array_equal(maker.host(world.allreduce(tensor, transport="cuda-ipc")), 0.5)

    with emulated(2) as provider:
        on_threads(2, program, provider, hosts=((0,), (1,)))


@pytest.mark.parametrize("process_sets", [False, True])
def test_a_rank_without_messages_connects_and_takes_its_turn_with_the_others(process_sets: bool) -> None:
    """Rank 2 sends nothing and receives nothing, where NCCL is used for the first time."""
    splits = [[1, 2, 0], [3, 1, 0], [0, 0, 0]]

    def program(world: World, maker: EmulatedMaker) -> None:
        if process_sets:
            world.add_process_set((0, 1))
        mine = splits[world.rank]
        tensor = maker.device(np.full(sum(mine), float(world.rank), np.float32))
        result, received = world.alltoall(tensor, mine, transport="nccl")
        assert list(received) == [row[world.rank] for row in splits]
        np.testing.assert_array_equal(maker.host(result), np.repeat(np.arange(3.0), received))

    with emulated(3) as provider:
        on_threads(3, program, provider)


def test_what_a_joined_rank_gives_outlives_an_operation_that_is_refused() -> None:
    """Its neutral elements are still on their way to the device when the operation ends."""

    def program(world: World, maker: EmulatedMaker) -> None:
        if world.rank:
            tensor = maker.device(np.ones(1000, np.float32))
            with pytest.raises(TransportError, match="nccl"):
                world.allreduce(tensor, transport="nccl")
        world.join()

    for seed in range(5):
        with emulated(2, library=NO_NCCL, delays=seed) as provider:
            on_threads(2, program, provider)


def test_a_refused_group_keeps_nothing_alive() -> None:
    """All is given back at the shutdown, with no garbage collected: the error that the caller has must not know the
    engine's frames."""
    kept: list[Any] = []

    def body(world: World) -> None:
        device = provider.device(world.rank)
        with active(device), own_stream(device):
            tensors = [EmulatedMaker(device).device(np.ones(count, np.float32)) for count in (5, 1000)]
            for _ in range(3):
                kept.append(world.grouped_allreduce_async(tensors, name="group", transport="nccl"))
                with pytest.raises(TransportError, match="nccl"):
                    world.synchronize(kept[-1])
            world.shutdown()

    with emulated(2, library=NO_NCCL) as provider:
        gc.disable()
        try:
            thread_groups.run(
                2,
                body,
                timeout=PATIENCE,
                make_world=lambda group: World(group, Config(timeout=PATIENCE, device=group.rank)),
            )
            check(provider.device(0), collect=False)
            check(provider.device(1), collect=False)
        finally:
            gc.enable()


def test_a_scaled_group_of_one_rank_leaves_nothing_behind() -> None:
    """The host's entries remember groups, and so their members' tables: the shutdown must not wait for the last who
    knows them."""

    def body(world: World) -> None:
        device = provider.device(0)
        with active(device), own_stream(device):
            tensors = [EmulatedMaker(device).device(np.ones(count, np.float32)) for count in (5, 1000)]
            for result in world.grouped_allreduce(tensors, name="group", prescale_factor=2.0):
                np.testing.assert_array_equal(EmulatedMaker(device).host(result), 2.0)
            world.shutdown()

    with emulated(1) as provider:
        gc.disable()
        try:
            thread_groups.run(1, body, timeout=PATIENCE, make_world=World)
            check(provider.device(0), collect=False)
        finally:
            gc.enable()


def test_measuring_at_first_leaves_the_turn_to_process_sets() -> None:
    """The operation for which the ranks have met is refused; its world has no more to do, and must not keep the
    turn."""

    def program(world: World, maker: EmulatedMaker) -> None:
        pair = world.add_process_set((0, 1))
        tensor = maker.device(np.full(100, float(world.rank), np.float32))
        with pytest.raises(TransportError, match="cuda-ipc"):
            world.allreduce(tensor, transport="cuda-ipc")
        assert pair is not None
        np.testing.assert_array_equal(maker.host(pair.allreduce(tensor, transport="nccl")), 0.5)

    with emulated(2, refuse_sharing=True) as provider:
        on_threads(2, program, provider, config=Config(timeout=PATIENCE / 4))


@pytest.mark.parametrize("in_place", [False, True])
def test_an_adasum_of_one_rank_is_scaled(in_place: bool) -> None:
    def program(world: World, maker: EmulatedMaker) -> None:
        tensor = maker.device(np.full(100, 3.0, np.float32))
        call = world.allreduce_ if in_place else world.allreduce
        result = call(tensor, op=Op.ADASUM, prescale_factor=0.5, postscale_factor=4.0)
        np.testing.assert_array_equal(maker.host(result), 6.0)
        np.testing.assert_array_equal(maker.host(tensor), 6.0 if in_place else 3.0)

    with emulated(1) as provider:
        on_threads(1, program, provider)
