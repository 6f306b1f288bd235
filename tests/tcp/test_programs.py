"""Random programs over TCP, with forks in their middle, on pretended hosts and over messages only."""

from __future__ import annotations

import pytest

from tests.support.random.program_runs import run_on_processes


@pytest.mark.parametrize(("first", "size"), [(1010, 4), (1060, 3)], ids=["2-and-2", "3-messages"])
def test_programs(first: int, size: int) -> None:
    run_on_processes(range(first, first + 8), size, tcp=True)
