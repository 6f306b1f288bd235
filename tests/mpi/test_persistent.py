"""Every scenario of persistent operations with ranks as processes, on one host, on pretended ones and over messages
only; and as `collectives` shows them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import collectives as hvd
from collectives.worlds.world import World
from tests.mpi.test_engine import connect
from tests.mpi.worlds import configs
from tests.support.scenarios import persistent as persistent_scenarios
from tests.support.scenarios.persistent import SCENARIOS

pytestmark = pytest.mark.mpi
RANKS = {"openmpi": (2,), "mpich": (3,)}

CONFIGS = configs(cache_capacity=8)


@pytest.fixture(scope="module", params=list(CONFIGS))
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = connect(CONFIGS[request.param])
    yield world
    world.shutdown()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(scenario: Callable[[World], None], world: World) -> None:
    scenario(world)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_mapped_tensors(scenario: Callable[[World], None], world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent_scenarios, "empty", persistent_scenarios.mapped)
    scenario(world)


def test_the_functions_take_process_sets_and_the_numbers_of_all_ranks() -> None:
    hvd.init()
    size, rank = hvd.size(), hvd.rank()
    last = hvd.add_process_set([size - 1])
    tensor = np.full(4, rank + 1.0)
    functions = [name for name in hvd.__all__ if name.endswith("_init")]
    for name in functions:
        assert "process_set" in inspect.signature(getattr(hvd, name)).parameters
    if last.included():
        with hvd.broadcast_init(tensor, size - 1, process_set=last) as alone:
            assert alone() is tensor and (tensor == size).all()
    else:
        with pytest.raises(hvd.InvalidArgumentError, match=r"rank .* is not in ProcessSet"):
            hvd.broadcast_init(tensor, size - 1, process_set=last)
    made = [
        hvd.allreduce_init(tensor),
        hvd.grouped_allreduce_init([tensor]),
        hvd.broadcast_init(tensor, 0),
        hvd.grouped_broadcast_init([tensor], 0),
        hvd.allgather_init(tensor),
        hvd.grouped_allgather_init([tensor]),
        hvd.reducescatter_init(tensor, hvd.Sum),
        hvd.grouped_reducescatter_init([tensor], hvd.Sum),
        hvd.alltoall_init(np.ones(size)),
    ]
    assert len(made) == len(functions)
    for operation in made:
        assert isinstance(operation, hvd.PersistentOperation)
        operation()
        operation.free()
    again = hvd.allreduce_init(tensor)
    hvd.shutdown()
    with pytest.raises(hvd.NotInitializedError, match="shut down"):
        again()
    with pytest.raises(hvd.NotInitializedError):
        hvd.allreduce_init(tensor)
    hvd.init()
    with pytest.raises(hvd.NotInitializedError, match="shut down"):
        again.start()
    assert hvd.allreduce(1.0) == 1
    hvd.shutdown()
