"""Gradients of PyTorch that are summed where they lie: on a GPU through NCCL, and without a way over the host."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from choros.comm import Communicator, ReduceOp
from choros.comm.fusion import WireDtype
from choros.parallel.compression import Compressor
from choros.parallel.compression.casts import Float16, NoCompression
from choros.parallel.reduce.exchange import Array, Exchange, Layout

if TYPE_CHECKING:
    import torch

    from choros.comm.engines.torch import DeviceGroup

__all__ = ["DeviceExchange", "device_to_reduce_on"]

#: The groups of each communicator, by device: connecting one takes seconds.
_groups: weakref.WeakKeyDictionary[Communicator, dict[Any, DeviceGroup]] = weakref.WeakKeyDictionary()


def device_to_reduce_on(
    communicator: Communicator, compressor: Compressor, devices: Iterable[torch.device]
) -> torch.device | None:
    """Where tensors on ``devices`` are summed; ``None``: on the host.

    On a GPU they are whatever the engine, which then is the control plane; on the CPU only by the torch engine, whose
    Gloo takes tensors as they are. Compressions that keep an error work on the host.
    """
    different = set(devices)
    if len(different) != 1 or not isinstance(compressor, NoCompression | Float16):
        return None
    (device,) = different
    here = device.type == "cuda" or (device.type == "cpu" and communicator.moves_tensors)
    return device if here and communicator.size > 1 else None


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
        self._communicator = communicator
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

        group = self._group()
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
                # What is made small is scaled before: the sum need not fit the dtype that travels.
                narrower = any(source.element_size() > message.element_size() for source in sources)
                torch._foreach_copy_(slots, torch._foreach_mul(sources, before) if narrower else sources)
                if not narrower:
                    message.mul_(before)
            self._communicator.bytes_sent += message.nbytes
            group.reduce_in_place(message, ReduceOp.SUM)
            for slot, index in zip(slots, part, strict=True):
                results[index] = slot.to(self._dtypes[index])
            if after != 1.0:
                torch._foreach_mul_([results[index] for index in part], after)
        return results

    def _group(self) -> DeviceGroup:
        """Connected at the first use, in which all ranks take part."""
        from choros.comm.engines.torch import DeviceGroup

        groups = _groups.setdefault(self._communicator, {})
        if self._device not in groups:
            groups[self._device] = DeviceGroup(self._communicator, self._device)
        return groups[self._device]


def _torch_dtype(dtype: np.dtype[np.generic]) -> Any:
    import torch

    return getattr(torch, dtype.name)
