"""Prediction over processes: each predicts its rows of every batch; all gather all outputs, in the input's order.

::

    batch 0        batch 1            outputs of process 0   outputs of process 1
    a b c d   ─►   e f g         ─►   a b │ e f              c d │ g
                                      └── counts 2, 2        └── counts 2, 1      allgather
                                      a b c d e f g                               on both
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from choros.comm import global_process_set
from choros.data.kinds import are_arrays, kind_of
from choros.data.rows import count_rows, cut
from choros.distribute.fit.training import KerasCall
from choros.errors import ConfigError
from choros.parallel.objects import allgather_object
from choros.topology import shard_range
from choros.training.evaluation import RanksHaveChanged


def predict_rows(
    call: KerasCall, rank: int, size: int, *, distributed: bool = False, needs_labels: bool = False
) -> Any:
    """Runs ``model.predict`` over ``size`` processes; RanksHaveChanged if an elastic job lost one: call it again.
    ``distributed`` says that the batches are this process's rows of global batches already, and ``needs_labels`` that
    a ``predict_step`` of the user's gets all of a batch.
    """
    data, ranks = call["x"], global_process_set.communicator.launched
    if size == 1 or global_process_set.communicator.is_new:  # a new rank predicts all rows, as the others have them
        return call.run()
    if are_arrays(data):
        rows = count_rows(data)
        if rows < size:  # fewer rows than processes: every process predicts all of them
            return call.run()
        start, end = shard_range(rows, rank, size)
        outputs = call.replaced(x=cut(data, start, end)).run()
        return _gather_outputs(outputs, [end - start], ranks)
    batches: Iterator[Any] = itertools.islice(kind_of(data).batches(data), call["steps"])
    first = next(batches, None)
    if first is None:
        return call.run()
    batches = itertools.chain([first], batches)
    if not distributed and count_rows(_inputs(first)) < size:
        return call.replaced(x=(_given(batch, needs_labels) for batch in batches), steps=None).run()
    counts: list[int] = []

    def own_batches() -> Iterator[Any]:
        for batch in batches:
            given, rows = _given(batch, needs_labels), count_rows(_inputs(batch))
            start, end = (0, rows) if distributed else shard_range(rows, rank, size)
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
