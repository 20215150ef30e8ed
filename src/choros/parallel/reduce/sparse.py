"""Sparse gradients: the rows of a variable that a batch used. Ranks gather them, in rank order, instead of summing.

A step with the gradients of two embeddings, a and b, of different numbers of rows::

             rank 0                 rank 1
    (1)  3 rows of a, 2 of b    1 row of a, 4 of b      allgather: the numbers of rows, and whether they are distinct
    (2)  [a a a│b b]            [a│b b b b]             pack: indices, then values, scaled and cast
    (3)  ──────────────── allgather ────────────────    one message for all embeddings
    (4)  a: [a a a│a]           b: [b b│b b b b]        unpack, on both ranks

A row that occurs twice stays twice, as in one process on the whole batch: optimizers such as Adam, and clipping by
norm, treat that differently from the sum of both. But some functions sum equal rows of a batch themselves, such as
``tf.nn.embedding_lookup_sparse`` and a dense layer of sparse inputs. So rows that several ranks have are summed if each
rank has each of them once, and the variable is not known to be that of a Keras embedding. The cost of a step grows with
the batch and not with the variable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from choros.comm import Communicator
from choros.comm.fusion import WireDtype
from choros.comm.memory import aligned_empty
from choros.parallel.reduce.exchange import Array, Exchange

__all__ = ["RowsExchange", "RowsLayout", "SparseRows"]

DType = np.dtype[np.generic]


class RowsLayout(NamedTuple):
    """What ranks agree on about a sparse gradient.

    Attributes:
        shape: the shape of its variable.
        dtype: the dtype of its variable.
        index_dtype: the dtype of the indices.
        repeats: whether a row that several ranks have stays several rows, even if each rank has it once.
    """

    shape: tuple[int, ...]
    dtype: DType
    index_dtype: DType
    repeats: bool = True

    def rows(self, count: int) -> SparseRows:
        """Returns this many rows, uninitialised."""
        values = aligned_empty((count, *self.shape[1:]), self.dtype)
        return SparseRows(aligned_empty((count,), self.index_dtype), values, self.shape)

    def __str__(self) -> str:
        return f"{'' if self.repeats else 'distinct '}rows of {self.dtype}{list(self.shape)} by {self.index_dtype}"


@dataclass(frozen=True, eq=False)
class SparseRows:
    """A gradient that is zero but for some rows. A row that occurs several times is the sum of these.

    Attributes:
        indices: the rows' numbers, of shape (n,).
        values: the rows, of shape (n, …).
        shape: the shape of the variable.

    Example:
        >>> rows = SparseRows(np.array([2, 0]), np.ones((2, 1)), shape=(3, 1))
        >>> (rows * 2.0 + rows).indices, (rows * 2.0 + rows).values.tolist()
        (array([2, 0, 2, 0]), [[2.0], [2.0], [1.0], [1.0]])
    """

    indices: Array
    values: Array
    shape: tuple[int, ...]

    @property
    def layout(self) -> RowsLayout:
        """The part of it that is the same on all ranks."""
        return RowsLayout(self.shape, self.values.dtype, self.indices.dtype)

    @property
    def distinct(self) -> bool:
        """Whether no row occurs twice."""
        return len(np.unique(self.indices)) == len(self.indices)

    def merged(self) -> SparseRows:
        """Returns each row once, the sum of those with its index."""
        order = np.argsort(self.indices, kind="stable")
        indices, starts = np.unique(self.indices[order], return_index=True)
        if len(indices) == len(self.indices):
            return self
        values = np.add.reduceat(self.values[order], starts, axis=0)
        return SparseRows(indices, values, self.shape)

    def zeros(self) -> SparseRows:
        """Returns a gradient of no rows."""
        return SparseRows(self.indices[:0], self.values[:0], self.shape)

    def __mul__(self, factor: float) -> SparseRows:
        values = np.empty_like(self.values)
        _scale_into(values, self.values, factor)
        return SparseRows(self.indices, values, self.shape)

    def __add__(self, other: SparseRows) -> SparseRows:
        indices = np.concatenate([self.indices, other.indices])
        return SparseRows(indices, np.concatenate([self.values, other.values]), self.shape)


@final
class RowsExchange(Exchange):
    """Gathers the ranks' rows of all sparse gradients in one message.

    Args:
        communicator: the ranks.
        layout: the sparse gradients.
        row_dtype: maps the dtype of values to the dtype in which they are sent.
    """

    def __init__(self, communicator: Communicator, layout: Sequence[RowsLayout], row_dtype: WireDtype) -> None:
        self._communicator = communicator
        self._layout = layout
        self._wires = [row_dtype(each.dtype) for each in layout]
        self.description = ", ".join(f"gathered {wire}" for wire in self._wires)

    def sum(self, arrays: Sequence[SparseRows] | None, before: float, after: float) -> list[SparseRows]:
        """See ``Exchange``; takes and gives rows."""
        size, number = self._communicator.size, len(self._layout)
        given = [each.rows(0) for each in self._layout] if arrays is None else arrays
        own = [len(rows.indices) for rows in given]
        distinct = [not each.repeats and rows.distinct for each, rows in zip(self._layout, given, strict=True)]
        header = np.array([own, distinct], np.int64)
        gathered = self._communicator.gather_bytes(header.reshape(-1).view(np.uint8), [header.nbytes] * size)
        table = gathered.view(np.int64).reshape(size, 2, number)
        counts: list[list[int]] = table[:, 0].tolist()

        message = np.empty(self._nbytes(own), np.uint8)
        for (indices, values), rows in zip(self._views(message, own), given, strict=True):
            np.copyto(indices, rows.indices)
            _scale_into(values, rows.values.reshape(-1), before)
        received = self._communicator.gather_bytes(message, [self._nbytes(each) for each in counts])

        totals = [sum(each) for each in zip(*counts, strict=True)]
        results = [each.rows(total) for each, total in zip(self._layout, totals, strict=True)]
        starts = [0] * number
        for part, counts_of_rank in zip(self._split(received, counts), counts, strict=True):
            for index, (indices, values) in enumerate(self._views(part, counts_of_rank)):
                start, stop = starts[index], starts[index] + counts_of_rank[index]
                np.copyto(results[index].indices[start:stop], indices)
                _scale_into(results[index].values[start:stop].reshape(-1), values, after)
                starts[index] = stop
        merge = [all(flags) for flags in zip(*table[:, 1].tolist(), strict=True)]
        return [rows.merged() if each else rows for rows, each in zip(results, merge, strict=True)]

    def _nbytes(self, counts: Sequence[int]) -> int:
        """The bytes of a message with these numbers of rows."""
        return sum(
            count * (each.index_dtype.itemsize + math.prod(each.shape[1:]) * wire.itemsize)
            for count, each, wire in zip(counts, self._layout, self._wires, strict=True)
        )

    def _views(self, message: NDArray[np.uint8], counts: Sequence[int]) -> list[tuple[Array, Array]]:
        """The flat indices and values of each gradient in a message with these numbers of rows."""
        start = 0

        def view(count: int, dtype: DType) -> Array:
            nonlocal start
            stop = start + count * dtype.itemsize
            part: Array = message[start:stop].view(dtype)
            start = stop
            return part

        indices = [view(count, each.index_dtype) for count, each in zip(counts, self._layout, strict=True)]
        sizes = [count * math.prod(each.shape[1:]) for count, each in zip(counts, self._layout, strict=True)]
        return list(zip(indices, [view(*pair) for pair in zip(sizes, self._wires, strict=True)], strict=True))

    def _split(self, received: NDArray[np.uint8], counts: Sequence[Sequence[int]]) -> list[NDArray[np.uint8]]:
        ends = np.cumsum([self._nbytes(each) for each in counts])
        return np.split(received, ends[:-1])


def _scale_into(target: Array, source: Array, scale: float) -> None:
    """Computes ``target = source * scale`` in float32 or wider, and rounds once."""
    if scale == 1.0:
        np.copyto(target, source, casting="unsafe")
    else:
        working: Any = np.result_type(source.dtype, np.float32)
        np.multiply(source, working.type(scale), out=target, dtype=working, casting="unsafe")
