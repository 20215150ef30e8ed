"""Horovod's API for TensorFlow: ``choros.tensorflow``."""

from choros.tensorflow import *

from horovod import _keras_2
from horovod.tensorflow import compression, elastic, functions, mpi_ops, sync_batch_norm, util
from horovod.tensorflow.util import _executing_eagerly
