"""The environment each rank gets on top of the user's: thread counts, live output, memory that stays mapped.

What the user has set is never changed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from choros.launch.cores import Share

__all__ = ["MEMORY", "THREADS", "rank_settings"]

#: Every thread pool a framework brings along reads one of these.
THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "NPROC",  # XLA's pool on the CPU
)

#: glibc gives large buffers back to the kernel when they are freed and faults them in again at the next step;
#: gradients are such buffers. Keeping them costs memory that is in use anyway, and saves a third of the time.
MEMORY = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
}


def rank_settings(environ: Mapping[str, str], share: Share, platform: str = sys.platform) -> dict[str, str]:
    """What to add to ``environ`` for a rank that has ``share`` of its host.

    Example:
        >>> rank_settings({"OMP_NUM_THREADS": "8"}, Share(bind=(0,), threads=1), "darwin")["NPROC"]
        '1'
        >>> "OMP_NUM_THREADS" in rank_settings({"OMP_NUM_THREADS": "8"}, Share(bind=(0,), threads=1))
        False
    """
    wanted = {"PYTHONUNBUFFERED": "1"}
    wanted |= dict.fromkeys(THREADS, str(share.threads))
    wanted["TF_NUM_INTEROP_THREADS"] = "1" if share.threads == 1 else "2"
    if share.crowded:
        wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if platform.startswith("linux") and not any(name in environ for name in MEMORY):
        wanted |= MEMORY
    return {name: value for name, value in wanted.items() if name not in environ}
