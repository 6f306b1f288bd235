"""`local_world`: threads of this process as ranks, and what threads that are none get."""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import collectives
from collectives.base.errors import (
    CollectiveTimeoutError,
    InvalidArgumentError,
    InvalidTypeError,
    MismatchError,
    NotInitializedError,
    RankFailedError,
)
from collectives.worlds import local_world, runtime
from collectives.worlds.default_world import DefaultWorld
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.world import World
from tests.support.launching.training import train_alone, train_as_rank


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert type(runtime.default) is DefaultWorld
    assert type(collectives.global_process_set) is ProcessSet
    assert not local_world._ranks
    assert not collectives.is_initialized()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_each_thread_is_its_own_rank(size: int) -> None:
    def of_rank(world: World) -> tuple[int, ...]:
        collectives.init()
        assert world is collectives.world() and collectives.is_initialized()
        everyone = collectives.global_process_set
        assert (everyone.rank(), everyone.size(), everyone.process_set_id) == (world.rank, size, 0)
        assert (collectives.local_rank(), collectives.local_size(), collectives.cross_size()) == (world.rank, size, 1)
        total = collectives.allreduce(np.full(3, world.rank + 1.0), op=collectives.Sum, process_set=everyone)
        assert (total == size * (size + 1) / 2).all()
        assert collectives.broadcast_object(f"from {world.rank}", size - 1) == f"from {size - 1}"
        return collectives.rank(), collectives.size()

    with collectives.local_world(size) as world:
        assert world.run(of_rank) == [(rank, size) for rank in range(size)]
        assert world.run(lambda: collectives.rank()) == list(range(size))


def test_each_rank_has_its_own_process_sets() -> None:
    def of_rank() -> float | None:
        odd = collectives.add_process_set([1, 3])
        assert odd.process_set_id == 1 and odd.included() == (collectives.rank() in (1, 3))
        total = None
        if odd.included():
            total = collectives.allreduce(float(collectives.rank()), op=collectives.Sum, process_set=1)
        assert collectives.remove_process_set(odd)
        with pytest.raises(collectives.InvalidTypeError, match="process_set: expected a ProcessSet, got None"):
            collectives.remove_process_set(None)  # type: ignore[arg-type]
        with pytest.raises(collectives.InvalidArgumentError, match="algorithm=1: expected one of auto, ring"):
            collectives.allreduce_(np.ones(4), algorithm=1)  # type: ignore[call-overload]
        return total

    with collectives.local_world(4) as world:
        assert world.run(of_rank) == [None, 4.0, None, 4.0]


def test_training_is_that_of_one_process_on_all_data() -> None:
    with collectives.local_world(3) as world:
        for weights in world.run(train_as_rank):
            np.testing.assert_allclose(weights, train_alone(), rtol=1e-12)


def test_a_rank_that_raises_ends_the_others_and_no_later_run() -> None:
    def of_rank() -> None:
        if collectives.rank() == 1:
            raise KeyError("no such layer")
        collectives.barrier()

    with collectives.local_world(3) as world:
        with pytest.raises(RankFailedError, match="rank 1 of the local world raised KeyError: 'no such") as raised:
            world.run(of_rank)
        assert isinstance(raised.value.__cause__, KeyError)
        assert (
            world.run(lambda: float(collectives.allreduce(collectives.rank() + 1.0, op=collectives.Sum))) == [6.0] * 3
        )


def test_an_error_of_all_ranks_has_its_type_as_the_cause() -> None:
    with collectives.local_world(2) as world:
        with pytest.raises(RankFailedError, match="MismatchError") as raised:
            world.run(lambda rank: collectives.allreduce(np.zeros(2 + rank.rank)))
        assert isinstance(raised.value.__cause__, MismatchError)


def test_a_rank_that_returns_early_is_not_waited_for() -> None:
    with (
        collectives.local_world(2) as world,
        pytest.raises(RankFailedError, match=r"rank 1 of the local world.*rank 0.*has shut down"),
    ):
        world.run(lambda rank: collectives.barrier() if rank.rank else None)


def test_a_run_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_world, "END_WITHIN", 0.2)
    goes_on, ended = threading.Event(), []

    def of_rank(world: World) -> None:
        if world.rank == 0:
            goes_on.wait(30)
        else:
            with pytest.raises(RankFailedError, match="the run was ended: CollectiveTimeoutError"):
                collectives.barrier()
            ended.append(world.rank)

    with collectives.local_world(2) as world:
        with pytest.raises(CollectiveTimeoutError, match=r"rank 0, rank 1 did not end within 0.1 s"):
            world.run(of_rank, timeout=0.1)
        with pytest.raises(InvalidArgumentError, match="an earlier run\(\) is still running: rank 0"):
            world.run(of_rank)
        goes_on.set()
        for thread in world._threads:
            thread.join(30)
        assert ended == [1]
        assert world.run(lambda: collectives.rank()) == [0, 1]


def test_a_rank_that_does_not_end_after_anothers_failure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_world, "END_WITHIN", 0.2)
    goes_on = threading.Event()

    def of_rank(world: World) -> None:
        if world.rank:
            raise OSError("disk full")
        goes_on.wait(30)

    with collectives.local_world(2) as world:
        with pytest.raises(RankFailedError, match=r"rank 1 .*OSError: disk full \(rank 0 did not end after that\)"):
            world.run(of_rank)
        goes_on.set()
        for thread in world._threads:
            thread.join(30)


def test_threads_without_a_rank_are_refused() -> None:
    def in_thread(function: object) -> list[object]:
        answers: list[object] = []

        def call() -> None:
            try:
                answers.append(collectives.rank())
            except NotInitializedError as error:
                answers.append(str(error))

        run = (lambda body: body()) if function is None else function
        thread = threading.Thread(target=lambda: run(call), name="a helper")  # type: ignore[operator]
        thread.start()
        thread.join(30)
        return answers

    def of_rank() -> int:
        (refusal,) = in_thread(None)
        assert "thread 'a helper' belongs to no rank of the local world" in str(refusal)
        assert in_thread(contextvars.copy_context().run) == [collectives.rank()]
        assert in_thread(local_world.bound(lambda body: body())) == [collectives.rank()]
        return collectives.rank()

    with collectives.local_world(2) as world:
        for name in ("rank", "init", "is_initialized", "barrier"):
            with pytest.raises(NotInitializedError, match="belongs to no rank of the local world"):
                getattr(collectives, name)()
        with pytest.raises(NotInitializedError, match="belongs to no rank of the local world"):
            collectives.global_process_set.rank()
        assert world.run(of_rank) == [0, 1]


def test_what_a_rank_has_made_is_no_other_ranks_and_none_after_the_world() -> None:
    made: dict[int, object] = {}

    def of_rank(world: World) -> None:
        made[world.rank] = local_world.bound(collectives.rank)
        collectives.barrier()
        assert made[world.rank]() == world.rank  # type: ignore[operator]
        with pytest.raises(InvalidArgumentError, match=f"rank {world.rank} uses an object"):
            made[1 - world.rank]()  # type: ignore[operator]

    with collectives.local_world(2) as world:
        world.run(of_rank)
    with pytest.raises(NotInitializedError, match="a local world that has ended"):
        made[0]()  # type: ignore[operator]


def test_one_local_world_at_a_time_and_none_beside_init() -> None:
    with collectives.local_world(2) as world:
        with pytest.raises(InvalidArgumentError, match="already has a local world"), collectives.local_world(2):
            pass
        with pytest.raises(RankFailedError, match="already has a local world"):
            world.run(lambda: collectives.local_world(1).__enter__())
    with pytest.raises(InvalidArgumentError, match="has ended"):
        world.run(lambda: None)
    collectives.init()
    try:
        with pytest.raises(InvalidArgumentError, match=r"init\(\) has made this process a rank"):
            collectives.local_world(2).__enter__()
    finally:
        collectives.shutdown()


def test_a_rank_that_has_shut_down_does_not_come_back() -> None:
    def of_rank() -> None:
        collectives.shutdown()
        assert not collectives.is_initialized()
        with pytest.raises(NotInitializedError, match="cannot join its local world again"):
            collectives.init()

    with collectives.local_world(2) as world:
        world.run(of_rank)


@pytest.mark.parametrize("size", [0, -1, "2"])
def test_wrong_sizes(size: int) -> None:
    error = InvalidTypeError if isinstance(size, str) else InvalidArgumentError
    with pytest.raises(error, match="local_world: size: expected"):
        collectives.local_world(size).__enter__()


def test_messages_name_the_threads_rank(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("collectives")
    with collectives.local_world(2) as world:
        world.run(lambda rank: logger.warning("of %d", rank.rank))
    assert sorted((each.getMessage(), each.rank) for each in caplog.records) == [("of 0", 0), ("of 1", 1)]  # type: ignore[attr-defined]
