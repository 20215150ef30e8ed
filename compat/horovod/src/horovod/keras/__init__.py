"""Horovod's API for Keras: ``choros.keras``, on TensorFlow, PyTorch and JAX."""

from choros.keras import *

from horovod import _keras_2
from horovod.keras import callbacks, elastic
