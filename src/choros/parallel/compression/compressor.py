"""The interface of all compressions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from choros.comm import BFLOAT16, Communicator
from choros.errors import ConfigError
from choros.parallel.reduce.exchange import Exchange, Layout

__all__ = ["Compressor", "DType", "is_floating", "reject_single_array"]

DType = np.dtype[np.generic]


class Compressor(ABC):
    """A compression of gradients. It has no state: the exchange that it creates keeps what lasts from step to step."""

    @abstractmethod
    def wire_dtype(self, dtype: DType) -> DType:
        """Returns the dtype in which an allreduce of a single array of ``dtype`` sends it.

        Raises:
            ConfigError: the compression is not a cast: it works for a model's gradients only.
        """

    def row_dtype(self, dtype: DType) -> DType:
        """Returns the dtype in which rows of sparse gradients are sent: they are gathered and not summed."""
        return dtype

    @abstractmethod
    def exchange(self, communicator: Communicator, layout: Layout, groups: Sequence[Sequence[int]]) -> Exchange:
        """Creates the exchange that sums arrays of ``layout``; those of a group are sent together."""


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
