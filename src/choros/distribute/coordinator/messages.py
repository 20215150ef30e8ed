"""What chief and workers say to each other; ``Hello`` and ``Shutdown`` are the parameter servers' too.

::

    worker                                   chief
      Hello(worker, index, made) ──────────────►             before anything else
      ◄──────────────────────────────────── Run              a closure; its function only the first time
      Ran, or Failure ─────────────────────────►
      ◄─────────────────────────────── Shutdown              at any time between closures: the worker ends
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from choros.distribute.coordinator.metrics import Report

__all__ = ["Ran", "Run"]


@dataclass(frozen=True)
class Run:
    """A function to run.

    Attributes:
        key: of the function.
        function: its pickle, ``None`` if this worker has had it.
        arguments: the pickle of ``(args, kwargs)``.
        learning_rates: of the scope's optimizers, by their numbers.
    """

    key: bytes
    function: Any
    arguments: Any
    learning_rates: Mapping[int, float]


@dataclass(frozen=True)
class Ran:
    """A function has returned.

    Attributes:
        result: the pickle of what it returned.
        metrics: what it counted.
    """

    result: Any
    metrics: Report
