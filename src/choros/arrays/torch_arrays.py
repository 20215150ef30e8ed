"""PyTorch tensors."""

import math
from collections.abc import Sequence
from typing import Any, final

import ml_dtypes
import numpy as np
import torch
from torch._dynamo import trace_rules

from choros.arrays.adapter import (
    COLUMNS,
    WORD_BYTES,
    ArrayFunction,
    ArrayLayout,
    ArraySpec,
    DeviceArrayAdapter,
    HostArray,
    HostFunction,
)
from choros.errors import ConfigError

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
trace_rules.add("choros")  # what torch.compile must not trace: it has no operations of its own


@final
class TorchArrays(DeviceArrayAdapter):
    """Tensors, with or without gradient, on any device."""

    def to_host(self, array: Any) -> HostArray:
        """Shares memory with a contiguous CPU tensor. NumPy has no bfloat16: its bits are passed as int16."""
        if array.layout is not torch.strided:
            raise ConfigError(
                f"a tensor of {array.layout} cannot be communicated like this: make it dense, with to_dense(). Only "
                "allreduce takes sparse ones."
            )
        tensor = array.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(_BFLOAT16)  # type: ignore[no-any-return]
        try:
            return tensor.numpy()  # type: ignore[no-any-return]
        except TypeError:  # NumPy has no such dtype
            raise ConfigError(f"tensors of {tensor.dtype} cannot be communicated: cast it to another dtype.") from None

    def fingerprint(self, array: Any) -> bytes:
        """Adds on the device; integers have the same sums there."""
        return super().fingerprint(array) if array.device.type == "cpu" else self.fingerprint_on_device(array)

    @staticmethod
    def laid_out_as(like: Any, tensor: Any) -> Any:
        """The tensor, with the strides of another if that has its shape: fused updates read both in step."""
        if tensor.shape != like.shape or tensor.stride() == like.stride():
            return tensor
        return torch.empty_like(like, dtype=tensor.dtype, device=tensor.device).copy_(tensor)

    @staticmethod
    def fingerprint_on_device(array: Any) -> bytes:
        """``fingerprint`` of a tensor anywhere, of which its device computes the sums."""
        raw = array.detach().contiguous().reshape(-1).view(torch.uint8)
        if raw.storage_offset() % WORD_BYTES:
            raw = raw.clone()
        rows = raw.numel() // (COLUMNS * WORD_BYTES)
        whole = rows * COLUMNS * WORD_BYTES
        sums = raw[:whole].view(torch.int64).view(rows, COLUMNS).sum(0) if rows else raw[:0]
        return bytes(sums.cpu().numpy().tobytes() + raw[whole:].cpu().numpy().tobytes())

    def from_host(self, host: HostArray, like: Any) -> Any:
        """Shares memory with ``host`` if ``like`` is on the CPU."""
        writable = np.require(host, requirements=["C", "W"])
        if writable.dtype == _BFLOAT16:
            tensor = torch.from_numpy(writable.view(np.int16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(writable)
        return tensor.to(like.device)

    def host_call(
        self,
        function: HostFunction,
        arrays: Sequence[Any],
        outputs: Sequence[ArraySpec],
        *,
        replaced: int = 0,
        keeps: bool = False,
    ) -> list[Any]:
        """Results get the memory of the arguments that they replace."""

        def update(hosts: Sequence[HostArray]) -> Sequence[HostArray]:
            return function(hosts, None if keeps else hosts[len(hosts) - replaced :])

        return super().host_call(update if replaced else function, arrays, outputs)

    @staticmethod
    def own_host_memory(tensors: Sequence[Any]) -> bool:
        """Whether NumPy may write to all tensors: on the host, contiguous, and none shares its memory with another."""
        for tensor in tensors:
            if tensor.layout is not torch.strided or tensor.device.type != "cpu":
                return False
            if tensor.is_neg() or not tensor.is_contiguous():
                return False
        return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)

    def spec(self, array: Any) -> ArraySpec:
        part = array[:0] if array.ndim and array.layout is torch.strided else array
        return ArraySpec(tuple(array.shape), self.to_host(part).dtype)

    def rows_of(self, array: Any) -> tuple[Any, Any, Any] | None:
        """Of sparse COO tensors. Indices are numbers of rows, or one row of indices for each element or block."""
        if not array.is_sparse:
            return None
        indices = array._indices()
        return indices[0] if len(indices) == 1 else indices.t(), array._values(), tuple(array.shape)

    def from_rows(self, indices: Any, values: Any, shape: Any) -> Any:
        indices = indices[None] if indices.ndim == 1 else indices.t()
        return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)

    def to_dense(self, array: Any, shape: tuple[int, ...]) -> Any:
        del shape
        return array.to_dense() if array.is_sparse else array

    def cast(self, array: Any, dtype: np.dtype[np.generic]) -> Any:
        return array.to(getattr(torch, dtype.name))

    def stop_gradient(self, array: Any) -> Any:
        return array.detach()

    def device_call(self, function: ArrayFunction, arrays: Sequence[Any], outputs: Sequence[ArraySpec]) -> list[Any]:
        del outputs
        return list(function(arrays))

    def zeros_like(self, array: Any) -> Any:
        return array.new_zeros(array.shape)

    def pack(
        self,
        arrays: Sequence[Any] | None,
        sizes: Sequence[int],
        dtype: np.dtype[np.generic],
        factor: float,
        device: Any,
    ) -> Any:
        """Copies all of them at once. torch's kernels multiply in float32 at least."""
        on = torch.device(device.type, device.index) if device.type != "cpu" else torch.device("cpu")
        # New in every step: results are views of it, and torch has the memory of the step before at hand.
        vector = torch.zeros(sum(sizes), dtype=getattr(torch, dtype.name), device=on)
        if arrays is not None:
            sources = [array.detach() for array in arrays]
            slots = [
                slot.view(each.shape) for slot, each in zip(torch.split(vector, list(sizes)), sources, strict=True)
            ]
            narrower = any(source.element_size() > vector.element_size() for source in sources)
            torch._foreach_copy_(slots, torch._foreach_mul(sources, factor) if narrower else sources)
            if not narrower:
                vector.mul_(factor)
        return vector

    def unpack(self, vector: Any, layout: Sequence[ArrayLayout], factor: float) -> list[Any]:
        """Views, if the dtype is that of ``vector``."""
        parts = torch.split(vector, [math.prod(shape) for shape, _ in layout])
        results = [
            part.view(shape).to(getattr(torch, dtype.name)) for part, (shape, dtype) in zip(parts, layout, strict=True)
        ]
        if factor != 1.0:
            torch._foreach_mul_(results, factor)
        return results

    def buffer(self, vector: Any, device: Any) -> Any:
        del device
        return vector

    def with_gradient(self, forward: ArrayFunction, backward: ArrayFunction, arrays: Sequence[Any]) -> list[Any]:
        if not (torch.is_grad_enabled() and any(array.requires_grad for array in arrays)):
            return list(forward(arrays))
        return list(_Differentiable.apply(forward, backward, *arrays))  # type: ignore[no-untyped-call, unused-ignore]


ADAPTER = TorchArrays()


@final
class _Differentiable(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    @staticmethod
    def forward(ctx: Any, forward: ArrayFunction, backward: ArrayFunction, *tensors: Any) -> tuple[Any, ...]:
        results = tuple(forward(tensors))
        ctx.backward_rule = backward
        ctx.integers = [None if result.is_floating_point() else result for result in results]
        ctx.mark_non_differentiable(*(result for result in ctx.integers if result is not None))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        pairs = zip(gradients, ctx.integers, strict=True)
        return None, None, *ctx.backward_rule([given if integer is None else integer for given, integer in pairs])
