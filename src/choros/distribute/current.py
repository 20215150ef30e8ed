"""The current strategy and replica, for users; and the default strategy, which is active outside of all scopes.

::

    get_strategy()            the default                     has_strategy() is False
    with strategy.scope():    strategy                        in_cross_replica_context() is True
        strategy.run(step)    strategy                        get_replica_context() is the replica's
"""

import functools
import threading
from contextlib import ExitStack
from typing import final

from choros.distribute import scope
from choros.distribute.replicas import ProcessReplicas, ReplicaContext
from choros.distribute.strategy import Strategy
from choros.errors import StrategyError


@final
class DefaultStrategy(Strategy):
    """One replica, on the framework's default device; models created in its scope train as without a strategy."""

    is_default = True

    def __init__(self) -> None:
        super().__init__(ProcessReplicas(alone=True), training=None)


_default_strategy = functools.cache(DefaultStrategy)


def get_strategy() -> Strategy:
    """Returns the strategy in whose scope the program is; outside of all, the default one, which has one replica.

    Example:
        >>> from choros import distribute
        >>> distribute.get_strategy()
        DefaultStrategy(1 replicas)
    """
    strategy: Strategy = scope.current_strategy() or _default_strategy()
    return strategy


def get_replica_context() -> ReplicaContext | None:
    """Returns the context of the current replica; ``None`` in cross-replica context.

    Outside of all scopes, it is that of the one replica of the default strategy.

    Example:
        >>> from choros import distribute
        >>> distribute.OneDeviceStrategy("cpu").run(lambda: distribute.get_replica_context().num_replicas_in_sync)
        1
    """
    if scope.current_strategy() is None:
        return ReplicaContext(_default_strategy(), 0)
    replica: ReplicaContext | None = scope.current_replica()
    return replica


class _Lasting(threading.local):
    """The scope that ``experimental_set_strategy`` has entered in this thread, and the place in it."""

    def __init__(self) -> None:
        self.scope = ExitStack()
        self.place = scope.OUTSIDE


_lasting = _Lasting()


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Enters the scope of ``strategy`` until the next call, for notebooks, where a block cannot span cells.

    Args:
        strategy: the one to enter; ``None`` leaves the scope.

    Raises:
        StrategyError: it was called inside ``with strategy.scope():``, or in a replica.

    Example:
        >>> from choros import distribute
        >>> distribute.experimental_set_strategy(distribute.OneDeviceStrategy("cpu"))
        >>> distribute.has_strategy()
        True
        >>> distribute.experimental_set_strategy(None)
    """
    if scope.here.place not in (scope.OUTSIDE, _lasting.place):
        raise StrategyError(
            "experimental_set_strategy was called inside a strategy's scope: call it outside of all `with` blocks."
        )
    _lasting.scope.close()
    if strategy is not None:
        _lasting.scope.enter_context(strategy.scope())
        _lasting.place = scope.here.place
