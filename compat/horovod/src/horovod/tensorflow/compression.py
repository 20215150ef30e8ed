"""The compressions of gradients."""

from horovod._compression import *
