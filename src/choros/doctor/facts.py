"""What the doctor knows of a machine, and what it finds there: frozen values, which become JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

OK, WARNING, PROBLEM = "ok", "warning", "problem"


@dataclass(frozen=True)
class Finding:
    """What a check has found, in a sentence; unless it is ``ok``, with the command or setting that mends it."""

    check: str
    level: str
    text: str
    fix: str = ""
    host: str = "localhost"


@dataclass(frozen=True)
class PackageFacts:
    """A package's version; ``problem``: why its import fails. Without either it is not installed."""

    version: str = ""
    problem: str = ""

    @property
    def state(self) -> str:
        """The version, or why there is none."""
        return self.version or (f"broken ({self.problem})" if self.problem else "not installed")


@dataclass(frozen=True)
class DirectoryFacts:
    """A directory's file system, in bytes; ``problem``: why a file cannot be written there."""

    path: str
    size: int = 0
    free: int = 0
    problem: str = ""


@dataclass(frozen=True)
class MachineFacts:
    """A machine as a job would find it. Of limits -1 is none; ``mpirun_problem``: why there is no mpirun."""

    name: str = ""
    python: str = ""
    executable: str = ""
    choros: str = ""
    packages: Mapping[str, PackageFacts] = field(default_factory=dict)
    mpirun: str = ""
    mpirun_path: str = ""
    mpirun_problem: str = ""
    from_wheel: bool = False
    survives: bool = False
    shared_memory: DirectoryFacts | None = None
    temporary: DirectoryFacts = DirectoryFacts("")
    requested_temporary: str = ""
    current: DirectoryFacts = DirectoryFacts("")
    open_files: tuple[int, int] = (-1, -1)
    locked_memory: int = -1
    processes: int = -1
    fabric: bool = False
    cores: int = 1
    allowed: int = 1
    processors: int = 1
    quota: float | None = None
    numa_nodes: int = 0
    accelerators: int = 0
    gpus: tuple[str, ...] = ()
    gpu_problem: str = ""
    devices: str = ""
    settings_problem: str = ""
    loopback_problem: str = ""
    addresses: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> MachineFacts:
        """Returns the facts that another machine, perhaps with another version of choros, has sent, made by ``asdict``.

        >>> from dataclasses import asdict
        >>> facts = MachineFacts(packages={"jax": PackageFacts("0.8")}, open_files=(64, 64))
        >>> MachineFacts.from_json({**asdict(facts), "later": 1}) == facts
        True
        """
        made = {each.name: values[each.name] for each in fields(cls) if each.name in values}
        made = {name: tuple(value) if isinstance(value, list) else value for name, value in made.items()}
        for name in ("shared_memory", "temporary", "current"):
            if made.get(name) is not None:
                made[name] = DirectoryFacts(**made[name])
        packages = made.get("packages", {})
        return cls(**{**made, "packages": {name: PackageFacts(**package) for name, package in packages.items()}})
