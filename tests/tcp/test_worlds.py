"""Scenarios and random programs over TCP: ranks as processes that no MPI connects, on pretended hosts, and over
messages only.

`python -m tests.support.scenarios.everywhere` has all scenarios in worlds of all shapes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from collectives.base.config import Config
from collectives.base.errors import RankFailedError
from collectives.transport.tcp.tcp_groups import TcpWiring
from collectives.worlds.world import World
from tests.support.launching.processes import by_tcp, run
from tests.support.launching.teams import Team
from tests.support.random.program_runs import run_on_processes
from tests.support.scenarios import engine as engine_scenarios
from tests.support.scenarios import persistent as persistent_scenarios
from tests.support.scenarios import worlds as scenarios
from tests.support.scenarios.everywhere import mapped
from tests.threads.test_fast_path import fewest_calls_in

Scenario = Callable[[World], None]
WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "2-and-1": (3, {"local_size": 2, "cache_capacity": 8}),
    "5-messages": (5, {"transport": "tcp"}),
}
"""By name: the number of ranks, and their settings."""


@pytest.fixture(scope="module")
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    size, settings = WORLDS[request.param]
    team = Team(size, Config(timeout=30, **settings), connect=by_tcp)
    yield team
    team.end()


def in_worlds(*names: str) -> Any:
    """A test of a team, in each of these worlds."""
    return pytest.mark.parametrize("team", names, indirect=True, scope="module")


def each(functions: list[Scenario]) -> Any:
    """A test of each scenario."""
    return pytest.mark.parametrize("scenario", functions, ids=lambda scenario: scenario.__name__)


@in_worlds("2-and-1", "5-messages")
@each(scenarios.SCENARIOS)
def test_collectives(scenario: Scenario, team: Team) -> None:
    team.run(scenario)


@in_worlds("2-and-1")
@each(engine_scenarios.SCENARIOS)
def test_engine(scenario: Scenario, team: Team) -> None:
    team.run(scenario)


@in_worlds("2-and-1")
@each(persistent_scenarios.SCENARIOS)
def test_mapped_tensors(scenario: Scenario, team: Team) -> None:
    team.run(functools.partial(mapped, scenario))


@each(engine_scenarios.STEADY)
def test_the_steady_state(scenario: Scenario) -> None:
    team = Team(3, Config(timeout=30, cycle_time=60_000.0, local_size=2), connect=by_tcp)
    team.run(scenario)
    team.end()


def test_a_small_allreduce_passes_few_functions() -> None:
    def program(world: World) -> list[str]:
        tensor = np.ones(1, np.float32)
        return fewest_calls_in(lambda: world.allreduce_(tensor))

    for calls in run(2, program, connect=by_tcp, config=Config(timeout=10, local_size=1)):
        assert len(calls) <= 19, calls


def test_a_rank_that_fails_while_others_connect_a_part_leaves_nobody_waiting() -> None:
    goes_on, done = os.pipe()

    def program(world: World) -> None:
        if world.rank == 0:
            with pytest.raises(RankFailedError, match=r"rank 1 has failed \[R3\]:\nKeyError: 'sockets'"):
                world.add_process_set([0, 1])
            os.write(done, b"!")
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TcpWiring, "split", lambda wiring, members: {}["sockets"])
            with pytest.raises(KeyError):
                world.add_process_set([0, 1])
        os.read(goes_on, 1)  # its end would be noticed, too

    run(2, program, connect=by_tcp, config=Config(timeout=10, local_size=1))


@pytest.mark.parametrize(("first", "size"), [(1010, 4), (1060, 3)], ids=["2-and-2", "3-messages"])
def test_random_programs_with_forks_in_their_middle(first: int, size: int) -> None:
    run_on_processes(range(first, first + 8), size, tcp=True)
