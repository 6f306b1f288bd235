"""Every scenario of the engine with ranks as threads: one host, hosts of several shapes, and settings that make its
limits near."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from collectives.base.config import Config
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World
from tests.support.scenarios.engine import SCENARIOS, STEADY

Scenario = Callable[[World], None]
SEVERAL_HOSTS = (
    ((0, 2), (1,)),
    pytest.param(((0, 1), (2, 3)), marks=pytest.mark.slow),
)
NEAR_LIMITS = {
    "tiny": Config(cache_capacity=8, fusion_threshold=1000),
    "none": Config(cache_capacity=0, fusion_threshold=0, cycle_time=0.0),
}
"""What the cache, the buckets and the cycle are limited to."""
LIMITED = [scenario for scenario in SCENARIOS if scenario.__name__ != "ranks_that_wait_for_each_other"]
"""That one waits for seconds until a deadlock is believed, and reaches no limit."""
LONG_CYCLE = Config(cycle_time=60_000.0)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_one_host(scenario: Scenario, size: int) -> None:
    thread_groups.run(size, scenario, make_world=World)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("hosts", SEVERAL_HOSTS, ids=str)
def test_several_hosts(scenario: Scenario, hosts: Sequence[Sequence[int]]) -> None:
    thread_groups.run(sum(map(len, hosts)), scenario, hosts=hosts, make_world=World)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", LIMITED, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("config", NEAR_LIMITS.values(), ids=NEAR_LIMITS)
def test_near_limits(scenario: Scenario, config: Config) -> None:
    thread_groups.run(3, scenario, make_world=lambda group: World(group, config))


@pytest.mark.parametrize("scenario", STEADY, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("hosts", [((0, 1),), ((0, 1, 2, 3),), ((0, 1), (2,))], ids=str)
def test_the_steady_state(scenario: Scenario, hosts: Sequence[Sequence[int]]) -> None:
    thread_groups.run(sum(map(len, hosts)), scenario, hosts=hosts, make_world=lambda group: World(group, LONG_CYCLE))
