"""Every scenario of the engine and of persistent operations with ranks as processes, on one host, on pretended ones and
over messages only; and both as `collectives` shows them, with process sets in the numbers of all ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import collectives as hvd
from collectives.base.config import Config
from collectives.worlds.world import World
from tests.mpi.worlds import configs, connect
from tests.support.scenarios import engine, persistent

pytestmark = pytest.mark.mpi
RANKS = {"openmpi": (1, 2), "mpich": (3,)}

CONFIGS = configs(cache_capacity=8)


@pytest.fixture(scope="module", params=list(CONFIGS))
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = connect(CONFIGS[request.param])
    yield world
    world.shutdown()


@pytest.mark.parametrize("scenario", engine.SCENARIOS + persistent.SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(scenario: Callable[[World], None], world: World) -> None:
    scenario(world)


@pytest.mark.parametrize("scenario", persistent.SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_mapped_tensors(scenario: Callable[[World], None], world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent, "empty", persistent.mapped)
    scenario(world)


@pytest.mark.parametrize("scenario", engine.STEADY, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_the_steady_state(scenario: Callable[[World], None], transport: str) -> None:
    world = connect(Config(timeout=30, cycle_time=60_000.0, transport=transport))
    scenario(world)
    world.shutdown()


@pytest.fixture
def size() -> Iterator[int]:
    hvd.init()
    yield hvd.size()
    hvd.shutdown()


def test_process_sets_are_numbered_like_all_ranks(size: int) -> None:
    everybody, last = hvd.global_process_set, size - 1
    assert everybody.size() == size and everybody.rank() == hvd.rank() and everybody.included()
    chosen = hvd.add_process_set(hvd.ProcessSet([last]))
    upper = hvd.add_process_set(list(range(size // 2, size)))
    assert chosen.ranks == [last] and chosen.process_set_id != upper.process_set_id != everybody.process_set_id
    assert chosen.included() == (hvd.rank() == last)
    if upper.included():
        assert upper.size() == size - size // 2 and upper.rank() == hvd.rank() - size // 2
        root = hvd.broadcast(np.array([hvd.rank()]), root_rank=last, process_set=upper)
        both = hvd.grouped_broadcast([np.array([hvd.rank()]), np.full(3, hvd.rank())], last, process_set=upper)
        assert both[0] == last and both[1].tolist() == [last] * 3
        assert root.tolist() == [last]
        handle = hvd.allreduce_async(np.array([hvd.rank()]), op=hvd.Sum, name="upper", process_set=upper)
        assert hvd.synchronize(handle).tolist() == [sum(range(size // 2, size))] and hvd.poll(handle)
        if size // 2:
            with pytest.raises(hvd.InvalidArgumentError, match="root_rank"):
                hvd.broadcast(np.array([1]), root_rank=0, process_set=upper)
    if not chosen.included():
        calls: list[Callable[[], object]] = [
            lambda: hvd.allreduce(np.ones(3), process_set=chosen),
            lambda: hvd.allgather_async(np.ones(3), process_set=chosen),
            lambda: hvd.broadcast(np.ones(3), last, process_set=chosen),
        ]
        for call in calls:
            with pytest.raises(hvd.InvalidArgumentError, match="process"):
                call()
    assert hvd.allreduce(1.0, op=hvd.Sum) == size
    assert hvd.remove_process_set(upper) is not False
    with pytest.raises(hvd.CollectivesError):
        hvd.allreduce(np.ones(3), process_set=upper)
    assert hvd.allreduce(1.0, op=hvd.Sum) == size


def test_a_process_set_that_cannot_be(size: int) -> None:
    for ranks in ([], [size], [-1], [0, 0]):
        with pytest.raises(hvd.CollectivesError):
            hvd.add_process_set(ranks)
        assert hvd.allreduce(1.0, op=hvd.Sum) == size


def test_ranks_that_ask_for_different_process_sets(size: int) -> None:
    if size > 1:
        with pytest.raises(hvd.MismatchError):
            hvd.add_process_set([0] if hvd.rank() == 0 else [0, 1])
    assert hvd.allreduce(1.0, op=hvd.Sum) == size


def test_joining(size: int) -> None:
    for step in range(hvd.rank() + 1):
        ranks = [rank for rank in range(size) if rank >= step]
        assert hvd.allreduce(1.0, op=hvd.Sum) == len(ranks)
    assert hvd.join() == size - 1
    assert hvd.allreduce(1.0, op=hvd.Sum) == size


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
