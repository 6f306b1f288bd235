"""Random programs with ranks as processes: many programs on one world, with forks in their middle, on one host, on
pretended hosts, and over messages only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from collectives.worlds.world import World
from tests.mpi.worlds import configs, connect
from tests.support.random.programs import SETS, draw, make_sets, run
from tests.support.scenarios.worlds import parts_of_several_mebibytes

pytestmark = pytest.mark.mpi
RANKS = {"openmpi": (4,), "mpich": (3,)}

CONFIGS = configs()
Worlds = tuple[World, dict[tuple[int, ...], World | None]]


@pytest.fixture(scope="module", params=list(CONFIGS))
def worlds(request: pytest.FixtureRequest) -> Iterator[Worlds]:
    world = connect(CONFIGS[request.param])
    yield world, make_sets(world, SETS[world.size])
    world.shutdown()


def test_parts_have_the_same_bits_on_one_two_and_all_ranks(worlds: Worlds) -> None:
    parts_of_several_mebibytes(worlds[0])


@pytest.mark.parametrize("seed", range(1000, 1010))
def test_program(seed: int, worlds: Worlds) -> None:
    world, sets = worlds
    run(world, draw(seed, world.size), sets, forks=True)
