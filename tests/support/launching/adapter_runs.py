"""Runs the tests of a framework's adapter under mpirun: all of its files in one run for each number of ranks.

Starting a framework takes longer than most of its tests, so that the ranks go through all files without ending in
between.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import pytest

from tests.support.launching.mpirun import ROOT, UNUSED, UNUSED_BY_TENSORFLOW, run_ranks

FOLDER = ROOT / "tests" / "adapters"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", **UNUSED_BY_TENSORFLOW}
# Tests of JAX compile many small programs, each for one call: to optimize them takes longer than it saves.
XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
KERAS_3 = ("keras", "keras3")
ENVIRONMENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]] = {
    # Compilers in processes of their own, as torch 2.4 starts them, would outlive the ranks.
    "torch": (("torch",), ("torch",), {"TORCHINDUCTOR_COMPILE_THREADS": "1"}),
    "torch.distributed": (("c10d",), ("torch",), {}),
    "tensorflow": (("tensorflow",), ("tensorflow",), QUIET),
    "jax": (("jax",), ("jax",), {"XLA_FLAGS": f"{XLA_FLAGS} --xla_force_host_platform_device_count=2"}),
    "keras on tensorflow": (KERAS_3, ("keras", "tensorflow"), {"KERAS_BACKEND": "tensorflow", **QUIET}),
    "keras on jax": (KERAS_3, ("keras", "jax"), {"KERAS_BACKEND": "jax", "XLA_FLAGS": XLA_FLAGS, **UNUSED}),
    "keras on torch": (KERAS_3, ("keras", "torch"), {"KERAS_BACKEND": "torch", **UNUSED_BY_TENSORFLOW}),
    "keras 2": (("keras", "keras2"), ("tensorflow", "tf_keras"), {"TF_USE_LEGACY_KERAS": "1", **QUIET}),
}
"""By what messages call it: the words in the names of the files, the modules that they need, and further environment
variables."""


def run_adapter(name: str, n: int, which: Sequence[str] = ("*",), but: Sequence[str] = ()) -> None:
    """Run an adapter's tests on ``n`` ranks: of files that match ``which``, ``but`` for some of them; skip where a
    framework is missing."""
    words, modules, environment = ENVIRONMENTS[name]
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    files = sorted(_matching(words, which) - _matching(words, but))
    assert files
    result = run_ranks(
        n, ["-m", "pytest", "--with-mpi", "-q", "-x", "-p", "no:cacheprovider", *files], timeout=540, env=environment
    )
    assert all(" passed" in output for output in result.ranks), str(result)


def _matching(words: Sequence[str], patterns: Sequence[str]) -> set[str]:
    return {str(path) for word in words for each in patterns for path in FOLDER.glob(f"test_{word}_{each}.py")}
