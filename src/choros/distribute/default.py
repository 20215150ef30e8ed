"""The strategy that is in force where none is."""

from __future__ import annotations

import functools
from typing import final

from choros.distribute.fit import Training
from choros.distribute.process_replicas import ProcessReplicas
from choros.distribute.strategy import Strategy

__all__ = ["default_strategy"]


@final
class DefaultStrategy(Strategy):
    """One replica, which computes where the framework likes; models made in its scope train as they would without."""

    def __init__(self) -> None:
        super().__init__(ProcessReplicas(1, 0))

    @property
    def training(self) -> Training | None:
        """``None``: what Keras makes is left alone."""
        return None


@functools.cache
def default_strategy() -> Strategy:
    """What ``get_strategy()`` gives outside of all scopes.

    Example:
        >>> default_strategy()
        DefaultStrategy(1 replicas)
    """
    return DefaultStrategy()
