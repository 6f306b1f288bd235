"""Every framework on the ranks of a local world trains as on one rank with all data; Keras as ``MirroredStrategy``."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("framework", ["torch", "jax", "tensorflow", "keras"])
def test_training_is_that_of_one_rank(framework: str) -> None:
    needed = (framework, "tensorflow") if framework == "keras" else (framework,)
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    shown = subprocess.run(
        [sys.executable, "-m", "tests.support.scenarios.local_worlds", framework],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert shown.stdout.strip().endswith("equal"), shown.stdout + shown.stderr
