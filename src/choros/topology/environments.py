"""The environment variables of launchers, as one table, and their precedence: what started *this process* is first,
so SLURM, inside which ``mpirun`` and ``torchrun`` may run, is read last. Two launchers that each start single
ranks cannot be nested; if the variables of both are set, they must agree. After it, where ranks meet that are started
without MPI; at the end, SLURM's lists.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from choros.errors import ConfigError
from choros.settings import VARIABLES
from choros.topology.tf_config import TF_CONFIG, parse_port, read_tf_config, split_address
from choros.topology.topology import Topology

Environ = Mapping[str, str]

#: The ports of SLURM's job steps: 100 jobs and 100 steps in each have different ones.
_FIRST_PORT, _STEPS, _JOBS = 20_000, 100, 100


@dataclass(frozen=True)
class Environment:
    """The variables in which one launcher sets a process's rank and size.

    ``rank`` and ``size`` are always set by the launcher; the others may be missing. ``tasks_per_host`` is
    SLURM's list of ranks on each host (``2(x3),1``), ``host_rank`` and ``host_count`` count hosts. ``also`` is a
    variable that must be set, too, because the launcher sets it only with an option. Without
    ``reliable_local_size`` the launcher's number of ranks per host may be wrong; the engine determines it.
    """

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    host_rank: str = ""
    host_count: str = ""
    tasks_per_host: str = ""
    also: str = ""
    reliable_local_size: bool = True

    def read(self, environ: Environ) -> Topology | None:
        """Returns the topology in ``environ``, ``None`` if this launcher did not start the process."""
        if not {self.rank, self.size, self.also or self.rank} <= environ.keys():
            return None
        rank, size = _integer(environ, self.rank), _integer(environ, self.size)
        if not 0 <= rank < size:
            raise ConfigError(
                f"{self.rank}={rank} and {self.size}={size} contradict each other: expected 0 <= rank < size. "
                f"{self.launcher} sets both; do not set them yourself."
            )
        if self.tasks_per_host in environ:
            return self._from_tasks_per_host(environ, rank, size)
        local_rank = _integer(environ, self.local_rank, default=0)
        local_size = _integer(environ, self.local_size, default=1)
        if not self.reliable_local_size:
            local_size = max(local_size, local_rank + 1)
        if not 0 <= local_rank < local_size <= size:
            raise ConfigError(
                f"{self.local_rank}={local_rank}, {self.local_size}={local_size} and {self.size}={size} "
                "contradict each other: expected 0 <= local rank < local size <= size."
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
        # srun distributes ranks block-wise, cyclically or in a given order: only this rank's own position is known.
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
    reliable_local_size=False,  # Open MPI 5 sets the same value on hosts with different numbers of ranks.
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
    # Not SLURM_NTASKS: batch scripts have it, too, with SLURM_PROCID=0, but are not ranks of a job.
    size="SLURM_STEP_NUM_TASKS",
    local_rank="SLURM_LOCALID",
    local_size="SLURM_NTASKS_PER_NODE",
    host_rank="SLURM_NODEID",
    host_count="SLURM_STEP_NUM_NODES",
    tasks_per_host="SLURM_STEP_TASKS_PER_NODE",
)
#: srun as Open MPI needs it.
SLURM_PMIX = replace(SLURM, launcher="srun --mpi=pmix", also="PMIX_RANK")

#: Launchers that start one process per rank, read first; their variables must agree.
RANK_LAUNCHERS = (OPEN_MPI, MPICH, TORCHRUN)
#: All launchers whose variables are read, in order of precedence. ``TF_CONFIG`` precedes SLURM.
ENVIRONMENTS = (*RANK_LAUNCHERS, SLURM_PMIX, SLURM)

#: Launchers without MPI: in a rank that they start, MPI sees only that rank.
NEVER_MPI = (TORCHRUN.launcher, TF_CONFIG)
#: Launchers whose ranks are not expected to have MPI. One that was built for SLURM may know srun's ranks all the same.
WITHOUT_MPI = (*NEVER_MPI, SLURM.launcher)


def detect(environ: Environ) -> Topology:
    """Returns this process's topology; a single process if no variable is set, or for ``TF_CONFIG``'s parameter
    servers and evaluators, which join no collective. A ``ConfigError`` names variables that contradict each other.

        >>> detect({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}).rank
        1
        >>> detect({}).size
        1
    """
    if new_rank := VARIABLES["new_rank"].read(environ):  # to mpirun it is the only rank of a job of its own
        rank, *hosts = new_rank.split(",")
        launched = OPEN_MPI.read(environ) or Topology()
        return Topology.from_hosts(hosts, int(rank), launcher=launched.launcher)
    found: list[tuple[str, Topology]] = []
    for environment in RANK_LAUNCHERS:
        topology = environment.read(environ)
        if topology is not None:
            found.append((f"{environment.rank}={topology.rank}, {environment.size}={topology.size}", topology))
    from_tf_config = _from_tf_config(environ)
    if from_tf_config is not None:
        found.append((f"{TF_CONFIG} (rank {from_tf_config.rank} of {from_tf_config.size})", from_tf_config))
    if not found:
        return SLURM_PMIX.read(environ) or SLURM.read(environ) or Topology()
    variables, first = found[0]
    for other_variables, other in found[1:]:
        if (other.rank, other.size) != (first.rank, first.size):
            raise ConfigError(
                f"The environment contradicts itself: {variables} ({first.launcher}), but {other_variables} "
                f"({other.launcher}). Unset the variables of the launcher that did not start this process."
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


def _from_tf_config(environ: Environ) -> Topology | None:
    """Returns the topology of ``TF_CONFIG``'s cluster: chief first, then workers; addresses identify hosts."""
    config = read_tf_config(environ)
    if config is None:
        return None
    if config.rank is None:
        return Topology(launcher=TF_CONFIG)
    hosts = [split_address(address)[0] for address in config.ranks]
    return Topology.from_hosts(hosts, config.rank, launcher=TF_CONFIG)


@dataclass(frozen=True)
class Master:
    """The rendezvous address of ranks; ``listens``: torchrun's agent already listens there; otherwise rank 0 must."""

    host: str
    port: int
    listens: bool = False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def find_master(environ: Mapping[str, str], launcher: str) -> Master | None:
    """Returns the address of ``TF_CONFIG``'s first task, ``MASTER_ADDR``, or for srun the job step's first host.

    >>> print(find_master({"MASTER_ADDR": "a", "MASTER_PORT": "29500"}, "torchrun"))
    a:29500
    """
    if launcher == TF_CONFIG:
        config = read_tf_config(environ)
        return Master(*split_address(config.ranks[0])) if config is not None and config.ranks else None
    host, text = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not host:
        return _of_slurm(environ, text) if launcher == SLURM.launcher else None
    port = parse_port(text)
    if port is None:
        raise ConfigError(
            f"MASTER_ADDR={host!r} and MASTER_PORT={text!r} are not a valid address: expected a port of 1 … 65535."
        )
    return Master(host, port, listens=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


def _of_slurm(environ: Mapping[str, str], port: str) -> Master | None:
    """The address of rank 0 in a job step of SLURM; ``None`` if the step is not described."""
    names = [environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    given = environ.get("SLURM_STEP_NODELIST", "")
    if not given or not all(name.isdecimal() for name in names):
        return None
    hosts = expand_hosts(given)
    if environ.get("SLURM_PROCID") == "0" and environ.get("SLURM_NODEID", "0") != "0":
        raise ConfigError(
            f"rank 0 is not on {hosts[0]}, the first host of SLURM_STEP_NODELIST={given!r}, where the ranks would "
            "connect. Set MASTER_ADDR and MASTER_PORT on every rank: an address of rank 0's host, and a free port."
        )
    job, step = map(int, names)
    chosen = parse_port(port) if port else _FIRST_PORT + job % _JOBS * _STEPS + step % _STEPS
    if chosen is None:
        raise ConfigError(f"MASTER_PORT={port!r} is not a port of 1 … 65535.")
    return Master(hosts[0] if len(hosts) > 1 else "127.0.0.1", chosen)


def expand_counts(text: str, name: str) -> list[int]:
    """Parses SLURM's list of ranks per host, ``text``, which is the value of the variable ``name``.

    >>> expand_counts("2(x3),1", "SLURM_STEP_TASKS_PER_NODE")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(f"{name}={text!r} is not a list of counts such as 2(x3),1.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_hosts(text: str) -> list[str]:
    """Parses SLURM's list of hosts, keeping its order; a ``ConfigError`` if ``text`` is not such a list.

    >>> expand_hosts("n[08-10,12]x,login,r[1-2]c[1-2]")
    ['n08x', 'n09x', 'n10x', 'n12x', 'login', 'r1c1', 'r1c2', 'r2c1', 'r2c2']
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text)
    hosts = [host for part in parts for host in _expand(part)]
    if ",".join(parts) != text or not hosts or not all(re.fullmatch(r"[\w.-]+", host) for host in hosts):
        raise ConfigError(f"SLURM_STEP_NODELIST={text!r} is not a list of hosts such as n[01-03,7],login.")
    return hosts


def _expand(part: str) -> Iterator[str]:
    """``"n[1-2]x"`` → ``n1x n2x``."""
    segments = re.findall(r"\[.*?\]|[^\[]+", part)
    choices = [list(_numbers(segment[1:-1])) if segment.startswith("[") else [segment] for segment in segments]
    return map("".join, itertools.product(*choices))


def _numbers(text: str) -> Iterator[str]:
    """``"08-10,12"`` → ``08 09 10 12``."""
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            yield f"[{part}]"  # invalid in a host name: the caller rejects the list
            continue
        first, last = match[1], match[2] or match[1]
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
