"""Data sets distributed to replicas: each gets its rows of every global batch.

::

    global batches     0 1 2 3 | 4 5 6 7 | 8
    replica 0          0 1     | 4 5     | 8          the rows of choros.topology.shard_range
    replica 1              2 3 |     6 7 | (none)     a batch of no rows: all replicas run the same number of steps

``choros.data`` splits each kind: a ``tf.data.Dataset`` becomes another one, with a mark, which stores the data on which
``fit`` trains; others become ``LocalBatches``. For ``fit``, ``split_batches`` drops empty batches at the end.
Where processes may end at different times, each batch has a flag::

    process 0       process 1
    batch    1 ──── 1    batch        allgather: has a batch?
    batch    1 ──── 0    (no rows)    process 1 runs the step with a batch of no rows
    (end)    0 ──── 0    (end)        no process has one: all end together
"""

import itertools
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from choros.arrays import adapter_of, framework_adapter
from choros.comm import global_process_set
from choros.data.kinds import LocalBatches, kind_of
from choros.data.rows import Part, cut
from choros.distribute.replicas import Replicas
from choros.distribute.types import InputContext, per_replica
from choros.errors import ConfigError
from choros.parallel.objects import allgather_object

_log = logging.getLogger("choros")
#: The attribute of a distributed data set that returns the data on which ``fit`` trains.
_MARK = "_choros_for_fit"
#: How many rows of an array are compared, evenly spread.
_ROWS = 32
#: Differences below this part of the values are rounding: hosts may have different processors.
_ROUNDING = 1e-4
_ADVICE = (
    "Each process takes its part of the same rows, so some would be used twice and others never. Draw the same random "
    "numbers on all processes: call keras.utils.set_random_seed(…) first, pass random_state=… or seed=… to what splits "
    "and shuffles, or create the strategy before the data, which gives all processes the same numbers of random and "
    "numpy.random. Files with the same rows must have the same paths."
)


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
    own = kind_of(dataset).local_batches(dataset, lambda: replicas.part)
    distributed = own
    if local > 1:
        parts = [Part(replica, local) for replica in range(local)]
        distributed = LocalBatches(
            lambda: (per_replica([part.of(batch) for part in parts]) for batch in own), lambda: len(own)
        )
    setattr(distributed, _MARK, partial(split_batches, dataset, replicas))
    return distributed


def check_shared(data: Any, replicas: Replicas) -> None:
    """Raises a ``ConfigError`` on every process if some have other rows in ``data``, as far as a sample shows; warns
    where rows may differ because each process augments them. All processes call it, but new ones of elastic jobs.
    Otherwise their parts repeat some rows and miss others, and nothing else shows it::

        process 0    rows 0 1 2 3 4 5    its part: 0 1 2         a sample of each kind's ``traits``, gathered once
        process 1    rows 4 0 5 1 3 2    its part: 1 3 2         differs: ConfigError on both
    """
    if replicas.local_count == replicas.count or is_distributed(data):
        return
    communicator = global_process_set.communicator
    if communicator.is_new:
        return
    kind = kind_of(data)
    samples = [_sample(each) for each in kind.traits(data)]
    own = np.concatenate([np.zeros((3, 0)), *samples], axis=1)
    shapes = communicator.allgather(np.array([own.shape[1]]), name="length of a sample of the data")
    differing: list[int] = np.flatnonzero(shapes != shapes[0]).tolist()
    if not differing and own.size:
        gathered = communicator.allgather(own[None], name="a sample of the data")
        counts, values, sizes = gathered.swapaxes(0, 1)
        differs = (counts != counts[0]) | (np.abs(values - values[0]) > _ROUNDING * (sizes + sizes[0]))
        differing = np.flatnonzero(differs.any(axis=1)).tolist()
    if differing:
        rank = communicator.ranks[differing[0]]
        found = f"the processes have different data: rank {rank} has not the same rows as rank {communicator.ranks[0]}"
        if not kind.augments:
            raise ConfigError(f"{found}. {_ADVICE} For rows of each process's own, use {kind.own_rows}.")
        if communicator.rank == 0:
            _log.warning("%s in the first batch's labels. %s", found, _ADVICE)


def _sample(array: Any) -> NDArray[np.float64]:
    """For each of some rows: how many the array has, a weighted sum of the row, and how large its terms are.

    >>> _sample(np.arange(3.0)).shape
    (3, 32)
    """
    adapter, places = adapter_of(array), np.linspace(0, len(array) - 1, _ROWS).astype(int)
    if not len(array):
        rows = np.zeros((_ROWS, 1))
    elif adapter is framework_adapter("numpy"):
        rows = np.asarray(array)[places]
    else:  # maybe on a device, from which no more than these rows are copied
        rows = np.stack([adapter.to_host(array[place]) for place in places.tolist()])
    if rows.dtype.kind in "OSUc":
        names = [repr(row) for row in rows.tolist()]
        # The same files may lie in other directories; a protobuf's fields have another order in each process.
        names = ["".join(sorted(name)) if "\\" in name else name.rpartition("/")[2] for name in names]
        numbers = np.array([[zlib.crc32(name.encode())] for name in names], np.float64)
    else:
        numbers = np.nan_to_num(rows.reshape(_ROWS, -1).astype(np.float64), posinf=1e9, neginf=-1e9)
    weights = np.random.default_rng(0).random(numbers.shape[1])
    return np.stack([np.full(_ROWS, len(array), np.float64), numbers @ weights, np.abs(numbers) @ weights])


def from_function(dataset_fn: Callable[[InputContext], Any], replicas: Replicas) -> Any:
    """Returns the data set that ``dataset_fn`` creates here; replicas whose data end early get batches of no rows."""
    local = replicas.local_count
    own = dataset_fn(InputContext(replicas.count // local, replicas.first // local, replicas.count))
    if replicas.count == 1:
        return own
    kind = kind_of(own)
    padded = kind.padded(own) if local == 1 else None
    if padded is None:
        padded = LocalBatches(lambda: pad_batches(kind.batches(own), replicas))
    setattr(padded, _MARK, lambda: own)
    return padded


def is_distributed(dataset: Any) -> bool:
    """Whether ``dataset`` was returned by ``distribute`` or ``from_function``."""
    return any(hasattr(each, _MARK) for each in (dataset, *kind_of(dataset).sources(dataset)))


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
    return kind_of(data).split(data, replicas.part)


@cache
def _warn_of_losses() -> None:
    if global_process_set.rank() == 0:
        _log.warning(
            "if a rank is lost in a loop of your own, what it has left of a distributed data set is not used; the next "
            "iteration is sharded over the ranks that are left. model.fit uses each example once."
        )


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
