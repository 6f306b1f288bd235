"""Calls that are made of several operations: what fails on one rank between them is told to all, and the next call
works."""

from __future__ import annotations

import contextlib
import pickle
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from collectives.base.errors import MismatchError, RankFailedError, TransportError
from collectives.base.reduce_op import Op
from collectives.tensors.result_pool import ResultPool
from collectives.transport.group import Group
from collectives.transport.threads import thread_groups
from collectives.worlds import objects
from collectives.worlds.world import World

ODD = 1
"""The rank on which something fails."""


def works(world: World) -> None:
    """The ranks are in step, named and unnamed, and nothing is left over."""
    for name in (None, "thing", "thing.length", None):
        assert world.allreduce(np.array([world.rank + 1.0]), op=Op.SUM, name=name)[0] == sum(range(1, world.size + 1))
    assert world.broadcast_object({"rank": world.rank}, 0, name="thing") == {"rank": 0}
    assert world.allgather_object(world.rank) == list(range(world.size))
    assert not world._engine._submissions.pending and not world._engine._submissions.names


@contextlib.contextmanager
def fails(world: World, error: type[BaseException]) -> Iterator[None]:
    """This ends with ``error`` on the rank where something fails, which the others are told of."""
    with pytest.raises(error if world.rank == ODD else MismatchError) as caught:
        yield
    assert error.__name__ in str(caught.value) or world.rank == ODD, caught.value


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("name", [None, "thing"])
@pytest.mark.parametrize("root", [0, ODD])
def test_an_object_that_one_rank_has_no_memory_for(
    root: int, name: str | None, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    value = "x" * 12345

    class Numpy:
        def __getattr__(self, attribute: str) -> Any:
            return getattr(np, attribute)

        def empty(self, count: int, dtype: Any) -> Any:
            if count > len(value) and threading.current_thread().name == f"rank {ODD}":
                raise error("nothing left")
            return np.empty(count, dtype)

    def program(world: World) -> None:
        for _ in range(2):
            with fails(world, error):
                world.broadcast_object(value, root, name=name)
        works(world)

    monkeypatch.setattr(objects, "np", Numpy())
    assert len(pickle.dumps(value)) > len(value)
    thread_groups.run(3, program, make_world=World)


@pytest.mark.parametrize("waits", ["for each", "for all"])
@pytest.mark.parametrize("before", ["a", "b", "c"])
def test_operations_that_are_carried_out_as_one_fail_as_one(before: str, waits: str) -> None:
    def program(world: World) -> None:
        for _ in range(2):
            handles = []
            with fails(world, ValueError), world.composed("abc") as begin:
                for name in "abc":
                    if name == before and world.rank == ODD:
                        raise ValueError
                    handles.append(world.allreduce_async(np.full(3, world.rank + 1.0), op=Op.SUM, name=begin(name)))
                    if waits == "for each":
                        assert handles[-1].wait()[0] == 6
                for handle in handles:
                    handle.wait()
            with contextlib.suppress(MismatchError):
                for handle in handles:
                    handle.wait()
        world.barrier()
        works(world)

    thread_groups.run(3, program, make_world=World)


def test_rows_that_one_rank_has_no_memory_for_are_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many they are is known when all have agreed: the world has failed, and each rank says why."""

    def program(world: World) -> None:
        empty = ResultPool.empty

        def refuse(pool: ResultPool, shape: Any, dtype: Any) -> Any:
            if pool is world._pool and world.rank == ODD and shape == (6, 2):
                raise MemoryError("nothing left")
            return empty(pool, shape, dtype)

        world.barrier()
        if world.rank == ODD:
            monkeypatch.setattr(ResultPool, "empty", refuse)
        world.barrier()
        with pytest.raises((MemoryError, RankFailedError), match="nothing left"):
            world.allgather(np.full((world.rank + 1, 2), 1.0))
            world.barrier()
        with pytest.raises(RankFailedError, match="nothing left"):
            world.barrier()

    thread_groups.run(3, program, make_world=World)


def test_a_process_set_that_one_rank_cannot_make_is_an_error_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(group: Group, *arguments: Any, **keywords: Any) -> World:
        if group.ranks[group.rank] == ODD:
            raise MemoryError("nothing left")
        return World(group, *arguments, **keywords)

    def program(world: World) -> None:
        world.barrier()
        monkeypatch.setattr(sys.modules["collectives.worlds.world"], "World", refuse)
        world.barrier()
        with pytest.raises(TransportError, match=rf"\[0, 1\] cannot be made: rank {ODD}: MemoryError: nothing left"):
            world.add_process_set([0, 1])
        child = world.add_process_set([0, 2])
        assert child is None or child.allreduce(np.ones(1), op=Op.SUM)[0] == 2
        works(world)

    thread_groups.run(3, program, make_world=World)
