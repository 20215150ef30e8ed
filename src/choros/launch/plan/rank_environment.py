"""Variables that choros adds for ranks (threads, unbuffered output, allocator); the user's are never changed.
The allocator is kept from returning pages to the kernel. Each step frees and allocates large gradients, with a page
fault for every page returned in between: 160 steps of an MLP with 19.5 million parameters took 56 s of CPU time with
glibc's defaults, and 34 s with these settings.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from choros.errors import ConfigError
from choros.launch.plan.cores import Share
from choros.settings import VARIABLES
from choros.topology import Topology

#: The thread pools of the frameworks each read one of these.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")


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
    """Returns the variables to add to ``environ``; TCP if ranks may join, or shared memory has no room for MPI.

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
    """Returns Horovod's variables for a position; MPI or Gloo only if requested: choros reads them, as a request.

    >>> topology = Topology.from_hosts(["a", "b"], rank=1)
    >>> horovod_variables(topology, "b", {"CHOROS_ENGINE": "torch"})  # doctest: +NORMALIZE_WHITESPACE
    {'HOROVOD_HOSTNAME': 'b', 'HOROVOD_RANK': '1', 'HOROVOD_SIZE': '2', 'HOROVOD_LOCAL_RANK': '0',
     'HOROVOD_LOCAL_SIZE': '1', 'HOROVOD_CROSS_RANK': '1', 'HOROVOD_CROSS_SIZE': '2',
     'HOROVOD_CONTROLLER': 'gloo', 'HOROVOD_CPU_OPERATIONS': 'gloo'}
    """
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    position = {f"HOROVOD_{name.upper()}": str(getattr(topology, name)) for name in names}
    _, requested = VARIABLES["engine"].given(environ)
    connection = {"mpi": "mpi", "torch": "gloo"}.get(requested.casefold())
    engines = dict.fromkeys(sorted(VARIABLES["engine"].aliases), connection) if connection else {}
    return {"HOROVOD_HOSTNAME": host, **position, **engines}


#: glibc: keep freed memory, in huge pages where the kernel has them, in one arena.
MEMORY = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
}
#: The two allocators that are preloaded instead of glibc's: the same, their libraries, and Debian's package.
_PRELOADED = {
    "jemalloc": (
        {"MALLOC_CONF": "thp:always,dirty_decay_ms:-1,muzzy_decay_ms:-1,narenas:1"},
        ("jemalloc",),
        "libjemalloc2",
    ),
    "tcmalloc": ({"TCMALLOC_RELEASE_RATE": "0"}, ("tcmalloc_minimal", "tcmalloc"), "libtcmalloc-minimal4"),
}


def _find_library(name: str) -> str | None:
    import ctypes.util  # takes 5 ms in every rank's wrapper, so only if needed

    return ctypes.util.find_library(name)


def allocator_settings(
    environ: Mapping[str, str],
    platform: str = sys.platform,
    find: Callable[[str], str | None] = _find_library,
) -> dict[str, str]:
    """Returns the variables for ``CHOROS_ALLOCATOR``'s allocator; none changes if the user has set one of glibc's.

    >>> allocator_settings({"CHOROS_ALLOCATOR": "system"}, "linux")
    {}
    >>> allocator_settings({"CHOROS_ALLOCATOR": "tcmalloc"}, "linux", "lib{}.so.4".format)
    {'LD_PRELOAD': 'libtcmalloc_minimal.so.4', 'TCMALLOC_RELEASE_RATE': '0'}
    """
    name = VARIABLES["allocator"].read(environ)
    if name == "system" or not platform.startswith("linux"):
        return {}
    if name == "glibc":
        return {} if any(variable in environ for variable in MEMORY) else dict(MEMORY)
    settings, libraries, package = _PRELOADED[name]
    conda = Path(sys.prefix, "lib")  # where it installs libraries beside this Python
    found = (path for each in libraries for path in (find(each), *map(str, sorted(conda.glob(f"lib{each}.so*")))))
    library = next(filter(None, found), None)
    if library is None:
        raise ConfigError(
            f"CHOROS_ALLOCATOR={name}: {name} is not installed on this host. Install it (Debian: apt install "
            f"{package}; conda: conda install {name}), or set CHOROS_ALLOCATOR=glibc."
        )
    preload = " ".join(filter(None, [environ.get("LD_PRELOAD", ""), library]))
    return {"LD_PRELOAD": preload, **{k: v for k, v in settings.items() if k not in environ}}
