"""The environment variables that choros adds for each rank: thread counts, unbuffered output, allocator settings.

Variables that the user has set are never changed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from choros.config import ENGINE
from choros.launch.plan.allocator import allocator_settings
from choros.launch.plan.cores import Share
from choros.topology import Topology

__all__ = ["THREADS", "horovod_variables", "rank_settings"]

#: The thread pools of the frameworks each read one of these.
THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
)


#: Selects Open MPI's transports.
_TRANSPORTS = "OMPI_MCA_btl"
#: Those for fabrics between hosts: on a machine without one, the search takes a second.
_FABRICS = ("ofi", "uct")
#: All that ranks of one host need. Without others, MPI listens nowhere.
_SHARED_MEMORY = "self,sm"


def rank_settings(
    environ: Mapping[str, str],
    share: Share,
    platform: str = sys.platform,
    *,
    one_host: bool = False,
    elastic: bool = False,
    has_memory: bool = True,
) -> dict[str, str]:
    """Returns the variables to add to ``environ`` for a rank with ``share`` of its host's cores.

    Args:
        environ: the rank's environment.
        share: the rank's cores and number of threads.
        platform: as ``sys.platform``.
        one_host: whether the whole job runs on this host.
        elastic: whether ranks may join later, which MPI connects through TCP.
        has_memory: whether there is room for Open MPI's shared memory; otherwise ranks communicate through TCP.

    Raises:
        ConfigError: the requested allocator is unknown or not installed.

    Example:
        >>> rank_settings({"OMP_NUM_THREADS": "8"}, Share(bind=(0,), threads=1), "darwin")["NPROC"]
        '2'
        >>> "OMP_NUM_THREADS" in rank_settings({"OMP_NUM_THREADS": "8"}, Share(bind=(0,), threads=1))
        False
    """
    wanted = {"PYTHONUNBUFFERED": "1"}
    wanted["UCX_DEBUG_SIGNO"] = "0"  # else this library of Open MPI takes SIGHUP, and the rank goes on
    wanted |= dict.fromkeys(THREADS, str(share.threads))
    # XLA's CPU thread pool: the thread that waits for other ranks must not be its only one.
    wanted["NPROC"] = str(max(2, share.threads))
    wanted["TF_NUM_INTEROP_THREADS"] = "1" if share.threads == 1 else "2"
    if share.oversubscribed:
        wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if one_host and has_memory and not elastic:
        wanted[_TRANSPORTS] = _SHARED_MEMORY
    elif one_host or not has_memory:
        excluded = (*(_FABRICS if one_host else ()), *(() if has_memory else ("sm",)))
        wanted[_TRANSPORTS] = "^" + ",".join(excluded)
    added = {name: value for name, value in wanted.items() if name not in environ}
    return added | allocator_settings(environ, platform)


def horovod_variables(topology: Topology, host: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables from which Horovod's scripts read a rank's position, and what connects the ranks.

    Args:
        topology: the rank's position.
        host: the name of its host.
        environ: its environment. Only where it requests MPI or Gloo, as by ``--gloo``, the variables say so: choros
            reads them, too, and they would request it.

    Example:
        >>> topology = Topology.from_hosts(["a", "b"], rank=1)
        >>> horovod_variables(topology, "b", {"CHOROS_ENGINE": "torch"})  # doctest: +NORMALIZE_WHITESPACE
        {'HOROVOD_HOSTNAME': 'b', 'HOROVOD_RANK': '1', 'HOROVOD_SIZE': '2', 'HOROVOD_LOCAL_RANK': '0',
         'HOROVOD_LOCAL_SIZE': '1', 'HOROVOD_CROSS_RANK': '1', 'HOROVOD_CROSS_SIZE': '2',
         'HOROVOD_CONTROLLER': 'gloo', 'HOROVOD_CPU_OPERATIONS': 'gloo'}
    """
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    position = {f"HOROVOD_{name.upper()}": str(getattr(topology, name)) for name in names}
    _, requested = ENGINE.given(environ)
    connection = {"mpi": "mpi", "torch": "gloo"}.get(requested.casefold())
    engines = {alias.name: connection for alias in reversed(ENGINE.aliases)} if connection else {}
    return {"HOROVOD_HOSTNAME": host, **position, **engines}
