"""Elastic training for PyTorch."""

from choros.torch.elastic import *

from horovod.torch.elastic import sampler, state
