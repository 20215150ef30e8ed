"""The messages between the chief and workers; ``Hello`` and ``Shutdown`` are those of the parameter servers.

::

    worker                                   chief
      Hello(created) ──────────────────────────►             the first message
      ◄──────────────────────────────────── Run              a closure; its function only once per worker
      Ran, or Failure ─────────────────────────►
      ◄─────────────────────────────── Shutdown              after any closure: the worker ends
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from choros.distribute.coordinator.metrics import Report

__all__ = ["Ran", "Run"]


@dataclass(frozen=True)
class Run:
    """Requests that a worker run a function.

    Attributes:
        key: the hash of the pickled function.
        function: the pickled function; ``None`` if this worker has received it before.
        arguments: the pickled ``(args, kwargs)``.
        learning_rates: the learning rates of the scope's optimizers, by number.
    """

    key: bytes
    function: Any
    arguments: Any
    learning_rates: Mapping[int, float]


@dataclass(frozen=True)
class Ran:
    """The reply to ``Run`` when the function has returned.

    Attributes:
        result: the pickled result.
        metrics: the metrics that the function updated.
    """

    result: Any
    metrics: Report
