"""Ranks that wait for operations that not all have submitted: each is told, and no sum is of two steps' values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import pytest

from collectives.base.errors import MismatchError, OperationError
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World


def total(world: World) -> float:
    return world.size * (world.size + 1) / 2


def blocking(world: World, name: str | None, x: np.ndarray) -> None:
    world.allreduce_(x, average=False, name=name)


def in_two_halves(world: World, name: str | None, x: np.ndarray) -> None:
    world.synchronize(world.allreduce_async_(x, average=False, name=name))


Call = Callable[[World, "str | None", np.ndarray], None]
CALLS = pytest.mark.parametrize("call", [blocking, in_two_halves])


def run(size: int, program: Callable[[World], None]) -> None:
    thread_groups.run(size, program, make_world=World, timeout=30)


@CALLS
@pytest.mark.parametrize("names", [("a", "b"), ("a", None)])
def test_what_is_waited_for_fails_on_every_rank(call: Call, names: tuple[str | None, ...]) -> None:
    """Each learns who waits for what and where, and who has not submitted it; then the ranks go on."""
    size = 3

    def program(world: World) -> None:
        x = np.full(3, world.rank + 1.0)
        with pytest.raises(MismatchError, match="every rank waits") as caught:
            call(world, names[min(world.rank, 1)], x)
        assert (x == world.rank + 1.0).all()
        message = str(caught.value)
        assert (
            message.startswith(f"rank {world.rank}: ")
            and f"test_deadlocks.py:{call.__code__.co_firstlineno + 1}" in message
        )
        for rank in range(size):
            others = [str(other) for other in range(size) if min(other, 1) != min(rank, 1)]
            who = f"rank{'s' * (len(others) > 1)} {', '.join(others)}"
            name = names[min(rank, 1)]
            asked = "" if name is None else f"name={name!r}, "
            assert f"  rank {rank}: waits for allreduce({asked}dtype=" in message, message
            assert f"in {call.__name__} (not submitted by {who})\n" in message, message
        assert ("order of calls" in message) == (None in names)
        for name in ("a", "b", None):
            x[:] = world.rank + 1.0
            call(world, name, x)
            assert (x == total(world)).all()

    run(size, program)


@CALLS
def test_what_nobody_waits_for_goes_on(call: Call) -> None:
    def program(world: World) -> None:
        ones = np.ones(2)
        fine = [world.allreduce_async(ones, average=False, name=f"fine {k}") for k in range(3)]
        if world.rank:
            fine.append(world.allreduce_async(ones, average=False, name="late"))
        with pytest.raises(MismatchError, match="every rank waits"):
            call(world, f"of rank {world.rank}", np.ones(2))
        if not world.rank:
            fine.append(world.allreduce_async(ones, average=False, name="late"))
        for handle in fine:
            assert world.synchronize(handle)[0] == world.size

    run(2, program)


def test_what_one_rank_waits_for_fails_also_where_it_is_only_in_flight() -> None:
    def program(world: World) -> None:
        ones = np.ones(2)
        begun = world.allreduce_async(ones, average=False, name="a") if world.rank == 1 else None
        with pytest.raises(MismatchError, match=r"name='a'.*not submitted by rank 2"):
            world.allreduce(ones, name="a" if world.rank == 0 else "b")
        if begun is not None:
            with pytest.raises(MismatchError, match=r"name='a'.*not submitted by rank 2"):
                world.synchronize(begun)
        for name in ("a", "b"):
            assert world.allreduce(ones, average=False, name=name)[0] == world.size

    run(3, program)


@pytest.mark.slow
def test_names_that_come_again_never_meet_those_of_another_step() -> None:
    """Nobody knows who is behind: all fail, and no rank is given a sum of two steps' values."""
    sums: dict[int, list[float]] = {0: [], 1: []}

    def attempt(world: World, name: str, value: float) -> None:
        try:
            sums[world.rank].append(float(world.allreduce(np.full(2, value), average=False, name=name)[0]))
        except MismatchError as error:
            assert "every rank waits" in str(error), error

    def program(world: World) -> None:
        for step in range(4):
            for name in ("a", "b", "c"):
                if (world.rank, step, name) != (0, 2, "b"):
                    attempt(world, name, 10.0**step)
        if world.rank == 0:
            attempt(world, "one more", 1.0)

    run(2, program)
    assert sums[0] == sums[1] == [2.0] * 3 + [20.0] * 3 + [200.0]


@pytest.mark.slow
def test_names_that_are_new_never_meet_those_of_another_step() -> None:
    """Rank 0 has passed over the end of step 0, so that the names of step 1 are as new as those for which rank 1
    waits."""
    sums: list[float] = []

    def program(world: World) -> None:
        def attempt(name: str, value: float) -> None:
            with contextlib.suppress(OperationError):  # one rank's program ends before the other's
                sums.append(float(world.allreduce(np.full(2, value), average=False, name=name)[0]))

        def step(number: int) -> None:
            if number == 1:
                attempt("a", 10.0)
            if number == 1 or world.rank == 1:
                attempt("b", 10.0**number)
                attempt("c", 10.0**number)

        for number in range(2):
            step(number)

    run(2, program)
    assert sums == []


@pytest.mark.slow
def test_names_of_the_first_step_never_meet_those_of_the_second() -> None:
    """Rank 0 has passed over the end of the first step, and comes to the names of the second that both know; then to
    those that are new."""
    sums: list[float] = []

    def program(world: World) -> None:
        for step in range(2):
            for number in range(4):
                if step == 1 or world.rank == 1 or number == 0:
                    with contextlib.suppress(OperationError):
                        value = np.full(2, 10.0**step)
                        sums.append(float(world.allreduce(value, average=False, name=f"layer {number}")[0]))

    run(2, program)
    assert sums == [2.0, 2.0]


def test_an_unnamed_mismatch_says_what_to_do() -> None:
    def program(world: World) -> None:
        with pytest.raises(MismatchError, match="order of calls; pass name=") as raised:
            world.allreduce(np.ones(2 + world.rank))
        assert "shutdown()" not in str(raised.value)  # the next call works

    run(2, program)


def test_unnamed_calls_of_different_kinds_say_how_a_rank_gets_into_step_again() -> None:
    def program(world: World) -> None:
        with pytest.raises(MismatchError, match=r"order of calls; pass name=.*shutdown\(\) and init\(\)"):
            world.barrier() if world.rank else world.allreduce(np.ones(2))

    run(2, program)
