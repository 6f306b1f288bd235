"""Direct exchange: who meets whom, who moves the bytes, and in which order contributions are combined."""

from __future__ import annotations

import numpy as np
import pytest

from collectives.schedules import direct
from collectives.schedules.proof.replay import replay
from collectives.schedules.schedule import StepKind


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


def test_one_shot_combines_by_the_fixed_tree() -> None:
    size = 4
    data = [{0: np.array([f"{rank}"], object)} for rank in range(size)]
    results = replay([direct.one_shot(rank, size) for rank in range(size)], data, lambda a, b: "(" + a + b + ")")
    assert [result[0][0] for result in results] == ["((01)(23))"] * size
