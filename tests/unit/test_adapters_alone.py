"""Each adapter works where only its own framework is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

FRAMEWORKS = ("cupy", "flax", "jax", "keras", "optax", "tensorflow", "tf_keras", "torch")
UNUSED = ("matplotlib", "pandas", "sklearn")
"""What Keras takes seconds to import wherever it is installed."""
PROGRAM = """
import sys
from importlib.machinery import PathFinder


class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {absent} else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Without
import numpy as np
import collectives.{adapter} as hvd
hvd.init()
tensor = {tensor}
result = hvd.allreduce(tensor, op=hvd.Sum)
assert np.array_equal(np.asarray(result), np.asarray(tensor)) and type(result) is type(tensor), result
hvd.shutdown()
print("alone")
"""
CASES = [
    # adapter, what is installed, a tensor of it, KERAS_BACKEND
    ("torch", {"torch"}, "__import__('torch').arange(3.0)", ""),
    ("tensorflow", {"tensorflow", "keras"}, "__import__('tensorflow').range(3.0)", "tensorflow"),
    ("jax", {"jax"}, "__import__('jax').numpy.arange(3.0)", ""),
    ("keras", {"keras", "jax"}, "__import__('keras').ops.arange(3.0)", "jax"),
    ("keras", {"keras", "torch"}, "__import__('keras').ops.arange(3.0)", "torch"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "installed", "tensor", "backend"), CASES, ids=[f"{a}-{b}".rstrip("-") for a, _, _, b in CASES]
)
def test_an_adapter_needs_no_framework_but_its_own(
    adapter: str, installed: set[str], tensor: str, backend: str
) -> None:
    missing = sorted(name for name in installed if importlib.util.find_spec(name) is None)
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    program = PROGRAM.format(
        absent=[*UNUSED, *(name for name in FRAMEWORKS if name not in installed)], adapter=adapter, tensor=tensor
    )
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND": backend}
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert shown.returncode == 0 and shown.stdout.endswith("alone\n"), shown.stdout + shown.stderr
