"""A replica's share of the global batches: its rows of the data, and the note on errors that it may have caused."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from choros.arrays import adapter_of
from choros.comm import global_process_set
from choros.data.epochs import StepsOfEpoch, epochs_of_steps
from choros.data.kinds import are_arrays, data_of, epochs_of_shard, kind_of
from choros.data.rows import Part, Sharding, check_global_batch, count_rows, cut
from choros.distribute import datasets
from choros.distribute.fit.training import KerasCall
from choros.distribute.replicas import Replicas
from choros.errors import ChorosError, ConfigError
from choros.parallel.objects import object_of_first
from choros.parallel.structure import leaves, map_structure

_log = logging.getLogger("choros")
#: Keras' default batch size for arrays.
BATCH = 32
_OF_SHAPES = re.compile(r"shape|dimension|size|broadcast|incompatible", re.IGNORECASE)


@contextmanager
def shares_named(batch_size: Any, replicas: int) -> Iterator[None]:
    """A context in which a framework's shape error gets a note on what shapes a replica's arrays have; ``batch_size``
    is ``None`` if the data has batches of its own.

        >>> try:
        ...     with shares_named(8, 2):
        ...         raise ValueError("incompatible shapes: (8, 3) and (4, 3)")
        ... except ValueError as error:
        ...     print(error.__notes__[0][:60])
        choros: a replica has its share of each global batch, 4 of 8
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, ChorosError) and _OF_SHAPES.search(str(error)):
            error.add_note(_note(batch_size, replicas))
        raise


def _note(batch_size: Any, replicas: int) -> str:
    is_known = isinstance(batch_size, int) and batch_size % replicas == 0
    rows = f", {batch_size // replicas} of {batch_size} rows" if is_known else ""
    return (
        f"choros: a replica has its share of each global batch{rows}, along the first axis of every array. If this is "
        "the cause: a model for a fixed number of rows, such as a stateful RNN, is declared for a share, "
        "keras.Input(batch_size=global_batch_size // strategy.num_replicas_in_sync), with batches that all replicas "
        "can share equally; an array whose first axis does not count rows, such as a matrix of all nodes of a graph, "
        "belongs into the model, or into each row."
    )


def training_data(call: KerasCall, x: Any, y: Any, weights: Any, replicas: Replicas) -> Any:
    """Returns this process's rows, for ``fit``; ``EpochData`` in elastic jobs, and if an epoch is a part of them."""
    elastic, steps, part = global_process_set.communicator.elastic, call["steps_per_epoch"], datasets.part_of(replicas)
    if datasets.is_distributed(x):
        own = datasets.split_batches(x, replicas)
        return epochs_of_steps(epochs_of_shard(own, part), steps, part) if elastic else own
    sharding, kind = Sharding(part, epoch=call["initial_epoch"]), kind_of(x)
    if are_arrays(x):
        _check_dense((x, y, weights))
        size = call["batch_size"] or BATCH
        check_global_batch(min(size, count_rows(x)), part.count)
        sharding, x = replace(sharding, batch_size=size), _packed(x, y, weights)
    elif (rows := kind.rows(x)) is not None:
        check_global_batch(rows, part.count)
    datasets.check_shared(x, replicas)
    if call["shuffle"] and kind.shuffles and (sharding.batch_size or kind.has_batches):
        drawn = int(np.random.randint(2**31))  # on all processes, so that these go on drawing the same numbers
        sharding = replace(sharding, shuffle=True, seed=object_of_first(lambda: drawn))
    if elastic or steps is not None:
        epochs = epochs_of_steps(kind_of(x).epochs(x, sharding), steps, part)
        if elastic or (isinstance(epochs, StepsOfEpoch) and epochs.doubt is None):
            return epochs
    if sharding.batch_size or sharding.shuffle:
        return kind_of(x).shard(x, sharding)
    return datasets.split_batches(x, replicas)


def evaluation_data(
    x: Any, y: Any, weights: Any, batch_size: int | None, replicas: Replicas, steps: int | None = None
) -> Any:
    """Returns this process's evaluation data, ``None`` if rows are too few; elastic jobs shard anew each time."""
    elastic = global_process_set.communicator.elastic
    if are_arrays(x):
        _check_dense((x, y, weights))
        size = batch_size or BATCH
        rows = count_rows(x) if steps is None else min(count_rows(x), steps * size)
        data = cut(_packed(x, y, weights), 0, rows)
        datasets.check_shared(data, replicas)
        if elastic:
            return data_of(kind_of(data).epochs(data, Sharding(Part(0, 1), size)))
        if rows < replicas.count:
            return None
        return kind_of(data).shard(data, Sharding(datasets.part_of(replicas), max(size, replicas.count)))
    datasets.check_shared(x, replicas)
    if elastic:
        doubt = "they are distributed already. Pass the original data set."
        if not datasets.is_distributed(x):
            epochs = kind_of(x).epochs(x, Sharding(Part(0, 1)))
            if epochs.doubt is None:
                return data_of(epochs)
            doubt = epochs.doubt
        if replicas.first == 0:
            _log.warning("if a rank is lost, no other one evaluates its part of the data: %s", doubt)
    elif not datasets.is_distributed(x) and (kind_of(x).rows(x) or replicas.count) < replicas.count:
        return None
    return datasets.split_batches(x, replicas)


def _check_dense(arrays: Any) -> None:
    for leaf in leaves(arrays):
        if type(leaf).__name__ in ("SparseTensor", "RaggedTensor") or hasattr(leaf, "tocsr"):
            raise ConfigError(
                f"a strategy cannot shard the rows of a {type(leaf).__name__}: pass dense arrays, or a data set, such "
                "as tf.data.Dataset.from_tensor_slices((x, y)).batch(64)."
            )


def _packed(x: Any, y: Any, weights: Any) -> Any:
    """Returns the arrays as the structure of which a step receives rows, in host memory."""
    given = keras.utils.pack_x_y_sample_weight(x, y, weights)
    return map_structure(lambda leaf: adapter_of(leaf).to_host(leaf), given)
