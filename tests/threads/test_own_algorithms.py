"""Algorithms of the program's own run over every transport, among ranks as threads and on emulated GPUs; what ranks
have registered differently is an error on all of them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

import numpy as np
import pytest

from collectives.algorithms import register_algorithm
from collectives.base.config import Config
from collectives.base.errors import InvalidArgumentError, MismatchError
from collectives.base.reduce_op import Op
from collectives.schedules import registry
from collectives.schedules.schedule import Step, receive, reduce, send
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World
from tests.support.emulated.ranks import PATIENCE, emulated, on_threads
from tests.support.scenarios import gpu, worlds
from tests.support.scenarios.gpu_makers import EmulatedMaker
from tests.support.schedules import own

HOSTS = [
    ((0, 1),),
    ((0, 1, 2),),
    ((0, 1), (2, 3)),
    ((0, 2), (1, 3)),
    ((0,), (1,), (2,), (3,), (4,)),
    ((0, 1, 2), (3, 4)),
]
SCENARIOS = [
    worlds.every_algorithm_and_size,
    worlds.every_algorithm_with_halves_and_product,
    worlds.broadcasts,
    worlds.allgathers,
    worlds.reducescatters,
    worlds.alltoalls,
]


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_over_every_transport(
    monkeypatch: pytest.MonkeyPatch, scenario: Callable[[World], None], hosts: tuple[tuple[int, ...], ...]
) -> None:
    size = sum(map(len, hosts))
    with own.registered([size]) as names:
        monkeypatch.setattr(worlds, "algorithms", names)
        monkeypatch.setattr(worlds, "COUNTS", (0, 1, 7, 3001, 100_003))
        thread_groups.run(size, scenario, hosts=hosts, make_world=World)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("transport", "hosts", "devices"),
    [
        ("cuda-ipc", ((0, 1, 2),), 1),
        ("nccl", ((0, 1, 2, 3),), 4),
        ("cuda-ipc", ((0, 1), (2, 3)), 1),
        ("host", ((0, 1, 2),), 1),
    ],
)
def test_on_gpus(
    monkeypatch: pytest.MonkeyPatch, transport: str, hosts: tuple[tuple[int, ...], ...], devices: int
) -> None:
    size = sum(map(len, hosts))
    own_names = tuple(dict.fromkeys(name for _, name, _ in own.OWN))
    monkeypatch.setattr(gpu, "ALGORITHMS", ("auto", "direct", "hierarchical", *own_names))
    ran: set[str] = set()

    def program(world: World, maker: EmulatedMaker) -> None:
        one = maker.device(np.full(10, world.rank + 1.0, np.float32))
        for name in own_names:
            try:
                result = maker.host(world.allreduce(one, average=False, algorithm=name, transport=transport))
            except InvalidArgumentError:
                continue
            except Exception as error:
                assert "stays on one host" in str(error), error
                continue
            np.testing.assert_array_equal(result, np.full(10, size * (size + 1) / 2))
            ran.add(name)
        if len(hosts) == 1:
            gpu.every_algorithm(world, maker, {"transport": transport})

    with own.registered([size]), emulated(devices, delays=size) as provider:
        on_threads(size, program, provider, hosts=hosts, config=Config(timeout=PATIENCE, host_until=0))
    expected = {"own-levels"} if len(hosts) > 1 else {"own-star", "own-bidirectional", "own-halves", "own-pushed"}
    assert expected <= ran


def test_one_registered_after_the_world_began_is_found_and_one_of_another_size_refused() -> None:
    def program(world: World) -> None:
        data, total = np.arange(5.0) + world.rank, 2 * np.arange(5.0) + 1
        with pytest.raises(InvalidArgumentError, match="expected one of auto, ring, direct"):
            world.allreduce(data, algorithm="own-star", name="early")
        world.barrier()
        with own.registered([2]) if world.rank == 0 else contextlib.nullcontext():
            if world.rank == 0:
                register_algorithm("allreduce", "own-narrow", own.star, sizes=[3, 4])
            world.barrier()
            np.testing.assert_array_equal(world.allreduce(data, average=False, algorithm="own-star"), total)
            with pytest.raises(InvalidArgumentError, match="was proved for 3, 4 ranks, not for 2"):
                world.allreduce(data, algorithm="own-narrow", name="narrow")
            np.testing.assert_array_equal(world.allreduce(data, average=False), total)
            world.barrier()

    thread_groups.run(2, program, make_world=World)


def test_a_setting_chooses_it_for_every_operation_that_has_it() -> None:
    def program(world: World) -> str:
        np.testing.assert_array_equal(world.allreduce(np.ones(5) * world.rank, average=False), np.ones(5) * 3)
        np.testing.assert_array_equal(world.broadcast(np.arange(3.0) * world.rank, 1), np.arange(3.0))
        return world.planner.choose("allreduce", 40).algorithm

    with own.registered([3]):
        config = Config.from_environment({"COLLECTIVES_ALGORITHM": "own-star"})
        assert thread_groups.run(3, program, make_world=lambda group: World(group, config)) == ["own-star"] * 3


def test_ranks_that_registered_different_ones_all_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank is a process with a registry of its own; here, a digest that differs from call to call stands for
    them."""

    def program(world: World) -> None:
        with pytest.raises(MismatchError, match=r"disagree on algorithm(.*\n)*.*own-star@[0-9a-f]{8}-[01]'"):
            world.allreduce(np.ones(4), algorithm="own-star", name="differs")
        np.testing.assert_array_equal(world.allreduce(np.ones(4)), np.ones(4))

    with own.registered([2]):
        signed, number = registry.signed, itertools.count()
        monkeypatch.setattr(registry, "signed", lambda *names: f"{signed(*names)}-{next(number)}")
        thread_groups.run(2, program, make_world=World)


@pytest.mark.parametrize("hosts", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[2, 3], [0, 1]], [[1, 3], [0, 2]]])
def test_hosts_of_any_numbers_combine_in_the_order_that_was_proved(
    hosts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 combines all values in one round, ranks 1 to 3 in two: alike only by the numbers of the proof."""

    def in_one_round_or_two(rank: int, size: int, width: int) -> list[list[Step]]:
        exchanges = [
            [(1, 0, reduce), (2, 0, reduce), (3, 0, reduce), (0, 1, reduce), (3, 2, reduce)],
            [(1, 2, reduce)],
            [(2, 1, receive), (2, 3, receive)],
        ]
        return [
            [send(to, 0) for sender, to, _ in each if sender == rank]
            + [take(sender, 0) for sender, to, take in each if to == rank]
            for each in exchanges
        ]

    monkeypatch.setattr(registry, "_ALL", dict(registry._ALL))
    register_algorithm("allreduce", "uneven", in_one_round_or_two, sizes=[4], spans_hosts=True)

    def program(world: World) -> list[float]:
        values = np.repeat(np.float32([1e8, 1.0, -1e8, 1.0]), 5).reshape(4, 5)
        return world.allreduce(values[world.rank], op=Op.SUM, algorithm="uneven").tolist()

    results = thread_groups.run(4, program, hosts=hosts, make_world=World)
    assert results == [results[0]] * 4
