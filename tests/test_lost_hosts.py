"""Ranks and hosts that die between hosts; more of them: ``python -m tests.lost_hosts 0 60``."""

from __future__ import annotations

import pytest

from tests.lost_hosts import draw, lose


@pytest.mark.parametrize(
    ("seed", "how", "mpi"), [(5, "killed", False), (2, "off", False), (7, "cut for a moment", False), (4, "off", True)]
)
def test_every_survivor_is_told_who_was_lost(seed: int, how: str, mpi: bool) -> None:
    assert lose(draw(seed, how, mpi)) == []
