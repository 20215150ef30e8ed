"""Exchanges that are no allreduces of host arrays: of tensors on their device, and of several parts."""

import math
from collections.abc import Sequence
from typing import Any

from choros.arrays import device_adapter
from choros.comm import Communicator, DType, Reduction
from choros.comm.devices import Device
from choros.comm.fusion import Exchange, Given, Layout, WireDtype
from choros.errors import EngineError
from choros.parallel.structure import with_items


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
