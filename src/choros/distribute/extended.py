"""The rarer methods of a strategy, where Keras users and optimizers written for TensorFlow meet them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

from choros.distribute.keras_hook import strategy_of
from choros.distribute.reduce_op import ReduceOp

__all__ = ["StrategyExtended"]


@final
class StrategyExtended:
    """``tf.distribute.StrategyExtended``: what is left of it where each process holds one copy of every variable."""

    def __init__(self, strategy: Any) -> None:  # a Strategy, which is made of this
        self._strategy = strategy

    def variable_created_in_scope(self, v: Any) -> bool:
        """Whether the Keras variable ``v`` was made in this strategy's scope."""
        return strategy_of(v) is self._strategy

    def reduce_to(self, reduce_op: ReduceOp | str, value: Any, destinations: Any = None, options: Any = None) -> Any:
        """``strategy.reduce``: every process gets the result, wherever ``destinations`` says."""
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
        """``fn(var, *args)``: this process has one copy of ``var`` to update."""
        result = fn(var, *args, **(kwargs or {}))
        return result if group else (result,)

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """``strategy.run``."""
        return self._strategy.run(fn, args, kwargs)

    def colocate_vars_with(self, colocate_with_variable: Any) -> AbstractContextManager[None]:
        """Nothing: a process has one place for its variables."""
        del colocate_with_variable
        return nullcontext()

    def value_container(self, value: Any) -> Any:
        """``value`` itself: no variable here consists of others."""
        return value
