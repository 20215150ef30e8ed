"""Gradients of several batches for each step, in graphs of TensorFlow 1."""

from choros.tensorflow import LocalGradientAggregationHelper

__all__ = ["LocalGradientAggregationHelper"]
