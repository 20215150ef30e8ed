"""The interface of all compressions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from choros.arrays import adapter_of
from choros.comm import BFLOAT16, Communicator
from choros.errors import ConfigError
from choros.parallel.reduce.exchange import Exchange, Layout

__all__ = ["Compressor", "DType", "check_compressor", "is_floating", "reject_single_array"]

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

        Example:
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
        """Returns the tensor in its own dtype.

        Args:
            tensor: as ``compress`` returned it, or the sum of such.
            context: what it returned besides.
        """
        return adapter_of(tensor).cast(tensor, context)

    @abstractmethod
    def exchange(self, communicator: Communicator, layout: Layout, groups: Sequence[Sequence[int]]) -> Exchange:
        """Creates the exchange that sums arrays of ``layout``; those of a group are sent together."""


def check_compressor(value: object) -> None:
    """Raises a ConfigError unless ``value`` is a compression."""
    if not isinstance(value, Compressor):
        raise ConfigError(
            f"compression={getattr(value, '__name__', repr(value))} is none of Compression's: expected "
            "Compression.none, .fp16, .bf16, .int8, .top_k(…) or .power_sgd(…). Compressors of one's own, as Horovod "
            "takes them, are not supported: write fp16 or bf16 for a cast."
        )


def is_floating(dtype: DType) -> bool:
    """Returns whether ``dtype`` is a floating-point dtype, bfloat16 included."""
    return dtype.kind == "f" or dtype == BFLOAT16


def reject_single_array(compression: str, dtype: DType) -> DType:
    """Implements ``wire_dtype`` for compressions that are not casts: raises a ConfigError for floating-point arrays."""
    if not is_floating(dtype):
        return dtype
    raise ConfigError(
        f"compression={compression}: an allreduce of a single array supports none and fp16. The others are for "
        "gradients: pass them to DistributedOptimizer(…, compression=…)."
    )
