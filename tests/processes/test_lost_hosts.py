"""Ranks and hosts that die between hosts; more, and under mpirun: ``python -m tests.trials.lost_hosts 0 60
[--mpi]``."""

from __future__ import annotations

import pytest

from tests.trials.lost_hosts import draw, lose


@pytest.mark.parametrize(
    ("seed", "how", "mpi"),
    [(5, "killed", ""), (2, "off", ""), (7, "cut for a moment", ""), (4, "off", "openmpi"), (4, "cut", "mpich")],
)
def test_every_survivor_is_told_who_was_lost(seed: int, how: str, mpi: str) -> None:
    assert lose(draw(seed, how, mpi)) == []
