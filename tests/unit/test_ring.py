"""The ring: its number of rounds and chunks, the neighbours, and its drawing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from collectives import ring
from collectives.schedules.schedule import Schedule, StepKind

Algorithm = Callable[..., Schedule]


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
