"""What the three trainings share: the model, its batches, and the line that a rank writes after each step."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import nn

FOLDER, STEPS, EVERY = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
"""Where ranks leave lines and checkpoints; the steps to train; the steps from one commit or checkpoint to the next."""

_WIDTH = 512
_LINES = open(os.path.join(FOLDER, f"steps-{os.getpid()}"), "w", buffering=1)  # noqa: SIM115  # as long as the process


def new_model() -> nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """The loss of a rank's batch of a step. The pause stands for more computation, and leaves the cores to others."""
    time.sleep(0.02)
    rows = torch.randn(16, _WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
    loss: torch.Tensor = (model(rows) - rows).square().mean()
    return loss


def done(step: int, size: int) -> None:
    """Write that a step is done: the time in seconds, its number, and the number of ranks that took it together."""
    _LINES.write(f"{time.monotonic()} {step} {size}\n")
