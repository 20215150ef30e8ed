"""Gradient compression: one interface, one module per algorithm.

::

    Compressor ─creates─► Exchange, which keeps buffers and residuals from step to step
    ├── NoCompression, Float16      casts.py       FusedExchange: an allreduce in that dtype
    ├── Bfloat16                    bfloat16.py  ┐ VectorExchange: arrays concatenated to one
    ├── Int8                        int8.py      │ float32 vector, which a VectorSum sums:
    ├── TopK                        top_k.py     ┘ SlicedSum (sliced.py) or TopKSum
    └── PowerSGD                    power_sgd.py   two small allreduces for all matrices

Arrays that cannot be compressed, or are too small to gain from it, are sent uncompressed (``selection.py``).
"""

from __future__ import annotations

from choros.parallel.compression.bfloat16 import Bfloat16
from choros.parallel.compression.casts import Float16, NoCompression
from choros.parallel.compression.compressor import Compressor, check_compressor
from choros.parallel.compression.int8 import Int8
from choros.parallel.compression.power_sgd import PowerSGD
from choros.parallel.compression.top_k import TopK

__all__ = ["Compression", "Compressor", "check_compressor"]


class Compression:
    """The compressions of gradients; ``none`` and ``fp16`` are Horovod's.

    ========================  ====================  ======================================================
    ``none``                  4 bytes per element   uncompressed
    ``fp16``                  2                     values are averaged before they are sent, so that their
                                                    sum does not overflow; values below 6e-8 become 0
    ``bf16``                  2                     summed in float32 and rounded once: no overflow
    ``int8``                  1.02                  blocks of 256 share a scale; error feedback
    ``top_k(ratio=0.01)``     8 × ``ratio``         the largest elements; error feedback
    ``power_sgd(rank=4)``     4 × rank × (n + m)    of an n × m matrix; error feedback
    ========================  ====================  ======================================================

    Example:
        >>> from choros.parallel.reduce.reducer import GradientReducer, ReduceConfig
        >>> reducer = GradientReducer(ReduceConfig(compressor=Compression.power_sgd(rank=2)))
    """

    none: Compressor = NoCompression()
    fp16: Compressor = Float16()
    bf16: Compressor = Bfloat16()
    int8: Compressor = Int8()

    @staticmethod
    def top_k(ratio: float = 0.01) -> Compressor:
        """See ``TopK``."""
        return TopK(ratio)

    @staticmethod
    def power_sgd(rank: int = 4) -> Compressor:
        """See ``PowerSGD``."""
        return PowerSGD(rank)
