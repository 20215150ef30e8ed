"""The interface of all compressions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from choros.comm import BFLOAT16, Communicator
from choros.errors import ConfigError
from choros.parallel.reduce.exchange import Exchange, Layout

__all__ = ["Compressor", "DType", "is_floating", "refuse_lone"]

DType = np.dtype[np.generic]


class Compressor(ABC):
    """How arrays are made smaller on their way. Holds no state: what is kept from step to step is the exchange's."""

    @abstractmethod
    def wire_dtype(self, dtype: DType) -> DType:
        """The dtype in which an allreduce of a single array of ``dtype`` sends it.

        Raises:
            ConfigError: it is no matter of a dtype: this compression is for a model's gradients.
        """

    @abstractmethod
    def exchange(self, communicator: Communicator, layout: Layout, groups: Sequence[Sequence[int]]) -> Exchange:
        """What sums arrays of ``layout``; those of a group travel together."""


def is_floating(dtype: DType) -> bool:
    """Whether ``dtype`` is a floating-point format, bfloat16 included."""
    return dtype.kind == "f" or dtype == BFLOAT16


def refuse_lone(compression: str, dtype: DType) -> DType:
    """The ``wire_dtype`` of a compression that has none: an error for what it would have to compress."""
    if not is_floating(dtype):
        return dtype
    raise ConfigError(
        f"compression={compression}: an allreduce of a single array travels in one dtype, none or fp16. Others are for "
        "gradients: DistributedOptimizer(…, compression=…)."
    )
