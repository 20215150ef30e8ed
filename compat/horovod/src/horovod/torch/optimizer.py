"""The distributed optimizer."""

from choros.torch import DistributedOptimizer
from choros.torch.optimizer import _HorovodMethods as _DistributedOptimizer  # by which scripts recognize one

__all__ = ["DistributedOptimizer", "_DistributedOptimizer"]
