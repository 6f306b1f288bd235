"""The framework that a test is for, joined with the other ranks: once for all files of an mpirun."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def hvd() -> Iterator[Any]:
    """`collectives.torch`, initialized."""
    import torch

    import collectives.torch

    torch.set_num_threads(1)  # there are more ranks than cores
    collectives.torch.init()
    yield collectives.torch
    collectives.torch.shutdown()
