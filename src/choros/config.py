"""The environment variables choros reads, in one table.

They are read once, when a process calls ``init()``, so that a setting cannot change during a job.
``chorosrun`` forwards them to every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from choros.errors import ConfigError

__all__ = ["VARIABLES", "Config", "Variable"]


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, default value, valid values (``()``: any) and purpose."""

    name: str
    default: str
    choices: tuple[str, ...]
    help: str

    def read(self, environ: Mapping[str, str]) -> str:
        """Returns the value in ``environ``, ignoring case; raises a ``ConfigError`` if it is not one of ``choices``."""
        value = environ.get(self.name, "") or self.default
        if not self.choices:
            return value
        for choice in self.choices:
            if value.casefold() == choice.casefold():
                return choice
        raise ConfigError(f"{self.name}={value!r} is not one of {', '.join(self.choices)}. It sets {self.help}")


ENGINE = Variable(
    "CHOROS_ENGINE",
    "auto",
    ("auto", "local", "mpi", "torch", "xla"),
    "the engine of the collectives: auto selects local for one rank, mpi for ranks that MPI knows, torch for others.",
)
DEVICES = Variable(
    "CHOROS_DEVICES",
    "auto",
    ("auto", "nccl4py", "torch", "host"),
    "what moves tensors on GPUs: nccl4py or torch.distributed, both without host staging, or the engine, through host "
    "memory; auto selects the first that can.",
)
AUTOTUNE = Variable(
    "CHOROS_AUTOTUNE",
    "0",
    ("0", "1"),
    "whether ranks measure at startup which message sizes are fastest on this machine.",
)
OVERLAP = Variable(
    "CHOROS_OVERLAP",
    "auto",
    ("auto", "0", "1"),
    "whether gradients are reduced during the backward pass: auto does so on accelerators.",
)
ALLOCATOR = Variable(
    "CHOROS_ALLOCATOR",
    "glibc",
    ("glibc", "jemalloc", "tcmalloc", "system"),
    "the memory allocator of ranks: glibc is configured to keep its pages, system is not configured.",
)
LOG_LEVEL = Variable(
    "CHOROS_LOG_LEVEL",
    "WARNING",
    ("DEBUG", "INFO", "WARNING", "ERROR"),
    "the log level: INFO, which chorosrun --verbose sets, logs the engine and why it was selected; DEBUG all events.",
)
MERGE_OUTPUT = Variable(
    "CHOROS_MERGE_OUTPUT",
    "1",
    ("0", "1"),
    "whether chorosrun shows equal lines that several ranks write on standard error within a moment as one line.",
)
START_TIMEOUT = Variable(
    "CHOROS_START_TIMEOUT",
    "300",
    (),
    "the seconds within which ranks that are started without MPI must connect to each other.",
)
SECRET = Variable(
    "CHOROS_SECRET",
    "",
    (),
    "the key, in hex, with which processes that MPI did not start authenticate each other. chorosrun generates one.",
)

VARIABLES: tuple[Variable, ...] = (
    ENGINE,
    DEVICES,
    AUTOTUNE,
    OVERLAP,
    ALLOCATOR,
    LOG_LEVEL,
    MERGE_OUTPUT,
    START_TIMEOUT,
    SECRET,
)


@dataclass(frozen=True)
class Config:
    """The settings from the environment, read once.

    Example:
        >>> Config.from_environ({"CHOROS_ENGINE": "mpi"}).engine
        'mpi'
    """

    engine: str
    devices: str
    autotune: bool
    overlap: bool | None
    log_level: str
    start_timeout: float

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Config:
        """Reads ``environ``; raises a ``ConfigError`` that names the first variable with an invalid value."""
        overlap = OVERLAP.read(environ)
        return cls(
            engine=ENGINE.read(environ),
            devices=DEVICES.read(environ),
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
