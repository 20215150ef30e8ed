"""What the reducer and compressions have in common: an exchange sums arrays over the ranks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from choros.arrays import device_adapter
from choros.comm import Array, Communicator, DType, Reduction
from choros.comm.devices import Device
from choros.comm.fusion import (
    Chunk,
    Layout,
    WireDtype,
    concatenate_scaled,
    pack,
    plan_fusion,
    reduce_buffers,
    scale_into,
)
from choros.errors import EngineError
from choros.parallel.structure import with_items

#: Arrays as an exchange takes them: host arrays, tensors on a device or ``SparseRows``.
Given: TypeAlias = Sequence[Any] | None


@dataclass(frozen=True)
class Exchange:
    """Sums arrays of one layout over the ranks of one communicator; created once, used in every step.

    All ranks call ``sum`` within the exclusive section in which they have agreed on the step. It owns the state that it
    keeps from step to step (buffers, the residual of a compression).

    Attributes:
        description: how it sums. Ranks compare it before the first byte is sent.
        sum: ``sum(arrays, before, after, out=None)`` returns the sum over the ranks of ``arrays * before``, times
            ``after``: arrays of the layout's shapes and dtypes, the same on every rank. ``arrays`` are this rank's,
            which are not written to; ``None`` for zeros, of a rank that has no gradients. ``before``: its share of the
            examples; ``after`` is the same on every rank. ``out``: where results may be written, maybe ``arrays``.
    """

    description: str
    sum: Callable[..., list[Any]]


def fused_exchange(
    communicator: Communicator, layout: Layout, groups: Sequence[Sequence[int]], wire_dtype: WireDtype
) -> Exchange:
    """Sums arrays by allreduces, as they are or cast; each is scaled and copied into a message once, and out of it
    once. In place, it writes a chunk where it has just read it, and it is still in the caches.
    """
    buffers = plan_fusion(layout, groups, wire_dtype, communicator.chunk_bytes, communicator.direct_bytes)

    def reduce(arrays: Given, before: float, after: float, out: Given = None) -> list[Array]:
        if out is not None and not all(array.flags.c_contiguous for array in out):
            out = None
        flats = None if arrays is None else [array.reshape(-1) for array in arrays]

        def fill(chunk: Chunk, message: Array) -> None:
            if flats is None:
                message.fill(0)
            elif before != 1.0 and message.itemsize < flats[chunk.slices[0].index].itemsize:
                # Before the cast: values that overflow the narrower dtype may fit after scaling.
                concatenate_scaled(chunk.parts(flats), message, before)
            else:
                pack(flats, chunk, message)
                scale_into(message, message, before)

        def write(message: Array, target: Array) -> None:
            scale_into(target, message, after)

        return reduce_buffers(communicator, layout, buffers, Reduction.SUM, fill, write, out)

    return Exchange(", ".join(f"{buffer.wire}[{buffer.size}]" for buffer in buffers), reduce)


def device_exchange(
    communicator: Communicator,
    layout: Layout,
    groups: Sequence[Sequence[int]],
    wire_dtype: WireDtype,
    device: Device,
) -> Exchange:
    """Sums tensors by allreduces on their device, without host staging; many to a message, which the framework itself
    packs and unpacks.
    """
    collectives, adapter = communicator.devices, device_adapter(device.framework)
    if collectives is None:
        raise EngineError(f"the {communicator.engine} engine cannot reduce tensors on {device.type} in place.")
    all_sizes = [math.prod(shape) for shape, _ in layout]
    messages: list[tuple[DType, list[int]]] = [
        (wire, [index for index in group if wire_dtype(layout[index][1]) == wire])
        for group in groups
        for wire in dict.fromkeys(wire_dtype(layout[index][1]) for index in group)
    ]

    def reduce(arrays: Given, before: float, after: float, _: Given = None) -> list[Any]:
        results: list[Any] = [None] * len(layout)
        for wire, part in messages:
            own = None if arrays is None else [arrays[index] for index in part]
            sizes = [all_sizes[index] for index in part]
            message = adapter.pack(own, sizes, wire, before, device)
            communicator.bytes_sent += sum(sizes) * wire.itemsize
            if sum(sizes):
                collectives.reduce_in_place(adapter.buffer(message, device), Reduction.SUM)
            results = with_items(results, part, adapter.unpack(message, [layout[index] for index in part], after))
        return results

    sent = [f"{wire}{[all_sizes[index] for index in part]}" for wire, part in messages]
    return Exchange(f"on {device.type}: " + ", ".join(sent), reduce)


def split_exchange(parts: Sequence[tuple[Sequence[int], Exchange]]) -> Exchange:
    """Sums the arrays of each part by an exchange of its own; every array is in one part."""

    def reduce(arrays: Given, before: float, after: float, _: Given = None) -> list[Any]:
        results: dict[int, Any] = {}
        for indices, exchange in parts:
            own = None if arrays is None else [arrays[index] for index in indices]
            results.update(zip(indices, exchange.sum(own, before, after), strict=True))
        return [results[index] for index in range(len(results))]

    return Exchange("; ".join(exchange.description for _, exchange in parts), reduce)


def only(indices: Sequence[int], layout: Layout, groups: Sequence[Sequence[int]]) -> tuple[Layout, list[list[int]]]:
    """Returns the layout of the arrays at ``indices``, and their groups with renumbered indices.

    >>> only([0, 2], ("a", "b", "c"), [[0, 1], [2]])
    (('a', 'c'), [[0], [1]])
    """
    positions = {index: position for position, index in enumerate(indices)}
    parts = [[positions[index] for index in group if index in positions] for group in groups]
    return tuple(layout[index] for index in indices), [part for part in parts if part]
