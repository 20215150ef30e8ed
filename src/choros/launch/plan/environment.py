"""Filters of environment variables: those to forward to other hosts, and those a nested job must not inherit."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from choros.errors import ConfigError
from choros.launch.plan.hosts import parse_hostfile, total_slots
from choros.topology import ENVIRONMENTS, TF_CONFIG, expand_counts

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
