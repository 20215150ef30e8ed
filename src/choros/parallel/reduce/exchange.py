"""What the reducer and compressions have in common: an exchange sums arrays over the ranks."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias, final

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


class Exchange(ABC):
    """Sums arrays of one layout over the ranks of one communicator; created once, used in every step.

    All ranks call ``sum`` within the exclusive section in which they have agreed on the step. It owns the state that it
    keeps from step to step (buffers, the residual of a compression).

    Attributes:
        description: how it sums. Ranks compare it before the first byte is sent.
    """

    description: str

    @abstractmethod
    def sum(self, arrays: Given, before: float, after: float, out: Given = None) -> list[Any]:
        """Returns the sum over the ranks of ``arrays * before``, times ``after``.

        Args:
            arrays: this rank's, which are not written to; ``None`` for zeros, of a rank that has no gradients.
            before: the factor of this rank's arrays: its share of the examples.
            after: the factor of the sum, the same on every rank.
            out: where results may be written, maybe ``arrays`` themselves; ``None``: into new arrays.

        Returns:
            Arrays of the layout's shapes and dtypes, the same on every rank.
        """


@final
class FusedExchange(Exchange):
    """Sums arrays by allreduces, as they are or cast; each is scaled and copied into a message once, and out of it
    once. In place, it writes a chunk where it has just read it, and it is still in the caches.
    """

    def __init__(
        self, communicator: Communicator, layout: Layout, groups: Sequence[Sequence[int]], wire_dtype: WireDtype
    ) -> None:
        self._communicator = communicator
        self._layout = layout
        self._buffers = plan_fusion(layout, groups, wire_dtype, communicator.chunk_bytes, communicator.direct_bytes)
        self.description = ", ".join(f"{buffer.wire}[{buffer.size}]" for buffer in self._buffers)

    def sum(self, arrays: Given, before: float, after: float, out: Given = None) -> list[Array]:
        """See ``Exchange``."""
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

        return reduce_buffers(self._communicator, self._layout, self._buffers, Reduction.SUM, fill, write, out)


@final
class DeviceExchange(Exchange):
    """An allreduce of tensors on their device, without host staging; many to a message, which the framework itself
    packs and unpacks.
    """

    def __init__(
        self,
        communicator: Communicator,
        layout: Layout,
        groups: Sequence[Sequence[int]],
        wire_dtype: WireDtype,
        device: Device,
    ) -> None:
        if communicator.devices is None:
            raise EngineError(f"the {communicator.engine} engine cannot reduce tensors on {device.type} in place.")
        self._communicator = communicator
        self._collectives = communicator.devices
        self._device = device
        self._arrays = device_adapter(device.framework)
        self._layout = layout
        self._sizes = [math.prod(shape) for shape, _ in layout]
        self._messages: list[tuple[DType, list[int]]] = [
            (wire, [index for index in group if wire_dtype(layout[index][1]) == wire])
            for group in groups
            for wire in dict.fromkeys(wire_dtype(layout[index][1]) for index in group)
        ]
        sent = [f"{wire}{[self._sizes[index] for index in part]}" for wire, part in self._messages]
        self.description = f"on {device.type}: " + ", ".join(sent)

    def sum(self, arrays: Given, before: float, after: float, out: Given = None) -> list[Array]:
        """See ``Exchange``; takes and gives tensors."""
        del out
        results: list[Any] = [None] * len(self._layout)
        for wire, part in self._messages:
            own = None if arrays is None else [arrays[index] for index in part]
            sizes = [self._sizes[index] for index in part]
            message = self._arrays.pack(own, sizes, wire, before, self._device)
            self._communicator.bytes_sent += sum(sizes) * wire.itemsize
            if sum(sizes):
                self._collectives.reduce_in_place(self._arrays.buffer(message, self._device), Reduction.SUM)
            parts = self._arrays.unpack(message, [self._layout[index] for index in part], after)
            results = with_items(results, part, parts)
        return results


@final
class SplitExchange(Exchange):
    """An exchange of several: sums the arrays of each part by an exchange of its own; every array is in one part."""

    def __init__(self, parts: Sequence[tuple[Sequence[int], Exchange]]) -> None:
        self._parts = parts
        self.description = "; ".join(exchange.description for _, exchange in parts)

    def sum(self, arrays: Given, before: float, after: float, out: Given = None) -> list[Any]:
        """See ``Exchange``."""
        del out
        results: dict[int, Any] = {}
        for indices, exchange in self._parts:
            own = None if arrays is None else [arrays[index] for index in indices]
            results.update(zip(indices, exchange.sum(own, before, after), strict=True))
        return [results[index] for index in range(len(results))]


def only(indices: Sequence[int], layout: Layout, groups: Sequence[Sequence[int]]) -> tuple[Layout, list[list[int]]]:
    """Returns the layout of the arrays at ``indices``, and their groups with renumbered indices.

    >>> only([0, 2], ("a", "b", "c"), [[0, 1], [2]])
    (('a', 'c'), [[0], [1]])
    """
    positions = {index: position for position, index in enumerate(indices)}
    parts = [[positions[index] for index in group if index in positions] for group in groups]
    return tuple(layout[index] for index in indices), [part for part in parts if part]
