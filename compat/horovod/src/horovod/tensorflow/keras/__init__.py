"""Horovod's API for tf.keras: ``choros.keras``."""

from choros.keras import *

from horovod.tensorflow.keras import callbacks, elastic
