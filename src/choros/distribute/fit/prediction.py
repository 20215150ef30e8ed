"""Prediction over processes: each predicts its rows of every batch, then all have all outputs, in the input's order.

::

    batch 0        batch 1            outputs of process 0   outputs of process 1
    a b c d   ─►   e f g         ─►   a b │ e f              c d │ g
                                      └── counts 2, 2        └── counts 2, 1      all know all counts
                                      a b c d e f g                               on both
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from choros.comm import global_process_set
from choros.distribute.fit.call import Call
from choros.parallel.data import are_arrays, count_rows, cut, kind_of
from choros.parallel.objects import allgather_object
from choros.topology import shard_range

__all__ = ["order_of_rows", "predict_rows"]


def predict_rows(call: Call, rank: int, size: int) -> Any:
    """``model.predict`` or ``predict_on_batch`` over ``size`` processes, of which this is ``rank``."""
    data = call["x"]
    if size == 1:
        return call.run()
    if are_arrays(data):
        rows = count_rows(data)
        if rows < size:  # not a row for each: everybody predicts all of them
            return call.run()
        start, end = shard_range(rows, rank, size)
        outputs = call.replaced(x=cut(data, start, end)).run()
        return _together(outputs, [end - start])
    batches: Iterator[Any] = itertools.islice(kind_of(data).batches(data), call["steps"])
    first = next(batches, None)
    if first is None:
        return call.run()
    batches = itertools.chain([first], batches)
    if count_rows(_inputs(first)) < size:
        return call.replaced(x=(_inputs(batch) for batch in batches), steps=None).run()
    counts = []

    def mine() -> Iterator[Any]:
        for batch in batches:
            inputs = _inputs(batch)
            start, end = shard_range(count_rows(inputs), rank, size)
            counts.append(end - start)
            if end > start:
                yield (cut(inputs, start, end),)

    return _together(call.replaced(x=mine(), steps=None).run(), counts)


def order_of_rows(counts: list[list[int]]) -> NDArray[np.int64]:
    """Where the rows of the input are among the outputs of all processes, put one after the other.

    Args:
        counts: of each process, how many rows of each batch it had.

    Example:
        >>> order_of_rows([[2, 2], [2, 1]]).tolist()
        [0, 1, 4, 5, 2, 3, 6]
    """
    starts = np.cumsum([0, *(sum(of_process) for of_process in counts[:-1])])
    pieces = []
    for batch in zip(*counts, strict=True):
        for process, rows in enumerate(batch):
            pieces.append(np.arange(starts[process], starts[process] + rows))
            starts[process] += rows
    return np.concatenate(pieces)


def _inputs(batch: Any) -> Any:
    return keras.utils.unpack_x_y_sample_weight(batch)[0]


def _together(outputs: Any, counts: list[int]) -> Any:
    order = order_of_rows(allgather_object(counts))

    def gathered(output: Any) -> Any:
        return global_process_set.communicator.allgather(np.asarray(output), name="predictions")[order]

    return keras.tree.map_structure(gathered, outputs)
