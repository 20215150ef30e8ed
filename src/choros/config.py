"""The environment variables choros reads, in one table.

They are read when a process starts to use choros (``init()``), never later, so that a job cannot change
its mind half-way. ``chorosrun`` forwards them to every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from choros.errors import ConfigError

__all__ = ["VARIABLES", "Config", "Variable"]


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, its default, the values it takes and what it is for."""

    name: str
    default: str
    choices: tuple[str, ...]
    help: str

    def read(self, environ: Mapping[str, str]) -> str:
        """The variable's value in ``environ``; a ``ConfigError`` if it is not one of ``choices``."""
        value = environ.get(self.name, "") or self.default
        if self.choices and value not in self.choices:
            raise ConfigError(f"{self.name}={value!r} is not one of {', '.join(self.choices)}. It chooses {self.help}")
        return value


ENGINE = Variable(
    "CHOROS_ENGINE",
    "auto",
    ("auto", "local", "mpi"),
    "the engine that moves bytes: auto takes local for one rank and mpi for more.",
)

VARIABLES: tuple[Variable, ...] = (ENGINE,)


@dataclass(frozen=True)
class Config:
    """What the environment says, read once.

    Example:
        >>> Config.from_environ({"CHOROS_ENGINE": "mpi"}).engine
        'mpi'
    """

    engine: str

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Config:
        """Reads ``environ``; a ``ConfigError`` names the first variable whose value cannot be meant."""
        return cls(engine=ENGINE.read(environ))
