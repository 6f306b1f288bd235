"""Ranks that die while they train over torch.distributed; more of them: ``python -m tests.trials.c10d_deaths``."""

from __future__ import annotations

import pytest

pytest.importorskip("torch.distributed.fsdp")

from tests.trials.c10d_deaths import Death, inject


@pytest.mark.parametrize(
    "death",
    [
        Death("DDP", "SIGKILL", (0, 0, 0), 1, steps=2, delay=0.1),
        Death("FSDP2", "exception", (0, 0), 0, steps=2, delay=0.2),
        Death("tensor parallel", "SIGSTOP", (0, 0), 1, steps=2, delay=0.1),
    ],
    ids=str,
)
def test_every_survivor_raises_and_ends(death: Death) -> None:
    assert inject(death)[2] == []
