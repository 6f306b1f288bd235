"""Every scenario with ranks as threads: one host of 1, 2, 3 and 7 ranks, hosts of several shapes, small
segments, and no direct reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from collectives.base.config import Config
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World
from tests.support.scenarios.worlds import SCENARIOS

ONE_HOST = (1, 2, 3, pytest.param(7, marks=pytest.mark.slow))
SEVERAL_HOSTS = (
    ((0, 2), (1, 3)),
    *(pytest.param(hosts, marks=pytest.mark.slow) for hosts in (((0, 1, 2), (3,)), ((0, 1), (2, 3), (4, 5)))),
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("size", ONE_HOST)
def test_one_host(scenario: Callable[[World], None], size: int) -> None:
    thread_groups.run(size, scenario, make_world=World)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("hosts", SEVERAL_HOSTS, ids=str)
def test_several_hosts(scenario: Callable[[World], None], hosts: Sequence[Sequence[int]]) -> None:
    thread_groups.run(sum(map(len, hosts)), scenario, hosts=hosts, make_world=World)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_small_segments(scenario: Callable[[World], None]) -> None:
    thread_groups.run(2, scenario, make_world=lambda group: World(group, Config(segment=4096)))


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_without_direct_reads(scenario: Callable[[World], None]) -> None:
    thread_groups.run(3, scenario, reads_private=False, make_world=World)
