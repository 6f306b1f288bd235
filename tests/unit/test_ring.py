"""The ring: proved for every size, in its number of rounds and chunks, safe in place, and equal to the last bit on all
ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from collectives import ring
from collectives.schedules.races import races
from collectives.schedules.schedule import Schedule, StepKind
from collectives.schedules.verify import verify
from collectives.transport.simulated import replay

Algorithm = Callable[..., Schedule]

SIZES = [*range(1, 65), 67, 96, 128, 257]
ALGORITHMS = [ring.allreduce, ring.reducescatter, ring.allgather]


def roots(size: int) -> list[int]:
    return list(range(size)) if size <= 9 else [0, size // 2, size - 1]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_size_is_proved(algorithm: Algorithm) -> None:
    for size in SIZES:
        verify([algorithm(rank, size) for rank in range(size)])


def test_broadcast_is_proved_from_every_root() -> None:
    for size in SIZES[:-1]:
        for root in roots(size):
            verify([ring.broadcast(rank, size, root) for rank in range(size)])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("aliased", [True, False])
def test_nothing_races(algorithm: Algorithm, aliased: bool) -> None:
    for size in range(1, 13):
        assert races([algorithm(rank, size) for rank in range(size)], aliased) == []


@pytest.mark.parametrize("aliased", [True, False])
def test_broadcast_does_not_race(aliased: bool) -> None:
    for size in range(1, 10):
        for root in roots(size):
            assert races([ring.broadcast(rank, size, root) for rank in range(size)], aliased) == []


@pytest.mark.parametrize(("algorithm", "passes"), [(ring.allreduce, 2), (ring.reducescatter, 1), (ring.allgather, 1)])
def test_every_rank_sends_one_chunk_to_its_neighbour_in_each_round(algorithm: Algorithm, passes: int) -> None:
    for size in range(2, 20):
        for rank in range(size):
            schedule = algorithm(rank, size)
            assert len(schedule.rounds) == passes * (size - 1)
            for steps in schedule.rounds:
                sends = [step for step in steps if step.kind is StepKind.SEND]
                arrivals = [step for step in steps if step.kind in (StepKind.RECEIVE, StepKind.REDUCE)]
                assert [(s.peer, s.span) for s in sends] == [((rank + 1) % size, 1)]
                assert [(s.peer, s.span) for s in arrivals] == [((rank - 1) % size, 1)]


def test_after_the_reduce_scatter_a_rank_owns_the_chunk_of_its_number() -> None:
    for size in range(2, 20):
        for rank in range(size):
            both, first = ring.allreduce(rank, size).rounds, ring.reducescatter(rank, size).rounds
            assert both[: size - 1] == first
            assert (first[-1][-1].kind, first[-1][-1].chunk) == (StepKind.REDUCE, rank)


def test_the_drawing_shows_what_four_ranks_do() -> None:
    schedules = [ring.allreduce(rank, 4) for rank in range(4)]
    held = [[letter] * 4 for letter in "abcd"]
    drawn: list[list[list[str]]] = []
    for number in range(6):
        before = [list(chunks) for chunks in held]
        rows = [["."] * 4 for _ in held]
        for rank, schedule in enumerate(schedules):
            _, arrival = schedule.rounds[number]
            value = before[arrival.peer][arrival.chunk] + (held[rank][arrival.chunk] if number < 3 else "")
            held[rank][arrival.chunk] = value
            rows[rank][arrival.chunk] = "all" if len(value) == 4 else value
        drawn.append(rows)
    lines = [line.split() for line in (ring.__doc__ or "").splitlines()]
    for rounds in (drawn[:3], drawn[3:]):
        for rank in range(4):
            assert ["rank", str(rank), *rounds[0][rank], *rounds[1][rank], *rounds[2][rank]] in lines


def test_one_rank_copies() -> None:
    for schedule in (ring.allreduce(0, 1), ring.reducescatter(0, 1), ring.allgather(0, 1), ring.broadcast(0, 1, 0)):
        assert [step.kind for steps in schedule.rounds for step in steps] == [StepKind.COPY]


@pytest.mark.parametrize("size", [2, 3, 5, 8, 13])
def test_all_ranks_get_the_same_bits(size: int) -> None:
    random = np.random.default_rng(size)
    data = [{chunk: random.standard_normal(40).astype(np.float32) for chunk in range(size)} for _ in range(size)]
    results = replay([ring.allreduce(rank, size) for rank in range(size)], data)
    for chunk in range(size):
        np.testing.assert_allclose(
            results[0][chunk], sum(mine[chunk].astype(float) for mine in data), rtol=1e-5, atol=1e-5
        )
        assert len({result[chunk].tobytes() for result in results}) == 1
