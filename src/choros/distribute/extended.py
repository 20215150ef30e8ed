"""The ``extended`` methods of a strategy, which Keras and optimizers written for TensorFlow use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

from choros.distribute.keras_hook import strategy_of
from choros.distribute.reduce_op import ReduceOp

__all__ = ["StrategyExtended"]


@final
class StrategyExtended:
    """``tf.distribute.StrategyExtended``, for processes that each hold one copy of every variable."""

    #: Makes ``tf.function`` trace a function anew in a strategy, where TensorFlow's names have other answers.
    _retrace_functions_for_each_device = True

    def __init__(self, strategy: Any) -> None:  # a Strategy; its module imports this one
        self._strategy = strategy

    def _use_merge_call(self) -> bool:
        """Tells TensorFlow that variables are updated in replica context."""
        return False

    def variable_created_in_scope(self, v: Any) -> bool:
        """Whether the Keras variable ``v`` was created in this strategy's scope."""
        return strategy_of(v) is self._strategy

    def reduce_to(self, reduce_op: ReduceOp | str, value: Any, destinations: Any = None, options: Any = None) -> Any:
        """``strategy.reduce``: every process receives the result; ``destinations`` has no effect."""
        del destinations, options
        return self._strategy.reduce(reduce_op, value, axis=None)

    def batch_reduce_to(
        self, reduce_op: ReduceOp | str, value_destination_pairs: Sequence[tuple[Any, Any]], options: Any = None
    ) -> list[Any]:
        """``reduce_to`` for each pair of a value and a destination."""
        return [self.reduce_to(reduce_op, value, to, options) for value, to in value_destination_pairs]

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls ``fn(var, *args)`` once: this process has one copy of ``var``."""
        result = fn(var, *args, **(kwargs or {}))
        return result if group else (result,)

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """``strategy.run``."""
        return self._strategy.run(fn, args, kwargs)

    def colocate_vars_with(self, colocate_with_variable: Any) -> AbstractContextManager[None]:
        """Does nothing: all variables of a process are on one device."""
        del colocate_with_variable
        return nullcontext()

    def value_container(self, value: Any) -> Any:
        """Returns ``value`` itself: no variable consists of others."""
        return value
