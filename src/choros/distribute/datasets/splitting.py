"""Distribution of data sets of every kind to a strategy's replicas."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from choros.comm import global_process_set
from choros.distribute.datasets.distributed import DistributedDataset, pad_batches, to_replicas
from choros.distribute.datasets.marks import for_fit_of, is_marked, mark
from choros.distribute.input_context import InputContext
from choros.distribute.replicas import Replicas
from choros.errors import ConfigError
from choros.parallel.data import Part, kind_of

__all__ = ["distribute", "from_function", "is_distributed", "split_batches"]

_log = logging.getLogger("choros")


def distribute(dataset: Any, replicas: Replicas) -> Any:
    """Distributes ``dataset``, whose batches are global, to the replicas.

    Args:
        dataset: a ``tf.data.Dataset``, a ``PyDataset``, a torch ``DataLoader``, a Grain data set, or an iterable or
            generator of batches: arrays of any framework, or tuples, lists and dicts of them.
        replicas: those of the strategy. If there is only one, ``dataset`` itself is returned.

    Returns:
        A ``tf.data.Dataset`` for a ``tf.data.Dataset``, else a ``DistributedDataset``. All replicas get the same
        number of batches, of which some may have no rows. If ranks are lost, later iterations are sharded over the
        others.

    Raises:
        ConfigError: the kind is unknown, the first batch is smaller than the number of replicas, or replicas would not
            read ``dataset`` in the same order.
    """
    if replicas.count == 1:
        return dataset
    if is_distributed(dataset):
        raise ConfigError("the data set has been distributed to the replicas already: pass the original one.")
    local = replicas.local_count
    if local < replicas.count and global_process_set.communicator.elastic:
        _warn_of_losses()
    own = kind_of(dataset).local_batches(dataset, partial(_part, replicas))

    def for_fit() -> Any:
        return split_batches(dataset, replicas)

    if local == 1 and own.dataset is not None:
        return mark(own.dataset, for_fit)
    return DistributedDataset(lambda: (to_replicas(batch, local) for batch in own.start()), for_fit, own.length)


def from_function(dataset_fn: Callable[[InputContext], Any], replicas: Replicas) -> Any:
    """Returns the data set that ``dataset_fn`` creates for this process, of batches for one replica.

    Returns:
        As ``distribute``; replicas whose data end before those of others get batches of no rows.
    """
    local = replicas.local_count
    own = dataset_fn(InputContext(replicas.count // local, replicas.first // local, replicas.count))
    if replicas.count == 1:
        return own
    kind = kind_of(own)
    padded = kind.padded(own) if local == 1 else None
    if padded is not None:
        return mark(padded, lambda: own)
    return DistributedDataset(lambda: pad_batches(kind.batches(own), replicas), lambda: own)


def is_distributed(dataset: Any) -> bool:
    """Whether ``dataset`` was returned by ``distribute`` or ``from_function``."""
    return isinstance(dataset, DistributedDataset) or is_marked(dataset)


def split_batches(data: Any, replicas: Replicas) -> Any:
    """Returns this process's rows of each batch, for ``fit``, as ``DataKind.split`` does.

    Args:
        data: global batches, of any kind that ``distribute`` takes; or a result of ``distribute`` or ``from_function``.
        replicas: those of the strategy.

    Returns:
        Data of the same kind; a generator for a plain iterable. Known lengths stay known.

    Raises:
        ConfigError: as ``distribute``.
    """
    if isinstance(data, DistributedDataset):
        return data.for_fit()
    if is_marked(data):
        return for_fit_of(data)
    if replicas.local_count == replicas.count:
        return data
    return kind_of(data).split(data, _part(replicas))


@cache
def _warn_of_losses() -> None:
    if global_process_set.rank() == 0:
        _log.warning(
            "if a rank is lost in a loop of your own, what it has left of a distributed data set is not used; the next "
            "iteration is sharded over the ranks that are left. model.fit uses each example once."
        )


def _part(replicas: Replicas) -> Part:
    return Part(replicas.first, replicas.count, replicas.local_count)
