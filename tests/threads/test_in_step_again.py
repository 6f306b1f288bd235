"""Ranks of which one has passed over an operation, or made one more, find each other again where it is known who is
behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import pytest

from collectives.base.errors import MismatchError, OperationError
from collectives.transport import threads
from collectives.worlds import World


def total(world: World) -> float:
    return world.size * (world.size + 1) / 2


def blocking(world: World, name: str | None) -> float:
    return float(world.allreduce(np.full(3, world.rank + 1.0), average=False, name=name)[0])


def in_two_halves(world: World, name: str | None) -> float:
    return float(world.synchronize(world.allreduce_async(np.full(3, world.rank + 1.0), average=False, name=name))[0])


Call = Callable[[World, str | None], float]
CALLS = pytest.mark.parametrize("call", [blocking, in_two_halves])


def run(size: int, program: Callable[[World], None]) -> None:
    threads.run(size, program, make_world=World, timeout=30)


@CALLS
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_an_operation_that_one_rank_passes_over_fails_alone(call: Call, size: int) -> None:
    """Whoever waits for it is told; what the other rank waits for meanwhile is carried out as if nothing had been."""

    def program(world: World) -> None:
        if world.rank:
            with pytest.raises(MismatchError, match="'a'") as caught:
                call(world, "a")
            assert "for which rank 0 has not asked" in str(caught.value), caught.value
            others = ", ".join(map(str, range(1, size)))
            assert f"for which rank {others} has not asked, and goes on waiting for it" in str(caught.value), (
                caught.value
            )
        assert call(world, "b") == total(world)
        assert call(world, None) == total(world)

    run(size, program)


def test_the_rank_that_goes_on_waiting_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    def program(world: World) -> None:
        if world.rank:
            with pytest.raises(MismatchError):
                blocking(world, "a")
        blocking(world, "b")

    run(2, program)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "collectives"]
    assert said.startswith("rank 0: ") and "'a'" in said and "'b'" in said and "test_in_step_again.py" in said, said


@CALLS
def test_an_operation_that_only_one_rank_makes_fails_alone(call: Call) -> None:
    def program(world: World) -> None:
        assert call(world, "before") == total(world)
        if world.rank == 0:
            with pytest.raises(MismatchError, match="'extra'"):
                call(world, "extra")
        assert call(world, "after") == total(world)

    run(2, program)


@CALLS
def test_several_operations_in_flight_are_left_alone(call: Call) -> None:
    def program(world: World) -> None:
        ones = np.ones(2)
        fine = [world.allreduce_async(ones, average=False, name=f"fine {k}") for k in range(3)]
        if world.rank:
            left_over = world.allreduce_async(ones, average=False, name="a")
            fine.append(world.allreduce_async(ones, average=False, name="late"))
            with pytest.raises(MismatchError, match="'a'"):
                world.synchronize(left_over)
        else:
            fine.append(world.allreduce_async(ones, average=False, name="late"))
        assert call(world, "b") == total(world)
        for handle in fine:
            assert world.synchronize(handle)[0] == world.size

    run(2, program)


@CALLS
@pytest.mark.slow
def test_a_loop_over_names_is_in_step_again_after_two_of_them(call: Call) -> None:
    """Both wait at the same line, so that nobody knows who is behind, until one comes to a name at which the other
    was."""
    told: dict[int, list[int]] = {0: [], 1: []}

    def program(world: World) -> None:
        for step in range(8):
            if world.rank == 0 and step == 2:
                continue
            try:
                assert call(world, f"part {step}") == total(world)
            except MismatchError:
                told[world.rank].append(step)

    run(2, program)
    assert told == {0: [3], 1: [2, 3]}


@CALLS
@pytest.mark.slow
def test_unnamed_operations_are_in_step_again_after_named_ones(call: Call) -> None:
    told: dict[int, list[str]] = {0: [], 1: []}

    def program(world: World) -> None:
        if world.rank == 0:
            with pytest.raises(MismatchError, match=r"order of calls.*shutdown\(\) and init\(\)"):
                call(world, None)
        for name in ("a", "b", "c"):
            try:
                assert call(world, name) == total(world)
            except MismatchError:
                told[world.rank].append(name)
        for _ in range(3):
            assert call(world, None) == total(world)

    run(2, program)
    assert told == {0: ["a"], 1: ["a"]}


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
        with pytest.raises(
            MismatchError, match=r"order of calls.*name the operations, or call shutdown\(\) and init\(\)"
        ):
            world.allreduce(np.ones(2 + world.rank))

    run(2, program)
