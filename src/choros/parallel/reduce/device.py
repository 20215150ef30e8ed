"""Reduction of gradients on their device: on a GPU through NCCL, without host staging."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, final

from choros.arrays import device_adapter
from choros.comm import Array, Communicator, DType, Reduction
from choros.comm.devices import Device
from choros.comm.fusion import Layout, WireDtype
from choros.errors import EngineError
from choros.parallel.compression import Compressor
from choros.parallel.compression.compressor import Float16, NoCompression
from choros.parallel.reduce.exchange import Exchange
from choros.parallel.structure import with_items


def device_to_reduce_on(
    communicator: Communicator, compressor: Compressor, framework: str, devices: Iterable[Any]
) -> Device | None:
    """Where tensors on ``devices`` are summed; ``None``: on the host, as for compressions that keep an error."""
    different = {Device(device.type, device.index or 0, framework) for device in devices}
    if len(different) != 1 or not isinstance(compressor, NoCompression | Float16):
        return None
    (device,) = different
    collectives = communicator.devices
    return device if collectives is not None and collectives.moves(device.type) else None


@final
class DeviceExchange(Exchange):
    """An allreduce of tensors on their device, many to a message, which the framework itself packs and unpacks."""

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

    def sum(self, arrays: Sequence[Any] | None, before: float, after: float) -> list[Array]:
        """See ``Exchange``; takes and gives tensors."""
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
