"""The distributed optimizer of `collectives.torch`."""

from collectives.torch.optimizer import DistributedOptimizer
from collectives.torch.optimizer import GradientSteps as _DistributedOptimizer

__all__ = ["DistributedOptimizer", "_DistributedOptimizer"]
