"""The environment each rank gets on top of the user's: thread counts, live output, memory that stays mapped.

What the user has set is never changed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from choros.launch.plan.allocator import allocator_settings
from choros.launch.plan.cores import Share

__all__ = ["THREADS", "rank_settings"]

#: Every thread pool a framework brings along reads one of these.
THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
)


#: Open MPI's components for remote memory over a fabric. Where there is none, looking for one takes a second.
_FABRICS = {"OMPI_MCA_btl": "^ofi,uct"}


def rank_settings(
    environ: Mapping[str, str], share: Share, platform: str = sys.platform, *, one_host: bool = False
) -> dict[str, str]:
    """What to change in ``environ`` for a rank that has ``share`` of its host.

    Args:
        environ: the rank's.
        share: what it gets of the host.
        platform: as ``sys.platform``.
        one_host: whether the whole job runs on this host.

    Raises:
        ConfigError: the allocator asked for is not there.

    Example:
        >>> rank_settings({"OMP_NUM_THREADS": "8"}, Share(bind=(0,), threads=1), "darwin")["NPROC"]
        '2'
        >>> "OMP_NUM_THREADS" in rank_settings({"OMP_NUM_THREADS": "8"}, Share(bind=(0,), threads=1))
        False
    """
    wanted = {"PYTHONUNBUFFERED": "1"}
    wanted |= dict.fromkeys(THREADS, str(share.threads))
    # XLA's pool on the CPU: the thread that waits for other ranks must not be its only one.
    wanted["NPROC"] = str(max(2, share.threads))
    wanted["TF_NUM_INTEROP_THREADS"] = "1" if share.threads == 1 else "2"
    if share.crowded:
        wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if one_host:
        wanted |= _FABRICS
    added = {name: value for name, value in wanted.items() if name not in environ}
    return added | allocator_settings(environ, platform)
