"""The scope stack of each thread: outside of all strategies, in the scope of one, in a replica, or in its ``fit``.

::

    outside of all scopes                                     current_strategy() is None
    with strategy.scope():    cross-replica context           models and optimizers are created here
        strategy.run(step)      replica context               step() runs once per replica; sums gradients
          merge_call(f)           cross-replica context       f(strategy, …) sees all replicas
        model.fit(…)          in the scope again              averages gradients over examples

The topmost entry counts; ``tf.distribute`` and ``tf.nn`` answer for it, too. This module does not depend on the
strategies, so that all of their modules can import it; ``choros.distribute.current`` is for users.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from choros.errors import StrategyError
from choros.training.tf_context import as_one_replica, current_for_tensorflow


@dataclass(frozen=True)
class _ScopeEntry:
    """An entry of the stack: ``replica`` is ``None`` in cross-replica context."""

    strategy: Any  # a Strategy; its module imports this one
    replica: Any = None
    fit: bool = False


class _Stack(threading.local):
    def __init__(self) -> None:
        self.entries: list[_ScopeEntry] = []

    @property
    def top(self) -> _ScopeEntry | None:
        return self.entries[-1] if self.entries else None


_stack = _Stack()


@contextmanager
def enter_scope(strategy: Any, replica: Any = None) -> Iterator[None]:
    """The block in the scope of ``strategy``, or in its ``replica``; the default strategy's scope has no effect."""
    if replica is None and strategy.is_default:
        yield
        return
    top = _stack.top
    if top is not None and top.strategy is not strategy:
        raise StrategyError(
            f"a {type(strategy).__name__} was used inside the scope of another strategy, "
            f"{type(top.strategy).__name__}: a program is in one strategy's scope at a time. Leave the other first."
        )
    with _entered(_ScopeEntry(strategy, replica)):
        yield


@contextmanager
def enter_fit() -> Iterator[None]:
    """The block of the current strategy's ``fit``, ``evaluate`` or ``predict``; no effect outside of all scopes."""
    top = _stack.top
    if top is None or top.strategy.is_default:
        yield
        return
    with _entered(_ScopeEntry(top.strategy, fit=True)):
        yield


@contextmanager
def _entered(entry: _ScopeEntry) -> Iterator[None]:
    if entry.strategy.num_replicas_in_sync == 1:  # TensorFlow's default
        in_tensorflow: AbstractContextManager[None] = nullcontext()
    else:
        in_tensorflow = as_one_replica() if entry.fit else current_for_tensorflow(entry.strategy, entry.replica)
    _stack.entries.append(entry)
    try:
        with in_tensorflow:
            yield
    finally:
        _stack.entries.pop()


def depth() -> int:
    """Returns the number of scopes, replicas and ``fit`` calls that this thread has entered."""
    return len(_stack.entries)


def current_strategy() -> Any:
    """Returns the strategy whose scope, replica or ``fit`` is active; ``None`` outside of all."""
    return None if _stack.top is None else _stack.top.strategy


def current_replica() -> Any:
    """Returns the context of the current replica; ``None`` in cross-replica context and outside of scopes."""
    return None if _stack.top is None else _stack.top.replica


def has_strategy() -> bool:
    """Whether the program is in the scope of a strategy.

    Example:
        >>> from choros import distribute
        >>> distribute.has_strategy()
        False
    """
    return _stack.top is not None and not _stack.top.strategy.is_default


def in_cross_replica_context() -> bool:
    """Whether the program is in the scope of a strategy, but not in a replica.

    Example:
        >>> from choros import distribute
        >>> with distribute.OneDeviceStrategy("cpu").scope():
        ...     distribute.in_cross_replica_context()
        True
    """
    return _stack.top is not None and _stack.top.replica is None


def in_replica() -> bool:
    """Whether the program is in a replica of a strategy other than the default one."""
    return has_strategy() and current_replica() is not None


def in_fit() -> bool:
    """Whether a strategy's ``fit``, ``evaluate`` or ``predict`` is active, without a replica inside it."""
    innermost = next((entry for entry in reversed(_stack.entries) if entry.fit or entry.replica is not None), None)
    return innermost is not None and innermost.fit
