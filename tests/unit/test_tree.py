"""Recursive doubling and the binomial tree: few rounds, any number of ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from collectives.schedules import tree
from collectives.schedules.races import races
from collectives.schedules.schedule import StepKind
from collectives.schedules.verify import verify
from collectives.transport.simulated import replay

SIZES = [*range(1, 65), 67, 96, 127, 128, 129, 200, 257, 384, 511, 512]


def roots(size: int) -> list[int]:
    return list(range(size)) if size <= 16 else [0, 1, size // 2, size - 1]


def test_recursive_doubling_is_proved_for_every_size() -> None:
    for size in SIZES:
        verify([tree.recursive_doubling(rank, size) for rank in range(size)])


def test_broadcast_is_proved_from_every_root() -> None:
    for size in SIZES:
        for root in roots(size):
            verify([tree.broadcast(rank, size, root) for rank in range(size)])


def test_rounds() -> None:
    for size in SIZES[1:]:
        folds = 0 if size & (size - 1) == 0 else 2
        assert len(tree.recursive_doubling(0, size).rounds) == math.floor(math.log2(size)) + folds
        assert len(tree.broadcast(0, size, 0).rounds) == math.ceil(math.log2(size))


@pytest.mark.parametrize("size", range(1, 18))
def test_recursive_doubling_needs_its_versions_kept(size: int) -> None:
    """Partners write while they are read: in place always, and out of place from the second exchange on."""
    schedules = [tree.recursive_doubling(rank, size) for rank in range(size)]
    assert bool(races(schedules, aliased=True)) == (size > 1)
    assert bool(races(schedules, aliased=False)) == (size > 2)


@pytest.mark.parametrize("aliased", [True, False])
def test_broadcast_does_not_race(aliased: bool) -> None:
    for size in range(1, 12):
        for root in roots(size):
            assert races([tree.broadcast(rank, size, root) for rank in range(size)], aliased) == []


def test_one_rank_copies() -> None:
    for schedule in (tree.recursive_doubling(0, 1), tree.broadcast(0, 1, 0)):
        assert [step.kind for steps in schedule.rounds for step in steps] == [StepKind.COPY]


@pytest.mark.parametrize("size", [2, 3, 5, 7, 8, 13, 16])
def test_all_ranks_get_the_same_bits(size: int) -> None:
    random = np.random.default_rng(size)
    data = [{0: random.standard_normal(200).astype(np.float32)} for _ in range(size)]
    results = replay([tree.recursive_doubling(rank, size) for rank in range(size)], data)
    np.testing.assert_allclose(results[0][0], sum(mine[0].astype(float) for mine in data), rtol=1e-5, atol=1e-5)
    assert len({result[0].tobytes() for result in results}) == 1
