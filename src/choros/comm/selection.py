"""Selection of the engine and of the collectives on devices: tables of rules, of which the first that holds applies."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from choros.config import DEVICES, ELASTIC, ENGINE, Config
from choros.errors import ChorosError, ConfigError, EngineUnavailable
from choros.topology import NEVER_MPI, WITHOUT_MPI, Topology

__all__ = [
    "CHOICES",
    "DEVICE_CHOICES",
    "REFUSALS",
    "Choice",
    "DeviceChoice",
    "DeviceRule",
    "DeviceSituation",
    "EngineRule",
    "Refusal",
    "Situation",
    "is_installed",
    "nccl4py_problem",
    "select",
    "select_devices",
]


@dataclass(frozen=True)
class Choice:
    """An engine, the name of its module in ``comm/engines``, and why it was selected."""

    engine: str
    reason: str

    def __str__(self) -> str:
        return f"engine {self.engine}: {self.reason}"


@dataclass(frozen=True)
class Situation:
    """The inputs of the choice.

    Attributes:
        requested: the value of ``CHOROS_ENGINE``.
        topology: the topology from the launcher's environment.
        comm: the ``comm`` argument of ``init``.
        installed: returns whether a module can be imported.
        elastic: whether others may join the job.
    """

    requested: str
    topology: Topology
    comm: Any
    installed: Callable[[str], bool]
    elastic: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank, and will be none."""
        return self.topology.size == 1 and self.comm in (None, [0]) and not self.elastic

    @property
    def is_without_mpi(self) -> bool:
        """Whether there are other ranks, which are not expected to have MPI."""
        return self.topology.launcher in WITHOUT_MPI and self.topology.size > 1

    @property
    def has_mpi_communicator(self) -> bool:
        """Whether ``init`` was given a communicator of mpi4py."""
        return self.comm is not None and not isinstance(self.comm, Sequence)


@dataclass(frozen=True)
class EngineRule:
    """An engine, and when it is selected; ``reason`` may contain ``{launcher}`` and ``{size}``."""

    engine: str
    reason: str
    holds: Callable[[Situation], bool]


def _requested(engine: str) -> EngineRule:
    return EngineRule(engine, f"{ENGINE.name}={engine}", lambda situation: situation.requested == engine)


CHOICES: tuple[EngineRule, ...] = (
    *(_requested(engine) for engine in ENGINE.choices if engine != "auto"),
    EngineRule("local", "one rank: nothing to move", lambda situation: situation.is_alone),
    EngineRule("mpi", "init() was given an MPI communicator", lambda situation: situation.has_mpi_communicator),
    EngineRule("torch", "{launcher} started {size} ranks without MPI", lambda situation: situation.is_without_mpi),
    EngineRule("mpi", "{launcher} started {size} ranks", lambda _: True),
)


@dataclass(frozen=True)
class Refusal:
    """Why an engine cannot be selected, and when; ``text`` may contain ``{launcher}`` and ``{size}``."""

    engine: str
    error: type[ChorosError]
    text: str
    holds: Callable[[Situation], bool]


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "local",
        ConfigError,
        "CHOROS_ENGINE=local is for one rank, but {launcher} started {size}.",
        lambda situation: situation.topology.size > 1,
    ),
    Refusal(
        "mpi",
        EngineUnavailable,
        "{launcher} started {size} ranks, and the mpi engine cannot join ranks that MPI's own launchers did not start. "
        "Start the script with chorosrun -np {size} in place of it, or unset CHOROS_ENGINE: the torch engine can.",
        lambda situation: situation.topology.launcher in NEVER_MPI and situation.topology.size > 1,
    ),
    Refusal(
        "torch",
        EngineUnavailable,
        "{launcher} started {size} ranks, and the torch engine, which moves their bytes, needs PyTorch: pip install "
        "torch. Without it, start the script with chorosrun -np {size}, or, if SLURM has PMIx, with srun "
        "--mpi=pmix.",
        lambda situation: not situation.installed("torch"),
    ),
    Refusal(
        "torch",
        ConfigError,
        "init() was given an MPI communicator, which only the mpi engine takes: unset CHOROS_ENGINE, or give init() a "
        "list of ranks.",
        lambda situation: situation.has_mpi_communicator,
    ),
    Refusal(
        "xla",
        EngineUnavailable,
        "CHOROS_ENGINE=xla needs JAX: pip install jax. Without it, unset CHOROS_ENGINE.",
        lambda situation: not situation.installed("jax"),
    ),
)


def is_installed(module: str) -> bool:
    """Whether ``module`` can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


def select(
    environ: Mapping[str, str], topology: Topology, comm: Any = None, installed: Callable[[str], bool] = is_installed
) -> Choice:
    """Selects the engine for this job, the same on every rank.

    Args:
        environ: the environment, usually ``os.environ``.
        topology: the topology from the launcher's environment.
        comm: the ``comm`` argument of ``init``.
        installed: returns whether a module can be imported.

    Raises:
        ConfigError: ``CHOROS_ENGINE`` is invalid for this job.
        EngineUnavailable: the engine that is needed cannot run here.

    Example:
        >>> print(select({}, Topology()))
        engine local: one rank: nothing to move
        >>> print(select({}, Topology(rank=1, size=4, launcher="mpirun")))
        engine mpi: mpirun started 4 ranks
    """
    elastic = ELASTIC.read(environ) == "1"
    situation = Situation(Config.from_environ(environ).engine, topology, comm, installed, elastic)
    rule = next(rule for rule in CHOICES if rule.holds(situation))
    for refusal in REFUSALS:
        if refusal.engine == rule.engine and refusal.holds(situation):
            raise refusal.error(refusal.text.format(launcher=topology.launcher, size=topology.size))
    return Choice(rule.engine, rule.reason.format(launcher=topology.launcher, size=topology.size))


# ── tensors on devices ───────────────────────────────────────────────────────────────────────────


def nccl4py_problem() -> str:
    """Returns why nccl4py cannot be used here, as a clause; nothing if it can.

    NCCL's library and the driver are loaded, but CUDA is not initialised: the script may yet choose its devices.
    """
    if importlib.util.find_spec("nccl") is None:
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


@dataclass(frozen=True)
class DeviceChoice:
    """The collectives on devices, and why they were selected.

    Attributes:
        module: the module in ``comm/engines`` that connects devices; ``None`` if tensors are copied to the host.
        kinds: the kinds of devices whose tensors are not copied to the host.
        reason: why.
    """

    module: str | None
    kinds: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class DeviceSituation:
    """The inputs of that choice.

    Attributes:
        requested: the value of ``CHOROS_DEVICES``.
        engine: the engine of host arrays.
        size: the number of ranks.
        installed: returns whether a module can be imported.
        nccl4py_problem: returns why nccl4py cannot be used, as a clause; nothing if it can.
    """

    requested: str
    engine: str
    size: int
    installed: Callable[[str], bool]
    nccl4py_problem: Callable[[], str]

    def allows(self, library: str) -> bool:
        """Whether ``CHOROS_DEVICES`` names ``library``, or none."""
        return self.requested in ("auto", library)


@dataclass(frozen=True)
class DeviceRule:
    """A choice, and when it is selected; its reason may contain ``{problem}``, that of nccl4py."""

    choice: DeviceChoice
    holds: Callable[[DeviceSituation], bool]


DEVICE_CHOICES: tuple[DeviceRule, ...] = (
    DeviceRule(DeviceChoice(None, (), "one rank: nothing to move"), lambda situation: situation.size == 1),
    DeviceRule(
        DeviceChoice(None, (), f"copied through host memory: {DEVICES.name}=host"),
        lambda situation: situation.requested == "host",
    ),
    DeviceRule(
        DeviceChoice(None, (), "copied through host memory, which threads share"),
        lambda situation: situation.engine == "threads",
    ),
    DeviceRule(
        DeviceChoice(None, (), "copied through host memory: this engine has no collectives on devices"),
        lambda situation: situation.engine not in ("mpi", "torch"),
    ),
    DeviceRule(
        DeviceChoice(
            "torch_devices",
            ("cpu", "cuda"),
            "torch.distributed, which connects these ranks, moves those on GPUs (NCCL, RCCL) and in host memory (Gloo)",
        ),
        lambda situation: situation.engine == "torch" and situation.allows("torch"),
    ),
    DeviceRule(
        DeviceChoice(
            "nccl4py_devices",
            ("cuda",),
            "NCCL moves those on GPUs, by nccl4py, of TensorFlow and of PyTorch; the engine moves host memory",
        ),
        lambda situation: situation.allows("nccl4py") and not situation.nccl4py_problem(),
    ),
    DeviceRule(
        DeviceChoice("torch_devices", ("cuda",), f"torch.distributed moves those on GPUs: {DEVICES.name}=torch"),
        lambda situation: situation.requested == "torch" and situation.installed("torch"),
    ),
    DeviceRule(
        DeviceChoice(
            "torch_devices", ("cuda",), "torch.distributed moves those on GPUs (NCCL, RCCL), because {problem}"
        ),
        lambda situation: situation.allows("torch") and situation.installed("torch"),
    ),
    DeviceRule(
        DeviceChoice(None, (), "copied through host memory, because {problem}, and PyTorch is not installed either"),
        lambda situation: situation.requested == "auto",
    ),
)


def select_devices(
    engine: str,
    size: int,
    environ: Mapping[str, str],
    installed: Callable[[str], bool] = is_installed,
    nccl4py_problem: Callable[[], str] = nccl4py_problem,
) -> DeviceChoice:
    """Selects the collectives on devices between ``size`` ranks whose host arrays ``engine`` moves.

    Args:
        engine: the engine of a communicator.
        size: the number of its ranks.
        environ: the environment, usually ``os.environ``.
        installed: returns whether a module can be imported.
        nccl4py_problem: returns why nccl4py cannot be used, as a clause; nothing if it can.

    Raises:
        EngineUnavailable: what ``CHOROS_DEVICES`` names cannot be used here.

    Example:
        >>> select_devices("mpi", 1, {}).reason
        'one rank: nothing to move'
    """
    problem_once = functools.cache(nccl4py_problem)  # loads libraries, and several rules ask
    situation = DeviceSituation(Config.from_environ(environ).devices, engine, size, installed, problem_once)
    choice = next((rule.choice for rule in DEVICE_CHOICES if rule.holds(situation)), None)
    if choice is not None:
        return replace(choice, reason=choice.reason.format(problem=problem_once())) if "{" in choice.reason else choice
    problem = problem_once() if situation.requested == "nccl4py" else "PyTorch is not installed"
    raise EngineUnavailable(
        f"{DEVICES.name}={situation.requested} cannot be used, because {problem}. Install what is missing "
        "(pip install 'choros[cuda]', or torch), or unset it: choros then selects what can be used."
    )
