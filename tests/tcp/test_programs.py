"""Random programs over TCP: many in one world, with forks in their middle, on one host, on pretended ones, and over
messages only."""

from __future__ import annotations

import pytest

from tests.program_runs import run_on_processes


@pytest.mark.parametrize("first", range(1000, 1040, 10))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_programs(size: int, first: int) -> None:
    run_on_processes(range(first, first + 10), size, tcp=True)
