"""What an optimizer that was made in a scope does with gradients: it depends on where ``apply`` is called.

::

    in strategy.run(step)     the sum over replicas: the step has divided its loss by the global batch
    in model.fit              the mean over the examples of all replicas
    in neither                an error: it would train this process's copy of the variables alone
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, final

from choros.distribute.reduce_op import ReduceOp
from choros.distribute.replica_context import get_replica_context, in_fit, scope_of
from choros.errors import StrategyError
from choros.training.combiner import Combiner, Update, combiner_of, passes_of, wrap
from choros.training.synchronizer import Synchronizer, synchronizer_for

__all__ = ["ReplicaCombiner", "adopt"]


def adopt(optimizer: Any, combiner: Callable[[Any], Combiner]) -> None:
    """Makes ``optimizer`` combine the gradients of a strategy's replicas, in place; once."""
    if combiner_of(optimizer) is None:
        wrap(optimizer, combiner(optimizer))


@final
class ReplicaCombiner(Combiner):
    """Sums in a replica, averages in ``fit``; every process keeps the optimizer's state and makes the same updates.

    Args:
        optimizer: the one whose gradients these are.
    """

    has_state = True
    shares_state = True

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @cached_property
    def synchronizer(self) -> Synchronizer:
        """For ``fit``; made when it is needed, as the optimizer is not through its own ``__init__`` yet."""
        return synchronizer_for(self._optimizer)

    def combine(self, gradients: Sequence[Any], variables: Sequence[Any], passes: Any) -> list[Any]:
        """The gradients of all replicas together."""
        if in_fit():
            return self.synchronizer.combine(gradients, variables, passes)
        strategy, replica = scope_of(), get_replica_context()
        if strategy is None or replica is None:
            raise StrategyError(
                "an optimizer that was made in a strategy's scope was applied outside of its replicas, which would "
                "change this process's copy of the variables alone: do it in a function that strategy.run(fn, args=…) "
                "calls, or use model.fit."
            )
        given = [gradient for gradient in gradients if gradient is not None]
        summed = iter(strategy.replicas.all_reduce(ReduceOp.SUM, given))
        return [None if gradient is None else next(summed) for gradient in gradients]

    def apply(self, optimizer: Any, update: Update, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Updates with what is combined."""
        update(self.combine(gradients, variables, passes_of(optimizer)))

    def join(self, optimizer: Any) -> None:
        """Only ``fit`` has batches that others may not have."""
        self.synchronizer.join(optimizer)
