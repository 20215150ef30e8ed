"""What each launcher tells its processes, as one table, and who wins when several speak.

``mpirun`` may run inside a SLURM allocation and ``torchrun`` inside ``srun``: the launcher that started
*this process* counts, so SLURM is asked last. Two launchers that each start single ranks cannot nest; if
both left variables behind they must agree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from choros.errors import ConfigError
from choros.topology.tf_config import TF_CONFIG, read_tf_config, split_address
from choros.topology.topology import Topology

__all__ = ["ENVIRONMENTS", "WITHOUT_MPI", "Environment", "detect", "expand_counts"]

Environ = Mapping[str, str]


@dataclass(frozen=True)
class Environment:
    """The variables in which one launcher tells a process its place.

    ``rank`` and ``size`` are always set by the launcher; the others may be missing. ``tasks_per_host`` is
    SLURM's list of ranks on each host (``2(x3),1``), ``host_rank`` and ``host_count`` count hosts. Without
    ``tells_local_size`` the launcher's number of ranks on a host is not to be relied on; the engine finds it out.
    """

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    host_rank: str = ""
    host_count: str = ""
    tasks_per_host: str = ""
    tells_local_size: bool = True

    def read(self, environ: Environ) -> Topology | None:
        """The place ``environ`` gives, ``None`` if this launcher did not start the process."""
        if self.rank not in environ or self.size not in environ:
            return None
        rank, size = _integer(environ, self.rank), _integer(environ, self.size)
        if not 0 <= rank < size:
            raise ConfigError(
                f"{self.rank}={rank} and {self.size}={size} contradict each other: a rank is at least 0 and "
                f"less than the size. {self.launcher} sets both; do not set them by hand."
            )
        if self.tasks_per_host in environ:
            return self._from_tasks_per_host(environ, rank, size)
        local_rank = _integer(environ, self.local_rank, default=0)
        local_size = _integer(environ, self.local_size, default=1)
        if not self.tells_local_size:
            local_size = max(local_size, local_rank + 1)
        if not 0 <= local_rank < local_size <= size:
            raise ConfigError(
                f"{self.local_rank}={local_rank}, {self.local_size}={local_size} and {self.size}={size} "
                "contradict each other: local rank < local size ≤ size must hold."
            )
        hosts = -(-size // local_size)
        return Topology(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            cross_rank=_integer(environ, self.host_rank, default=rank // local_size),
            cross_size=_integer(environ, self.host_count, default=hosts),
            is_homogeneous=size % local_size == 0,
            launcher=self.launcher,
        )

    def _from_tasks_per_host(self, environ: Environ, rank: int, size: int) -> Topology:
        counts = expand_counts(environ[self.tasks_per_host], self.tasks_per_host)
        tasks = f"{self.tasks_per_host}={environ[self.tasks_per_host]!r}"
        if sum(counts) != size:
            raise ConfigError(f"{tasks} adds up to {sum(counts)} ranks, but {self.size}={size}.")
        # srun deals ranks out block-wise, cyclically or as it is told: only a rank's own place is known.
        host, local_rank = _integer(environ, self.host_rank), _integer(environ, self.local_rank)
        if not (0 <= host < len(counts) and 0 <= local_rank < counts[host]):
            raise ConfigError(f"{self.host_rank}={host} and {self.local_rank}={local_rank} contradict {tasks}.")
        peers = [i for i, count in enumerate(counts) if count > local_rank]
        return Topology(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=counts[host],
            cross_rank=peers.index(host),
            cross_size=len(peers),
            is_homogeneous=len(set(counts)) == 1,
            launcher=self.launcher,
        )


OPEN_MPI = Environment(
    "Open MPI's mpirun",
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    tells_local_size=False,  # Open MPI 5 gives ranks on unequal hosts one and the same.
)
MPICH = Environment(
    "MPICH's mpiexec",
    rank="PMI_RANK",
    size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_size="MPI_LOCALNRANKS",
)
TORCHRUN = Environment(
    "torchrun",
    rank="RANK",
    size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_size="LOCAL_WORLD_SIZE",
    host_rank="GROUP_RANK",
    host_count="GROUP_WORLD_SIZE",
)
SLURM = Environment(
    "srun",
    rank="SLURM_PROCID",
    # Not SLURM_NTASKS: a batch script has that too, with SLURM_PROCID=0, and is no rank of a job.
    size="SLURM_STEP_NUM_TASKS",
    local_rank="SLURM_LOCALID",
    local_size="SLURM_NTASKS_PER_NODE",
    host_rank="SLURM_NODEID",
    host_count="SLURM_STEP_NUM_NODES",
    tasks_per_host="SLURM_STEP_TASKS_PER_NODE",
)

#: Launchers that start one process a rank, asked first; their answers must agree.
RANK_LAUNCHERS = (OPEN_MPI, MPICH, TORCHRUN)
#: Every launcher whose variables we read, in the order they are asked. ``TF_CONFIG`` comes before SLURM.
ENVIRONMENTS = (*RANK_LAUNCHERS, SLURM)

#: The launchers that know nothing of MPI: its library, loaded by one of their ranks, sees that rank alone.
WITHOUT_MPI = (TORCHRUN.launcher, TF_CONFIG)


def detect(environ: Environ) -> Topology:
    """Who am I? Reads what started this process from its environment.

    Args:
        environ: the environment, usually ``os.environ``.

    Returns:
        The place of this process; that of a lone process if nothing is set, or if ``TF_CONFIG`` says that it is a
        parameter server or an evaluator, which take part in no collective.

    Raises:
        ConfigError: variables contradict each other or are not numbers; the text names them.

    Example:
        >>> detect({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}).rank
        1
        >>> detect({}).size
        1
    """
    found: list[tuple[str, Topology]] = []
    for environment in RANK_LAUNCHERS:
        place = environment.read(environ)
        if place is not None:
            found.append((f"{environment.rank}={place.rank}, {environment.size}={place.size}", place))
    from_tf_config = _place_of_task(environ)
    if from_tf_config is not None:
        found.append((f"{TF_CONFIG} (rank {from_tf_config.rank} of {from_tf_config.size})", from_tf_config))
    if not found:
        return SLURM.read(environ) or Topology()
    variables, first = found[0]
    for other_variables, other in found[1:]:
        if (other.rank, other.size) != (first.rank, first.size):
            raise ConfigError(
                f"The environment contradicts itself: {variables} ({first.launcher}), but {other_variables} "
                f"({other.launcher}). Unset the ones that did not start this process."
            )
    return first


def _integer(environ: Environ, name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a whole number.") from None


def expand_counts(text: str, name: str) -> list[int]:
    """SLURM's way to write ranks on each host, ``text``, the value of the variable ``name``.

    Example:
        >>> expand_counts("2(x3),1", "SLURM_STEP_TASKS_PER_NODE")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(f"{name}={text!r} is not a list like 2(x3),1.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _place_of_task(environ: Environ) -> Topology | None:
    """``TF_CONFIG``'s place: chief first, then workers; hosts are told apart by their addresses."""
    config = read_tf_config(environ)
    if config is None:
        return None
    if config.rank is None:
        return Topology(launcher=TF_CONFIG)
    hosts = [split_address(address)[0] for address in config.ranks]
    return Topology.from_hosts(hosts, config.rank, launcher=TF_CONFIG)
