"""Where the program is: outside of all strategies, in the scope of one, in one of its replicas, or in its ``fit``.

::

    get_strategy()            the default                     has_strategy() is False
    with strategy.scope():    cross-replica context           models and optimizers are made here
        strategy.run(step)      replica context               step() runs once a replica; sums gradients
          merge_call(f)           cross-replica context       f(strategy, …) sees all replicas
        model.fit(…)          in the scope again              averages gradients over examples

A thread's places form a stack; the topmost counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np

from choros.distribute.reduce_op import ReduceOp
from choros.errors import StrategyError

if TYPE_CHECKING:
    from choros.distribute.strategy import Strategy

__all__ = [
    "ReplicaContext",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "in_fit",
    "in_place",
    "scope_of",
]


@dataclass(frozen=True)
class _Place:
    """An entry of the stack: ``replica`` is ``None`` in cross-replica context."""

    strategy: Strategy
    replica: ReplicaContext | None = None
    fit: bool = False


class _Stack(threading.local):
    def __init__(self) -> None:
        self.places: list[_Place] = []

    @property
    def top(self) -> _Place | None:
        return self.places[-1] if self.places else None


_stack = _Stack()


@contextmanager
def in_place(strategy: Strategy, *, replica: ReplicaContext | None = None, fit: bool = False) -> Iterator[None]:
    """The block in which ``strategy`` counts: in its scope, in one of its replicas, or in its ``fit``.

    Raises:
        StrategyError: another strategy's scope is open.
    """
    if replica is None and _is_default(strategy):
        yield  # in whose scope all is as outside of all scopes
        return
    top = _stack.top
    if top is not None and top.strategy is not strategy:
        raise StrategyError(
            f"a {type(strategy).__name__} was used inside the scope of another strategy, "
            f"{type(top.strategy).__name__}: a program is in one strategy's scope at a time. Leave the other first."
        )
    _stack.places.append(_Place(strategy, replica, fit))
    try:
        yield
    finally:
        _stack.places.pop()


def _is_default(strategy: Strategy) -> bool:
    from choros.distribute.default import DefaultStrategy

    return isinstance(strategy, DefaultStrategy)


def scope_of() -> Strategy | None:
    """The strategy whose scope, replica or ``fit`` the program is in."""
    return None if _stack.top is None else _stack.top.strategy


def in_fit() -> bool:
    """Whether a strategy's ``fit``, ``evaluate`` or ``predict`` has the word: no replica within it has."""
    decisive = next((place for place in reversed(_stack.places) if place.fit or place.replica is not None), None)
    return decisive is not None and decisive.fit


def has_strategy() -> bool:
    """Whether the program is in the scope of a strategy.

    Example:
        >>> from choros import distribute
        >>> distribute.has_strategy()
        False
    """
    return _stack.top is not None and not _is_default(_stack.top.strategy)


def get_strategy() -> Strategy:
    """The strategy in whose scope the program is; outside of all, the default one, which has one replica.

    Example:
        >>> from choros import distribute
        >>> distribute.get_strategy().num_replicas_in_sync
        1
    """
    if _stack.top is not None:
        return _stack.top.strategy
    from choros.distribute.default import default_strategy

    return default_strategy()


def in_cross_replica_context() -> bool:
    """Whether the program is in the scope of a strategy, but in none of its replicas.

    Example:
        >>> from choros import distribute
        >>> with distribute.OneDeviceStrategy("cpu").scope():
        ...     distribute.in_cross_replica_context()
        True
    """
    return _stack.top is not None and _stack.top.replica is None


def get_replica_context() -> ReplicaContext | None:
    """The replica in which the program is; ``None`` in cross-replica context.

    Outside of all strategies that is the one replica of the default strategy.

    Example:
        >>> from choros import distribute
        >>> distribute.OneDeviceStrategy("cpu").run(lambda: distribute.get_replica_context().num_replicas_in_sync)
        1
    """
    if _stack.top is None:
        return ReplicaContext(get_strategy(), 0)
    return _stack.top.replica


@final
class ReplicaContext:
    """What a function that ``strategy.run`` calls knows of its replica, and how it speaks to the others.

    All replicas must call the collective methods alike, in the same order.

    Attributes:
        strategy: the replicas'.
    """

    def __init__(self, strategy: Strategy, replica_id: Any) -> None:
        self.strategy = strategy
        self._replica_id = replica_id

    @property
    def replica_id_in_sync_group(self) -> Any:
        """Which replica this is, from 0: a number, or a traced one where several replicas share one program."""
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas there are, on all workers together."""
        return self.strategy.num_replicas_in_sync

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: Any = None) -> Any:
        """Combines the replicas' values; each gets the result. Gradients flow through it.

        Args:
            reduce_op: ``SUM`` or ``MEAN``.
            value: an array, a number, or a structure of them; the same shapes on every replica.
            options: ``tf.distribute``'s; the engine decides how to travel.

        Example:
            >>> from choros import distribute
            >>> def step():
            ...     return distribute.get_replica_context().all_reduce("SUM", 2.0)
            >>> distribute.OneDeviceStrategy("cpu").run(step)
            2.0
        """
        del options
        return self.strategy.replicas.all_reduce(ReduceOp.of(reduce_op), value)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Concatenates the replicas' values along ``axis``; each gets the result. Gradients flow through it.

        Args:
            value: an array with at least one dimension, or a structure of them; only the dimension ``axis`` may differ
                between replicas.
            axis: the dimension.
            options: ``tf.distribute``'s.
        """
        del options
        return self.strategy.replicas.all_gather(value, axis)

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls ``merge_fn(strategy, *args)`` in cross-replica context, where ``strategy.reduce`` works.

        Every process calls it for its replica. Unlike TensorFlow's, this one may be called from within a condition or a
        nested function, as long as all replicas do.
        """
        return self.strategy.replicas.merge_call(self.strategy, merge_fn, args, dict(kwargs or {}))

    def __repr__(self) -> str:
        number = self._replica_id if isinstance(self._replica_id, (int, np.integer)) else "traced"
        return f"ReplicaContext(replica {number} of {self.num_replicas_in_sync})"
