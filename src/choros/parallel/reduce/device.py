"""Reduction of PyTorch's gradients on their device: on a GPU through NCCL, without host staging."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from choros.comm import Communicator, Reduction
from choros.comm.fusion import WireDtype
from choros.errors import EngineError
from choros.parallel.compression import Compressor
from choros.parallel.compression.casts import Float16, NoCompression
from choros.parallel.reduce.exchange import Array, Exchange, Layout

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceExchange", "device_to_reduce_on"]


def device_to_reduce_on(
    communicator: Communicator, compressor: Compressor, devices: Iterable[torch.device]
) -> torch.device | None:
    """Where tensors on ``devices`` are summed; ``None``: on the host.

    That is asked of the communicator's ``devices``. Compressions that keep an error work on the host.
    """
    different = set(devices)
    if len(different) != 1 or not isinstance(compressor, NoCompression | Float16):
        return None
    (device,) = different
    collectives = communicator.devices
    return device if collectives is not None and collectives.moves(device.type) else None


@final
class DeviceExchange(Exchange):
    """An allreduce of tensors on their device, many to a message."""

    def __init__(
        self,
        communicator: Communicator,
        layout: Layout,
        groups: Sequence[Sequence[int]],
        wire_dtype: WireDtype,
        device: torch.device,
    ) -> None:
        if communicator.devices is None:
            raise EngineError(f"the {communicator.engine} engine cannot reduce tensors on {device} in place.")
        self._communicator = communicator
        self._collectives = communicator.devices
        self._device = device
        self._shapes = [shape for shape, _ in layout]
        self._dtypes = [_torch_dtype(dtype) for _, dtype in layout]
        self._messages = [
            (_torch_dtype(wire), [index for index in group if wire_dtype(layout[index][1]) == wire])
            for group in groups
            for wire in dict.fromkeys(wire_dtype(layout[index][1]) for index in group)
        ]
        sizes = [f"{wire}{[math.prod(self._shapes[index]) for index in part]}" for wire, part in self._messages]
        self.description = f"on {device.type}: " + ", ".join(sizes)

    def sum(self, arrays: Sequence[Any] | None, before: float, after: float) -> list[Array]:
        """See ``Exchange``; takes and gives tensors."""
        import torch

        results: list[Any] = [None] * len(self._shapes)
        for wire, part in self._messages:
            sizes = [math.prod(self._shapes[index]) for index in part]
            # New in every step: results are views of it, and torch has the memory of the step before at hand.
            message = torch.zeros(sum(sizes), dtype=wire, device=self._device)
            slots = [
                slot.view(self._shapes[index]) for slot, index in zip(torch.split(message, sizes), part, strict=True)
            ]
            if arrays is not None:
                sources = [arrays[index] for index in part]
                # Scaled before the cast: the unscaled sum may overflow the narrower dtype that is sent.
                narrower = any(source.element_size() > message.element_size() for source in sources)
                torch._foreach_copy_(slots, torch._foreach_mul(sources, before) if narrower else sources)
                if not narrower:
                    message.mul_(before)
            self._communicator.bytes_sent += message.nbytes
            self._collectives.reduce_in_place(message, Reduction.SUM)
            for slot, index in zip(slots, part, strict=True):
                results[index] = slot.to(self._dtypes[index])
            if after != 1.0:
                torch._foreach_mul_([results[index] for index in part], after)
        return results


def _torch_dtype(dtype: np.dtype[np.generic]) -> Any:
    import torch

    return getattr(torch, dtype.name)
