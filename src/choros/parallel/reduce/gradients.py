"""The gradients that the reducer takes: host arrays, tensors on a device and sparse rows, and their layout.

Sparse gradients are the rows of a variable that a batch used. Ranks gather them, in rank order, instead of summing. A
step with the gradients of two embeddings, a and b, of different numbers of rows, costs what the batch does::

             rank 0                 rank 1
    (1)  3 rows of a, 2 of b    1 row of a, 4 of b      allgather: the numbers of rows, and how they may be summed
    (2)  [a a a│b b]            [a│b b b b]             pack: indices; then values, scaled and cast
    (3)  ──────────────── allgather ────────────────    one message each for all embeddings; of one, without packing
    (4)  a: [a a a│a]           b: [b b│b b b b]        unpack, on both ranks

A row that occurs twice stays twice, as in one process on the whole batch: Adam and clipping by norm treat that
differently from the sum. But functions such as ``tf.nn.embedding_lookup_sparse`` sum equal rows themselves, so
rows of several ranks are summed if each rank has each once, and the variable is not known to be a Keras
embedding's. And where indices do not follow from the batch, as those of positions, one process has each of them once,
whatever its batch: such rows are summed if all ranks have the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from choros.arrays import adapter_of
from choros.comm import Array, Communicator, DType
from choros.comm.fusion import Exchange, Given, WireDtype, aligned_empty, regrouped, scale_into
from choros.comm.reduction import wide_dtype

#: A host array, a tensor on a device or ``SparseRows``.
Gradient: TypeAlias = Any
#: The items of a flat array that each rank owns: the first one, and the one after the last.
Ranges = tuple[tuple[int, int], ...]
#: How rows of several ranks may be summed, in a bit mask: by their indices, or one by one, if all ranks have the same.
_BY_INDEX, _ONE_BY_ONE = 1, 2


class GradientKind(NamedTuple):
    """What ranks agree on about a gradient. ``ranges``: each rank receives its own items, or the rows that have these,
    see ``slices.py``; ``number``: that of its variable, see ``numbered``. Sparse ones have an ``index_dtype``;
    ``repeats``: a row of several ranks stays several rows.
    """

    shape: tuple[int, ...]
    dtype: DType
    ranges: Ranges = ()
    number: int | None = None
    index_dtype: Any = None
    repeats: bool = True

    @property
    def sparse(self) -> bool:
        """Whether ranks gather its rows."""
        return self.index_dtype is not None

    def items(self, rank: int) -> int:
        """The number of items of ``rank``."""
        start, stop = self.ranges[rank]
        return stop - start

    def of_rank(self, rank: int) -> GradientKind:
        """That of what ``rank`` receives."""
        if not self.ranges:
            return self
        items, inner = self.items(rank), self.shape[1:]
        return self._replace(shape=(items // math.prod(inner), *inner) if self.sparse else (items,), ranges=())

    def zeros(self) -> Gradient:
        """Zeros, in host memory."""
        return self.rows(0) if self.sparse else np.zeros(self.shape, self.dtype)

    def rows(self, count: int) -> SparseRows:
        """Returns this many rows, uninitialised."""
        values = aligned_empty((count, *self.shape[1:]), self.dtype)
        return SparseRows(aligned_empty((count,), self.index_dtype), values, self.shape)

    def __str__(self) -> str:
        kind = f"{self.dtype}{list(self.shape)}" + ("" if self.number is None else f" of variable {self.number}")
        if self.sparse:
            return f"{'' if self.repeats else 'distinct '}rows of {kind} by {self.index_dtype}"
        slices = ", ".join(str(stop - start) for start, stop in self.ranges)
        return kind + (f" in slices of {slices}" if slices else "")


@dataclass(frozen=True, eq=False)
class SparseRows:
    """A gradient that is zero but for some rows. A row that occurs several times is the sum of these. ``of_batch``:
    whether the indices follow from the batch; ``None``: not known.

    >>> rows = SparseRows(np.array([2, 0]), np.ones((2, 1)), shape=(3, 1))
    >>> (rows * 2.0 + rows).indices, (rows * 2.0 + rows).values.tolist()
    (array([2, 0, 2, 0]), [[2.0], [2.0], [1.0], [1.0]])
    """

    indices: Array
    values: Array
    shape: tuple[int, ...]
    of_batch: bool | None = True

    @property
    def layout(self) -> GradientKind:
        """The part of it that is the same on all ranks."""
        return GradientKind(self.shape, self.values.dtype, index_dtype=self.indices.dtype)

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
        values = np.add.reduceat(self.values[order], starts, axis=0, dtype=wide_dtype(self.values.dtype))
        return SparseRows(indices, values.astype(self.values.dtype, copy=False), self.shape)

    def __mul__(self, factor: float) -> SparseRows:
        values = np.empty_like(self.values)
        scale_into(values, self.values, factor)
        return replace(self, values=values)

    def __add__(self, other: SparseRows) -> SparseRows:
        if self.of_batch is False and np.array_equal(self.indices, other.indices):
            return replace(self, values=self.values + other.values)
        indices = np.concatenate([self.indices, other.indices])
        return replace(self, indices=indices, values=np.concatenate([self.values, other.values]))


GradientLayout = tuple[GradientKind, ...]


def layout_of(gradients: Sequence[Any]) -> GradientLayout:
    """Returns the layout of ``gradients``.

    >>> describe(layout_of([np.ones(2), SparseRows(np.array([3]), np.ones((1, 4)), shape=(9, 4))]))
    'float64[2], rows of float64[9, 4] by int64'
    """
    return tuple(
        each.layout if isinstance(each, SparseRows) else GradientKind(tuple(each.shape), _dtype(each))
        for each in gradients
    )


def numbered(layout: GradientLayout, variables: Sequence[Any], known: Sequence[Any]) -> GradientLayout:
    """The layout of gradients of ``variables``. If they are not all that are ``known``, in this order, it has their
    numbers: others may have the same shapes.
    """
    number_of = {id(variable): number for number, variable in enumerate(known)}
    numbers = [number_of.get(id(variable), -1) for variable in variables]
    if not known or numbers == [*range(len(known))]:
        return layout
    return tuple(each._replace(number=number) for each, number in zip(layout, numbers, strict=True))


def variables_of(layout: GradientLayout, known: Sequence[Any]) -> list[Any]:
    """The variables of a ``numbered`` layout."""
    return [known[index if each.number is None else each.number] for index, each in enumerate(layout)]


def describe(layout: GradientLayout) -> str:
    """Returns ``layout`` as text, for errors."""
    return ", ".join(map(str, layout))


def zeros_like(gradient: Any) -> Any:
    """Returns zeros of the same layout, on the device of ``gradient``."""
    return gradient.layout.rows(0) if isinstance(gradient, SparseRows) else adapter_of(gradient).zeros_like(gradient)


def squared_norm(gradients: Sequence[Gradient]) -> Any:
    """The sum of the squares of all elements: a number, or on a device one of its framework.

    >>> squared_norm([np.array([3.0, 4.0]), SparseRows(np.array([1, 1]), np.ones((2, 1)), shape=(2, 1))])
    29.0
    """
    return sum((_squares(each) for each in gradients), 0.0)


def _squares(gradient: Gradient) -> Any:
    if isinstance(gradient, SparseRows):
        gradient = gradient.merged().values
    if isinstance(gradient, np.ndarray):
        flat = gradient.reshape(-1)
        flat = flat if flat.dtype in (np.float32, np.float64) else flat.astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # steps that overflow are left out
            return float(np.dot(flat, flat))
    adapter = adapter_of(gradient)
    wide = adapter.cast(adapter.stop_gradient(gradient), np.dtype(np.float32))
    return adapter.sum(wide * wide)


def _dtype(array: Any) -> DType:
    return array.dtype if isinstance(array, np.ndarray) else np.dtype(str(array.dtype).removeprefix("torch."))


def rows_exchange(communicator: Communicator, layout: Sequence[GradientKind], row_dtype: WireDtype) -> Exchange:
    """Gathers the ranks' rows of all sparse gradients in one message; ``row_dtype`` maps a dtype to the sent one."""
    wires = [row_dtype(each.dtype) for each in layout]

    def gather(arrays: Sequence[SparseRows] | None, before: float, after: float, _: Given = None) -> list[SparseRows]:
        given = [each.rows(0) for each in layout] if arrays is None else arrays
        own = [len(rows.indices) for rows in given]
        summable = [_summable(each, rows) for each, rows in zip(layout, given, strict=True)]
        header = np.array([own, summable], np.int64)
        gathered = communicator.gather_bytes(header.reshape(-1).view(np.uint8), [header.nbytes] * communicator.size)
        table = gathered.view(np.int64).reshape(communicator.size, 2, len(layout))
        counts: list[list[int]] = table[:, 0].tolist()

        # Factors that fit into the dtype of values are applied once, to the rows of this rank.
        early = [before * after if wire == each.dtype else before for wire, each in zip(wires, layout, strict=True)]
        parts = [rows.indices for rows in given]
        indices = _gathered(communicator, parts, [each.index_dtype for each in layout], counts)
        sizes = [math.prod(each.shape[1:]) for each in layout]
        elements = [[count * size for count, size in zip(each, sizes, strict=True)] for each in counts]
        values = _gathered(communicator, [rows.values.reshape(-1) for rows in given], wires, elements, early)
        results = []
        for each, wire, rows, part in zip(layout, wires, indices, values, strict=True):
            if wire != each.dtype:
                wide = aligned_empty(part.shape, each.dtype)
                scale_into(wide, part, after)
                part = wide
            results.append(SparseRows(rows, part.reshape(-1, *each.shape[1:]), each.shape))
        ways = np.bitwise_and.reduce(table[:, 1]).tolist()
        return [_summed(*each) for each in zip(results, table[:, 0].T.tolist(), ways, strict=True)]

    return Exchange(", ".join(f"gathered {wire}" for wire in wires), gather)


def _gathered(
    communicator: Communicator,
    parts: Sequence[Array],
    dtypes: Sequence[DType],
    counts: Sequence[list[int]],
    scales: Sequence[float] = (),
) -> list[Array]:
    """Concatenates each of the ranks' flat ``parts`` in rank order, sent in one message as these ``dtypes``."""
    scales = scales or [1.0] * len(parts)
    table = np.array(counts, np.int64) * np.array([dtype.itemsize for dtype in dtypes], np.int64)
    nbytes: list[int] = table.sum(1).tolist()
    if len(parts) == 1 and scales[0] == 1.0 and parts[0].dtype == dtypes[0]:
        message = np.ascontiguousarray(parts[0]).view(np.uint8)
    else:
        message = np.empty(nbytes[communicator.rank], np.uint8)
        slots = np.split(message, np.cumsum(table[communicator.rank])[:-1])
        for slot, dtype, part, scale in zip(slots, dtypes, parts, scales, strict=True):
            scale_into(slot.view(dtype), part, scale)
    of_parts = regrouped(communicator.gather_bytes(message, nbytes), table)
    return [part.view(dtype) for part, dtype in zip(of_parts, dtypes, strict=True)]


def _summable(layout: GradientKind, rows: SparseRows) -> int:
    """How other ranks' rows may be added to these."""
    if not len(rows.indices):
        return _BY_INDEX | _ONE_BY_ONE
    if not layout.repeats:
        return _BY_INDEX if rows.distinct else 0
    if rows.of_batch is None:  # several rows that all ranks have once, in one order, are hardly those of batches
        return _ONE_BY_ONE if len(rows.indices) > 1 and rows.distinct else 0
    return 0 if rows.of_batch else _ONE_BY_ONE


def _summed(rows: SparseRows, counts: Sequence[int], ways: int) -> SparseRows:
    """All ranks' ``rows``, of which each has these ``counts``; those that may be summed once."""
    if ways & _BY_INDEX:
        return rows.merged()
    count, ranks = max(counts), len(rows.indices) // max(1, *counts)
    if not ways & _ONE_BY_ONE or not set(counts) <= {0, count}:
        return rows
    indices = rows.indices.reshape(ranks, count)
    if (indices != indices[0]).any():
        return rows
    values = rows.values.reshape(ranks, *rows.values[:count].shape).sum(0, dtype=wide_dtype(rows.values.dtype))
    return replace(rows, indices=indices[0], values=values.astype(rows.values.dtype, copy=False))
