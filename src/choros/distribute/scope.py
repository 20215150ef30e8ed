"""The scope stack of each thread: outside of all strategies, in the scope of one, in a replica, or in its ``fit``.

::

    outside of all scopes                                     current_strategy() is None
    with strategy.scope():    cross-replica context           models and optimizers are created here
        strategy.run(step)      replica context               step() runs once per replica; sums gradients
          merge_call(f)           cross-replica context       f(strategy, …) sees all replicas
        model.fit(…)          in the scope again              averages gradients over examples

Each thread has a stack of entered scopes; the topmost entry counts. TensorFlow's own functions in ``tf.distribute`` and
``tf.nn`` answer for it, too. This module does not depend on the strategies, so that all of their modules can import it;
``choros.distribute.current`` has the functions for users.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from choros.errors import StrategyError
from choros.training.tf_context import as_one_replica, current_for_tensorflow

__all__ = [
    "current_replica",
    "current_strategy",
    "depth",
    "enter_fit",
    "enter_scope",
    "has_strategy",
    "in_fit",
    "in_replica",
]


class EnteredStrategy(Protocol):
    """The part of a strategy that this module uses."""

    @property
    def is_default(self) -> bool:
        """Whether its scope counts as outside of all scopes."""

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""


@dataclass(frozen=True)
class _ScopeEntry:
    """An entry of the stack: ``replica`` is ``None`` in cross-replica context."""

    strategy: EnteredStrategy
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
def enter_scope(strategy: EnteredStrategy, replica: Any = None) -> Iterator[None]:
    """The block in which the program is in the scope of ``strategy``, or in one of its replicas.

    Args:
        strategy: the one to enter. The default strategy's scope has no effect.
        replica: the replica's context; ``None`` for cross-replica context.

    Raises:
        StrategyError: another strategy's scope is open.
    """
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
    _stack.entries.append(entry)
    try:
        with _answers_of_tensorflow(entry):
            yield
    finally:
        _stack.entries.pop()


def _answers_of_tensorflow(entry: _ScopeEntry) -> AbstractContextManager[None]:
    """Returns the block in which TensorFlow's functions answer for ``entry``; one replica is TensorFlow's default."""
    if entry.strategy.num_replicas_in_sync == 1:
        return nullcontext()
    return as_one_replica() if entry.fit else current_for_tensorflow(entry.strategy, entry.replica)


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
    """Whether the program is in the scope of a strategy other than the default one."""
    return _stack.top is not None and not _stack.top.strategy.is_default


def in_replica() -> bool:
    """Whether the program is in a replica of a strategy other than the default one."""
    return has_strategy() and current_replica() is not None


def in_fit() -> bool:
    """Whether a strategy's ``fit``, ``evaluate`` or ``predict`` is active, without a replica inside it."""
    innermost = next((entry for entry in reversed(_stack.entries) if entry.fit or entry.replica is not None), None)
    return innermost is not None and innermost.fit
