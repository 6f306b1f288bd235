"""The distributed optimizer of `collectives.torch`."""

from collectives.torch.optimizer import DistributedOptimizer
from collectives.torch.optimizer import _Distributed as _DistributedOptimizer

__all__ = ["DistributedOptimizer", "_DistributedOptimizer"]
