"""Small all-reduces whose data travels with the words of a round, and other operations, over TCP between threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from collectives.base.config import Config
from collectives.base.errors import MismatchError, TransportError
from collectives.base.reduce_op import Op
from collectives.plan.planner import Placement, Planner
from collectives.transport.group import Group
from collectives.transport.tcp.network_control import NetworkControl
from collectives.transport.tcp.tcp_channel import TcpWords
from collectives.transport.tcp.tcp_messages import TcpMessages
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World
from tests.support.emulated import loopback_links
from tests.support.emulated.loopback_links import LoopbackLinks, raised
from tests.support.scenarios.worlds import assert_close, expected, ops_for, sample


def run(size: int, body: Callable[[World], Any]) -> list[Any]:
    """Call ``body(world)`` on a thread for each rank, each on a host of its own."""

    def rank(channel: Any, links: LoopbackLinks) -> Any:
        control = NetworkControl(channel, TcpWords(channel), channel.exchange, None)
        channel.check = lambda: control.check(deep=True)
        messages = TcpMessages(channel, links)
        hosts = tuple((peer,) for peer in range(size))
        world = World(
            Group(
                channel.rank,
                size,
                hosts,
                control,
                None,
                messages,
                lambda members: None,
                tuple(range(size)),
                messages.close,
            ),
            Config(timeout=20.0),
        )
        result = body(world)
        world.shutdown()
        return result

    return loopback_links.run(size, rank)


@pytest.mark.parametrize("size", [2, 3])
def test_every_dtype_and_operation_gives_the_same_everywhere(size: int) -> None:
    dtypes = [np.dtype(name) for name in ("bool", "int8", "uint16", "float16", "float32", "complex128")]

    def body(world: World) -> list[bytes]:
        results = []
        for dtype in (*dtypes, np.dtype(ml_dtypes.bfloat16)):
            for count in (1, 3, 999):
                parts = [sample(dtype, count, rank) for rank in range(size)]
                for op in ops_for(dtype):
                    mine = parts[world.rank].copy()
                    result = world.allreduce(mine, op=op)
                    assert_close(result, expected(op, parts), size)
                    np.testing.assert_array_equal(mine, parts[world.rank])
                    assert world.allreduce_(mine, op=op) is mine
                    np.testing.assert_array_equal(mine, result)
                    results.append(result.tobytes())
        assert world.planner.choose("allreduce", 999 * 16).inline
        return results

    results = run(size, body)
    assert not raised(results) and results == [results[0]] * size


def test_factors_handles_buckets_and_larger_tensors() -> None:
    def body(world: World) -> None:
        ones, total = np.ones(5, np.float32), world.size * (world.size + 1) / 2
        scaled = world.allreduce(ones * (world.rank + 1), op=Op.SUM, prescale_factor=0.5, postscale_factor=4.0)
        np.testing.assert_array_equal(scaled, ones * 2 * total)
        np.testing.assert_array_equal(world.allreduce(ones * (world.rank + 1), op=Op.AVERAGE), ones * total / 3)
        for _ in range(2):
            handles = [world.allreduce_async(np.full(n, world.rank + n), op=Op.SUM, name=f"t{n}") for n in range(40)]
            for n, handle in enumerate(handles):
                np.testing.assert_array_equal(world.synchronize(handle), np.full(n, 3 * n + 3))
        for count in (100_000, 3):
            for algorithm in ("inline", "auto", "ring", "recursive-doubling", "inline"):
                large = np.arange(count, dtype=np.float64) + world.rank
                world.allreduce_(large, op=Op.SUM, algorithm=algorithm)
                np.testing.assert_array_equal(large, 3.0 * np.arange(count) + 3)
        choice = world.planner.choose("allreduce", 1 << 20)
        plan = world._context.plans.allreduce((1 << 17,), np.dtype(np.float64), choice, np.add, None)
        assert f"{choice.algorithm} over tcp, " in plan.description
        gathered = world.allgather(np.full((world.rank + 1, 2), world.rank))
        assert gathered[:, 0].tolist() == [0, 1, 1, 2, 2, 2]

    assert not raised(run(3, body))


def test_shapes_that_differ_are_an_error_on_every_rank_and_the_next_call_works() -> None:
    def body(world: World) -> None:
        for odd in (1, 5000):
            with pytest.raises(MismatchError, match="shape"):
                world.allreduce(np.ones(odd if world.rank == 1 else 7), name="it")
            assert world.allreduce(np.full(3, world.rank), op=Op.SUM).tolist() == [1, 1, 1]

    assert not raised(run(2, body))


def test_without_tcp_no_data_travels_inline() -> None:
    world = World(thread_groups.connect(1)[0])
    assert not world.planner.placement.carries
    one_host = Planner(Placement(0, 2, ((0, 1),), True, True, carries=True))
    assert not one_host.choose("allreduce", 4).inline
    several = Planner(Placement(0, 2, ((0,), (1,)), True, True))
    assert several.choose("allreduce", 4).algorithm == "recursive-doubling"
    with pytest.raises(TransportError, match="needs ranks that coordinate over TCP"):
        several.choose("allreduce", 4, algorithm="inline")
