"""Horovod's PyTorch API.

::

    import choros.torch as hvd

    hvd.init()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for x, y in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""

try:
    import torch as _torch  # noqa: F401  (reports missing PyTorch before any other import fails)
except ImportError as _error:
    raise ImportError("choros.torch needs PyTorch: pip install 'choros[torch]'.") from _error

from choros.parallel import horovod as _horovod
from choros.parallel.horovod import *
from choros.torch import collectives as _collectives
from choros.torch import elastic
from choros.torch.collectives import *
from choros.torch.optimizer import DistributedOptimizer, join
from choros.torch.state import broadcast_optimizer_state, broadcast_parameters
from choros.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "DistributedOptimizer",
    "SyncBatchNorm",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "join",
]
__all__ += _horovod.__all__
__all__ += _collectives.__all__
