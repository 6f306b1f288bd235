"""Set-up shared by tests of single parts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.emulated.fake_cupy import build_library


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in for the driver of NVIDIA's GPUs."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("the driver's stand-in is a C library: needs gcc")
    return build_library(tmp_path_factory.mktemp("driver"), compiler)
