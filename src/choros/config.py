"""The environment variables choros reads, in one table.

They are read when a process starts to use choros (``init()``), never later, so that a job cannot change
its mind half-way. ``chorosrun`` forwards them to every rank.
"""

from __future__ import annotations

import math
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
        """The variable's value in ``environ``, in any case; a ``ConfigError`` if it is not one of ``choices``."""
        value = environ.get(self.name, "") or self.default
        if not self.choices:
            return value
        for choice in self.choices:
            if value.casefold() == choice.casefold():
                return choice
        raise ConfigError(f"{self.name}={value!r} is not one of {', '.join(self.choices)}. It chooses {self.help}")


ENGINE = Variable(
    "CHOROS_ENGINE",
    "auto",
    ("auto", "local", "mpi", "torch", "xla"),
    "the engine that moves bytes: auto takes local for one rank, mpi for ranks that MPI knows, torch for others.",
)

AUTOTUNE = Variable(
    "CHOROS_AUTOTUNE",
    "0",
    ("0", "1"),
    "whether ranks measure, when they start, which sizes of messages are fastest here.",
)
OVERLAP = Variable(
    "CHOROS_OVERLAP",
    "auto",
    ("auto", "0", "1"),
    "whether gradients are exchanged while the backward pass still runs: auto does so on accelerators.",
)
ALLOCATOR = Variable(
    "CHOROS_ALLOCATOR",
    "glibc",
    ("glibc", "jemalloc", "tcmalloc", "system"),
    "what gives ranks their memory: glibc is told to keep its pages, system is left as it is.",
)
LOG_LEVEL = Variable(
    "CHOROS_LOG_LEVEL",
    "WARNING",
    ("DEBUG", "INFO", "WARNING", "ERROR"),
    "what is logged: INFO, which chorosrun --verbose sets, the engine and why it was chosen; DEBUG every event too.",
)
START_TIMEOUT = Variable(
    "CHOROS_START_TIMEOUT",
    "300",
    (),
    "the seconds that ranks started without MPI may take to meet.",
)
SECRET = Variable(
    "CHOROS_SECRET",
    "",
    (),
    "the key, in hex, by which the processes of a job with parameter servers know each other. chorosrun makes it.",
)

VARIABLES: tuple[Variable, ...] = (ENGINE, AUTOTUNE, OVERLAP, ALLOCATOR, LOG_LEVEL, START_TIMEOUT, SECRET)


@dataclass(frozen=True)
class Config:
    """What the environment says, read once.

    Example:
        >>> Config.from_environ({"CHOROS_ENGINE": "mpi"}).engine
        'mpi'
    """

    engine: str
    autotune: bool
    overlap: bool | None
    log_level: str
    start_timeout: float

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Config:
        """Reads ``environ``; a ``ConfigError`` names the first variable whose value cannot be meant."""
        overlap = OVERLAP.read(environ)
        return cls(
            engine=ENGINE.read(environ),
            autotune=AUTOTUNE.read(environ) == "1",
            overlap=None if overlap == "auto" else overlap == "1",
            log_level=LOG_LEVEL.read(environ),
            start_timeout=_seconds(START_TIMEOUT, environ),
        )


def _seconds(variable: Variable, environ: Mapping[str, str]) -> float:
    text = variable.read(environ)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{variable.name}={text!r} is not a number of seconds above 0. It is {variable.help}")
    return seconds
