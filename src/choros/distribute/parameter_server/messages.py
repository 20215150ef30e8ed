"""The messages between a parameter server and its clients.

::

    chief or worker                          server
      Hello(job) ───────────────────────────►             the job whose variables are meant
      Pull(known) ──────────────────────────►             shards that changed since version `known`, and the
      ◄──────────────────────────── Changed               current version; for the chief, optimizer slots as well
      Push(optimizer, gradients, known) ────►             applied under a lock, by a real Keras optimizer
      ◄──────────────────────────── Changed
      Assign(values) ───────────────────────►             the last writer wins
      ◄─────────────────────────────── None
      Register(optimizer, recipe) ──────────►             creates the optimizer unless it exists
      ◄─────────────────────────────── None
      Shutdown ─────────────────────────────►             from the chief: the job has ended

A server replies to the requests of a connection in order. If a request fails, the reply is a ``Failure``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from choros.distribute.parameter_server.placement import Shard, VariableKey

__all__ = ["Assign", "Average", "Changed", "Hello", "OptimizerRecipe", "Pull", "Push", "Register", "Shutdown"]

Array = NDArray[Any]


@dataclass(frozen=True)
class Hello:
    """The first message of the connecting process, whose name the channel has.

    Attributes:
        job: the name of the job; the chief has chosen it.
        process: the host and number of the process.
    """

    job: str
    process: tuple[str, int]


@dataclass(frozen=True)
class Shutdown:
    """The job has ended; sent by the chief."""


@dataclass(frozen=True)
class Pull:
    """Requests the shards that changed since version ``known``; optimizer slots are included if ``slots`` is true."""

    known: int
    slots: bool


@dataclass(frozen=True)
class Changed:
    """The reply to ``Pull`` and ``Push``.

    Attributes:
        version: the number of changes this server has seen.
        values: the shards that changed since the requested version.
    """

    version: int
    values: Mapping[Shard, Array]


@dataclass(frozen=True)
class Push:
    """Gradients of the variables of an optimizer, already accumulated and clipped.

    Attributes:
        optimizer: its number.
        gradients: by shard; shards without a gradient are left out.
        learning_rate: the current one, or ``None`` if the optimizer follows a schedule.
        known: as in ``Pull``; the reply contains no slots.
    """

    optimizer: int
    gradients: Mapping[Shard, Array]
    learning_rate: float | None
    known: int


@dataclass(frozen=True)
class Assign:
    """New values of shards; the server creates those it does not have yet.

    Slots may be assigned before their optimizer is registered; it then starts from these values.
    """

    values: Mapping[Shard, Array]


@dataclass(frozen=True)
class OptimizerRecipe:
    """Everything a server needs to create an optimizer.

    Attributes:
        pickled: its class and configuration, by cloudpickle.
        variables: the keys of its variables in order; for each, whether weight decay applies, and its constraint.
    """

    pickled: bytes
    variables: Mapping[VariableKey, tuple[bool, Any]]


@dataclass(frozen=True)
class Register:
    """Registers an optimizer; the server creates it for the shards of its variables that it stores."""

    optimizer: int
    recipe: OptimizerRecipe


@dataclass(frozen=True)
class Average:
    """Overwrites the variables of an optimizer with ``use_ema`` with their moving averages."""

    optimizer: int
