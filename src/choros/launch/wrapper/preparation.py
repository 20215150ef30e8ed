"""What a wrapper corrects, checks and sets before it starts the command."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from choros.launch.plan.cores import Share
from choros.launch.plan.environment import horovod_variables, rank_settings
from choros.launch.plan.roles import CHIEF, role_in, task_environment
from choros.launch.processes.directories import SESSION, VARIABLE, Directory, shared_memory
from choros.launch.protocol.wrapper_options import CLUSTER, WrapperOptions
from choros.settings import VARIABLES
from choros.topology import Topology, split_address
from choros.topology.environments import OPEN_MPI

_LOCAL_SIZES = (OPEN_MPI.local_size, "OMPI_WORLD_LOCAL_SIZE")


def repairs(environ: Mapping[str, str], ranks_per_host: Sequence[int]) -> dict[str, str]:
    """Returns the variables to correct: Open MPI 5 tells all ranks one host's number of ranks.
    ``ranks_per_host``: the true ones, from chorosrun, in rank order; empty if not known.

    >>> names = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    >>> repairs(dict.fromkeys(names, "1"), (2, 1))["OMPI_COMM_WORLD_LOCAL_SIZE"]
    '2'
    """
    names = (OPEN_MPI.rank, OPEN_MPI.local_rank, OPEN_MPI.local_size)
    if not environ.keys() >= set(names):
        return {}
    rank, local_rank, reported = (int(environ[name]) for name in names)
    size = _size_of_host(rank, local_rank, ranks_per_host) or max(reported, local_rank + 1)
    return {} if size == reported else dict.fromkeys(_LOCAL_SIZES, str(size))


def _size_of_host(rank: int, local_rank: int, ranks_per_host: Sequence[int]) -> int | None:
    """Returns the number of ranks on ``rank``'s host; ``None`` if mpirun has assigned ranks in another way."""
    first = 0
    for count in ranks_per_host:
        if rank < first + count:
            return count if rank - first == local_rank else None
        first += count
    return None


def listening_problem(environ: Mapping[str, str], rank: int) -> str:
    """Returns why ``rank`` cannot listen at its address; empty if it can, or if it does not need to listen."""
    role = role_in(environ, rank)
    if role is None or role.name == CHIEF:
        return ""
    from choros.transport.address import listening_error  # imports sockets, which other jobs do not need

    address = json.loads(environ[CLUSTER])[role.name][role.index]
    error = listening_error(*split_address(address))
    if error is None:
        return ""
    return (
        f"{role} cannot listen at {address}: {error.strerror or error}. If the port is in use, start the job again: "
        "it chooses other ports. If the address is not this host's, give in -H the names by which the hosts reach "
        "each other."
    )


def job_memory(local_size: int) -> Directory | None:
    """Returns the directory for the shared memory of this host's ranks, if there is one; it notes mpirun's."""
    memory, session = shared_memory(os.environ, local_size), mpirun_session()
    if memory is not None and session is not None and not session.name.startswith(SESSION):
        memory.note_daemon(session)  # else mpirun's directory is chorosrun's to remove
    return memory


def mpirun_session() -> Path | None:
    """Returns the directory of mpirun, or of its daemon on this host."""
    session = Path(os.environ.get("PMIX_SERVER_TMPDIR", ""))
    if not session.is_absolute():
        return None
    return session.parent if session.parent.name.startswith(SESSION) else session


def command_environment(
    topology: Topology, options: WrapperOptions, host: str, share: Share, memory: Directory | None, command: list[str]
) -> dict[str, str]:
    """Returns the whole environment of the rank's command."""
    environ = task_environment(os.environ, topology.rank)
    has_role = role_in(os.environ, topology.rank) is not None
    if not has_role:
        environ |= horovod_variables(topology, host, environ)
    if memory is not None:
        environ[VARIABLE] = str(memory.path)
    if options.elastic:  # the argv that starts a further rank; {new_rank} stands for that option
        others = replace(options, new_rank="{new_rank}", stdin=False, ranks_per_host=())
        spawn = [sys.executable, "-I", "-S", sys.argv[0], str(others), *command]
        environ[VARIABLES["spawn"].name] = json.dumps(spawn)
    one_host = topology.local_size == topology.size
    environ |= rank_settings(environ, share, one_host=one_host, elastic=options.elastic, has_memory=VARIABLE in environ)
    if options.gated and not has_role:  # mpirun is behind a gate
        from choros.launch.wrapper.pmix_proxy import start_proxy  # imports sockets

        environ |= start_proxy(os.environ)
    return environ
