"""Horovod's backend of estimators is choros'."""

from choros.spark.backend import SparkBackend

__all__ = ["SparkBackend"]
