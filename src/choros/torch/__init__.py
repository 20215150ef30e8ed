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

from choros.comm import (
    ProcessSet,
    ReduceOp,
    add_process_set,
    global_process_set,
    init,
    is_initialized,
    remove_process_set,
    shutdown,
)
from choros.comm.ranks import cross_rank, cross_size, is_homogeneous, local_rank, local_size, rank, size
from choros.parallel.compression import Compression
from choros.parallel.objects import allgather_object, broadcast_object
from choros.parallel.ops import barrier
from choros.topology import shard_range
from choros.torch.collectives import (
    allgather,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allreduce,
    poll,
    reducescatter,
    synchronize,
)
from choros.torch.optimizer import DistributedOptimizer, join
from choros.torch.state import broadcast_optimizer_state, broadcast_parameters

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "grouped_allreduce",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "reducescatter",
    "remove_process_set",
    "shard_range",
    "shutdown",
    "size",
    "synchronize",
]
