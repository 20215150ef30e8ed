"""Adasum: a sum of gradients that does not grow where they point in the same direction (Maleki et al., MLSys 2021)::

    Adasum(a, b) = (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b

The sum of orthogonal vectors, the average of equal ones. More are combined in pairs, neighbours first; one without
a neighbour goes to the next level as it is. For powers of two that is Horovod's order::

    rank 0   rank 1   rank 2   rank 3   rank 4
       └──┬────┘         └──┬────┘         │       level 1
          └────────┬────────┘              │       level 2
                   └───────────┬───────────┘       level 3

Every rank does all levels, in float64, for one slice: it sends as many bytes as in a ring allreduce::

    slice of every rank's vector ──alltoall──► this rank
    each level: products of the slices ──allreduce──► a·b, |a|², |b|² of each array and pair ──► combined slices
    combined slice ──allgather──► every rank
"""

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from choros.comm.members import Members
from choros.comm.reduction import Array, Reduction
from choros.topology import shard_range

#: Vectors whose squared length is less have no direction.
_SMALLEST = float(np.sqrt(np.finfo(np.float64).tiny))


def adasum(members: Members, arrays: Sequence[Array]) -> list[Array]:
    """Combines the ranks' ``arrays``, each for itself, by Adasum; zeros change nothing."""
    results = [array.copy() for array in arrays]
    if members.size == 1:
        return results
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        same = [index for index, array in enumerate(arrays) if array.dtype == dtype]
        combined = _combine(members, [arrays[index].reshape(-1) for index in same])
        for index, vector in zip(same, combined, strict=True):
            results[index] = vector.reshape(arrays[index].shape)
    return results


def _combine(members: Members, vectors: Sequence[Array]) -> list[Array]:
    """``adasum`` of vectors of one dtype."""
    size, rank = members.size, members.rank
    sent = np.concatenate(vectors)
    slices = [shard_range(len(sent), each, size) for each in range(size)]
    start, end = slices[rank]
    counts = [(stop - begin) * sent.itemsize for begin, stop in slices]
    received = members.alltoallv_bytes(sent.view(np.uint8), counts, [counts[rank]] * size)
    rows = list(received.view(sent.dtype).reshape(size, end - start).astype(np.float64))
    # Where each array begins within the slice; most begin before or after it.
    edges = np.clip(np.cumsum([0, *map(len, vectors)]) - start, 0, end - start)
    with np.errstate(invalid="ignore", over="ignore"):  # as a sum, which may overflow, too
        while len(rows) > 1:
            rows = _level(members, rows, edges)
        combined = rows[0].astype(sent.dtype)
    gathered = members.gather_bytes(combined.view(np.uint8), counts).view(sent.dtype)
    return np.split(gathered, np.cumsum([len(vector) for vector in vectors])[:-1])


def _level(members: Members, rows: list[Array], edges: NDArray[np.int64]) -> list[Array]:
    """Combines pairs of ``rows``, which are this rank's slices, in their memory."""
    pairs = list(zip(rows[::2], rows[1::2], strict=False))
    parts = [slice(begin, stop) for begin, stop in itertools.pairwise(edges)]
    products = np.array(
        [[(a[part] @ b[part], a[part] @ a[part], b[part] @ b[part]) for part in parts] for a, b in pairs]
    )
    members.reduce_in_place(products.reshape(-1), Reduction.SUM)
    dots, squares = products[..., :1], products[..., 1:]
    factors = 1.0 - np.divide(dots, 2.0 * squares, out=np.zeros_like(squares), where=~(squares < _SMALLEST))
    for (a, b), of_parts in zip(pairs, factors, strict=True):
        for part, (first, second) in zip(parts, of_parts, strict=True):
            a[part] *= first
            b[part] *= second
        a += b
    return rows[::2]
