"""What a strategy does with each kind of data set."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from choros.distribute.datasets import tf_data
from choros.distribute.datasets.distributed import DistributedDataset, in_step, to_replicas
from choros.distribute.input_context import InputContext
from choros.distribute.replicas import Replicas
from choros.errors import ConfigError
from choros.parallel.data import (
    Part,
    check_global_batch,
    checked,
    count_rows,
    data_loader,
    grain_data,
    kinds,
)

__all__ = ["distribute", "from_function", "is_distributed", "split_batches"]


def distribute(dataset: Any, replicas: Replicas) -> Any:
    """``dataset``, whose batches are those of all replicas together, dealt out to them.

    Args:
        dataset: a ``tf.data.Dataset``, a ``PyDataset``, a torch ``DataLoader``, a Grain data set, or an iterable or
            generator of batches: arrays of any framework, or tuples, lists and dicts of them.
        replicas: those of the strategy. If there is one, it gets ``dataset`` itself.

    Returns:
        A ``tf.data.Dataset`` of one, else a ``DistributedDataset``. Every replica gets equally many batches, the last
        maybe without rows.

    Raises:
        ConfigError: the kind is not known, a batch is smaller than the number of replicas, or replicas would not see
            ``dataset`` in the same order.
    """
    if replicas.count == 1:
        return dataset
    if is_distributed(dataset):
        raise ConfigError("the data set has been dealt out to the replicas already: pass what it was made from.")
    part = _part(replicas)
    local = replicas.local_count

    def for_fit() -> Any:
        return split_batches(dataset, replicas)

    if kinds.is_tf_data(dataset):
        own = tf_data.split(dataset, part, keep_empty=True)
        if local == 1:
            return tf_data.marked(own, for_fit)
        return DistributedDataset(lambda: (to_replicas(batch, local) for batch in own), for_fit, lambda: _length(own))
    parts = _parts(dataset, part)
    return DistributedDataset(
        lambda: (to_replicas(batch, local) for batch in parts()), for_fit, lambda: _length(dataset)
    )


def from_function(dataset_fn: Callable[[InputContext], Any], replicas: Replicas) -> Any:
    """The data set that ``dataset_fn`` makes for this process, of batches for one replica.

    Returns:
        As ``distribute``; replicas whose data end before those of others get batches of no rows.
    """
    local = replicas.local_count
    own = dataset_fn(InputContext(replicas.count // local, replicas.first // local, replicas.count))
    if replicas.count == 1:
        return own
    if kinds.is_tf_data(own) and local == 1:
        return tf_data.marked(tf_data.in_step(own), lambda: own)
    return DistributedDataset(lambda: in_step(_epoch(own), replicas), lambda: own)


def is_distributed(dataset: Any) -> bool:
    """Whether ``dataset`` came from ``distribute`` or ``from_function``."""
    return isinstance(dataset, DistributedDataset) or (kinds.is_tf_data(dataset) and tf_data.is_marked(dataset))


def split_batches(data: Any, replicas: Replicas) -> Any:
    """This process's rows of each batch, for ``fit``: batches in which it has none are left out.

    Args:
        data: global batches, of any kind that ``distribute`` takes; or what that or ``from_function`` gave.
        replicas: those of the strategy.

    Returns:
        Something of the same kind; a generator of what is only iterable. Lengths that are known stay so.

    Raises:
        ConfigError: as ``distribute``.
    """
    if isinstance(data, DistributedDataset):
        return data.for_fit()
    if kinds.is_tf_data(data) and tf_data.is_marked(data):
        return tf_data.for_fit_of(data)
    if replicas.local_count == replicas.count:
        return data
    part = _part(replicas)
    if kinds.is_tf_data(data):
        return tf_data.split(data, part, keep_empty=False)
    if kinds.is_py_dataset(data):
        from choros.keras.data import PyDatasetPart

        check_global_batch(count_rows(data[0]), part.count)
        return PyDatasetPart(data, part)
    if kinds.is_data_loader(data):
        if data.batch_size is not None:
            check_global_batch(data.batch_size, part.count)
        return data_loader.split(data, part)
    if kinds.is_grain(data):
        grain_data.refuse_loader(data)
        return grain_data.split(data, part)
    return (rows for rows in _parts(data, part)() if count_rows(rows) > 0)


def _part(replicas: Replicas) -> Part:
    return Part(replicas.first, replicas.count, replicas.local_count)


def _parts(data: Any, part: Part) -> Callable[[], Iterator[Any]]:
    """What starts an iteration over the process's rows of each batch, maybe none."""
    if kinds.is_data_loader(data) and not data_loader.is_stream(data):
        loaded = data_loader.DataLoaderParts(data, part)
        return lambda: iter(loaded)
    if kinds.is_grain(data):
        grain_data.refuse_loader(data)
    elif (
        not (kinds.is_py_dataset(data) or isinstance(data, Iterable))
        or isinstance(data, (tuple, dict, str, bytes))
        or hasattr(data, "shape")
    ):
        raise ConfigError(
            f"a {type(data).__name__} is no data set of batches. Strategies take tf.data.Dataset, PyDataset, torch "
            "DataLoader, Grain data sets and iterables of batches; of arrays, make batches first."
        )
    return lambda: (part.of(batch) for batch in checked(_epoch(data), part.count, count_rows))


def _epoch(data: Any) -> Iterator[Any]:
    """The batches of one iteration."""
    if not kinds.is_py_dataset(data):
        yield from data
        return
    data.on_epoch_begin()
    for index in itertools.count() if data.num_batches is None else range(data.num_batches):
        yield data[index]
    data.on_epoch_end()


def _length(data: Any) -> int | None:
    if kinds.is_py_dataset(data):
        number: int | None = data.num_batches
        return number
    return len(data) if hasattr(data, "__len__") else None
