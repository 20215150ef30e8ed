"""Prediction over processes: each predicts its rows of every batch; all gather all outputs, in the input's order.

::

    batch 0        batch 1            outputs of process 0   outputs of process 1
    a b c d   ─►   e f g         ─►   a b │ e f              c d │ g
                                      └── counts 2, 2        └── counts 2, 1      allgather
                                      a b c d e f g                               on both
"""

import itertools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from choros.comm import global_process_set
from choros.data.kinds import are_arrays, kind_of
from choros.data.rows import count_rows, cut
from choros.distribute.fit.training import KerasCall
from choros.parallel.objects import allgather_object
from choros.topology import shard_range
from choros.training.evaluation import RanksHaveChanged


def predict_rows(call: KerasCall, rank: int, size: int, *, distributed: bool = False) -> Any:
    """Runs ``model.predict`` over ``size`` processes; RanksHaveChanged if an elastic job lost one: call it again.
    ``distributed`` says that the batches are this process's rows of global batches already.
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
        return call.replaced(x=((_inputs(batch),) for batch in batches), steps=None).run()
    counts: list[int] = []

    def own_batches() -> Iterator[Any]:
        for batch in batches:
            inputs = _inputs(batch)
            rows = count_rows(inputs)
            start, end = (0, rows) if distributed else shard_range(rows, rank, size)
            counts.append(end - start)
            if end > start:
                yield (cut(inputs, start, end),)
        if not any(counts):  # no rows, of the outputs' shapes
            yield (cut(inputs, 0, 0),)

    return _gather_outputs(call.replaced(x=own_batches(), steps=None).run(), counts, ranks)


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


def _inputs(batch: Any) -> Any:
    return keras.utils.unpack_x_y_sample_weight(batch)[0]


def _gather_outputs(outputs: Any, counts: list[int], ranks: tuple[int, ...]) -> Any:
    communicator = global_process_set.communicator
    order = order_of_rows(allgather_object(counts))
    gathered = keras.tree.map_structure(
        lambda output: communicator.allgather(np.asarray(output), name="predictions"), outputs
    )
    if communicator.launched != ranks:
        raise RanksHaveChanged
    return keras.tree.map_structure(lambda output: output[order], gathered)
