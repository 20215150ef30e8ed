"""Data sets distributed to replicas: each gets its rows of every global batch.

::

    global batches     0 1 2 3 | 4 5 6 7 | 8
    replica 0          0 1     | 4 5     | 8          the rows of choros.topology.shard_range
    replica 1              2 3 |     6 7 | (none)     a batch of no rows: all replicas run the same number of steps

``choros.data`` splits each kind: a ``tf.data.Dataset`` becomes another one, with a mark, which stores the data on which
``fit`` trains; others become a ``DistributedDataset``. For ``fit``, ``split_batches`` drops empty batches at the end.
Where processes may end at different times, each batch has a flag::

    process 0       process 1
    batch    1 ──── 1    batch        allgather: has a batch?
    batch    1 ──── 0    (no rows)    process 1 runs the step with a batch of no rows
    (end)    0 ──── 0    (end)        no process has one: all end together
"""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any, final

import numpy as np

from choros.comm import global_process_set
from choros.data.kinds import kind_of
from choros.data.rows import Part, cut
from choros.data.same_rows import check_same_rows
from choros.distribute.replicas import Replicas
from choros.distribute.types import InputContext, per_replica
from choros.errors import ConfigError
from choros.parallel.objects import allgather_object

_log = logging.getLogger("choros")
#: The attribute of a distributed data set that returns the data on which ``fit`` trains.
_MARK = "_choros_for_fit"


def distribute(dataset: Any, replicas: Replicas) -> Any:
    """Distributes ``dataset``, whose batches are global; if there is only one replica, it is returned itself.
    All replicas get the same number of batches, some without rows; later iterations are sharded without lost ranks.
    ConfigError if the kind is unknown, the first batch is too small, or replicas would read in different orders.
    """
    if replicas.count == 1:
        return dataset
    if is_distributed(dataset):
        raise ConfigError("the data set has been distributed to the replicas already: pass the original one.")
    local = replicas.local_count
    check_shared(dataset, replicas)
    if local < replicas.count and global_process_set.communicator.elastic:
        _warn_of_losses()
    own = kind_of(dataset).local_batches(dataset, partial(part_of, replicas))
    for_fit = partial(split_batches, dataset, replicas)
    if local == 1 and own.dataset is not None:
        setattr(own.dataset, _MARK, for_fit)
        return own.dataset
    return DistributedDataset(lambda: (to_replicas(batch, local) for batch in own.start()), for_fit, own.length)


def check_shared(data: Any, replicas: Replicas) -> None:
    """Raises a ``ConfigError`` on all processes if these have different rows in what they share."""
    if replicas.local_count < replicas.count and not is_distributed(data):
        check_same_rows(data)


def from_function(dataset_fn: Callable[[InputContext], Any], replicas: Replicas) -> Any:
    """Returns the data set that ``dataset_fn`` creates here; replicas whose data end early get batches of no rows."""
    local = replicas.local_count
    own = dataset_fn(InputContext(replicas.count // local, replicas.first // local, replicas.count))
    if replicas.count == 1:
        return own
    kind = kind_of(own)
    padded = kind.padded(own) if local == 1 else None
    if padded is not None:
        setattr(padded, _MARK, lambda: own)
        return padded
    return DistributedDataset(lambda: pad_batches(kind.batches(own), replicas), lambda: own)


def is_distributed(dataset: Any) -> bool:
    """Whether ``dataset`` was returned by ``distribute`` or ``from_function``."""
    return isinstance(dataset, DistributedDataset) or any(
        hasattr(each, _MARK) for each in kind_of(dataset).sources(dataset)
    )


def split_batches(data: Any, replicas: Replicas) -> Any:
    """Returns this process's rows of each batch, for ``fit``, of the same kind and with known lengths; a plain iterable
    becomes a generator; ``data`` may be a result of ``distribute`` or ``from_function``, but not derived from one.
    """
    if is_distributed(data):
        for_fit = getattr(data, _MARK, None)
        if for_fit is None:
            raise ConfigError(
                "the data set was transformed after the strategy had distributed it: transform it before."
            )
        return for_fit()
    if replicas.local_count == replicas.count:
        return data
    return kind_of(data).split(data, part_of(replicas))


def part_of(replicas: Replicas) -> Part:
    """Returns the part of each global batch that belongs to this process."""
    return Part(replicas.first, replicas.count, replicas.local_count)


@cache
def _warn_of_losses() -> None:
    if global_process_set.rank() == 0:
        _log.warning(
            "if a rank is lost in a loop of your own, what it has left of a distributed data set is not used; the next "
            "iteration is sharded over the ranks that are left. model.fit uses each example once."
        )


@final
class DistributedDataset:
    """This process's part of each global batch (a ``PerReplica`` if it has several replicas); each iteration starts
    anew if the source supports it.

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
        setattr(self, _MARK, for_fit)

    def __iter__(self) -> Iterator[Any]:
        return self._batches()

    def __len__(self) -> int:
        length = self._length()
        if length is None:
            raise TypeError("the number of batches of this data set is not known.")
        return length


def to_replicas(batch: Any, local: int) -> Any:
    """Splits a process's rows of a batch among its ``local`` replicas.

    >>> import numpy as np
    >>> to_replicas(np.arange(3), 2)
    PerReplica(0: array([0, 1]), 1: array([2]))
    """
    if local == 1:
        return batch
    return per_replica([Part(replica, local).of(batch) for replica in range(local)])


def pad_batches(batches: Iterable[Any], replicas: Replicas) -> Iterator[Any]:
    """Yields batches until no process has any left, of no rows where one lacks them; all iterate together."""
    iterator = iter(batches)
    empty = None
    for step in itertools.count():
        own = list(itertools.islice(iterator, replicas.local_count))
        flags = [bool(own)]
        if replicas.local_count < replicas.count:
            flags = global_process_set.communicator.allgather(np.array(flags), name="batches left").tolist()
        if not any(flags):
            return
        if empty is None and own:
            empty = cut(own[0], 0, 0)
        if step == 0 and not all(flags):
            # A process that never had a batch does not know its structure.
            empty = next(example for example in allgather_object(empty, name="batch of no rows") if example is not None)
        yield per_replica([*own, *[empty] * (replicas.local_count - len(own))])
