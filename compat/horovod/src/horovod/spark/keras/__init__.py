"""Horovod's estimator of Keras models is choros'."""

from choros.spark.keras import KerasEstimator, KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
