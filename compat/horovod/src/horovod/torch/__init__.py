"""Horovod's API for PyTorch: ``choros.torch``."""

from choros.torch import *

from horovod.torch import compression, elastic, functions, mpi_ops, optimizer, sync_batch_norm
