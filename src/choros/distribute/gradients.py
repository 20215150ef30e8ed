"""Gradient reduction of optimizers that were created in a scope; it depends on where ``apply`` is called.

::

    in strategy.run(step)     the sum over replicas: the step has divided its loss by the global batch
    in model.fit              the mean over the examples of all replicas
    elsewhere                 an error: only this process's copy of the variables would be updated
"""

from typing import Any

from choros.comm import Reduction
from choros.distribute.replicas import Replicas
from choros.distribute.scope import current_replica, in_fit
from choros.distribute.types import ReduceOp
from choros.errors import StrategyError
from choros.parallel.reduce.plan import ReduceConfig
from choros.training.device import placed
from choros.training.distributed_optimizer import reducer_of, wrap
from choros.training.keras_internals.models import global_seed_generator, innermost
from choros.training.optimizer_reducer import OptimizerReducer
from choros.training.random_numbers import draw_by_replica
from choros.training.trainer import spans_ranks

_ADVICE = (
    "Replicas must start from the same values and change them in the same way: create models and optimizers within "
    "`with strategy.scope():`, and apply the same updates on all replicas."
)


def distribute_optimizer(
    optimizer: Any, replicas: Replicas, state_owner: int | None = None, shard_state: bool | None = None
) -> None:
    """Patches ``optimizer``, once, to reduce the replicas' gradients; its ``__init__`` may not have returned yet.
    Processes use the gradient reducer, devices of one process their compiled step; ``state_owner`` is the only
    process that keeps state and applies updates; with ``shard_state`` each has a slice.
    """
    if reducer_of(optimizer) is not None:
        return

    def configure() -> ReduceConfig:
        steps = int(innermost(optimizer).gradient_accumulation_steps or 1)
        return placed(ReduceConfig(micro_batches=steps, compared_step=1))

    def sum_over_devices(gradients: list[Any]) -> list[Any]:
        summed: list[Any] = replicas.all_reduce(ReduceOp.SUM, gradients)  # None stays None
        return summed

    of_devices = sum_over_devices if replicas.local_count > 1 else None
    reducer = OptimizerReducer(
        configure,
        op=_op_here,
        sum_over_devices=of_devices,
        state_owner=state_owner,
        shard_state=shard_state,
        advice=_ADVICE,
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


def follow_seeds(generator: Any, replicas: Replicas) -> None:
    """Makes a seed generator draw other numbers on each replica; ``None``: Keras' own, for functions without a seed."""

    def index() -> Any:
        replica = current_replica()  # AutoGraph, which reads this in a tf.function, has no walrus
        if replica is not None:
            return replica.replica_id_in_sync_group
        # Outside of replicas and fit, such as for initial values, all processes draw the same numbers; so does a
        # compiled step that sees the batches of all ranks.
        return replicas.first if in_fit() and not spans_ranks() else 0

    followed = global_seed_generator() if generator is None else generator
    if followed is not None:  # Keras creates its own when it is first used
        draw_by_replica(followed, index)
