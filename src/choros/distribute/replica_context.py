"""The replica context of a function that ``strategy.run`` calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np

from choros.distribute.reduce_op import ReduceOp

__all__ = ["ReplicaContext"]


@final
class ReplicaContext:
    """The replica in which ``strategy.run`` calls a function, and its collectives.

    All replicas must call the same collective methods in the same order.

    Attributes:
        strategy: the ``Strategy`` of the replica.
    """

    def __init__(self, strategy: Any, replica_id: Any) -> None:
        self.strategy = strategy
        self._replica_id = replica_id

    @property
    def replica_id_in_sync_group(self) -> Any:
        """The index of this replica, from 0; a traced number where several replicas share one compiled step."""
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas on all processes together."""
        count: int = self.strategy.num_replicas_in_sync
        return count

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: Any = None) -> Any:
        """Reduces the replicas' values, on each replica. Gradients flow through it.

        Args:
            reduce_op: ``SUM`` or ``MEAN``.
            value: an array, a number, or a structure of them; the same shapes on every replica.
            options: has no effect; the engine decides how values are sent.

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
        """Concatenates the replicas' values along ``axis``, on each replica. Gradients flow through it.

        Args:
            value: an array with at least one dimension, or a structure of them; only the dimension ``axis`` may differ
                between replicas.
            axis: the dimension.
            options: has no effect.
        """
        del options
        return self.strategy.replicas.all_gather(value, axis)

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls ``merge_fn(strategy, *args)`` in cross-replica context, where ``strategy.reduce`` works.

        Every process calls it for its replica. Unlike TensorFlow's, it may be called within a condition or a nested
        function, provided that all replicas call it.
        """
        return self.strategy.replicas.merge_call(self.strategy, merge_fn, args, dict(kwargs or {}))

    def __repr__(self) -> str:
        number = self._replica_id if isinstance(self._replica_id, (int, np.integer)) else "traced"
        return f"ReplicaContext(replica {number} of {self.num_replicas_in_sync})"
