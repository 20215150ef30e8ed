"""A distributed data set, of any kind but ``tf.data``; and how processes stay in step.

Where processes read data of their own, they may run out at different times, so they ask before each batch::

    process 0       process 1
    batch    1 ──── 1    batch        who has one?
    batch    1 ──── 0    (no rows)    process 1 makes the step with a batch of no rows
    (end)    0 ──── 0    (end)        no process: all end together
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import numpy as np

from choros.comm import global_process_set
from choros.distribute.replicas import Replicas
from choros.distribute.values import per_replica
from choros.parallel.data import count_rows, cut
from choros.parallel.objects import allgather_object
from choros.topology import shard_range

__all__ = ["DistributedDataset", "in_step", "to_replicas"]


@final
class DistributedDataset:
    """This process's part of each global batch; with several local replicas, a ``PerReplica`` of theirs.

    Every iteration starts anew, if what it was made from does.

    Args:
        batches: starts an iteration.
        for_fit: gives what ``fit`` is to train on.
        length: gives the number of batches, where it is known.

    Example:
        >>> dataset = DistributedDataset(lambda: iter(["first", "second"]), list, lambda: 2)
        >>> list(dataset), len(dataset)
        (['first', 'second'], 2)
    """

    def __init__(
        self,
        batches: Callable[[], Iterator[Any]],
        for_fit: Callable[[], Any],
        length: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._batches = batches
        self._length = length
        self.for_fit = for_fit

    def __iter__(self) -> Iterator[Any]:
        return self._batches()

    def __len__(self) -> int:
        length = self._length()
        if length is None:
            raise TypeError("the number of batches of this data set is not known.")
        return length


def to_replicas(batch: Any, local: int) -> Any:
    """A process's rows of a batch as what its ``local`` replicas get.

    Example:
        >>> import numpy as np
        >>> to_replicas(np.arange(3), 2)
        PerReplica(0: array([0, 1]), 1: array([2]))
    """
    if local == 1:
        return batch
    rows = count_rows(batch)
    return per_replica([cut(batch, *shard_range(rows, replica, local)) for replica in range(local)])


def in_step(batches: Iterable[Any], replicas: Replicas) -> Iterator[Any]:
    """A batch of ``batches`` for each local replica in every step, until no process has any more.

    Replicas for which none is left get batches of no rows. All processes must iterate together.
    """
    iterator = iter(batches)
    empty = None
    for step in itertools.count():
        mine = list(itertools.islice(iterator, replicas.local_count))
        left = _who_has_any(bool(mine), replicas)
        if not any(left):
            return
        if empty is None and mine:
            empty = cut(mine[0], 0, 0)
        if step == 0 and not all(left):
            # Who never had a batch does not know what one looks like.
            empty = next(example for example in allgather_object(empty, name="batch of no rows") if example is not None)
        yield per_replica([*mine, *[empty] * (replicas.local_count - len(mine))])


def _who_has_any(mine: bool, replicas: Replicas) -> list[bool]:
    if replicas.local_count == replicas.count:
        return [mine]
    gathered: list[bool] = global_process_set.communicator.allgather(np.array([mine]), name="batches left").tolist()
    return gathered
