"""Direct exchange: proved for every size; what may work in place does, and what may not is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from collectives.schedules import direct
from collectives.schedules.races import races
from collectives.schedules.schedule import Schedule, StepKind
from collectives.schedules.verify import verify
from collectives.transport.simulated import replay

Algorithm = Callable[..., Schedule]

SIZES = [*range(1, 65), 67, 96, 128, 257]
ALGORITHMS = [direct.allreduce, direct.one_shot, direct.reducescatter, direct.allgather, direct.alltoall]
BROADCASTS = [direct.broadcast, direct.broadcast_flat]


def roots(size: int) -> list[int]:
    return list(range(size)) if size <= 9 else [0, size // 2, size - 1]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_size_is_proved(algorithm: Algorithm) -> None:
    for size in SIZES:
        verify([algorithm(rank, size) for rank in range(size)])


@pytest.mark.parametrize("algorithm", BROADCASTS)
def test_broadcasts_are_proved_from_every_root(algorithm: Algorithm) -> None:
    for size in SIZES[:-1]:
        for root in roots(size):
            verify([algorithm(rank, size, root) for rank in range(size)])


@pytest.mark.parametrize("algorithm", [direct.allreduce, direct.reducescatter, direct.allgather, direct.alltoall])
@pytest.mark.parametrize("aliased", [True, False])
def test_nothing_races(algorithm: Algorithm, aliased: bool) -> None:
    for size in range(1, 11):
        assert races([algorithm(rank, size) for rank in range(size)], aliased) == []


@pytest.mark.parametrize("algorithm", BROADCASTS)
@pytest.mark.parametrize("aliased", [True, False])
def test_broadcasts_do_not_race(algorithm: Algorithm, aliased: bool) -> None:
    for size in range(1, 10):
        for root in roots(size):
            assert races([algorithm(rank, size, root) for rank in range(size)], aliased) == []


@pytest.mark.parametrize("size", range(1, 11))
def test_one_shot_needs_its_input_kept(size: int) -> None:
    schedules = [direct.one_shot(rank, size) for rank in range(size)]
    assert races(schedules, aliased=False) == []
    assert bool(races(schedules, aliased=True)) == (size > 1)


def test_peers_are_met_in_turn() -> None:
    for size in range(2, 12):
        for rank in range(size):
            scatter, gather = direct.allreduce(rank, size).rounds
            for steps, kind in ((scatter, StepKind.REDUCE), (gather, StepKind.RECEIVE)):
                assert [s.peer for s in steps if s.kind is kind] == [(rank + d) % size for d in range(1, size)]
            assert all(step.push for step in gather) and not any(step.push for step in scatter)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_a_broadcast_takes_each_chunk_from_the_root_once(size: int) -> None:
    root = size - 1
    first, *_ = direct.broadcast(root, size, root).rounds
    assert sorted(step.chunk for step in first if step.kind is StepKind.SEND and not step.push) == [
        c for c in range(size) if c != root
    ]
    assert {step.chunk for step in first if step.push} == {root}
    for rank in set(range(size)) - {root}:
        got = [
            step.chunk
            for steps in direct.broadcast(rank, size, root).rounds
            for step in steps
            if step.kind is StepKind.RECEIVE
        ]
        assert sorted(got) == list(range(size))


def test_two_ranks_share_the_work_of_a_broadcast() -> None:
    (root, copies), (peer, _) = direct.broadcast(0, 2, 0).rounds, direct.broadcast(1, 2, 0).rounds
    assert [s.kind for s in copies] == [StepKind.COPY]
    assert [(s.chunk, s.push) for s in root if s.kind is StepKind.SEND] == [(1, False), (0, True)]
    assert [(s.chunk, s.push) for s in peer] == [(1, False), (0, True)]


@pytest.mark.parametrize("algorithm", [direct.allreduce, direct.one_shot])
@pytest.mark.parametrize("size", [2, 3, 5, 8, 13])
def test_all_ranks_get_the_same_bits(algorithm: Algorithm, size: int) -> None:
    schedules = [algorithm(rank, size) for rank in range(size)]
    random = np.random.default_rng(size)
    data = [
        {chunk: random.standard_normal(40).astype(np.float32) for chunk in range(schedules[0].chunks)}
        for _ in range(size)
    ]
    results = replay(schedules, data)
    for chunk in data[0]:
        np.testing.assert_allclose(
            results[0][chunk], sum(mine[chunk].astype(float) for mine in data), rtol=1e-5, atol=1e-5
        )
        assert len({result[chunk].tobytes() for result in results}) == 1


def test_one_shot_combines_in_the_order_of_the_ranks() -> None:
    size = 4
    data = [{0: np.array([f"{rank}"], object)} for rank in range(size)]
    assert [result[0][0] for result in replay([direct.one_shot(rank, size) for rank in range(size)], data)] == [
        "0123"
    ] * size
