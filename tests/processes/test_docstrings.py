"""Every public function that takes arguments has an example in its docstring; what an example shows is what it gives on
each of two ranks."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.launching.mpirun import UNUSED, python_for, run_command

NEEDS = {
    "collectives": "numpy",
    "collectives.elastic": "numpy",
    "collectives.torch": "torch",
    "collectives.torch.elastic": "torch",
    "collectives.jax": "optax",
    "collectives.jax.elastic": "optax",
    "collectives.tensorflow": "tensorflow",
    "collectives.tensorflow.elastic": "tensorflow",
    "collectives.tensorflow.keras": "tensorflow",
    "collectives.tensorflow.keras.elastic": "tensorflow",
    "collectives.keras": "keras",
    "collectives.keras.elastic": "keras",
    "collectives.ray": "ray",
    "collectives.spark": "pyspark",
    "collectives.dask": "distributed",
}
"""What each public module needs."""


def test_examples_give_what_they_show(tmp_path: Path) -> None:
    modules = [module for module, needed in NEEDS.items() if find_spec(needed)]
    job = ["collectivesrun", "-np", "2", str(python_for("openmpi")), "-m", "tests.support.examples", *modules]
    command = ["sh", "-c", 'cd "$0" && exec "$@"', str(tmp_path), *job]
    path = f"{python_for('openmpi').parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "TF_CPP_MIN_LOG_LEVEL": "3", **UNUSED}
    shown = run_command(command, timeout=120, env=environment)
    counts = re.findall(r"(\d+) lines of examples were run; without one, or failed: none", shown.output)
    assert len(counts) == 2 and int(counts[0]) > 60, str(shown)
    if missing := NEEDS.keys() - set(modules):
        pytest.skip(f"without the examples of {', '.join(sorted(missing))}")
