"""Every scenario with ranks as processes under mpirun."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import collectives
from collectives.worlds.world import World
from tests.support.scenarios.worlds import SCENARIOS

pytestmark = pytest.mark.mpi
RANKS = {"openmpi": (1, 2), "mpich": (3,)}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    collectives.init()
    yield collectives.world()
    collectives.shutdown()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(scenario: Callable[[World], None], world: World) -> None:
    scenario(world)
