"""Horovod's backend of estimators is choros'."""

from choros.spark.run import SparkBackend

__all__ = ["SparkBackend"]
