"""A replica's share of the global batches: its rows of the data, the note on errors that it may have caused, and the
prediction of its rows; all processes gather all outputs, in the input's order::

    batch 0        batch 1            outputs of process 0   outputs of process 1
    a b c d   ─►   e f g         ─►   a b │ e f              c d │ g
                                      └── counts 2, 2        └── counts 2, 1      allgather
                                      a b c d e f g                               on both
"""

import itertools
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from choros.arrays import adapter_of
from choros.comm import global_process_set
from choros.data.epochs import StepsOfEpoch, epochs_of_steps
from choros.data.kinds import are_arrays, data_of, epochs_of_shard, kind_of
from choros.data.rows import Part, Sharding, check_global_batch, count_rows, cut
from choros.distribute import datasets
from choros.distribute.replicas import Replicas
from choros.distribute.training import KerasCall
from choros.errors import ChorosError, ConfigError
from choros.parallel.objects import allgather_object, object_of_first
from choros.parallel.structure import leaves, map_structure
from choros.training.evaluation import RanksHaveChanged

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
    elastic, steps, part = global_process_set.communicator.elastic, call["steps_per_epoch"], replicas.part
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
        return kind_of(data).shard(data, Sharding(replicas.part, max(size, replicas.count)))
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
                f"a strategy cannot shard the rows of a {type(leaf).__name__}: pass dense arrays, such as "
                "x.toarray() of SciPy's, or a data set of batches, such as a keras.utils.PyDataset."
            )


def _packed(x: Any, y: Any, weights: Any) -> Any:
    """Returns the arrays as the structure of which a step receives rows, in host memory."""
    given = keras.utils.pack_x_y_sample_weight(x, y, weights)
    return map_structure(lambda leaf: adapter_of(leaf).to_host(leaf), given)


# prediction --------------------------------------------------------------------------------------


def predict_rows(call: KerasCall, replicas: Replicas, *, needs_labels: bool = False) -> Any:
    """Runs ``model.predict`` over the processes; RanksHaveChanged if an elastic job lost one: call it again.
    ``needs_labels``: a ``predict_step`` of the user's gets all of a batch.
    """
    data, ranks, part = call["x"], global_process_set.communicator.launched, replicas.part
    # A new rank predicts all rows, as the others have them.
    if part.count == 1 or global_process_set.communicator.is_new:
        return call.run()
    if are_arrays(data):
        rows = count_rows(data)
        if rows < part.count:  # fewer rows than processes: every process predicts all of them
            return call.run()
        start, end = part.range(rows)
        outputs = call.replaced(x=cut(data, start, end)).run()
        return _gather_outputs(outputs, [end - start], ranks)
    batches: Iterator[Any] = itertools.islice(kind_of(data).batches(data), call["steps"])
    first = next(batches, None)
    if first is None:
        return call.run()
    batches, distributed = itertools.chain([first], batches), datasets.is_distributed(data)
    if not distributed and count_rows(_inputs(first)) < part.count:
        return call.replaced(x=(_given(batch, needs_labels) for batch in batches), steps=None).run()
    counts: list[int] = []

    def own_batches() -> Iterator[Any]:
        for batch in batches:
            given, rows = _given(batch, needs_labels), count_rows(_inputs(batch))
            start, end = (0, rows) if distributed else part.range(rows)
            counts.append(end - start)
            if end > start:
                yield cut(given, start, end)
        if not any(counts):  # no rows, of the outputs' shapes
            yield cut(given, 0, 0)

    own = own_batches()
    if keras.backend.backend() == "tensorflow" and hasattr(data, "element_spec"):
        own = _dataset(own_batches, _given(data.element_spec, needs_labels)) or own
    return _gather_outputs(call.replaced(x=own, steps=None).run(), counts, ranks)


def order_of_rows(counts: list[list[int]]) -> NDArray[np.int64]:
    """Returns the position of each input row in the outputs of all processes; ``counts`` are rows by process and batch.

    >>> order_of_rows([[2, 2], [2, 1]]).tolist()
    [0, 1, 4, 5, 2, 3, 6]
    """
    starts = np.cumsum([0, *(sum(of_process) for of_process in counts[:-1])])
    positions = []
    for batch in zip(*counts, strict=True):
        for process, rows in enumerate(batch):
            positions.append(np.arange(starts[process], starts[process] + rows))
            starts[process] += rows
    return np.concatenate(positions)


def _dataset(batches: Callable[[], Iterator[Any]], spec: Any) -> Any:
    """The ``batches`` of a data set of tensors with this ``spec``; of a generator, Keras guesses it from the first."""
    import tensorflow as tf

    if not all(isinstance(each, tf.TensorSpec) and each.shape.rank for each in tf.nest.flatten(spec)):
        return None
    signature = tf.nest.map_structure(lambda each: tf.TensorSpec([None, *each.shape[1:]], each.dtype), spec)
    return tf.data.Dataset.from_generator(batches, output_signature=signature)


def _given(batch: Any, needs_labels: bool) -> tuple[Any, ...]:
    """What ``predict_step`` gets."""
    return tuple(batch) if needs_labels and isinstance(batch, tuple | list) else (_inputs(batch),)


def _inputs(batch: Any) -> Any:
    return keras.utils.unpack_x_y_sample_weight(batch)[0]


def _gather_outputs(outputs: Any, counts: list[int], ranks: tuple[int, ...]) -> Any:
    communicator = global_process_set.communicator
    order = order_of_rows(allgather_object(counts))

    def gather(output: Any) -> Any:
        own = np.asarray(output)
        if own.dtype.kind in "OSU":  # text
            return np.concatenate(allgather_object(own))
        return communicator.allgather(own, name="predictions")

    gathered = keras.tree.map_structure(gather, outputs)
    if communicator.launched != ranks:
        raise RanksHaveChanged
    for output in keras.tree.flatten(gathered):
        if len(output) != len(order):  # on all processes, so that no other one waits
            raise ConfigError(
                f"predict() has {len(output)} rows of an output for {len(order)} rows of the input, so that a strategy "
                "cannot put those of its replicas in order. Return one row for each, or call the model itself."
            )
    return keras.tree.map_structure(lambda output: output[order], gathered)
