"""Horovod's functions for Spark are choros'."""

from choros.spark import run, run_elastic

__all__ = ["run", "run_elastic"]
