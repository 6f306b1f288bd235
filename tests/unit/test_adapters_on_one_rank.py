"""The framework adapters on one rank, where a program must run as well. Each takes one core, so two run at a time."""

from __future__ import annotations

import pytest

from tests.support.launching.adapter_runs import run_adapter


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["torch", "tensorflow", "jax", "keras on tensorflow"])
def test_adapter(name: str) -> None:
    run_adapter(name, 1, ("op*", "training"))  # operations have paths of their own for one rank
