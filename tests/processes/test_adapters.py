"""The framework adapters under mpirun, on several ranks; on one rank: tests/unit/test_adapters_on_one_rank.py."""

from __future__ import annotations

import pytest

from tests.support.launching.adapter_runs import ENVIRONMENTS, run_adapter

DEPENDS_ON_THE_NUMBER = ("operations", "autograd", "gradients", "transforms", "sparse", "s*_norm")
"""What is not the same on any number of ranks beyond one. Rings, trees and hosts of more ranks are the engine's, whose
own tests need no framework."""
ON_THREE = {
    **dict.fromkeys(("torch", "tensorflow", "jax"), DEPENDS_ON_THE_NUMBER),
    "torch.distributed": ("calls", "membership"),
    # Its recipes come to what one rank comes to with the whole batch: here with thirds of it.
    "keras on torch": ("*",),
}
"""By adapter, what runs on three ranks; all else runs on two."""
RUNS = [
    *((name, 2, ("*",), ON_THREE.get(name, ())) for name in ENVIRONMENTS if ON_THREE.get(name) != ("*",)),
    *((name, 3, which, ()) for name, which in ON_THREE.items()),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "n", "which", "but"), RUNS, ids=[f"{name}-{n}" for name, n, _, _ in RUNS])
def test_adapter(name: str, n: int, which: tuple[str, ...], but: tuple[str, ...]) -> None:
    run_adapter(name, n, which, but)
