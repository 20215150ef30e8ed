"""The place of each thread: outside of all strategies, in the scope of one, in a replica, or in its ``fit``.

::

    outside of all scopes                                     current_strategy() is None
    with strategy.scope():    cross-replica context           models and optimizers are created here
        strategy.run(step)      replica context               step() runs once per replica; sums gradients
          merge_call(f)           cross-replica context       f(strategy, …) sees all replicas
        model.fit(…)          in the scope again              averages gradients over examples

``tf.distribute`` and ``tf.nn`` answer for it, too. This module does not depend on the strategies, so that all of their
modules can import it.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from choros.errors import StrategyError
from choros.training.tf_context import as_one_replica, current_for_tensorflow


class _Here(threading.local):
    """The place of this thread: ``replica`` is ``None`` in cross-replica context; ``fit``: no replica was entered since
    the ``fit``. ``depth`` counts the blocks that lead to it, ``lasting`` those of ``experimental_set_strategy``.
    """

    strategy: Any = None  # a Strategy; its module imports this one
    replica: Any = None
    fit = False
    depth = lasting = 0

    def __init__(self) -> None:
        #: Leaves the scope that ``experimental_set_strategy`` has entered.
        self.leaving = ExitStack()


here = _Here()


@contextmanager
def enter_scope(strategy: Any, replica: Any = None) -> Iterator[None]:
    """The block in the scope of ``strategy``, or in its ``replica``; the default strategy's scope has no effect."""
    if replica is None and strategy.is_default:
        yield
        return
    if here.strategy is not None and here.strategy is not strategy:
        raise StrategyError(
            f"a {type(strategy).__name__} was used inside the scope of another strategy, "
            f"{type(here.strategy).__name__}: a program is in one strategy's scope at a time. Leave the other first."
        )
    block = current_for_tensorflow(strategy, replica)
    with _entered(strategy, replica, here.fit and replica is None, block):
        yield


@contextmanager
def enter_fit() -> Iterator[None]:
    """The block of the current strategy's ``fit``, ``evaluate`` or ``predict``; no effect outside of all scopes."""
    if not has_strategy():
        yield
        return
    with _entered(here.strategy, None, True, as_one_replica()):
        yield


@contextmanager
def _entered(strategy: Any, replica: Any, fit: bool, in_tensorflow: AbstractContextManager[None]) -> Iterator[None]:
    is_one = strategy.num_replicas_in_sync == 1  # TensorFlow's default
    outer = here.strategy, here.replica, here.fit, here.depth
    here.strategy, here.replica, here.fit, here.depth = strategy, replica, fit, here.depth + 1
    try:
        with nullcontext() if is_one else in_tensorflow:
            yield
    finally:
        here.strategy, here.replica, here.fit, here.depth = outer


def current_strategy() -> Any:
    """Returns the strategy whose scope, replica or ``fit`` is active; ``None`` outside of all."""
    return here.strategy


def current_replica() -> Any:
    """Returns the context of the current replica; ``None`` in cross-replica context and outside of scopes."""
    return here.replica


def has_strategy() -> bool:
    """Whether the program is in the scope of a strategy.

    Example:
        >>> from choros import distribute
        >>> distribute.has_strategy()
        False
    """
    strategy = here.strategy
    return strategy is not None and not strategy.is_default


def in_cross_replica_context() -> bool:
    """Whether the program is in the scope of a strategy, but not in a replica.

    Example:
        >>> from choros import distribute
        >>> with distribute.OneDeviceStrategy("cpu").scope():
        ...     distribute.in_cross_replica_context()
        True
    """
    return here.strategy is not None and here.replica is None


def in_replica() -> bool:
    """Whether the program is in a replica of a strategy other than the default one."""
    return here.replica is not None and not here.strategy.is_default


def in_fit() -> bool:
    """Whether a strategy's ``fit``, ``evaluate`` or ``predict`` is active, without a replica inside it."""
    return here.fit


_ATTRIBUTE = "_choros_strategy"


def assign_strategy(created: Any, strategy: Any) -> None:
    """Marks what was created as the strategy's, past Keras' tracking of attributes: it is not part of its state."""
    object.__setattr__(created, _ATTRIBUTE, strategy)


def strategy_of(created: Any) -> Any:
    """Returns the strategy in whose scope a model, an optimizer or a Keras variable was created; else ``None``."""
    return getattr(created, "__dict__", {}).get(_ATTRIBUTE)
