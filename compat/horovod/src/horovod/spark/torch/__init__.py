"""Horovod's estimator of PyTorch's modules is choros'."""

from choros.spark.torch import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
