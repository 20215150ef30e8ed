"""What is said to a parameter server.

::

    chief or worker                          server
      Hello ────────────────────────────────►             who this is
      Pull(known) ──────────────────────────►             shards that changed since version `known`; for the chief
      ◄──────────────────────────── Changed               optimizers' slots as well: their values, and the version
      Push(optimizer, gradients, known) ────►             applied under a lock, by a real Keras optimizer
      ◄──────────────────────────── Changed
      Assign(values) ───────────────────────►             the last writer wins
      ◄─────────────────────────────── None
      Adopt(optimizer, recipe) ─────────────►             makes the optimizer, if nobody did before
      ◄─────────────────────────────── None
      Shutdown ─────────────────────────────►             from the chief: the job is over

The server answers one after the other. What goes wrong is the answer: a ``Failure``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from choros.distribute.parameter_server.placement import Shard, VariableKey

__all__ = ["Adopt", "Assign", "Average", "Changed", "Hello", "OptimizerRecipe", "Pull", "Push", "Shutdown"]

Array = NDArray[Any]


@dataclass(frozen=True)
class Hello:
    """Who connects: ``chief`` or ``worker``, and which; what it has made in the scope, in order."""

    role: str
    index: int
    made: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shutdown:
    """The chief is done: the job is over."""


@dataclass(frozen=True)
class Pull:
    """Asks for what changed since the version ``known``: variables, and the slots of optimizers, if they are wanted."""

    known: int
    slots: bool


@dataclass(frozen=True)
class Changed:
    """The answer to ``Pull`` and ``Push``.

    Attributes:
        version: how often anything has changed on this server.
        values: the shards that changed since the version asked for.
    """

    version: int
    values: Mapping[Shard, Array]


@dataclass(frozen=True)
class Push:
    """Gradients of the variables of an optimizer, ready to be applied.

    Attributes:
        optimizer: its number.
        gradients: by shard; shards that have none are left out.
        learning_rate: a number, or ``None`` if the optimizer follows a schedule.
        known: as in ``Pull``; the answer has no slots.
    """

    optimizer: int
    gradients: Mapping[Shard, Array]
    learning_rate: float | None
    known: int


@dataclass(frozen=True)
class Assign:
    """New values of shards; those that the server does not have yet are made.

    Of slots too, also before their optimizer is adopted: it begins with them.
    """

    values: Mapping[Shard, Array]


@dataclass(frozen=True)
class OptimizerRecipe:
    """How an optimizer is made.

    Attributes:
        pickled: its class and configuration, by cloudpickle.
        variables: its variables in order, each with whether weight decay applies to it, and its constraint.
    """

    pickled: bytes
    variables: Mapping[VariableKey, tuple[bool, Any]]


@dataclass(frozen=True)
class Adopt:
    """Makes an optimizer for those shards of its variables that live on this server."""

    optimizer: int
    recipe: OptimizerRecipe


@dataclass(frozen=True)
class Average:
    """Puts the moving averages that an optimizer with ``use_ema`` keeps in the place of the variables."""

    optimizer: int
