"""Selection of the engine and of the collectives on devices: tables of rules, of which the first that holds applies."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from choros.config import ENGINE, Config
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
    """

    requested: str
    topology: Topology
    comm: Any
    installed: Callable[[str], bool]

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank."""
        return self.topology.size == 1 and self.comm in (None, [0])

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
        "torch. Without it, start the script with chorosrun -np {size}, or, if Open MPI was built for SLURM, with srun "
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
    situation = Situation(Config.from_environ(environ).engine, topology, comm, installed)
    rule = next(rule for rule in CHOICES if rule.holds(situation))
    for refusal in REFUSALS:
        if refusal.engine == rule.engine and refusal.holds(situation):
            raise refusal.error(refusal.text.format(launcher=topology.launcher, size=topology.size))
    return Choice(rule.engine, rule.reason.format(launcher=topology.launcher, size=topology.size))


# ── tensors on devices ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class DeviceChoice:
    """The collectives on devices, and why they were selected.

    Attributes:
        module: their module in ``comm/engines``; ``None`` if tensors are copied to the host.
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
        engine: the engine of host arrays.
        size: the number of ranks.
        installed: returns whether a module can be imported.
    """

    engine: str
    size: int
    installed: Callable[[str], bool]


@dataclass(frozen=True)
class DeviceRule:
    """A choice, and when it is selected."""

    choice: DeviceChoice
    holds: Callable[[DeviceSituation], bool]


DEVICE_CHOICES: tuple[DeviceRule, ...] = (
    DeviceRule(DeviceChoice(None, (), "one rank: nothing to move"), lambda situation: situation.size == 1),
    DeviceRule(
        DeviceChoice(None, (), "copied through host memory, as PyTorch is not installed"),
        lambda situation: not situation.installed("torch"),
    ),
    DeviceRule(
        DeviceChoice("torch_devices", ("cpu", "cuda"), "NCCL moves those on GPUs, Gloo those in host memory"),
        lambda situation: situation.engine == "torch",
    ),
    DeviceRule(
        DeviceChoice("torch_devices", ("cuda",), "NCCL moves those on GPUs; MPI, the control plane, host memory"),
        lambda situation: situation.engine == "mpi",
    ),
    DeviceRule(
        DeviceChoice(None, (), "copied through host memory, which threads share"),
        lambda situation: situation.engine == "threads",
    ),
    DeviceRule(
        DeviceChoice(None, (), "copied through host memory: this engine has no collectives on devices"), lambda _: True
    ),
)


def select_devices(engine: str, size: int, installed: Callable[[str], bool] = is_installed) -> DeviceChoice:
    """Selects the collectives on devices between ``size`` ranks whose host arrays ``engine`` moves.

    Args:
        engine: the engine of a communicator.
        size: the number of its ranks.
        installed: returns whether a module can be imported.

    Example:
        >>> select_devices("mpi", 1).reason
        'one rank: nothing to move'
    """
    situation = DeviceSituation(engine, size, installed)
    return next(rule.choice for rule in DEVICE_CHOICES if rule.holds(situation))
