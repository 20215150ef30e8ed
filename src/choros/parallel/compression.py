"""In which number format gradients travel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import numpy as np

__all__ = ["Compression", "Compressor"]

DType = np.dtype[np.generic]


class Compressor(ABC):
    """Chooses the dtype in which arrays of another dtype are sent."""

    @abstractmethod
    def wire_dtype(self, dtype: DType) -> DType:
        """The dtype that travels for arrays of ``dtype``."""


@final
class _NoCompression(Compressor):
    def wire_dtype(self, dtype: DType) -> DType:
        """bfloat16 is summed, hence sent, in float32; all else as it is."""
        return np.dtype(np.float32) if dtype.name == "bfloat16" else dtype


@final
class _Float16Compression(Compressor):
    def wire_dtype(self, dtype: DType) -> DType:
        """float16 for every kind of floating-point number."""
        return np.dtype(np.float16) if dtype.kind == "f" or dtype.name == "bfloat16" else dtype


class Compression:
    """Horovod's choices: ``Compression.none`` and ``Compression.fp16``.

    ``fp16`` halves the bytes of float32 gradients; values are averaged before they are sent, so that their
    sum does not overflow, but parts below 6e-8 are lost.
    """

    none: Compressor = _NoCompression()
    fp16: Compressor = _Float16Compression()
