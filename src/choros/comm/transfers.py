"""The moves of a collective, once all members have agreed: arrays are packed into flat buffers of the primitives."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from choros.comm.adasum import adasum
from choros.comm.fusion import (
    Chunk,
    FusionBuffer,
    Layout,
    batches,
    flat_items,
    pack,
    plan_fusion,
    reduce_buffers,
    regrouped,
    slots_of,
)
from choros.comm.members import Members
from choros.comm.reduction import Array, DType, Reduction, working_dtype, working_op, writer
from choros.errors import ConfigError, MismatchError
from choros.topology import shard_range

#: The bytes that ranks gather in one message of a group: larger arrays are gathered sooner than they are copied.
GATHERED_TOGETHER = 128 << 10


def sum_numbers(members: Members, numbers: Array, sizes: Sequence[int], differ: str) -> None:
    """Sums the members' numbers in place, once they agree on the operation and ``sizes``, 0 for a rank without rows."""
    if len(set(sizes) - {0}) > 1:
        raise MismatchError(differ.format(list(sizes)))
    members.reduce_in_place(numbers, Reduction.SUM)


def reduce_all(
    members: Members, layout: Layout, arrays: list[Array], op: Reduction, outs: list[Array] | None
) -> list[Array]:
    """Reduces arrays of all members, into ``outs`` or new ones."""
    if op is Reduction.ADASUM:
        combined = adasum(members, arrays)
        for out, array in zip(outs or (), combined, strict=False):
            np.copyto(out, array)
        return outs or combined
    fill = functools.partial(pack, [flat_items(array) for array in arrays])
    # By messages, a minimum or maximum that keeps a NaN costs more than the copies.
    direct_bytes = None if op in (Reduction.MIN, Reduction.MAX) else members.direct_bytes
    buffers = _plan(layout, members.chunk_bytes, direct_bytes)
    return reduce_buffers(members, layout, buffers, op, fill, writer(op, members.size), outs)


def gather_rows(members: Members, rows: Array, lengths: Sequence[int]) -> Array:
    """Concatenates the rows of all members, which have ``lengths``."""
    row_bytes = _row_bytes(rows)
    received = members.gather_bytes(_bytes(rows), [length * row_bytes for length in lengths])
    return received.view(rows.dtype).reshape(sum(lengths), *rows.shape[1:])


def gather_all(members: Members, parts: list[Array], lengths: NDArray[np.int64], digests: Sequence[int]) -> list[Array]:
    """Gathers several arrays; ``digests`` are those of the ranks' ``lengths``."""
    if len(set(digests)) == 1:
        table = np.tile(lengths, (members.size, 1))
    else:
        received = members._allgather(lengths.view(np.uint8), [lengths.nbytes] * members.size)
        table = received.view(np.int64).reshape(members.size, len(parts))
    row_bytes = np.array([_row_bytes(rows) for rows in parts], np.int64)
    totals, results = table.sum(0), []
    for batch in batches((totals * row_bytes).tolist(), min(GATHERED_TOGETHER, members.chunk_bytes)):
        counts = table[:, batch] * row_bytes[batch]
        message = [_bytes(rows) for rows in parts[batch]]
        received = members.gather_bytes(
            message[0] if len(message) == 1 else np.concatenate(message), counts.sum(1).tolist()
        )
        results += regrouped(received, counts)
    return [
        result.view(rows.dtype).reshape(total, *rows.shape[1:])
        for result, rows, total in zip(results, parts, totals.tolist(), strict=True)
    ]


def broadcast_from(members: Members, root: int, source: Array) -> Array:
    """Returns the array of the member ``root``."""
    buffer = source.flatten()
    members.bytes_sent += buffer.nbytes if root == members.rank else 0
    members._broadcast(buffer.view(np.uint8), root)
    return buffer.reshape(source.shape)


def reduce_and_scatter(members: Members, arrays: list[Array], op: Reduction) -> list[Array]:
    """Reduces arrays, and returns this rank's rows of each."""
    results = list(arrays)
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        same = [index for index, array in enumerate(arrays) if array.dtype == dtype]
        for batch in batches([arrays[index].nbytes for index in same], members.chunk_bytes):
            own = _scatter_together(members, [arrays[index] for index in same[batch]], op)
            for index, array in zip(same[batch], own, strict=True):
                results[index] = array
    return results


def _scatter_together(members: Members, arrays: list[Array], op: Reduction) -> list[Array]:
    """Reduces arrays of one dtype, of which each rank gets the rows of ``shard_range``."""
    dtype, size, working = arrays[0].dtype, members.size, working_dtype(arrays[0].dtype)
    shares = [[array[slice(*shard_range(len(array), rank, size))] for array in arrays] for rank in range(size)]
    results = [np.empty(rows.shape, dtype) for rows in shares[members.rank]]
    flats = [[flat_items(rows) for rows in share] for share in shares]
    targets = [flat_items(result) for result in results]
    scatter_shares(members, flats, working, working_op(dtype, op), targets, writer(op, size))
    return results


def scatter_shares(
    members: Members,
    shares: Sequence[Sequence[Array]],
    wire: DType,
    op: Reduction,
    targets: Sequence[Array],
    write: Callable[[Array, Array], None],
    fill: Callable[[Sequence[Array], Array], None] | None = None,
) -> None:
    """Reduces flat arrays of one dtype: those of ``shares[rank]`` for each rank, in as few messages as hold them.
    ``fill`` concatenates parts as they are sent, and ``write`` converts this rank's sums to ``targets``. A message has
    items for each rank::

        shares     rank 0: a a a│b b          rank 1: a a│b
        messages   a a ┊ a a      a b ┊ b      b ┊                   the next items of each share
    """
    for chunks in _messages(members, shares, wire.itemsize):
        parts = [chunk.parts(share) for chunk, share in zip(chunks, shares, strict=True)]
        _scatter_message(members, parts, wire, op, chunks[members.rank].parts(targets), write, fill)


def _messages(members: Members, shares: Sequence[Sequence[Array]], itemsize: int) -> Iterator[list[Chunk]]:
    """Of each message the items of each share, which are the next ones, of some flat arrays."""
    slots = [[*slots_of(enumerate(part.size for part in share))] for share in shares]
    ends = [spans[-1].stop if spans else 0 for spans in slots]
    most = max(1, members.chunk_bytes // itemsize // members.size)
    for start in range(0, max(ends), most):
        yield [Chunk.of(spans, min(end, start), min(end, start + most)) for spans, end in zip(slots, ends, strict=True)]


def _scatter_message(
    members: Members,
    parts: Sequence[list[Array]],
    wire: DType,
    op: Reduction,
    targets: list[Array],
    write: Callable[[Array, Array], None],
    fill: Callable[[Sequence[Array], Array], None] | None,
) -> None:
    """Reduces ``parts`` for each rank, and converts this rank's to ``targets``."""
    rank, counts = members.rank, [sum(part.size for part in share) for share in parts]
    message = members.message(sum(counts) * wire.itemsize).view(wire)
    before = sum(counts[:rank])
    concatenate = fill or _concatenate
    concatenate([*itertools.chain(*parts[:rank])], message[:before])
    concatenate([*itertools.chain(*parts[rank + 1 :])], message[before + counts[rank] :])
    members.bytes_sent += message.nbytes
    # Of one array neither this rank's items nor their sum are copied, unless they are cast.
    whole = len(targets) == 1 and targets[0].dtype == wire
    if whole and fill is None:
        own = parts[rank][0]
    else:
        own = np.empty(counts[rank], wire)
        concatenate(parts[rank], own)
    reduced = targets[0] if whole else own
    members._reducescatter_into(reduced, own, message, counts, op)
    start = 0
    for target in targets:
        write(reduced if whole else reduced[start : start + target.size], target)
        start += target.size


def gather_shares(members: Members, own: Sequence[Array], outs: Sequence[Sequence[Array]]) -> None:
    """Gathers flat arrays of one dtype, ``own`` of this rank, into ``outs[rank]``: of the same sizes on all ranks,
    in messages as those of ``scatter_shares``. This rank's own ``outs`` may be the memory of ``own``.
    """
    dtype = next((part.dtype for share in outs for part in share), np.dtype(np.uint8))
    for chunks in _messages(members, outs, dtype.itemsize):
        parts = chunks[members.rank].parts(own)
        message = parts[0] if len(parts) == 1 else np.concatenate([*parts, np.empty(0, dtype)])
        counts = [(chunk.stop - chunk.start) * dtype.itemsize for chunk in chunks]
        received, begin = members.gather_bytes(_bytes(message), counts).view(dtype), 0
        for chunk, share in zip(chunks, outs, strict=True):
            for target in chunk.parts(share):
                target[...] = received[begin : begin + target.size]
                begin += target.size


def _concatenate(parts: Sequence[Array], out: Array) -> None:
    if parts:
        np.concatenate(parts, out=out, casting="unsafe")


def row_counts(
    shape: Sequence[int], splits: ArrayLike | None, size: int
) -> tuple[NDArray[np.int64], ConfigError | None]:
    """The number of rows that an alltoall of an array of ``shape`` sends to each of ``size`` ranks, or the error."""
    nothing = np.zeros(size, np.int64)
    if not shape:
        return nothing, ConfigError("alltoall: a scalar has no rows to send; give it at least one dimension.")
    if splits is None:
        if shape[0] % size:
            return nothing, ConfigError(
                f"alltoall: {shape[0]} rows cannot be split equally over {size} ranks; give the number for "
                "each with splits=[…]."
            )
        return np.full(size, shape[0] // size, np.int64), None
    counts = np.asarray(splits)
    numbers = counts.tolist()  # of Python, whose sum does not overflow
    if counts.dtype.kind not in "iu" or counts.shape != (size,) or min(numbers) < 0 or sum(numbers) > shape[0]:
        return nothing, ConfigError(
            f"alltoall: splits={numbers} must be {size} whole numbers, none negative, that add up to at most "
            f"the {shape[0]} rows."
        )
    return counts.astype(np.int64), None


def exchange_rows(members: Members, rows: Array, counts: NDArray[np.int64]) -> tuple[Array, NDArray[np.int32]]:
    """Sends ``counts`` rows to each member; returns those received, and how many from each."""
    eights = [counts.itemsize] * members.size
    received_counts = members._alltoall(counts.view(np.uint8), eights, eights).view(np.int64)
    row_bytes = _row_bytes(rows)
    received = members.alltoallv_bytes(
        _bytes(rows),
        [int(count) * row_bytes for count in counts],
        [int(count) * row_bytes for count in received_counts],
    )
    shape = (int(received_counts.sum()), *rows.shape[1:])
    return received.view(rows.dtype).reshape(shape), received_counts.astype(np.int32)


def _bytes(array: Array) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


@functools.lru_cache(maxsize=256)
def _plan(layout: Layout, chunk_bytes: int, direct_bytes: int | None) -> tuple[FusionBuffer, ...]:
    """Cached, as are requests. Arrays of one dtype are sent together."""
    return plan_fusion(layout, [range(len(layout))], working_dtype, chunk_bytes, direct_bytes)


def _row_bytes(rows: Array) -> int:
    return rows.itemsize * int(np.prod(rows.shape[1:], dtype=np.int64))
