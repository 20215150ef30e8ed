"""The interface of all compressions, and those that are casts: none and fp16."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, final

import numpy as np

from choros.arrays import adapter_of
from choros.comm import BFLOAT16, Communicator
from choros.comm.fusion import Layout
from choros.errors import ConfigError
from choros.parallel.reduce.exchange import Exchange, SplitExchange, only
from choros.parallel.reduce.fused import FusedExchange

DType = np.dtype[np.generic]


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
        return FusedExchange(communicator, layout, groups, self.wire_dtype)


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
            parts.append((others, FusedExchange(communicator, *only(others, layout, groups), plain_dtype)))
        return SplitExchange(parts)


def is_floating(dtype: DType) -> bool:
    """Returns whether ``dtype`` is a floating-point dtype, bfloat16 included."""
    return dtype.kind == "f" or dtype == BFLOAT16


def plain_dtype(dtype: DType) -> DType:
    """Returns the dtype in which uncompressed arrays are summed, hence sent: float32 for bfloat16, else ``dtype``."""
    return np.dtype(np.float32) if dtype == BFLOAT16 else dtype
