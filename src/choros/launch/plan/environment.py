"""Environment variables: those to forward to other hosts, those a nested job must not inherit, and those that choros
adds for ranks (threads, unbuffered output, allocator); the user's are never changed.
"""

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from choros.errors import ConfigError
from choros.launch.plan.cores import Share
from choros.launch.plan.hosts import parse_hostfile, total_slots
from choros.settings import VARIABLES
from choros.topology import ENVIRONMENTS, TF_CONFIG, Topology, expand_counts

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OF_THIS_HOST = {
    "_", "CLUSTER_SPEC", "DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "EDITOR", "HOSTNAME", "HOST", "JOB_COMPLETION_INDEX",
    "LOGNAME", "MAIL", "OLDPWD", "PAGER", "PWD", "SHELL", "SHLVL", "SM_CURRENT_HOST", "TEMP", "TERM", "TERMCAP", "TMP",
    "TMPDIR", "TTY", "USER", "WAYLAND_DISPLAY", "WINDOWID", "XAUTHORITY",
}  # fmt: skip
_OF_THIS_HOST_PREFIXES = (
    "AWS_BATCH_JOB_", "BASH_FUNC_", "GPG_", "HYDI_", "HYDRA_", "LC_", "LSB_", "LSF_", "OMPI_", "PBS_", "PET_", "PMI_",
    "PMIX_", "PRTE_", "SKYPILOT_", "SLURM_", "SSH_", "SUDO_", "XDG_",
)  # fmt: skip
#: Open MPI's settings by the user, unlike the rest of ``OMPI_``: they apply on every host.
_PREFIXES_KEPT = ("OMPI_MCA_",)
#: Set when a scheduler has allocated hosts; mpirun asks the scheduler for their names.
_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE")


def forwarded(environ: Iterable[str]) -> list[str]:
    """Returns the names in ``environ`` whose values are valid on another host, sorted.

    >>> forwarded({"PATH": "/bin", "HOSTNAME": "a", "SSH_TTY": "x", "BASH_FUNC_m%%": "()", "CHOROS_ENGINE": "mpi"})
    ['CHOROS_ENGINE', 'PATH']
    """
    return sorted(
        name
        for name in environ
        if _IDENTIFIER.fullmatch(name)
        and name not in _OF_THIS_HOST
        and (name.startswith(_PREFIXES_KEPT) or not name.startswith(_OF_THIS_HOST_PREFIXES))
    )


def parse_variables(given: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables given by ``--env KEY`` and ``--env KEY=VALUE``.

    >>> parse_variables(["A=1=2", "B"], {"B": "here"})
    {'A': '1=2', 'B': 'here'}
    """
    variables = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not _IDENTIFIER.fullmatch(name):
            raise ConfigError(
                f"--env {name!r}: not a valid name of an environment variable. Write KEY=VALUE, or only KEY."
            )
        if not equals and name not in environ:
            raise ConfigError(f"--env {name}: {name} is not set. Set it, or give a value with --env {name}=VALUE.")
        variables[name] = value if equals else environ[name]
    return variables


def in_allocation(environ: Mapping[str, str]) -> bool:
    """Returns whether a scheduler has allocated hosts, which mpirun uses if it is given none."""
    return any(name in environ for name in _ALLOCATIONS)


def in_slurm(environ: Mapping[str, str]) -> bool:
    """Returns whether SLURM has allocated hosts: mpirun reaches them through srun, not through ssh."""
    return "SLURM_JOB_ID" in environ


def check_allocation(environ: Mapping[str, str]) -> None:
    """Raises a ``ConfigError`` for an allocation that mpirun knows only in part.

    >>> check_allocation({"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2"})
    Traceback (most recent call last):
    choros.errors.ConfigError: this allocation of SLURM has 2 components, and mpirun knows only the first one: start \
the ranks without chorosrun, as tasks of srun --het-group=0,1 (docs/slurm.md).
    """
    count = environ.get("SLURM_HET_SIZE")
    if count is not None:
        groups = ",".join(map(str, range(int(count)))) if count.isdecimal() else "0,1,…"
        raise ConfigError(
            f"this allocation of SLURM has {count} components, and mpirun knows only the first one: start the ranks "
            f"without chorosrun, as tasks of srun --het-group={groups} (docs/slurm.md)."
        )


def for_srun(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns variables to start mpirun's daemons in the user's job step: their own would wait in ``srun --pty``."""
    return {"SLURM_OVERLAP": environ.get("SLURM_OVERLAP", "1")} if in_slurm(environ) else {}


def allocated_slots(environ: Mapping[str, str]) -> int | None:
    """Returns the number of processes for which a scheduler has allocated hosts; ``None`` outside of an allocation.

    >>> allocated_slots({"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "2(x2)"})
    4
    """
    if in_slurm(environ):
        name = "SLURM_TASKS_PER_NODE"
        return sum(expand_counts(environ[name], name)) if name in environ else None
    if "PBS_JOBID" in environ and "PBS_NODEFILE" in environ:
        return total_slots(parse_hostfile(Path(environ["PBS_NODEFILE"])))
    name = "LSB_DJOB_NUMPROC" if "LSB_JOBID" in environ else "NSLOTS" if "PE_HOSTFILE" in environ else ""
    return sum(expand_counts(environ[name], name)) if name in environ else None


def without_launchers(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns ``environ`` without a launcher's variables that pass a rank to this process; SLURM's are kept.

    >>> without_launchers({"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "TF_CONFIG": "{}", "PATH": "/bin"})
    {'PATH': '/bin'}
    """
    stale = {TF_CONFIG, *(value for launcher in ENVIRONMENTS for value in vars(launcher).values())}
    prefixes = ("OMPI_", "PMIX_", "PRTE_") if "PMIX_RANK" in environ else ()
    return {
        name: value
        for name, value in environ.items()
        if name.startswith("SLURM_") or (name not in stale and not name.startswith(prefixes))
    }


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


#: glibc: keep freed memory, in huge pages where the kernel has them, in one arena. Each step frees and allocates large
#: gradients, with a page fault for every page returned in between: 160 steps of an MLP with 19.5 million parameters
#: took 56 s of CPU time with glibc's defaults, and 34 s with these settings.
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
