"""Gradient reduction of optimizers that were created in a scope; it depends on where ``apply`` is called.

::

    in strategy.run(step)     the sum over replicas: the step has divided its loss by the global batch
    in model.fit              the mean over the examples of all replicas
    elsewhere                 an error: only this process's copy of the variables would be updated
"""

from __future__ import annotations

from typing import Any

from choros.comm import Reduction
from choros.distribute.reduce_op import ReduceOp
from choros.distribute.replicas import Replicas
from choros.distribute.scope import current_replica, in_fit
from choros.errors import StrategyError
from choros.parallel.reduce.reducer import ReduceConfig
from choros.training.distributed_optimizer import reducer_of, wrap
from choros.training.keras_internals import innermost
from choros.training.optimizer_reducer import OptimizerReducer, accumulation_steps, placed

__all__ = ["distribute_optimizer"]

_ADVICE = (
    "Replicas must start from the same values and change them in the same way: create models and optimizers within "
    "`with strategy.scope():`, and apply the same updates on all replicas."
)


def distribute_optimizer(optimizer: Any, replicas: Replicas, state_owner: int | None = None) -> None:
    """Patches ``optimizer`` to reduce the gradients of a strategy's replicas; does nothing if it is patched already.

    Args:
        optimizer: any Keras optimizer; its own ``__init__`` may not have returned yet.
        replicas: those of the strategy. Processes sum their gradients through the gradient reducer; the devices of one
            process sum them inside of their compiled step.
        state_owner: the only process that keeps its state and applies updates; ``None``: all processes do.
    """
    if reducer_of(optimizer) is not None:
        return

    def configure() -> ReduceConfig:
        return placed(ReduceConfig(micro_batches=accumulation_steps(innermost(optimizer), 1), compared_step=1))

    def sum_over_devices(gradients: list[Any]) -> list[Any]:
        summed: list[Any] = replicas.all_reduce(ReduceOp.SUM, gradients)  # None stays None
        return summed

    of_devices = sum_over_devices if replicas.local_count > 1 else None
    reducer = OptimizerReducer(
        configure, op=_op_here, sum_over_devices=of_devices, state_owner=state_owner, advice=_ADVICE
    )
    wrap(optimizer, reducer)


def _op_here() -> Reduction:
    """Returns what happens to gradients that are applied here: ``SUM`` in a replica, ``AVERAGE`` in ``fit``."""
    if in_fit():
        return Reduction.AVERAGE
    if current_replica() is None:
        raise StrategyError(
            "an optimizer that was created in a strategy's scope was applied outside of its replicas, which would "
            "update only this process's copy of the variables: apply it in a function that "
            "strategy.run(fn, args=…) runs, or use model.fit."
        )
    return Reduction.SUM
