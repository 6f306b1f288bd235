"""Every scenario of persistent operations with ranks as threads: on one host, on hosts of several shapes, and with
settings that make the engine's limits near."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from collectives.base.config import Config
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World
from tests.support.scenarios import persistent as persistent_scenarios
from tests.support.scenarios.persistent import SCENARIOS

Scenario = Callable[[World], None]
SEVERAL_HOSTS = (((0, 2), (1,)), pytest.param(((0,), (1,)), marks=pytest.mark.slow))
NEAR_LIMITS = {"no cache": Config(cache_capacity=0), "tiny buckets": Config(fusion_threshold=1000)}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_one_host(scenario: Scenario, size: int) -> None:
    thread_groups.run(size, scenario, make_world=World)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_mapped_tensors(scenario: Scenario, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent_scenarios, "empty", persistent_scenarios.mapped)
    thread_groups.run(size, scenario, make_world=World)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("hosts", SEVERAL_HOSTS, ids=str)
def test_several_hosts(scenario: Scenario, hosts: Sequence[Sequence[int]]) -> None:
    thread_groups.run(sum(map(len, hosts)), scenario, hosts=hosts, make_world=World)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("config", NEAR_LIMITS.values(), ids=NEAR_LIMITS)
def test_near_limits(scenario: Scenario, config: Config) -> None:
    thread_groups.run(3, scenario, make_world=lambda group: World(group, config))
