"""Ranks killed in the middle of operations on mapped memory; more of them: ``python -m tests.trials.killed_ranks 0
100``."""

from __future__ import annotations

import pytest

from tests.trials.killed_ranks import OPERATIONS, die


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_survivors_are_told_and_keep_nothing(operation: str) -> None:
    assert die(OPERATIONS.index(operation), operation) == []
