"""The public names that Horovod's APIs have in common, for every framework; faces re-export them. A face imports
these by ``import *`` and adds what its framework does differently: its collectives (``parallel/variants.py``), its
optimizer, its broadcast of parameters, its elastic states.
"""

from choros.comm import (
    ProcessSet,
    Reduction,
    add_process_set,
    global_process_set,
    init,
    is_initialized,
    remove_process_set,
    shutdown,
)
from choros.comm.built import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from choros.comm.context import cross_rank, cross_size, is_homogeneous, local_rank, local_size, rank, size
from choros.comm.recording import start_timeline, stop_timeline
from choros.errors import EngineError
from choros.parallel.compression import Compression
from choros.parallel.objects import allgather_object, broadcast_object
from choros.parallel.ops import barrier
from choros.topology import shard_range

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather_object",
    "barrier",
    "broadcast_object",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shard_range",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

Average = Reduction.AVERAGE
Sum = Reduction.SUM
Adasum = Reduction.ADASUM
Min = Reduction.MIN
Max = Reduction.MAX
Product = Reduction.PRODUCT

#: Communication failed, or ranks called different collectives: Horovod's name for it.
HorovodInternalError = EngineError
