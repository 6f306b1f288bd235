"""The ring: its number of rounds and chunks, and the neighbours."""

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
