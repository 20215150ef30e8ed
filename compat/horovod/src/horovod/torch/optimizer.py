"""The distributed optimizer."""

from choros.torch import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
