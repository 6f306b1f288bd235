"""Every scenario over TCP: ranks as processes that no MPI connects, on one host, on pretended ones, and over messages
only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from collectives.base.config import Config
from collectives.world import World
from tests import engine_scenarios, persistent_scenarios, scenarios
from tests.processes import by_tcp
from tests.teams import Team

Scenario = Callable[[World], None]
WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "1-alone": (1, {}),
    "2-one-host": (2, {}),
    "2-hosts": (2, {"local_size": 1}),
    "3-messages": (3, {"transport": "tcp"}),
    "2-and-1": (3, {"local_size": 2, "cache_capacity": 8}),
    "2-and-2": (4, {"local_size": 2}),
    "5-hosts": (5, {"local_size": 1}),
}
"""By name: the number of ranks, and their settings."""


@pytest.fixture(scope="module", params=list(WORLDS))
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    size, settings = WORLDS[request.param]
    team = Team(size, Config(timeout=30, **settings), connect=by_tcp)
    yield team
    team.end()


def mapped(scenario: Scenario, world: World) -> None:
    """A scenario of persistent operations whose tensors lie in the arena."""
    before = persistent_scenarios.empty
    persistent_scenarios.empty = persistent_scenarios.mapped
    try:
        scenario(world)
    finally:
        persistent_scenarios.empty = before


@pytest.mark.parametrize("scenario", scenarios.SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_collectives(scenario: Scenario, team: Team) -> None:
    team.run(scenario)


@pytest.mark.parametrize("scenario", engine_scenarios.SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_engine(scenario: Scenario, team: Team) -> None:
    team.run(scenario)


@pytest.mark.parametrize("scenario", persistent_scenarios.SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_persistent(scenario: Scenario, team: Team) -> None:
    team.run(scenario)


@pytest.mark.parametrize("scenario", persistent_scenarios.SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_mapped_tensors(scenario: Scenario, team: Team) -> None:
    team.run(functools.partial(mapped, scenario))


@pytest.mark.parametrize("scenario", engine_scenarios.STEADY, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("settings", [{"local_size": 2}, {"transport": "tcp"}], ids=["2-and-1", "messages"])
def test_the_steady_state(scenario: Scenario, settings: dict[str, Any]) -> None:
    team = Team(3, Config(timeout=30, cycle_time=60_000.0, **settings), connect=by_tcp)
    team.run(scenario)
    team.end()
