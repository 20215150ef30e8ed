"""The replica whose random numbers are drawn: in ``strategy.run``, in ``fit``, or none."""

from __future__ import annotations

from typing import Any

from choros.distribute.replicas import Replicas
from choros.distribute.scope import current_replica, in_fit
from choros.training.random_numbers import draw_by_replica, seed_generators
from choros.training.trainer import spans_ranks

__all__ = ["follow_seeds"]


def follow_seeds(generators: list[Any] | None, replicas: Replicas) -> None:
    """Makes seed generators draw other numbers on each replica of a strategy.

    Args:
        generators: those to change; ``None`` for Keras' own, for random functions without a seed.
        replicas: those of the strategy.
    """

    def index() -> Any:
        replica = current_replica()  # AutoGraph, which reads this in a tf.function, has no walrus
        if replica is not None:
            return replica.replica_id_in_sync_group
        # Outside of replicas and fit, such as for initial values, all processes draw the same numbers; so does a
        # compiled step that sees the batches of all ranks.
        return replicas.first if in_fit() and not spans_ranks() else 0

    for generator in seed_generators() if generators is None else generators:
        draw_by_replica(generator, index)
