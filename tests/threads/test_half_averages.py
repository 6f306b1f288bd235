"""Averages of float16 and bfloat16: right for the largest and the tiniest numbers, whatever combines them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from collectives.base.reduce_op import Op
from collectives.schedules import registration, registry
from collectives.schedules.schedule import Step, receive, reduce, send
from collectives.tensors.arena import arena
from collectives.tensors.compression import Compression
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World
from tests.support.emulated.ranks import emulated, on_threads

Array = np.ndarray[Any, Any]
EXTREMES = {np.dtype(np.float16): (60_000.0, 6e-8), np.dtype(ml_dtypes.bfloat16): (3e38, 1e-38)}
"""Numbers whose sums overflow, and numbers below the smallest normal one."""
WAYS: dict[str, tuple[dict[str, str], int | None]] = {
    "auto": ({}, None),
    "one-shot": ({"algorithm": "one-shot"}, None),
    "direct, windows": ({"algorithm": "direct", "transport": "window"}, None),
    "direct, messages": ({"algorithm": "direct", "transport": "mpi"}, None),
    "ring": ({"algorithm": "ring"}, None),
    "ring, messages": ({"algorithm": "ring", "transport": "mpi"}, None),
    "doubling, messages": ({"algorithm": "recursive-doubling", "transport": "mpi"}, None),
    "hosts of one": ({}, 1),
    "hierarchical": ({"algorithm": "hierarchical"}, 2),
    "hierarchical, leaders": ({"algorithm": "hierarchical"}, 3),
    "reproducible": ({"algorithm": "reproducible"}, 2),
}


def contribution(rank: int, count: int, dtype: np.dtype[Any]) -> Array:
    """Numbers of either sign from the tiniest to the largest; those at an index are alike on all ranks, if it divides
    by four."""
    big, tiny = EXTREMES[dtype]
    random = np.random.default_rng(7 * rank + count)
    sizes = np.exp(np.random.default_rng(count).uniform(np.log(tiny), np.log(big), count))
    values = sizes * random.uniform(0.5, 1.0, count) * random.choice([-1, 1], count)
    values[::4] = sizes[::4]
    return np.clip(values, -big, big).astype(dtype)


def check(result: Any, ranks: int, count: int, dtype: np.dtype[Any]) -> None:
    """Equal numbers have themselves as their mean, and others one within half a unit of the last place for each
    combination, of a number no larger than the largest contribution."""
    result = np.asarray(result)
    parts = [contribution(rank, count, dtype) for rank in range(ranks)]
    np.testing.assert_array_equal(result[::4].view(np.uint16), parts[0][::4].view(np.uint16))
    largest = np.max(np.abs([part.astype(np.float64) for part in parts]), axis=0)
    place = np.maximum(largest * float(ml_dtypes.finfo(dtype).eps), float(ml_dtypes.finfo(dtype).smallest_subnormal))
    error = np.abs(result.astype(np.float64) - np.mean([part.astype(np.float64) for part in parts], axis=0))
    assert (error <= place / 2 * (ranks - 1) * 1.01).all(), (error / place).max()


@pytest.mark.parametrize("ranks", [2, 4, 5])
@pytest.mark.parametrize("way", WAYS)
def test_an_average_that_fits_is_right_in_every_algorithm(way: str, ranks: int) -> None:
    how, each = WAYS[way]
    hosts = None if each is None else [list(range(at, min(at + each, ranks))) for at in range(0, ranks, each)]

    def program(world: World) -> None:
        for dtype in EXTREMES:
            for count in (7, 5000, 70_001):
                own = contribution(world.rank, count, dtype)
                check(world.allreduce(own, **how), ranks, count, dtype)
                check(world.allreduce_async(own, name="later", **how).wait(), ranks, count, dtype)
                check(world.grouped_allreduce([own, own], **how)[1], ranks, count, dtype)
                check(world.allreduce_(own, **how), ranks, count, dtype)

    thread_groups.run(ranks, program, hosts=hosts, make_world=World)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_form_of_a_half_average_is_right(ranks: int) -> None:
    dtype, count = np.dtype(np.float16), 9000

    def program(world: World) -> None:
        own = contribution(world.rank, count, dtype)
        mapped = arena.empty(count, dtype)
        mapped[...] = own
        check(world.allreduce_(mapped), ranks, count, dtype)
        mapped = [arena.empty(count, dtype) for _ in range(2)]
        for tensor in mapped:
            tensor[...] = own
        check(world.grouped_allreduce_(mapped)[1], ranks, count, dtype)
        operation = world.allreduce_init(own.copy(), name="kept")
        operation.start()
        check(operation.wait(), ranks, count, dtype)
        for algorithm in ("direct", "ring"):
            rows = np.repeat(own[None], world.size, 0)
            check(world.reducescatter(rows, Op.AVERAGE, algorithm=algorithm)[0], ranks, count, dtype)
        check(world.allreduce(own, postscale_factor=1.0, prescale_factor=1.0), ranks, count, dtype)
        scaled = world.allreduce(np.full(5, 60_000, dtype), postscale_factor=0.5)
        assert (scaled == 30_000).all(), scaled
        wide = world.allreduce(np.array([65_000, 70_000, -70_000], np.float32), compression=Compression.fp16)
        assert abs(wide[0] - 65_000) <= 16 and (wide[1:] == [np.inf, -np.inf]).all(), wide
        parts = np.full((2 if world.rank < world.size - 1 else 1, 3), 60_000, dtype)
        total = 2 * world.size - 1
        assert (world.allreduce(parts, parts=total, algorithm="reproducible") == 60_000).all()

    thread_groups.run(ranks, program, make_world=World)


def test_an_algorithm_of_ones_own_weights_what_it_combines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ALL", dict(registry._ALL))

    def chain(rank: int, size: int) -> list[list[Step]]:
        up = [[send(k + 1, 0)] if rank == k else [reduce(k, 0)] if rank == k + 1 else [] for k in range(size - 1)]
        last = size - 1
        back = [send(peer, 0) for peer in range(last)] if rank == last else [receive(last, 0)]
        return [*up, back]

    registration.register("allreduce", "chained", chain, sizes=[3, 5])

    def program(world: World) -> None:
        for dtype in EXTREMES:
            for count in (7, 5000):
                own = contribution(world.rank, count, dtype)
                check(world.allreduce(own, algorithm="chained"), world.size, count, dtype)

    for ranks in (3, 5):
        thread_groups.run(ranks, program, make_world=World)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_gpu_averages_halves_as_the_host_does(ranks: int) -> None:
    def program(world: World, maker: Any) -> None:
        for dtype in EXTREMES:
            for count in (7, 5000):
                own = contribution(world.rank, count, dtype)
                for how in ({}, {"algorithm": "ring"}, {"algorithm": "reproducible"}, {"transport": "host"}):
                    check(maker.host(world.allreduce(maker.device(own), **how)), ranks, count, dtype)
                    bucket = world.grouped_allreduce([maker.device(own), maker.device(own)], **how)
                    check(maker.host(bucket[1]), ranks, count, dtype)
        for how in ({}, {"transport": "host"}):
            wide = maker.device(np.array([65_000, 70_000, -70_000], np.float32))
            averages = maker.host(world.allreduce(wide, compression=Compression.fp16, **how))
            assert abs(averages[0] - 65_000) <= 16 and (averages[1:] == [np.inf, -np.inf]).all(), averages

    with emulated() as provider:
        on_threads(ranks, program, provider)
