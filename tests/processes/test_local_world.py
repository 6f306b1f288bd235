"""Every framework on the ranks of a local world trains as on one rank with all data; Keras as ``MirroredStrategy``."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tests.support.launching.mpirun import UNUSED, UNUSED_BY_TENSORFLOW, run_command


@pytest.mark.parametrize("framework", ["torch", "jax", "tensorflow", "keras"])
def test_training_is_that_of_one_rank(framework: str) -> None:
    needed = (framework, "tensorflow") if framework == "keras" else (framework,)
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    hidden = UNUSED if framework == "jax" else UNUSED_BY_TENSORFLOW
    command = [sys.executable, "-m", "tests.support.scenarios.local_worlds", framework]
    env = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", **hidden}
    assert "\nequal\n" in f"\n{run_command(command, timeout=280, env=env).output}"
