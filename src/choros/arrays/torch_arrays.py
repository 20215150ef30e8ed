"""PyTorch tensors."""

from __future__ import annotations

from typing import Any, final

import ml_dtypes
import numpy as np
import torch

from choros.arrays.adapter import ArrayAdapter, ArraySpec, HostArray

__all__ = ["TorchArrays"]

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@final
class TorchArrays(ArrayAdapter):
    """Tensors, with or without gradient, on any device."""

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def to_host(self, array: Any) -> HostArray:
        """Shares memory with a contiguous CPU tensor. NumPy has no bfloat16: its bits travel as int16."""
        tensor = array.detach().cpu().contiguous()
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(_BFLOAT16)  # type: ignore[no-any-return]
        return tensor.numpy()  # type: ignore[no-any-return]

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def from_host(self, host: HostArray, like: Any) -> Any:
        """Shares memory with ``host`` if ``like`` is on the CPU."""
        writable = np.require(host, requirements=["C", "W"])
        if writable.dtype == _BFLOAT16:
            tensor = torch.from_numpy(writable.view(np.int16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(writable)
        return tensor.to(like.device)

    def spec(self, array: Any) -> ArraySpec:
        """Shape and dtype."""
        return ArraySpec(tuple(array.shape), self.to_host(array[:0] if array.ndim else array).dtype)
