"""The framework adapters under mpirun, on several ranks; on one rank: tests/unit/test_adapters_on_one_rank.py."""

from __future__ import annotations

import pytest

from tests.adapter_runs import run_adapter

RUNS = [
    *(("torch", n) for n in (2, 3, 4)),
    *((name, n) for name in ("tensorflow", "jax") for n in (2, 3)),
    *((f"keras on {backend}", 2) for backend in ("tensorflow", "jax", "torch")),
    ("keras 2", 2),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "n"), RUNS)
def test_adapter(name: str, n: int) -> None:
    run_adapter(name, n)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*(f"keras on {backend}" for backend in ("tensorflow", "jax", "torch")), "keras 2"])
def test_recipes_on_three_ranks(name: str) -> None:
    run_adapter(name, 3, "*recipes*")
