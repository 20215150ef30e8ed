"""Adasum: a sum of gradients that does not grow where they point in the same direction.

Two vectors a and b (each is one array of one rank) are combined to ::

    Adasum(a, b) = (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b

their sum if they are orthogonal, their average if they are equal (Maleki et al., "Scaling Distributed Training with
Adaptive Summation", MLSys 2021). The vectors of more ranks are combined in pairs, neighbours first; one without a
neighbour goes to the next level as it is. For powers of two that is Horovod's order ::

    rank 0   rank 1   rank 2   rank 3   rank 4
       └──┬────┘         └──┬────┘         │       level 1
          └────────┬────────┘              │       level 2
                   └───────────┬───────────┘       level 3

Every rank does all levels, for one slice of the vectors ::

    slice of every rank's vector ──alltoall──► this rank
    each level: products of the slices ──allreduce──► a·b, |a|², |b|² of each array and pair ──► combined slices
    combined slice ──allgather──► every rank

so that each rank sends and receives as many bytes as in a ring allreduce, whatever the number of ranks. Products and
combinations are computed in float64, and rounded once to the dtype of the arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from choros.comm.reduction import Reduction
from choros.topology import shard_range

__all__ = ["Exchanges", "adasum"]

Array = NDArray[Any]
#: Vectors whose squared length is less have no direction.
_SMALLEST = float(np.sqrt(np.finfo(np.float64).tiny))


class Exchanges(Protocol):
    """What Adasum needs of a ``Communicator``, whose ranks have agreed on it."""

    rank: int
    size: int

    def alltoallv_bytes(
        self, send: NDArray[np.uint8], send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> NDArray[np.uint8]:
        """See ``Communicator``."""

    def reduce_in_place(self, buffer: Array, op: Reduction) -> None:
        """See ``Communicator``."""

    def gather_bytes(self, send: NDArray[np.uint8], counts: Sequence[int]) -> NDArray[np.uint8]:
        """See ``Communicator``."""


def adasum(communicator: Exchanges, arrays: Sequence[Array]) -> list[Array]:
    """Combines the ranks' ``arrays``, each for itself, by Adasum; zeros change nothing.

    Args:
        communicator: the ranks, of any number.
        arrays: floating-point arrays of the same shapes and dtypes on every rank.

    Returns:
        New arrays of the same shapes and dtypes, the same on every rank.
    """
    results = [array.copy() for array in arrays]
    if communicator.size == 1:
        return results
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        same = [index for index, array in enumerate(arrays) if array.dtype == dtype]
        combined = _combine(communicator, [arrays[index].reshape(-1) for index in same])
        for index, vector in zip(same, combined, strict=True):
            results[index] = vector.reshape(arrays[index].shape)
    return results


def _combine(communicator: Exchanges, vectors: Sequence[Array]) -> list[Array]:
    """``adasum`` of vectors of one dtype."""
    size, rank = communicator.size, communicator.rank
    sent = np.concatenate(vectors)
    slices = [shard_range(len(sent), each, size) for each in range(size)]
    start, end = slices[rank]
    counts = [(stop - begin) * sent.itemsize for begin, stop in slices]
    received = communicator.alltoallv_bytes(sent.view(np.uint8), counts, [counts[rank]] * size)
    rows = list(received.view(sent.dtype).reshape(size, end - start).astype(np.float64))
    # Where each array begins within the slice; most begin before or after it.
    edges = np.clip(np.cumsum([0, *map(len, vectors)]) - start, 0, end - start)
    with np.errstate(invalid="ignore", over="ignore"):  # as a sum, which may overflow, too
        while len(rows) > 1:
            rows = _level(communicator, rows, edges)
        combined = rows[0].astype(sent.dtype)
    gathered = communicator.gather_bytes(combined.view(np.uint8), counts).view(sent.dtype)
    return np.split(gathered, np.cumsum([len(vector) for vector in vectors])[:-1])


def _level(communicator: Exchanges, rows: list[Array], edges: NDArray[np.int64]) -> list[Array]:
    """Combines pairs of ``rows``, which are this rank's slices, in their memory."""
    pairs = list(zip(rows[::2], rows[1::2], strict=False))
    parts = [slice(begin, stop) for begin, stop in itertools.pairwise(edges)]
    products = np.array(
        [[(a[part] @ b[part], a[part] @ a[part], b[part] @ b[part]) for part in parts] for a, b in pairs]
    )
    communicator.reduce_in_place(products.reshape(-1), Reduction.SUM)
    dots, squares = products[..., :1], products[..., 1:]
    factors = 1.0 - np.divide(dots, 2.0 * squares, out=np.zeros_like(squares), where=~(squares < _SMALLEST))
    for (a, b), of_parts in zip(pairs, factors, strict=True):
        for part, (first, second) in zip(parts, of_parts, strict=True):
            a[part] *= first
            b[part] *= second
        a += b
    return rows[::2]
