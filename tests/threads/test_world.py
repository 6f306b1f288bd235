"""Every scenario of worlds, of the engine and of persistent operations with ranks as threads: on one host, on hosts of
several shapes, without direct reads, and with settings that make the limits near."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from collectives.base.config import Config
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World
from tests.support.scenarios import engine, persistent, worlds

Scenario = Callable[[World], None]
SCENARIOS = [*worlds.SCENARIOS, *engine.SCENARIOS, *persistent.SCENARIOS]
NEAR_LIMITS = {
    "tiny": Config(cache_capacity=8, fusion_threshold=1000),
    "none": Config(cache_capacity=0, fusion_threshold=0, cycle_time=0.0),
}
"""What the cache, the buckets and the cycle are limited to."""
LIMITED = [each for each in SCENARIOS[len(worlds.SCENARIOS) :] if each is not engine.ranks_that_wait_for_each_other]
"""That one waits for seconds until a deadlock is believed, and reaches no limit."""
LONG_CYCLE = Config(cycle_time=60_000.0)


def of(scenarios: Sequence[Scenario]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("scenario", scenarios, ids=lambda scenario: scenario.__name__)


@of(SCENARIOS)
@pytest.mark.parametrize("size", [1, 2, pytest.param(5, marks=pytest.mark.slow)])
def test_one_host(scenario: Scenario, size: int) -> None:
    thread_groups.run(size, scenario, make_world=World)


@of(SCENARIOS)
@pytest.mark.parametrize("hosts", [((0, 2), (1,)), pytest.param(((0, 1), (3,), (2,)), marks=pytest.mark.slow)], ids=str)
def test_several_hosts(scenario: Scenario, hosts: Sequence[Sequence[int]]) -> None:
    thread_groups.run(sum(map(len, hosts)), scenario, hosts=hosts, make_world=World)


@of(persistent.SCENARIOS)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_mapped_tensors(scenario: Scenario, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent, "empty", persistent.mapped)
    thread_groups.run(size, scenario, make_world=World)


@of(engine.STEADY)
@pytest.mark.parametrize("hosts", [((0, 1),), ((0, 1, 2, 3),), ((0, 1), (2,))], ids=str)
def test_the_steady_state(scenario: Scenario, hosts: Sequence[Sequence[int]]) -> None:
    thread_groups.run(sum(map(len, hosts)), scenario, hosts=hosts, make_world=lambda group: World(group, LONG_CYCLE))


@pytest.mark.slow
@of(LIMITED)
@pytest.mark.parametrize("config", NEAR_LIMITS.values(), ids=NEAR_LIMITS)
def test_near_limits(scenario: Scenario, config: Config) -> None:
    thread_groups.run(3, scenario, make_world=lambda group: World(group, config))


@pytest.mark.slow
@of(worlds.SCENARIOS)
def test_small_segments(scenario: Scenario) -> None:
    thread_groups.run(2, scenario, make_world=lambda group: World(group, Config(segment=4096)))


@pytest.mark.slow
@of(worlds.SCENARIOS)
def test_without_direct_reads(scenario: Scenario) -> None:
    thread_groups.run(3, scenario, reads_private=False, make_world=World)
