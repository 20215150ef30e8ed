"""Selection of the engine and of the collectives on devices: the first rule that holds applies."""

import ctypes
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


# ── tensors on devices ───────────────────────────────────────────────────────────────────────────


def nccl4py_problem() -> str:
    """Why nccl4py cannot be used here, as a clause, or nothing. CUDA stays as it is: the script may choose devices."""
    if not is_installed("nccl"):
        return "nccl4py is not installed"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "this machine has no driver of NVIDIA's"
    try:
        from nccl import core
    except ImportError as error:
        return f"nccl4py cannot be imported ({error})"
    return "" if core.get_version().libnccl is not None else "nccl4py does not find NCCL's library, libnccl.so.2"


def select_devices(
    engine: str,
    size: int,
    config: Config,
    installed: Callable[[str], bool] = is_installed,
    nccl4py_problem: Callable[[], str] = nccl4py_problem,
) -> tuple[str | None, tuple[str, ...], str]:
    """Selects the collectives on devices between ``size`` ranks whose host arrays ``engine`` moves: the module that
    connects devices, or ``None`` if tensors go through the host; the kinds of devices; and why.

    >>> select_devices("mpi", 1, Config.from_environ({}))
    (None, (), 'one rank: nothing to move')
    """
    requested = config.devices
    if size == 1:
        return (None, (), "one rank: nothing to move")
    if requested == "host":
        return (None, (), "copied through host memory: CHOROS_DEVICES=host")
    if engine == "threads":
        return (None, (), "copied through host memory, which threads share")
    if engine not in ("mpi", "torch"):
        return (None, (), "copied through host memory: this engine has no collectives on devices")
    if engine == "torch" and requested in ("auto", "torch"):
        moves = "which connects these ranks, moves those on GPUs (NCCL, RCCL) and in host memory (Gloo)"
        return ("torch_devices", ("cpu", "cuda"), f"torch.distributed, {moves}")
    problem = "" if requested == "torch" else nccl4py_problem()
    if requested != "torch" and not problem:
        moves = "NCCL moves those on GPUs, by nccl4py, of TensorFlow and of PyTorch; the engine moves host memory"
        return ("nccl4py_devices", ("cuda",), moves)
    if requested != "nccl4py" and installed("torch"):
        why = " (NCCL, RCCL), because " + problem if problem else ": CHOROS_DEVICES=torch"
        return ("torch_devices", ("cuda",), f"torch.distributed moves those on GPUs{why}")
    if requested == "auto":
        reason = f"copied through host memory, because {problem}, and PyTorch is not installed either"
        return (None, (), reason)
    raise EngineUnavailable(
        f"CHOROS_DEVICES={requested} cannot be used, because {problem or 'PyTorch is not installed'}. Install what is "
        "missing (pip install 'choros[cuda]', or torch), or unset it: choros then selects what can be used."
    )
