"""The framework adapters under mpirun, on several ranks; on one rank: tests/unit/test_adapters_on_one_rank.py."""

from __future__ import annotations

import pytest

from tests.adapter_runs import run_adapter

KERAS = [*(f"keras on {backend}" for backend in ("tensorflow", "jax", "torch")), "keras 2"]
DEPENDS_ON_THE_NUMBER = ("operations", "autograd", "gradients", "transforms", "sparse", "s*_norm", "tape", "training")
"""What is not the same on any number of ranks beyond one; besides the recipes."""
RUNS = [
    *((name, 2, ("*",)) for name in ("torch", "tensorflow", "jax", *KERAS)),
    *((name, 3, (*DEPENDS_ON_THE_NUMBER, "*recipes*")) for name in ("torch", "tensorflow", "jax")),
    *((name, 3, ("*recipes*",)) for name in KERAS),
    # Operations and optimizers, whose schedules and Adasum's tree have a further level.
    ("torch", 4, ("op*",)),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "n", "which"), RUNS, ids=[f"{name}-{n}" for name, n, _ in RUNS])
def test_adapter(name: str, n: int, which: tuple[str, ...]) -> None:
    run_adapter(name, n, which)
