"""Elastic training for TensorFlow."""

from choros.tensorflow.elastic import *
