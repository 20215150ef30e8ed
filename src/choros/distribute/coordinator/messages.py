"""The messages between the chief and workers; ``Shutdown`` is that of the parameter servers.

::

    chief                                    worker
      StartJob(job, partition) ─────────────────►             the first message: the worker connects to the servers
      ◄─────────────────────── Joined, or Failure          what it has created itself
      Run ───────────────────────────────────►             a closure; its function and definitions only once per worker
      ◄──────────────────────────── Ran, or Failure
      Shutdown ──────────────────────────────►             after any closure: the job has ended
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from choros.distribute.coordinator.closures import Reference
from choros.distribute.coordinator.definitions import Definition
from choros.distribute.coordinator.metrics import Report

__all__ = ["Joined", "Ran", "Run", "StartJob"]


@dataclass(frozen=True)
class StartJob:
    """The chief has connected.

    Attributes:
        job: the name of the chief's job on the parameter servers.
        partition: the strategy's ``variable_partitioner``, by cloudpickle.
    """

    job: str
    partition: bytes


@dataclass(frozen=True)
class Joined:
    """The worker has connected to the parameter servers.

    Attributes:
        kinds: the classes of the models and optimizers that it has created in the scope, in order.
        known: references to all objects that it has created.
    """

    kinds: tuple[str, ...]
    known: Mapping[Reference, int]


@dataclass(frozen=True)
class Run:
    """Requests that a worker run a function.

    Attributes:
        key: the hash of the pickled function.
        function: the pickled function; ``None`` if this worker has received it before.
        arguments: the pickled ``(args, kwargs)``.
        learning_rates: the learning rates of the scope's optimizers, by number.
        definitions: of the objects that the function uses and this worker lacks.
    """

    key: bytes
    function: Any
    arguments: Any
    learning_rates: Mapping[int, float]
    definitions: Sequence[Definition] = ()


@dataclass(frozen=True)
class Ran:
    """The reply to ``Run`` when the function has returned.

    Attributes:
        result: the pickled result.
        metrics: the metrics that the function updated.
        seconds: the time that it took, with the values that it has got from the servers.
        waiting: the part of it in which the worker waited for the servers.
    """

    result: Any
    metrics: Report
    seconds: float = 0.0
    waiting: float = 0.0
