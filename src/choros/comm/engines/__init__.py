"""Communication engines, one per file, imported only when selected (row ``engine`` of ``settings.py``, or the first
rule of ``select`` that holds); names of parts begin with their engine's. Each has ``start(topology, comm)``, which
returns a ``Communicator`` of all ranks, or of those in the list ``comm``, and this rank's ``Topology``; and
``finalize()``, for the end of the process.
"""

from collections.abc import Callable, Sequence
from typing import Any

from choros.errors import ConfigError, EngineUnavailable
from choros.frameworks import is_installed
from choros.settings import Config
from choros.topology import NEVER_MPI, WITHOUT_MPI, Topology


def select(
    config: Config, topology: Topology, comm: Any = None, installed: Callable[[str], bool] = is_installed
) -> tuple[str, str]:
    """Selects the engine for this job, the same on every rank: the name of its module in ``comm/engines``, and why.

    >>> select(Config.from_environ({}), Topology())
    ('local', 'one rank: nothing to move')
    >>> select(Config.from_environ({}), Topology(rank=1, size=4, launcher="mpirun"))
    ('mpi', 'mpirun started 4 ranks')
    """
    size, launcher = topology.size, topology.launcher
    has_mpi_communicator = comm is not None and not isinstance(comm, Sequence)
    if has_mpi_communicator and not hasattr(comm, "Create_intercomm"):  # as an Intracomm has
        raise ConfigError(f"init(comm={comm!r}): expected a list of ranks, or an Intracomm of mpi4py's.")
    if config.engine != "auto":
        engine, reason = config.engine, f"CHOROS_ENGINE={config.engine}"
    elif size == 1 and comm in (None, [0]) and not config.elastic:  # else others may join the job
        engine, reason = "local", "one rank: nothing to move"
    elif has_mpi_communicator:
        engine, reason = "mpi", "init() was given an MPI communicator"
    elif launcher in WITHOUT_MPI and size > 1:
        engine, reason = "torch", f"{launcher} started {size} ranks without MPI"
    else:
        engine, reason = "mpi", f"{launcher} started {size} ranks"
    if engine == "local" and size > 1:
        raise ConfigError(f"CHOROS_ENGINE=local is for one rank, but {launcher} started {size}.")
    if engine == "mpi" and launcher in NEVER_MPI and size > 1:
        raise EngineUnavailable(
            f"{launcher} started {size} ranks, and the mpi engine cannot join ranks that MPI's own launchers did not "
            f"start. Start the script with chorosrun -np {size} in place of it, or unset CHOROS_ENGINE: the torch "
            "engine can."
        )
    if engine == "torch" and not installed("torch"):
        raise EngineUnavailable(
            f"{launcher} started {size} ranks, and the torch engine, which moves their bytes, needs PyTorch: pip "
            f"install torch. Without it, start the script with chorosrun -np {size}, or, if SLURM has PMIx, with srun "
            "--mpi=pmix."
        )
    if engine == "torch" and has_mpi_communicator:
        raise ConfigError(
            "init() was given an MPI communicator, which only the mpi engine takes: unset CHOROS_ENGINE, or give "
            "init() a list of ranks."
        )
    if engine == "xla" and not installed("jax"):
        raise EngineUnavailable("CHOROS_ENGINE=xla needs JAX: pip install jax. Without it, unset CHOROS_ENGINE.")
    return engine, reason
