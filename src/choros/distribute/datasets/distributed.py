"""Distributed data sets of all kinds except ``tf.data``, and the synchronisation of their lengths.

Processes that read different data may finish at different times, so they exchange a flag before each batch::

    process 0       process 1
    batch    1 ──── 1    batch        allgather: has a batch?
    batch    1 ──── 0    (no rows)    process 1 runs the step with a batch of no rows
    (end)    0 ──── 0    (end)        no process has one: all end together
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import numpy as np

from choros.comm import global_process_set
from choros.distribute.replicas import Replicas
from choros.distribute.values import per_replica
from choros.parallel.data import Part, cut
from choros.parallel.objects import allgather_object

__all__ = ["DistributedDataset", "pad_batches", "to_replicas"]


@final
class DistributedDataset:
    """This process's part of each global batch; with several local replicas, a ``PerReplica`` of their parts.

    Every iteration starts from the beginning, if the source supports it.

    Args:
        batches: starts an iteration.
        for_fit: returns the data on which ``fit`` trains.
        length: returns the number of batches; ``None`` if it is unknown.

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
    """Splits a process's rows of a batch among its ``local`` replicas.

    Example:
        >>> import numpy as np
        >>> to_replicas(np.arange(3), 2)
        PerReplica(0: array([0, 1]), 1: array([2]))
    """
    if local == 1:
        return batch
    return per_replica([Part(replica, local).of(batch) for replica in range(local)])


def pad_batches(batches: Iterable[Any], replicas: Replicas) -> Iterator[Any]:
    """Yields a batch of ``batches`` for each local replica in every step, until no process has a batch left.

    Replicas without a batch get one of no rows. All processes must iterate together.
    """
    iterator = iter(batches)
    empty = None
    for step in itertools.count():
        own = list(itertools.islice(iterator, replicas.local_count))
        flags = _gather_flags(bool(own), replicas)
        if not any(flags):
            return
        if empty is None and own:
            empty = cut(own[0], 0, 0)
        if step == 0 and not all(flags):
            # A process that never had a batch does not know its structure.
            empty = next(example for example in allgather_object(empty, name="batch of no rows") if example is not None)
        yield per_replica([*own, *[empty] * (replicas.local_count - len(own))])


def _gather_flags(has_batch: bool, replicas: Replicas) -> list[bool]:
    if replicas.local_count == replicas.count:
        return [has_batch]
    gathered: list[bool] = global_process_set.communicator.allgather(
        np.array([has_batch]), name="batches left"
    ).tolist()
    return gathered
