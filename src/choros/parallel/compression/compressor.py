"""The interface of all compressions, and those that are casts: none and fp16."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from choros.arrays import adapter_of
from choros.comm import BFLOAT16, Array, Communicator, DType
from choros.comm.fusion import Exchange, Given, Layout, fused_exchange
from choros.errors import ConfigError

Vector = NDArray[np.float32]


class Compressor(ABC):
    """A compression of gradients. It has no state: the exchange that it creates keeps what lasts from step to step.

    Attributes:
        shares_state: whether this must be the same on all ranks, so that none can take part later.
    """

    shares_state: ClassVar[bool] = False

    @abstractmethod
    def wire_dtype(self, dtype: DType) -> DType:
        """Returns the dtype in which an allreduce of a single array of ``dtype`` sends it.

        Raises:
            ConfigError: the compression is not a cast: it works for a model's gradients only.
        """

    def row_dtype(self, dtype: DType) -> DType:
        """Returns the dtype in which rows of sparse gradients are sent: they are gathered and not summed."""
        return dtype

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Returns ``tensor`` as it is sent, and what ``decompress`` needs (Horovod's ``Compressor.compress``).

        >>> import numpy as np
        >>> from choros.parallel.compression import Compression
        >>> compressed, context = Compression.fp16.compress(np.ones(2))
        >>> compressed.dtype, Compression.fp16.decompress(compressed, context).dtype
        (dtype('float16'), dtype('float64'))
        """
        adapter = adapter_of(tensor)
        dtype = adapter.spec(tensor).dtype
        return adapter.cast(tensor, self.wire_dtype(dtype)), dtype

    def decompress(self, tensor: Any, context: Any) -> Any:
        """Returns the tensor that ``compress`` returned, or the sum of such, in its own dtype."""
        return adapter_of(tensor).cast(tensor, context)

    def exchange(self, communicator: Communicator, layout: Layout, groups: Sequence[Sequence[int]]) -> Exchange:
        """Creates the exchange that sums arrays of ``layout``; those of a group are sent together."""
        return fused_exchange(communicator, layout, groups, self.wire_dtype)


@final
class NoCompression(Compressor):
    """Gradients are sent uncompressed."""

    def wire_dtype(self, dtype: DType) -> DType:
        """See ``plain_dtype``."""
        return plain_dtype(dtype)

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Returns ``tensor`` itself."""
        return tensor, None

    def decompress(self, tensor: Any, context: Any) -> Any:
        """Returns ``tensor`` itself."""
        del context
        return tensor


@final
class Float16(Compressor):
    """Gradients are sent and summed in float16."""

    def wire_dtype(self, dtype: DType) -> DType:
        """Returns float16 for every floating-point dtype."""
        return np.dtype(np.float16) if is_floating(dtype) else dtype

    def row_dtype(self, dtype: DType) -> DType:
        """As ``wire_dtype``."""
        return self.wire_dtype(dtype)


class SelectiveCompressor(Compressor):
    """A compression of gradients only, and of those that it ``compresses``; others are sent uncompressed.

    Attributes:
        name: that of ``Compression``, for errors.
    """

    name: ClassVar[str]

    @abstractmethod
    def compresses(self, shape: tuple[int, ...], dtype: DType) -> bool:
        """Whether an array is compressed: it is of floating-point numbers, and it pays."""

    @abstractmethod
    def compressing(self, communicator: Communicator, layout: Layout) -> Exchange:
        """Creates the exchange of arrays that are compressed and sent together."""

    @final
    def wire_dtype(self, dtype: DType) -> DType:
        """This is no cast: a ConfigError for floating-point arrays."""
        if not is_floating(dtype):
            return dtype
        raise ConfigError(
            f"compression={self.name}: an allreduce of a single array supports none and fp16. The others are for "
            "gradients: pass them to DistributedOptimizer(…, compression=…)."
        )

    @final
    def exchange(self, communicator: Communicator, layout: Layout, groups: Sequence[Sequence[int]]) -> Exchange:
        """See ``Compressor``."""
        chosen = {index for index, each in enumerate(layout) if self.compresses(*each)}
        together = [[index for index in group if index in chosen] for group in groups]
        parts: list[tuple[Sequence[int], Exchange]] = [
            (indices, self.compressing(communicator, tuple(layout[index] for index in indices)))
            for indices in together
            if indices
        ]
        others = sorted(set(range(len(layout))) - chosen)
        if others:
            parts.append((others, fused_exchange(communicator, *only(others, layout, groups), plain_dtype)))
        return split_exchange(parts)


class VectorCompressor(SelectiveCompressor):
    """A compression of arrays that are concatenated to one float32 vector, which it sums with a rounding error.

    Attributes:
        feedback: whether the next step adds what the sum of this one lacks.
    """

    feedback: ClassVar[bool] = True

    @abstractmethod
    def sum(self, communicator: Communicator, vector: Vector, residual: Vector | None) -> Vector:
        """Returns the same sum on every rank, not finite if any vector is not; ``residual`` receives what it lacks."""

    def describe(self, count: int) -> str:
        """Returns how ``count`` numbers are sent: ranks compare it first."""
        return f"{self.name}[{count}]"

    @final
    def compressing(self, communicator: Communicator, layout: Layout) -> Exchange:
        """See ``SelectiveCompressor``."""
        return _vector_exchange(self, communicator, layout)


def _vector_exchange(compressor: VectorCompressor, communicator: Communicator, layout: Layout) -> Exchange:
    ends = list(accumulate((math.prod(shape) for shape, _ in layout), initial=0))
    slices = [slice(*bounds) for bounds in pairwise(ends)]
    vector = np.zeros(ends[-1], np.float32)
    feedback = ErrorFeedback(vector.shape) if compressor.feedback else None

    def reduce(arrays: Given, before: float, after: float, _: Given = None) -> list[Array]:
        if arrays is None:
            vector.fill(0)
        else:
            for array, part in zip(arrays, slices, strict=True):
                np.multiply(array.reshape(-1), before, out=vector[part], dtype=np.float32, casting="unsafe")
        if feedback is None:
            total = compressor.sum(communicator, vector, None)
        else:
            np.add(vector, feedback.residual, out=vector)
            total = compressor.sum(communicator, vector, feedback.next_residual)
            feedback.end_step(total)
        total *= np.float32(after)
        return [total[part].reshape(shape).astype(dtype) for part, (shape, dtype) in zip(slices, layout, strict=True)]

    return Exchange(compressor.describe(ends[-1]), reduce)


@final
class ErrorFeedback:
    """The residual of a lossy compression, which is added to the next step's values before they are compressed.

    Without it, biased compressions such as top-k need not converge (Karimireddy et al. 2019, arXiv:1901.09847)::

        residual ──► + gradient ──► compress ──► received values
           ▲                             │
           └─────── next_residual ◄──────┘

    It is that of the *sent* values, so a rank that has joined still sends it; steps that are not finite keep it.

        >>> feedback = ErrorFeedback((2,))
        >>> feedback.next_residual[:] = 0.25
        >>> feedback.end_step(np.ones(2))
        True
        >>> feedback.residual
        array([0.25, 0.25], dtype=float32)
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.residual: Vector = np.zeros(shape, np.float32)
        self.next_residual: Vector = np.zeros(shape, np.float32)

    def end_step(self, total: Array) -> bool:
        """Ends a step with the sum ``total`` of all ranks; returns whether it is finite, so that the step counts."""
        finite = bool(np.isfinite(total).all())
        if finite:
            self.residual, self.next_residual = self.next_residual, self.residual
        return finite


def is_floating(dtype: DType) -> bool:
    """Returns whether ``dtype`` is a floating-point dtype, bfloat16 included."""
    return dtype.kind == "f" or dtype == BFLOAT16


def plain_dtype(dtype: DType) -> DType:
    """Returns the dtype in which uncompressed arrays are summed, hence sent: float32 for bfloat16, else ``dtype``."""
    return np.dtype(np.float32) if dtype == BFLOAT16 else dtype


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
