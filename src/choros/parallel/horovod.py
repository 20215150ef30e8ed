"""The public names that Horovod's APIs have in common, for every framework; faces re-export them. A face imports
these by ``import *`` and adds what its framework does differently: its collectives, its
optimizer, its broadcast of parameters, its elastic states.
"""

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

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
from choros.comm.context import cross_rank, cross_size, is_homogeneous, local_rank, local_size, rank, size, topology
from choros.comm.recording import start_timeline, stop_timeline
from choros.errors import EngineError
from choros.frameworks import is_installed
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


# ── what can communicate here; answered without importing a framework ─────────────────────────────


def mpi_built() -> bool:
    """Whether the mpi engine is installed, that is mpi4py."""
    return is_installed("mpi4py")


def mpi_enabled() -> bool:
    """Whether MPI connects the ranks of this job; ``False`` before ``init()``, and of one rank without a launcher."""
    return _engine() == "mpi"


def mpi_threads_supported() -> bool:
    """Whether several threads may call MPI at once. ``NotInitializedError`` before ``init()``."""
    topology("mpi_threads_supported()")
    if not mpi_enabled():
        return False
    mpi: Any = sys.modules["mpi4py.MPI"]
    return bool(mpi.Query_thread() == mpi.THREAD_MULTIPLE)


def gloo_built() -> bool:
    """Whether the torch engine is installed: PyTorch contains Gloo."""
    return is_installed("torch")


def gloo_enabled() -> bool:
    """Whether ``torch.distributed`` connects the ranks of this job, in host memory by Gloo."""
    return _engine() == "torch"


def nccl_built() -> int:
    """The version of NCCL that is installed with PyTorch or nccl4py, such as 22703 for 2.27.3; 0 if there is none."""
    if not (is_installed("nccl") or _torch_version("cuda")):
        return 0
    for cuda in ("13", "12", "11"):
        try:
            major, minor, patch = importlib.metadata.version(f"nvidia-nccl-cu{cuda}").split(".")[:3]
        except importlib.metadata.PackageNotFoundError:
            continue
        return 10000 * int(major) + 100 * int(minor) + int(patch)
    return 0


def cuda_built() -> bool:
    """Whether tensors on NVIDIA's GPUs can stay there: with nccl4py and NCCL, or a PyTorch for CUDA."""
    return bool(nccl_built() or _torch_version("cuda"))


def rocm_built() -> bool:
    """Whether tensors on AMD's GPUs can stay there: with a PyTorch for ROCm."""
    return bool(_torch_version("hip"))


def ddl_built() -> bool:
    """``False``: choros has no engine for IBM's DDL."""
    return False


def ccl_built() -> bool:
    """``False``: choros has no engine for Intel's oneCCL."""
    return False


def _engine() -> str:
    return global_process_set.communicator.engine if is_initialized() else ""


def _torch_version(of: str) -> str:
    """The version of ``cuda`` or ``hip`` that the installed PyTorch was built with."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return ""
    text = Path(found.origin).with_name("version.py").read_text()
    version = re.search(rf"^{of}\b[^=\n]*= ['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return version[1] if version else ""
