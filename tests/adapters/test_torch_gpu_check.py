"""What `benchmarks.gpu.training` checks on a GPU, on the CPU: that the checks themselves are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.gpu.training import CHECKS


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_on_the_cpu(hvd: Any, check: Callable[[str], None]) -> None:
    check("cpu")
