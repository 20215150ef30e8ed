"""What an optimizer that was made in a scope does with gradients: it depends on where ``apply`` is called.

::

    in strategy.run(step)     the sum over replicas: the step has divided its loss by the global batch
    in model.fit              the mean over the examples of all replicas
    in neither                an error: it would train this process's copy of the variables alone
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from choros.distribute.reduce_op import ReduceOp
from choros.distribute.scope import current_replica, current_strategy, in_fit
from choros.errors import StrategyError
from choros.parallel.reduce.reducer import ReduceConfig
from choros.training.distributed_optimizer import reducer_of, wrap
from choros.training.keras_internals import innermost
from choros.training.optimizer_reducer import OptimizerReducer, accumulation_steps, placed

__all__ = ["distribute_optimizer"]


def distribute_optimizer(optimizer: Any, state_owner: int | None = None) -> None:
    """Makes ``optimizer`` reduce the gradients of a strategy's replicas, in place; once.

    Args:
        optimizer: any of Keras; its own ``__init__`` may not be through yet.
        state_owner: the process that alone keeps its state and makes the updates; ``None``: every one does.
    """
    if reducer_of(optimizer) is not None:
        return

    def configure() -> ReduceConfig:
        return placed(ReduceConfig(steps=accumulation_steps(innermost(optimizer), 1)))

    wrap(optimizer, OptimizerReducer(configure, sum_over_replicas=_sum_over_replicas, state_owner=state_owner))


def _sum_over_replicas(gradients: Sequence[Any]) -> list[Any] | None:
    """In a replica, the sum of all replicas' gradients; ``None`` in ``fit``."""
    if in_fit():
        return None
    if current_replica() is None:
        raise StrategyError(
            "an optimizer that was made in a strategy's scope was applied outside of its replicas, which would "
            "change this process's copy of the variables alone: do it in a function that strategy.run(fn, args=…) "
            "calls, or use model.fit."
        )
    summed: list[Any] = current_strategy().replicas.all_reduce(ReduceOp.SUM, list(gradients))  # None stays None
    return summed
