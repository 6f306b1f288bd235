"""What errors say on ranks as threads: a message that is passed on, or raised again, names its rank once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from collectives.base.config import Config
from collectives.base.errors import CollectivesError, InvalidArgumentError
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except CollectivesError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def test_a_timeline_that_cannot_be_begun(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "trace.json"
    for text in thread_groups.run(3, lambda world: said(lambda: world.start_timeline(path)), make_world=World):
        assert text.count("rank 0: ") == text.count("rank ") == 1, text


def test_a_world_that_has_failed() -> None:
    """Rank 1 comes too late, for a call that rank 0 has given up; then both call again."""

    def program(world: World) -> list[str]:
        call = lambda: world.allreduce(np.ones(3), name="late")  # noqa: E731
        if world.rank == 0:
            found = [said(call), said(call)]
            gave_up.append(True)
            return found
        while not gave_up:
            world._control.relax()
        return [said(call), said(call)]

    gave_up: list[bool] = []
    first, second = thread_groups.run(2, program, make_world=lambda group: World(group, Config(timeout=0.3)))
    assert [text.count("rank 0: ") for text in first] == [1, 1], first
    assert "rank 1" in first[0] and "COLLECTIVES_TIMEOUT" in first[0], first
    assert [text.count("rank 1: ") for text in second] == [1, 1], second


def test_an_argument_that_is_refused_further_out_again() -> None:
    """By an operation first, and then by what is made of it."""

    def program(world: World) -> str:
        if world.rank == 0:
            text = str(
                world.refused(InvalidArgumentError("rank 0: tensor 'x': root_rank: expected a rank, got 7"), "x")
            )
        else:
            text = said(lambda: world.allreduce(np.ones(3), name="x"))
        world.barrier()  # rank 0 leaves when the other one has been told
        return text

    refused = "InvalidArgumentError: tensor 'x': root_rank: expected a rank, got 7"
    first, second = thread_groups.run(2, program, make_world=World)
    assert first == refused.replace("InvalidArgumentError", "rank 0")
    assert f"\n  rank 0: refused its arguments: {refused}\n" in second, second


def test_a_failure_that_is_passed_on() -> None:
    """What rank 0 raised, as rank 1 hears of it."""

    def program(world: World) -> None:
        if world.rank == 0:
            raise InvalidArgumentError("rank 0: tensor 'x': expected numbers")
        heard.append(said(lambda: world.allreduce(np.ones(3), name="x")))

    heard: list[str] = []
    with pytest.raises(InvalidArgumentError):
        thread_groups.run(2, program, make_world=World)
    assert heard == ["rank 1: rank 0 has failed [R5]:\nInvalidArgumentError: tensor 'x': expected numbers"]


@pytest.mark.parametrize("name", ["last", None])
def test_a_rank_that_leaves_early_and_what_the_others_wait_for(name: str | None) -> None:
    def program(world: World) -> str:
        world.allreduce(np.ones(3), name="both")
        if world.rank:
            world.shutdown()
            return ""
        others = [world.allreduce_async(np.ones(3), name=f"async {k}") for k in range(7)]
        text = said(lambda: world.allreduce(np.ones(3), name=name))
        assert all(handle.poll() for handle in others)
        return text

    text = thread_groups.run(2, program, make_world=World)[0]
    assert "rank 1 has shut down or ended" in text, text
    assert (
        "rank 0 was waiting for allreduce 'async 0', submitted at " in text
        and "test_messages.py" in text
        and "; and " in text
    ), text


def test_a_rank_that_leaves_early_while_the_others_wait_for_one_operation() -> None:
    def program(world: World) -> str:
        if world.rank:
            world.shutdown()
            return ""
        return said(lambda: world.barrier())

    text = thread_groups.run(2, program, make_world=World)[0]
    assert "rank 0 was waiting for barrier number 0, unnamed, submitted at " in text, text
